"""A store that is away: saves that wait or fail, what is told of them, and when they end a job.

Training goes on meanwhile: what it does is lost only if the nodes go before the store is back. A
store that refuses (no rights, no room) refuses again, so that a few refusals end the job.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from spotguard.errors import StoreError, StoreUnavailable
from spotguard.events import keys
from spotguard.shared.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.errors import SpotguardError
    from spotguard.runtime.checkpoint.captured import Saved
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

REFUSED_BEFORE_STOP = 3
"""So many refused saves in a row end the job: nothing of it would be kept."""
PATIENCE_S = 3600.0
"""How long a store may be away, unless the user says otherwise."""
_AGAIN_S = 5.0
"""How long until a store that is away is asked again."""
_LATE_S, _LATE = 5.0, 3.0
"""A save in flight is stuck after so many seconds, and so many times as long as the last one."""
_WORD_TIMEOUT_S = 120.0
"""How long the first rank may take to say whether a save is to begin."""
_LOOK_S = 0.25


class FailedSaves:
    """Counts the saves of a rank that failed since the last good one."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._count = 0
        self._since = 0.0
        self._passing = False
        self._last: Saved | None = None
        """The good save before them."""

    def note(self, problem: SpotguardError, last: Saved | None, step: int, begun: int) -> str:
        """Count a failed save; return what is told of it: what would be lost, and until when.

        `last` is the newest good save, `step` are the steps done, of which the attempt did those
        from `begun` on.
        """
        now = time.monotonic()
        if not self._count or last is not self._last:
            self._count, self._since, self._last = 0, now, last
        self._count += 1
        self._passing = isinstance(problem, StoreUnavailable)
        kept = begun if last is None else last.step
        lost = f"if its nodes go before the next save, {step - kept} steps since step {kept}"
        told = f"{problem}; training goes on; {lost} are done again"
        if not self._passing:
            return told
        left_s = max(0.0, self._patience_s - (now - self._since))
        return f"{told}; it ends if nothing can be saved for {format_duration(left_s)} more"

    def check(self, last: Saved | None) -> None:
        """Let training go on, unless too many saves failed since `last`, or for too long.

        Raises:
            StoreError: what is trained from here on would not be kept.
        """
        if not self._count or last is not self._last:
            return
        away_s = time.monotonic() - self._since
        if self._passing and away_s > self._patience_s:
            raise StoreError(
                f"nothing could be saved for {format_duration(away_s)}; stopping, as nothing would "
                "be kept",
                hint="`store_patience` says how long a store may be away",
            )
        if not self._passing and self._count >= REFUSED_BEFORE_STOP:
            raise StoreError(
                f"{self._count} saves in a row failed; stopping, as nothing would be kept"
            )

    def await_store(self, store: ObjectStore, attempt: int) -> None:
        """Return once the store answers: there is nothing to restore from before.

        Raises:
            StoreUnavailable: it was away for too long.
        """

        def ask() -> None:
            try:
                store.head(keys.claim(attempt))
            except StoreUnavailable:
                raise
            except StoreError:  # an answer, too: who restores from it tells what it means
                return

        self.despite(ask)

    def despite(self, act: Callable[[], object], again: Callable[[], None] = lambda: None) -> None:
        """Do what can't wait for a better time, `again` and again while the store is away.

        Raises:
            SpotguardError: it failed for another reason, or the store was away for too long.
        """
        began = time.monotonic()
        while True:
            try:
                act()
            except StoreUnavailable as problem:
                left_s = self._patience_s - (time.monotonic() - began)
                if left_s <= 0:
                    raise
                log.error(
                    "%s; tried again for %s at most, while its nodes wait, and are paid",
                    problem,
                    format_duration(left_s),
                )
                again()
            else:
                return
            time.sleep(min(_AGAIN_S, left_s))


class SaveTurns:
    """Says whether a save that is due may begin: not while the one before is stuck in flight.

    The first rank says so for all: one that waits for another's save would hold up the others.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        rank: int,
        world_size: int,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`given_up`: returns True once no word of another rank is to be waited for any more."""
        self._coordinator = coordinator
        self._rank = rank
        self._others = world_size > 1
        self._given_up = given_up
        self._begun_at: float | None = None
        """When the save in flight began, by the monotonic clock."""
        self.tries = 0
        """How often the last save of all failed on all ranks: each try has words of its own."""
        self.is_stuck = False
        """True where the last answer was no."""

    def try_anew(self) -> None:
        """Have the next save of the same step talk with the other ranks under other words."""
        self.tries += 1

    def may_save(self, step: int, wait: Callable[[float], bool], last: Saved | None) -> bool:
        """Return whether the save due at `step` may begin; the same on all ranks.

        `wait` waits for the one in flight for so long, and returns whether none is any more. A
        store that is slow for a moment is waited for; one that is away stops no training.
        """
        word = f"save/may/{step}"
        if self._rank:
            said = self._heard(word)
            self.is_stuck = said == "0"
            return said is not None and not self.is_stuck
        patience_s = max(_LATE_S, 0.0 if last is None else _LATE * last.duration_s)
        now = time.monotonic()
        begun_at = now if self._begun_at is None else self._begun_at
        free = wait(max(0.0, patience_s - (now - begun_at)))
        if self._others:
            self._coordinator.set(word, "1" if free else "0")
        if not (free or self.is_stuck):
            log.warning(
                "a save waits for its store, and training goes on; if its nodes go before it is "
                "stored, the steps since %s are done again",
                "the beginning" if last is None else f"step {last.step}",
            )
        self.is_stuck = not free
        self._begun_at = time.monotonic() if free else begun_at
        return free

    def _heard(self, word: str) -> str | None:
        """Return what the first rank says; None if it may have left without a word."""
        end = time.monotonic() + _WORD_TIMEOUT_S
        while not self._given_up() and time.monotonic() < end:
            said = self._coordinator.get(word, _LOOK_S)
            if said is not None:
                return said
        return None
