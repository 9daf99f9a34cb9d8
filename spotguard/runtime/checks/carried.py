"""Whether a value that changes is state: carried on from step to step, or made anew in each.

A module may keep what it made of the last batch (`self.fake = net(x)`): the next step overwrites it
before anything reads it, and no checkpoint needs it. An average (`self.ema = 0.9 * self.ema + x`)
is read first. Which of both it is is read off the bytecode, since nothing else tells them apart
without running the script's code.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from spotguard.runtime.checks.walker import Leaf, is_installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CHANGE_IN_PLACE = {
    *("append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "rotate"),
    *("update", "add", "discard", "setdefault", "subtract"),
}
"""Methods of Python's containers."""
_TAKEN_FROM = ("BINARY_SUBSCR", "BINARY_SLICE")
_SET_UP = ("__init__", "__post_init__", "__new__", "setup", "build", "configure", "init")
"""Functions that begin a container rather than empty it in each step."""


def is_carried(before: Leaf, after: Leaf, functions: Iterable[types.CodeType] = ()) -> bool:
    """Return whether a leaf that has changed is carried from step to step.

    Args:
        before: As it was a step ago.
        after: As it is now.
        functions: Further code that may change it, such as the loop's own.
    """
    if after.kind == "position":
        return True
    if after.kind == "random":  # one that is seeded anew in each step is none
        return after.seed == before.seed
    there = after.where() if after.where is not None else None
    if there is not None and before.where is not None and before.where() is there:
        return True  # written to in place
    code = [*_code_of(after.owner), *functions]
    if after.type in ("count",) or after.of_kind == "position":
        return True
    if after.slot is None or _is_attribute(after):
        if after.slot is None and after.kind == "value" and after.type not in _PLAIN_NAMES:
            return any(_changes_container(each, after.name) for each in code)
        return any(is_read_before_written(each, after.name) for each in code)
    return any(_changes_items(each, after.name) for each in code)


_PLAIN_NAMES = {"bool", "int", "float", "str", "bytes", "complex", "NoneType"}


def _is_attribute(leaf: Leaf) -> bool:
    return isinstance(leaf.key, str) and leaf.key == leaf.name


def _code_of(owner: Any) -> Iterator[types.CodeType]:
    """Yield the code of an object's methods, or of a function and those in it."""
    if isinstance(owner, types.FunctionType):
        yield from nested(owner.__code__)
        return
    kind: Any = type(owner)
    yield from _code_of_class(kind)


@functools.cache
def _code_of_class(kind: Any) -> tuple[types.CodeType, ...]:
    return tuple(
        code
        for each in kind.__mro__
        if each not in (object, torch.nn.Module, torch.optim.Optimizer)
        for function in list(vars(each).values())
        for code in _code_in(function)
    )


def _code_in(function: Any) -> Iterator[types.CodeType]:
    if isinstance(function, property):
        for part in (function.fget, function.fset):
            yield from _code_in(part)
        return
    function = inspect.getattr_static(function, "__func__", function)
    while isinstance(wrapped := getattr(function, "__wrapped__", None), types.FunctionType):
        function = wrapped  # what a decorator such as `torch.no_grad()` is around
    if isinstance(function, types.FunctionType):
        yield from nested(function.__code__)


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions that are made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def functions_of(scope: dict[str, Any]) -> list[types.CodeType]:
    """Return the code of the functions and methods that a script has defined."""
    found: list[types.CodeType] = []
    for value in list(scope.values()):
        if isinstance(value, types.FunctionType) and not is_installed(value.__module__):
            found += nested(value.__code__)
        elif isinstance(value, type) and not is_installed(value.__module__):
            found += _code_of_class(value)
    return found


@functools.lru_cache(maxsize=2048)
def _uses(code: types.CodeType) -> dict[str, list[bool]]:
    """Return for each name whether its uses, in order, write it (True) or read it (False)."""
    found: dict[str, list[bool]] = {}
    for instruction in dis.get_instructions(code):
        for name, writes in accesses(instruction):
            found.setdefault(name, []).append(writes)
    return found


def accesses(instruction: dis.Instruction) -> list[tuple[str, bool]]:
    """Return which names an instruction reads (False) and writes (True), in this order."""
    op = instruction.opname
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    if op.startswith("STORE_FAST_LOAD_FAST"):
        return [(names[0], True), (names[1], False)]
    is_load = op.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "LOAD_FAST", "LOAD_NAME"))
    if is_load or op.startswith(("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT")):
        return [(name, False) for name in names if isinstance(name, str)]
    if op.startswith(("STORE_ATTR", "STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")):
        return [(name, True) for name in names if isinstance(name, str)]
    return []


def is_read_before_written(code: types.CodeType, name: str) -> bool:
    """Return whether a function reads an attribute or variable, and then writes it."""
    uses = _uses(code).get(name, [])
    by_name = name in code.co_consts and "getattr" in code.co_names
    return True in uses and (by_name or not uses[0])


def _changes_container(code: types.CodeType, name: str) -> bool:
    """Return whether a function changes the container of this name in place."""
    uses = _uses(code).get(name, [])
    if not uses or uses[0]:
        return False  # not used, or begun anew right here
    return not _CHANGE_IN_PLACE.isdisjoint(code.co_names) or "STORE_SUBSCR" in _operations(code)


def _changes_items(code: types.CodeType, name: str) -> bool:
    """Return whether a function reads items of the container of this name, and sets such."""
    operations = _operations(code)
    if not _uses(code).get(name) or "STORE_SUBSCR" not in operations:
        return False
    return not operations.isdisjoint(_TAKEN_FROM) or "get" in code.co_names


@functools.lru_cache(maxsize=2048)
def _operations(code: types.CodeType) -> frozenset[str]:
    found = set()
    for instruction in dis.get_instructions(code):
        op = instruction.opname
        found.add("BINARY_SUBSCR" if op == "BINARY_OP" and "[" in instruction.argrepr else op)
    return frozenset(found)
