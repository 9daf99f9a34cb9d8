"""An attempt whose nodes were asked for ahead waits, with all set up, until its turn has come.

The attempt before it was announced to end, and trains as long as it can. It says in the run store
when it has left; where it cannot, the controller says so, in a word for this attempt. Until one of
them does nothing is restored, claimed or trained here.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from spotguard.errors import NotFound, StoreError
from spotguard.events import keys
from spotguard.events.event import Event, JobEvent
from spotguard.events.states import EndReason
from spotguard.events.untrusted import Refused
from spotguard.runtime.distributed.rendezvous import LostContact
from spotguard.runtime.process import clock
from spotguard.runtime.process.failed_saves import FailedSaves
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.process.settings import Settings
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

_LOOK_EVERY_S = 1.0
_MOST_LOOKS = 900
"""A quarter of an hour: every notice of a cloud has come true long before, and who controls the run
would have given the nodes up. They must not be paid for as long as nobody does."""
_SLICE_S = 60.0
"""How long a rank listens for the first one at a time."""
_BEFORE_S = 3600.0
"""Ends that were written longer before this process began are not looked for."""
_WORD = "turn"


def await_turn(settings: Settings, store: ObjectStore, coordinator: Coordinator) -> None:
    """Block until the attempt before this one has ended, if this one was launched ahead.

    A store that is away is waited for first: there is nothing to restore from before it answers.
    The first rank reads the store, the others hear it. Who is told to stop meanwhile leaves by
    the thread that hears of it.

    Raises:
        StoreError: the store was away for longer than it may be.
        LostContact: the first rank cannot be heard, or the turn does not come: then neither the
            attempt before nor a controller is there to say so, and the nodes give themselves back.
    """
    if settings.attempt is not None:
        FailedSaves(settings.store_patience_s).await_store(store, settings.attempt)
    if settings.after is None or settings.attempt is None:
        return
    if settings.rank:
        while coordinator.get(_WORD, _SLICE_S) is None:
            pass
        return
    log.info("ready, and waits until attempt %d has ended", settings.after)
    looks = _Looks(store, settings.after, settings.attempt)
    for _ in range(_MOST_LOOKS):
        if looks.turn_has_come():
            coordinator.set(_WORD, "come")
            return
        time.sleep(_LOOK_EVERY_S)
    raise LostContact(f"attempt {settings.after} has not ended, and nobody says what to do")


class _Looks:
    """Looks into the store for the end of an attempt; each event of it is read once."""

    def __init__(self, store: ObjectStore, before: int, mine: int) -> None:
        self._store = store
        self._before = before
        self._mine = mine
        since = max(0.0, clock.now() - _BEFORE_S)
        self._start_after = keys.event(before, at=since, node=0, rank=0, count=0)
        self._read: set[str] = set()

    def turn_has_come(self) -> bool:
        """Tell whether somebody said so; a store that is silent says nothing."""
        try:
            return self._store.head(keys.go(self._mine)) is not None or self._has_left()
        except StoreError as problem:
            log.info("the store cannot tell whether it is its turn: %s", problem)
            return False

    def _has_left(self) -> bool:
        """Tell whether the whole attempt left, for another one to go on."""
        for info in self._store.list(keys.events(self._before), start_after=self._start_after):
            if info.key in self._read or keys.is_chunk(info.key):
                continue
            try:
                event = Event.from_json(get_small(self._store, info.key))
            except NotFound:  # merged with others a moment ago
                continue
            except Refused as problem:
                log.info("%s makes no sense: %s", info.key, problem)
            else:
                if _leads_on(event):
                    return True
            self._read.add(info.key)
        return False


def _leads_on(event: Event) -> bool:
    """Tell whether an event is the end of an attempt that is to be gone on from.

    One that left without the answer of its peers may not be the last to train.
    """
    if event.kind != JobEvent.ENDED.value or event.data.get("solo") is True:
        return False
    try:
        return EndReason(str(event.data.get("reason"))).retried
    except ValueError:
        return False
