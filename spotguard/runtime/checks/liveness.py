"""Which variables a frame will still read: what a step assigns anew before it reads it is no state.

The answer is read off the bytecode, by the usual analysis of live variables. Where it cannot know,
as of a variable that a nested function shares, the variable counts as alive.
"""

from __future__ import annotations

import dis
import functools
from typing import TYPE_CHECKING

from spotguard.runtime.checks.carried import accesses, nested

if TYPE_CHECKING:
    import types

_LONGEST = 5_000
"""Instructions: of a longer function, whatever it reads at all counts as alive."""
_NEVER_GO_ON = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_ALWAYS_JUMP = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")


def live_names(frame: types.FrameType) -> frozenset[str]:
    """Return the names of a frame's variables that it, or a function in it, may still read."""
    code = frame.f_code
    shared = {name for each in nested(code) if each is not code for name in each.co_freevars}
    used_by_functions = set()
    if code.co_name == "<module>":
        used_by_functions = {n for each in nested(code) if each is not code for n in each.co_names}
    return _live_after(code, frame.f_lasti) | shared | used_by_functions


@functools.lru_cache(maxsize=64)
def _live_after(code: types.CodeType, place: int) -> frozenset[str]:
    """Return the names that may be read after the instruction at `place`."""
    instructions = list(dis.get_instructions(code))
    if len(instructions) > _LONGEST:
        return frozenset(_all_names(instructions))
    at = {instruction.offset: number for number, instruction in enumerate(instructions)}
    after = [_successors(instructions, number, at) for number in range(len(instructions))]
    live: list[set[str]] = [set() for _ in instructions]
    is_other = True
    while is_other:
        is_other = False
        for number in reversed(range(len(instructions))):
            names = set().union(*(live[each] for each in after[number]))
            for name, writes in reversed(_variables(instructions[number])):
                names = names - {name} if writes else names | {name}
            if names != live[number]:
                live[number], is_other = names, True
    # Within a call the place is that of the call's last inline cache.
    here = at[max(offset for offset in at if offset <= max(place, 0))]
    found = set().union(*(live[each] for each in after[here]))
    reached = _reached(0, after)
    handlers = [i for number, i in enumerate(instructions) if number not in reached]
    return frozenset(found | _all_names(handlers))


def _successors(instructions: list[dis.Instruction], number: int, at: dict[int, int]) -> list[int]:
    instruction = instructions[number]
    found = []
    if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
        found.append(at.get(instruction.argval, number))
    goes_on = instruction.opname not in (*_NEVER_GO_ON, *_ALWAYS_JUMP)
    if goes_on and number + 1 < len(instructions):
        found.append(number + 1)
    return found


def _variables(instruction: dis.Instruction) -> list[tuple[str, bool]]:
    return [(name, writes) for name, writes in accesses(instruction) if name[0] != "."]


def _all_names(instructions: list[dis.Instruction]) -> set[str]:
    return {name for each in instructions for name, writes in _variables(each) if not writes}


def _reached(first: int, after: list[list[int]]) -> set[int]:
    reached, waiting = {first}, [first]
    while waiting:
        for each in after[waiting.pop()]:
            if each not in reached:
                reached.add(each)
                waiting.append(each)
    return reached
