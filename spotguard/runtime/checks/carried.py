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

from spotguard.runtime.checks.walker import StateLeaf, is_installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CHANGE_IN_PLACE = {
    *("append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "rotate"),
    *("update", "add", "discard", "setdefault", "subtract"),
}
"""Methods of Python's containers."""
_TAKEN_FROM = ("BINARY_SUBSCR", "BINARY_SLICE")
_COPIES = ("COPY", "DUP_TOP_TWO")
_KEY = 10
"""Instructions that may stand between a container and what is done to it: they make the key."""
_LOADS = (
    "LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT",
)  # fmt: skip


def is_carried(
    before: StateLeaf, after: StateLeaf, functions: Iterable[types.CodeType] = ()
) -> bool:
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
    if after.of_kind == "position":
        return True
    code = [*_code_of(after.owner), *functions]
    name = after.name if isinstance(after.owner, types.FunctionType) else f".{after.name}"
    if after.slot is not None and not _is_attribute(after):
        return any(_changes_items(each, name) for each in code)
    if any(is_read_before_written(each, name) for each in code):
        return True
    is_container = after.kind == "value" and after.type not in _PLAIN_NAMES
    return is_container and any(_changes_container(each, name) for each in code)


_PLAIN_NAMES = {"bool", "int", "float", "str", "bytes", "complex", "NoneType"}


def _is_attribute(leaf: StateLeaf) -> bool:
    return isinstance(leaf.key, str) and leaf.key == leaf.name


def _code_of(owner: Any) -> Iterator[types.CodeType]:
    """Yield the code of an object's methods, or of a function and those in it."""
    if isinstance(owner, types.FunctionType):
        yield from nested(owner.__code__)
        return
    kind: Any = owner if isinstance(owner, type) else type(owner)
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
def _uses(code: types.CodeType) -> dict[str, list[tuple[bool, Any]]]:
    """Return for each name whether its uses, in order, write it (True) or read it (False).

    Beside that, of an attribute, the name of its object: `step.number` says nothing of
    `optimizer.number`. None if it is not known, as in `self.calls += 1`.
    """
    found: dict[str, list[tuple[bool, Any]]] = {}
    before: Any = None
    for instruction in dis.get_instructions(code):
        for name, writes in accesses(instruction):
            found.setdefault(name, []).append((writes, before if name[0] == "." else ""))
        if instruction.opname.startswith("LOAD_"):
            before = instruction.argval
        elif not instruction.opname.startswith(("COPY", "DUP_", "CACHE")):
            before = None
    return found


def accesses(instruction: dis.Instruction) -> list[tuple[str, bool]]:
    """Return which names an instruction reads (False) and writes (True), in this order.

    Attributes have a dot before their names.
    """
    op = instruction.opname
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    if op.startswith("STORE_FAST_LOAD_FAST"):
        return [(names[0], True), (names[1], False)]
    if op.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")):
        return [(f".{name}", False) for name in names]
    if op == "STORE_ATTR":
        return [(f".{name}", True) for name in names]
    if op.startswith(_LOADS):
        return [(name, False) for name in names if isinstance(name, str)]
    if op.startswith(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")):
        return [(name, True) for name in names if isinstance(name, str)]
    return []


def is_read_before_written(code: types.CodeType, name: str) -> bool:
    """Return whether a function reads an attribute or variable, and then writes it."""
    uses = _uses(code).get(name, [])
    if name[0] == "." and name[1:] in code.co_consts and "getattr" in code.co_names:
        return any(writes for writes, _ in uses)
    for of in {of for writes, of in uses if not writes}:
        here = [writes for writes, each in uses if each in (of, None)]
        if not here[0] and True in here:
            return True
    return False


def _changes_container(code: types.CodeType, name: str) -> bool:
    """Return whether a function changes the container of this name in place."""
    uses = _uses(code).get(name, [])
    if not uses or uses[0][0]:
        return False  # not used, or begun anew right here
    return any(use in ("set", *_CHANGE_IN_PLACE) for use in _uses_of_container(code, name))


def _changes_items(code: types.CodeType, name: str) -> bool:
    """Return whether a function reads items of the container of this name, and then sets such."""
    uses = _uses_of_container(code, name)
    reads = [place for place, use in enumerate(uses) if use in ("read", "get", "items", "values")]
    sets = [place for place, use in enumerate(uses) if use in ("set", "update")]
    return bool(reads and sets) and (reads[0] < sets[0] or len(sets) > 1)


@functools.lru_cache(maxsize=2048)
def _uses_of_container(code: types.CodeType, name: str) -> list[str]:
    """Return what is done to the container of a name, in order: `read`, `set`, or a method.

    Of what a function reads and sets in one statement both come, reading first, as it runs so.
    """
    found: list[tuple[int, str]] = []
    names = {name}
    instructions = list(dis.get_instructions(code))
    for number, instruction in enumerate(instructions):
        if not any((each, False) in accesses(instruction) for each in names):
            continue
        for place, after in enumerate(instructions[number + 1 : number + _KEY], number + 1):
            op = after.opname
            if op.startswith(("STORE_FAST", "STORE_NAME")) and place == number + 1:
                names.add(str(after.argval))  # another name for it
            elif op.startswith(("LOAD_METHOD", "LOAD_ATTR")) and place == number + 1:
                found.append((place, str(after.argval)))
            elif op in _TAKEN_FROM or (op == "BINARY_OP" and "[" in after.argrepr):
                found.append((place, "read"))
                if any(each.opname in _COPIES for each in instructions[number + 1 : place]):
                    found.append((place, "set"))  # `held[key] += ...`
            elif op == "STORE_SUBSCR":
                found.append((place, "set"))
            elif op.startswith(("LOAD_", "COPY", "DUP_", "CACHE", "FORMAT_", "BUILD_STRING")):
                continue
            break
    return [use for _, use in sorted(found, key=lambda pair: pair[0])]
