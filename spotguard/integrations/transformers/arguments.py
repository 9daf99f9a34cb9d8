"""What a method of the script does with an argument, as far as its code tells."""

from __future__ import annotations

import dis
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType


def uses_argument(function: Callable[..., Any], name: str) -> bool:
    """Return False if `function` cannot know the value of its argument `name`.

    Its code then reads neither the argument nor the `*args` or `**kwargs` that it may be in. A
    `compute_loss` that never looks at the number of items cannot have divided by it: what it
    returns is the mean of one batch.
    """
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return True  # not Python's: nobody can tell
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = {name, *(each.name for each in parameters if each.kind in kinds)}
    return any(read in names for read in _names_read(code))


def _names_read(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_") or "_LOAD_" in instruction.opname:
            # Python 3.13 reads two variables by one instruction.
            read = instruction.argval
            yield from (each for each in _several(read) if isinstance(each, str))
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            yield from _names_read(constant)


def _several(read: Any) -> tuple[Any, ...]:
    return read if isinstance(read, tuple) else (read,)
