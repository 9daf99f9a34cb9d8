"""The last save of ranks that are all late: a few of them make it, the others wait for their word.

Each of them holds all of the state. If all stored it at once, the time for one copy would be spent
on as many copies as there are ranks, over one network, and every GPU's by way of pinned memory. In
that time there is no second try either, so two of different nodes begin at once: the node of one
may be the very one that goes. One node has one: two would share its network, and both be late.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.errors import SpotguardError
    from spotguard.runtime.checkpoint.saver import Saver
    from spotguard.runtime.distributed.rendezvous import Coordinator

log = logging.getLogger("spotguard")

_LOOK_UP_S = 0.25
_ANSWER_S = 2.0


class LateRank(NamedTuple):
    """A rank whose main thread is late."""

    rank: int
    node: int
    can_save: bool
    """True if it has the state to save: it may be elected."""


def patience_for_others_s(left_s: float, save_s: float) -> float:
    """Return how long to wait for the elected: until there is just time for a save of one's own.

    If there is no time for two, one after the other, that of the others is not disturbed.
    """
    return left_s - save_s if left_s >= 2 * save_s else left_s


def save_by_few(
    words: Coordinator,
    saver: Saver,
    save: Callable[[], SpotguardError | None],
    *,
    of: LateRank,
    step: int,
    patience_s: float,
) -> SpotguardError | None:
    """Save the state after `step`, or wait for a rank that does; return what went wrong.

    This rank saves it, too, if those say that they could not, are gone or cannot be heard, or say
    nothing within `patience_s`.
    """
    words.hurry(min(_ANSWER_S, patience_s))
    end = time.monotonic() + patience_s
    election = _Election(words, f"late-save/{step}")
    try:
        seat = election.seat_of(of) if of.can_save else None
        # Where nobody can save, nobody is elected, and there is nothing to wait for.
        is_left = not of.can_save and not election.has_begun(min(_ANSWER_S, patience_s))
    except ConnectionError:
        is_left = True
    if is_left:
        saver.alone.set()  # also of the first rank's copy nothing is to be expected
        return save()
    problem = None
    if seat is not None:
        problem = save()
        if problem is None and saver.last is not None and saver.last.step == step:
            election.tell(election.done, saver.last.checkpoint)
            return None
        election.tell(f"{seat}/failed", "1")
    checkpoint = election.heard(saver, end)
    if checkpoint is None:
        return save() if seat is None else problem
    saver.take_from_other(step, checkpoint)
    return None


class _Election:
    """Who saves a step, and what became of it, in words between the ranks."""

    def __init__(self, words: Coordinator, key: str) -> None:
        self._words = words
        self._seats = (f"{key}/0", f"{key}/1")
        self.done = f"{key}/done"

    def seat_of(self, late: LateRank) -> str | None:
        """Elect this rank if a seat is free, and no rank of its node has one; return the seat."""
        for seat in self._seats:
            holder = self._words.first(seat, f"{late.node}/{late.rank}")
            node, rank = map(int, holder.split("/"))
            if rank == late.rank:
                return seat
            log.info("rank %d saves", rank)
            if node == late.node:
                return None
        return None

    def has_begun(self, timeout_s: float) -> bool:
        """Return whether a rank is elected within that time."""
        return self._words.get(self._seats[0], timeout_s) is not None

    def tell(self, key: str, value: str) -> None:
        """Say what became of the save."""
        try:
            self._words.set(key, value)
        except ConnectionError:
            log.debug("the rendezvous ended first")

    def heard(self, saver: Saver, end: float) -> str | None:
        """Return the checkpoint that was made; None if there is none, or no word of it."""
        try:
            while not saver.alone.is_set() and (left_s := end - time.monotonic()) > 0:
                said = self._words.get(self.done, min(left_s, _LOOK_UP_S))
                if said is not None:
                    return said
                if self._all_failed():
                    return None
        except ConnectionError:
            log.debug("the rendezvous ended first")
        return None

    def _all_failed(self) -> bool:
        held = [seat for seat in self._seats if self._words.peek(seat) is not None]
        return all(self._words.peek(f"{seat}/failed") is not None for seat in held)
