"""Stores the frozen base beside the training, before a save needs it, and in no save's way.

A base of many gigabytes takes minutes, a save that refers to it a moment. Periodic saves that come
due meanwhile are put off until all ranks' bases are stored, so that none of them stands in the
loop's way, and none is measured with it. What cannot wait (an emergency, a best state, the end)
waits for the base: there is no checkpoint without it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from spotguard.errors import SpotguardError
from spotguard.runtime.checkpoint.save_schedule import LEAD_STEPS
from spotguard.shared.node_locks import saving

if TYPE_CHECKING:
    from spotguard.runtime.checkpoint.frozen_base import FrozenBase
    from spotguard.runtime.distributed.rendezvous import Coordinator

log = logging.getLogger("spotguard")

BASE_TIMEOUT_S: Final = 3600.0
"""For how long saves wait for the frozen base, and no longer."""
_TELL_AGAIN_S: Final = 5.0
_FROM: Final = "base/from"
_STORED, _FAILED = "stored", "failed"


class EarlyBase:
    """One rank's base on its way into the store, from the attempt's first step on."""

    def __init__(
        self,
        base: FrozenBase,
        coordinator: Coordinator,
        *,
        rank: int,
        world_size: int,
        saving_file: str | None = None,
    ) -> None:
        """`saving_file` is held as it is in a save: this is the first part of all of them."""
        self._base = base
        self._coordinator = coordinator
        self._rank = rank
        self._world_size = world_size
        self._saving_file = saving_file
        self._give_up_at = time.monotonic() + BASE_TIMEOUT_S
        self._has_told = False
        self._is_mine_stored = False
        self._over = threading.Event()
        """Set when this rank's is stored, or has failed, which the next save tells."""
        self._from: int | None = None
        """The first step at which saves may begin, once that is known."""
        self.are_stored = False
        """True once this rank knows that all ranks' bases are in the store."""
        threading.Thread(target=self._store, name="spotguard-base", daemon=True).start()

    def may_save(self, step: int) -> bool:
        """Return whether a save that is due at `step` is to begin; all ranks get the same answer.

        Nobody waits: the first rank names a step that lies so far ahead that the others have heard
        of it before they can reach it, as it does for each periodic save.
        """
        if self._from is None:
            self._from = self._decided(step) if self._rank == 0 else self._heard()
        return self._from is not None and step >= self._from

    def _decided(self, step: int) -> int | None:
        said = [self._coordinator.peek(_word_of(rank)) for rank in range(1, self._world_size)]
        if not (self._over.is_set() and None not in said) and time.monotonic() < self._give_up_at:
            if not self._has_told:
                self._has_told = True
                log.info("saves begin when the frozen base is stored; it is on its way")
            return None
        self.are_stored = self._is_mine_stored and all(word == _STORED for word in said)
        if self._world_size == 1:
            return step
        how = _STORED if self.are_stored else _FAILED
        self._coordinator.set(_FROM, f"{step + LEAD_STEPS} {how}")
        return step + LEAD_STEPS

    def _heard(self) -> int | None:
        word = self._coordinator.peek(_FROM)
        if word is None:
            return None
        begin, how = word.split()
        self.are_stored = how == _STORED
        return int(begin)

    def _store(self) -> None:
        """Top of the thread."""
        try:
            with saving(self._saving_file):
                self._base.stored()
            self._is_mine_stored = True
        except SpotguardError as problem:
            log.warning("the frozen base is stored with the next save: %s", problem)
        finally:  # whatever else goes wrong: saves are not put off for ever
            self._over.set()
            if self._rank:
                self._tell(_STORED if self._is_mine_stored else _FAILED)

    def _tell(self, how: str) -> None:
        """Tell the first rank; many ranks that are ready at once may find it busy."""
        while time.monotonic() < self._give_up_at:
            try:
                self._coordinator.connect().set(_word_of(self._rank), how)
            except ConnectionError as problem:  # whoever looks after the ranks says so, if it lasts
                log.info("could not tell the first rank yet: %s", problem)
                time.sleep(_TELL_AGAIN_S)
            else:
                return


def _word_of(rank: int) -> str:
    return f"base/of/{rank}"
