"""The language in which interruptions are scripted: `TARGET@WHEN:HOW`.

    node=1@step=40:notice      node 1 gets the cloud's notice once 40 steps are finished
    node=0@step=90:term        SIGTERM without a notice, SIGKILL after the grace
    node=1@t=12s:kill          kill -9 of all its processes, 12 s after the run's first launch
    all@step=50:reclaim-all    every node gets the notice (so do `@step=50:reclaim-all` and
                               `node=1@step=40:reclaim-all`)
    capacity=1@step=60         from then on only 1 node can be had; surplus ones get the notice
    capacity=2@t=30s           and from then on 2

Each fires once in a run. One that names a node waits until that node runs.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from spotguard.errors import SpecError
from spotguard.shared.units import parse_duration_s

if TYPE_CHECKING:
    from collections.abc import Iterable

FIELD = "interrupt"
"""The setting that errors name."""

_EXAMPLES = "such as node=1@step=40:notice, all@t=30s:kill or capacity=1@step=60"
_ENTRY = re.compile(r"(?P<target>[^@]*)@(?P<when>[^@:]*)(?::(?P<how>[^@:]*))?")


class How(str, Enum):
    """What the cloud does to a node."""

    NOTICE = "notice"
    """Announced by the metadata service, then SIGTERM and SIGKILL at the cloud's own times."""
    TERM = "term"
    """SIGTERM without a notice, SIGKILL after the grace."""
    KILL = "kill"
    """SIGKILL to every process at once."""
    RECLAIM_ALL = "reclaim-all"
    """The notice, to all nodes."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """One scripted act of the cloud. Exactly one of `at_step` and `at_s` is set."""

    node: int | None
    """Which node; None is all of them."""
    at_step: int | None
    """Fires when so many steps are finished."""
    at_s: float | None
    """Fires so many seconds after the run's first launch."""
    how: How
    capacity: int | None = None
    """If set, nothing is done to a given node: from then on only so many nodes can be had."""

    def __str__(self) -> str:
        when = f"t={self.at_s:g}s" if self.at_step is None else f"step={self.at_step}"
        if self.capacity is not None:
            return f"capacity={self.capacity}@{when}"
        target = "all" if self.node is None else f"node={self.node}"
        return f"{target}@{when}:{self.how.value}"

    def is_due(self, *, step: int, elapsed_s: float) -> bool:
        """Return whether its moment has come."""
        if self.at_step is not None:
            return step >= self.at_step
        return self.at_s is not None and elapsed_s >= self.at_s


def parse_interruptions(texts: Iterable[str]) -> tuple[Interruption, ...]:
    """Return what `texts` ask for, in their order; one text may hold several, comma-separated.

    Raises:
        SpecError: one of them is not of the language; says which, and the nearest word.
    """
    entries = (entry.strip() for text in texts for entry in text.split(","))
    return tuple(_parse(entry) for entry in entries if entry)


def _parse(entry: str) -> Interruption:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise _error(entry, f"is not TARGET@WHEN:HOW, {_EXAMPLES}")
    at_step, at_s = _parse_when(entry, match["when"].strip())
    key, value = _split(match["target"])
    if key == "capacity":
        if match["how"] is not None:
            raise _error(entry, "says how, but surplus nodes always get the notice: drop the ':'")
        count = _whole(entry, "capacity", value)
        return Interruption(node=None, at_step=at_step, at_s=at_s, how=How.NOTICE, capacity=count)
    how = _parse_how(entry, match["how"])
    node = _parse_node(entry, key, value, how)
    return Interruption(node=node, at_step=at_step, at_s=at_s, how=how)


def _parse_when(entry: str, when: str) -> tuple[int | None, float | None]:
    key, value = _split(when)
    if key == "step":
        return _whole(entry, "step", value), None
    if key != "t":
        raise _error(entry, _unknown("WHEN", key, ("step", "t"), "step=N or t=DURATION"))
    try:
        return None, parse_duration_s(value or "nothing")
    except ValueError:
        raise _error(entry, f"t must be a duration such as 12s or 5m, not {value!r}") from None


def _parse_how(entry: str, how: str | None) -> How:
    words = tuple(word.value for word in How)
    if how is None:
        raise _error(entry, f"says not how: end it with ':' and one of {', '.join(words)}")
    if how.strip() not in words:
        raise _error(entry, _unknown("HOW", how.strip(), words, "one of " + ", ".join(words)))
    return How(how.strip())


def _parse_node(entry: str, key: str, value: str | None, how: How) -> int | None:
    if key == "all" and value is None:
        return None
    if key == "" and value is None:
        if how is How.RECLAIM_ALL:
            return None
        raise _error(entry, "says not which node: begin it with node=N or all")
    if key != "node":
        allowed = ("node", "all", "capacity")
        raise _error(entry, _unknown("TARGET", key, allowed, "node=N, all or capacity=N"))
    node = _whole(entry, "node", value)
    return None if how is How.RECLAIM_ALL else node


def _split(text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    return key.strip(), value.strip() if equals else None


def _whole(entry: str, what: str, value: str | None) -> int:
    # isdecimal lets other scripts' digits through, which int reads too; isascii keeps them out
    if value is None or not (value.isascii() and value.isdecimal()):
        raise _error(entry, f"{what} must be a whole number from 0, not {value or 'nothing'!r}")
    return int(value)


def _unknown(what: str, given: str, allowed: tuple[str, ...], words: str) -> str:
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    question = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what} is {words}, not {given!r}{question}"


def _error(entry: str, problem: str) -> SpecError:
    return SpecError(FIELD, f"{entry!r}: {problem}", hint=f"write TARGET@WHEN:HOW, {_EXAMPLES}")
