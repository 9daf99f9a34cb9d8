"""A job whose nodes were asked for ahead begins only once the attempt before it has left."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import StoreError
from spotguard.events import env, keys
from spotguard.events.event import Event, JobEvent
from spotguard.runtime.distributed.rendezvous import Alone, LostContact
from spotguard.runtime.process import clock, wait_for_turn
from spotguard.runtime.process.settings import Settings
from spotguard.runtime.process.wait_for_turn import await_turn
from spotguard.testing.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable


def settings(rank: int = 0, after: int | None = 1) -> Settings:
    """Return what rank `rank` of attempt 2 is told."""
    return Settings(
        run_id="job-1",
        attempt=2,
        after=after,
        store_url="/store",
        rank=rank,
        world_size=3,
        local_rank=0,
        node=rank,
        launched=True,
    )


def write(store: MemoryStore, kind: JobEvent, count: int = 1, **data: Any) -> None:
    """Attempt 1 writes an event."""
    event = Event(kind=kind.value, at=clock.now(), attempt=1, data=data)
    key = keys.event(1, at=event.at, node=0, rank=0, count=count)
    store.put(key, event.to_json())


@pytest.fixture
def each_look(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Callable[[], None]]], list[int]]:
    """Return a function: what happens after each look in vain; one too many is an error."""

    def script(happenings: list[Callable[[], None]]) -> list[int]:
        looks: list[int] = []

        def sleep(_: float) -> None:
            assert len(looks) < len(happenings), "it waits for ever"
            looks.append(1)
            happenings[len(looks) - 1]()

        # Not `time` itself: threads that other tests have left sleep, too.
        monkeypatch.setattr(wait_for_turn, "time", SimpleNamespace(sleep=sleep))
        return looks

    return script


def nothing() -> None:
    """Let time pass."""


def test_an_attempt_that_was_not_launched_ahead_waits_for_nobody(each_look: Any) -> None:
    """Nor does it ask the store."""
    each_look([])
    await_turn(settings(after=None), MemoryStore(), Alone())


def test_it_begins_when_all_of_the_one_before_have_left(each_look: Any) -> None:
    """Not at its notice, its saves, nor the word of a rank that is alone."""
    store = MemoryStore()
    looks = each_look(
        [
            lambda: write(store, JobEvent.NOTICE, 1, source="aws"),
            lambda: write(store, JobEvent.SAVED, 2, step=5),
            lambda: write(store, JobEvent.ENDED, 3, reason="node_lost", solo=True),
            lambda: write(store, JobEvent.ENDED, 4, reason="finished"),
            lambda: write(store, JobEvent.ENDED, 5, reason="no such reason"),
            lambda: store.put(keys.event(1, at=clock.now(), node=0, rank=0, count=6), b"torn"),
            nothing,
            lambda: write(store, JobEvent.ENDED, 7, reason="preempted"),
        ]
    )
    await_turn(settings(), store, Alone())
    assert len(looks) == 8


def test_the_controllers_word_is_enough(each_look: Any) -> None:
    """Nodes that vanished say nothing; the store may be silent for a while."""
    store = MemoryStore()
    looks = each_look([nothing, lambda: store.put(keys.go(2), b"{}")])
    await_turn(settings(), store, Alone())
    assert len(looks) == 2

    class Silent(MemoryStore):
        failures = 3  # the first meets the look whether the store is there at all

        def head(self, key: str) -> Any:
            if self.failures:
                self.failures -= 1
                raise StoreError("no answer")
            return super().head(key)

    silent = Silent()
    silent.put(keys.go(2), b"{}")
    looks = each_look([nothing, nothing])
    await_turn(settings(), silent, Alone())
    assert len(looks) == 2


def test_a_turn_that_does_not_come_is_not_waited_for_for_ever(each_look: Any) -> None:
    """The notice was taken back and the controller is dead: nobody else ends the cost."""
    looks = each_look([nothing] * 1000)
    with pytest.raises(LostContact, match="attempt 1 has not ended"):
        await_turn(settings(), MemoryStore(), Alone())
    assert len(looks) == 900


def test_the_other_ranks_begin_with_the_first_one(each_look: Any) -> None:
    """They ask the store for nothing, and wait as long as it takes."""
    said, store = Alone(), MemoryStore()
    waiting = [
        threading.Thread(target=await_turn, args=(settings(rank), store, said)) for rank in (1, 2)
    ]
    for thread in waiting:
        thread.start()
    assert all(thread.is_alive() for thread in waiting)
    each_look([lambda: store.put(keys.go(2), b"{}")])
    await_turn(settings(), store, said)
    for thread in waiting:
        thread.join(10.0)
        assert not thread.is_alive()


def test_the_launcher_says_whom_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment; without it there is nobody."""
    plain = dict.fromkeys(("run_id", "store", "seed", "save_every", "keep_last", "peer_timeout"))
    monkeypatch.delenv(env.AFTER, raising=False)
    assert Settings.from_environment(**plain).after is None
    monkeypatch.setenv(env.AFTER, "4")
    assert Settings.from_environment(**plain).after == 4
