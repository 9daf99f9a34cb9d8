"""Stores the frozen base beside the training, before a save needs it, and in no save's way.

A base of many gigabytes takes minutes, a save that refers to it a moment. Periodic saves that come
due meanwhile are put off until all ranks' bases are stored, so that none of them stands in the
loop's way, and none is measured with it. What cannot wait (an emergency, a best state, the end)
waits for the base: there is no checkpoint without it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from spotguard.errors import SpotguardError
from spotguard.runtime.distributed.rendezvous import LostContact
from spotguard.shared.right_of_way import saving

if TYPE_CHECKING:
    from spotguard.runtime.checkpoint.frozen_base import FrozenBase
    from spotguard.runtime.distributed.rendezvous import Coordinator

log = logging.getLogger("spotguard")

_WORD_TIMEOUT_S: Final = 60.0
_YES, _NO = "yes", "no"


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
        self._has_told = False
        self._over = threading.Event()
        """Set when it is stored, or has failed, which the next save tells."""
        self.is_over = False
        """True once all ranks have heard that no save needs to wait for a base any more."""
        threading.Thread(target=self._store, name="spotguard-base", daemon=True).start()

    def may_save(self, step: int) -> bool:
        """Return whether a save that is due at `step` is to begin; all ranks get the same answer.

        The first rank decides, for which the others wait a moment. Once it is yes, nobody asks.

        Raises:
            LostContact: the first rank does not say.
        """
        if not self.is_over:
            self.is_over = self._answer(f"base/before/{step}")
        return self.is_over

    def _answer(self, word: str) -> bool:
        if self._rank:
            answer = self._coordinator.get(word, _WORD_TIMEOUT_S)
            if answer is None:
                raise LostContact("the first rank did not say whether to save")
            return answer == _YES
        others = range(1, self._world_size)
        are_over = self._over.is_set() and all(
            self._coordinator.peek(_word_of(rank)) is not None for rank in others
        )
        if self._world_size > 1:
            self._coordinator.set(word, _YES if are_over else _NO)
        if not are_over and not self._has_told:
            self._has_told = True
            log.info("saves begin when the frozen base is stored; it is on its way")
        return are_over

    def _store(self) -> None:
        """Top of the thread."""
        try:
            with saving(self._saving_file):
                self._base.stored()
        except SpotguardError as problem:
            log.warning("the frozen base is stored with the next save: %s", problem)
        finally:  # whatever else goes wrong: saves are not put off for ever
            self._over.set()
            self._tell()

    def _tell(self) -> None:
        if self._rank:
            try:
                self._coordinator.connect().set(_word_of(self._rank), _YES)
            except ConnectionError as problem:  # whoever looks after the ranks will say so
                log.warning("could not tell the first rank: %s", problem)


def _word_of(rank: int) -> str:
    return f"base/stored/{rank}"
