"""A large frozen base on its way into the store stands in no save's way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from spotguard.checkpoint.lineage import restorable
from spotguard.checkpoint.manifest import load_manifest
from spotguard.events import keys
from spotguard.runtime.checkpoint.early_base import EarlyBase
from spotguard.runtime.checkpoint.save_schedule import SaveSchedule
from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.process.settings import SaveEvery
from spotguard.shared.node_locks import is_saving
from spotguard.testing import FaultyStore, MemoryStore
from tests.runtime.checkpoint.test_frozen_base import Attempt, attempt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class HeldStore(MemoryStore):
    """A store in which the base takes as long as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.open = threading.Event(), threading.Event()

    def put(self, key: str, data, **over) -> str:  # type: ignore[no-untyped-def]
        """Store it; a base when it may."""
        if key.startswith(keys.FROZEN):
            self.asked.set()
            assert self.open.wait(60)
        return super().put(key, data, **over)


@pytest.fixture
def held() -> Iterator[HeldStore]:
    """Return such a store; at the end nothing waits for it."""
    store = HeldStore()
    yield store
    store.open.set()


def warmed(store: MemoryStore | FaultyStore) -> Attempt:
    """Return an attempt after its first step, whose base is on its way."""
    made = attempt(store)
    made.rank.saver.warm(made.objects)
    return made


def test_a_periodic_save_is_put_off_and_not_held_up(held: HeldStore) -> None:
    """What comes due meanwhile does not begin, and the loop goes on at once."""
    made = warmed(held)
    assert held.asked.wait(60)
    made.rank.saver.wait()  # what the next save waits for: not for the base
    assert not made.rank.saver.may_save(3)
    held.open.set()
    while not made.rank.saver.may_save(4):
        threading.Event().wait(0.01)
    made.save(4)
    assert made.rank.saver.last is not None
    assert list(restorable(held))


def test_what_cannot_wait_waits_for_the_base_and_is_not_measured_with_it(held: HeldStore) -> None:
    """There is no checkpoint without it; how fast a save is has nothing to do with it."""
    made = warmed(held)
    assert held.asked.wait(60)
    release = threading.Timer(0.8, held.open.set)
    release.start()
    made.save(2)
    release.join()
    last = made.rank.saver.last
    assert last is not None
    assert last.duration_s < 0.7
    assert [base.folder for base in load_manifest(held, last.checkpoint).bases] == [keys.frozen(1)]


def test_a_base_that_cannot_be_stored_is_told_by_the_next_save() -> None:
    """Saves are not put off for ever: the next one tries, and tells."""
    store = FaultyStore(MemoryStore()).fail("put", key_contains=keys.FROZEN)
    made = warmed(store)
    while not made.rank.saver.may_save(3):
        threading.Event().wait(0.01)
    made.save(3)
    assert list(restorable(store))


@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_goes_wrong_saves_are_not_put_off_for_ever(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody thought of ends the thread, and is the next save's to meet."""

    fell = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda told: fell.set())

    class Broken:
        def stored(self) -> None:
            raise RuntimeError("of a driver")

    words = Alone()
    ranks = [
        EarlyBase(
            Broken() if each == rank else Base(is_open=True),  # type: ignore[arg-type]
            words,
            rank=each,
            world_size=2,
        )
        for each in range(2)
    ]
    assert words.get("base/of/1", 60) is not None
    assert ranks[0]._over.wait(60)
    assert [each.may_save(3) for each in ranks] == [False, False]
    assert [each.may_save(6) for each in ranks] == [True, True]
    assert not any(each.are_stored for each in ranks), "a save may take as long as a base"
    assert fell.wait(60)


def test_caches_wait_for_a_base_as_for_a_save(tmp_path: Path) -> None:
    """It is the first part of every save."""
    path, base = str(tmp_path / "saving"), Base()
    early = EarlyBase(base, Alone(), rank=0, world_size=1, saving_file=path)  # type: ignore[arg-type]
    assert base.asked.wait(60)
    assert is_saving(path)
    base.may.set()
    assert early._over.wait(60)
    assert not is_saving(path)


def test_without_a_frozen_base_nobody_is_asked() -> None:
    """And a save may begin at any step."""
    made = Attempt(MemoryStore())
    made.begin()
    assert made.rank.saver.may_save(3)


class Base:
    """Stands for a rank's base: stored when it may be."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.asked, self.may = threading.Event(), threading.Event()
        if is_open:
            self.may.set()

    def stored(self) -> None:
        """Block until it may."""
        self.asked.set()
        assert self.may.wait(60)


def test_three_ranks_begin_together_or_not_at_all() -> None:
    """As long as the slowest rank's base is on its way, none of them begins a save."""
    words, bases = Alone(), [Base() for _ in range(3)]
    ranks = [
        EarlyBase(base, words, rank=rank, world_size=3)  # type: ignore[arg-type]
        for rank, base in enumerate(bases)
    ]

    def answers(step: int) -> list[bool]:
        return [rank.may_save(step) for rank in ranks]

    assert answers(3) == [False, False, False]
    bases[0].may.set()
    bases[2].may.set()
    assert words.get("base/of/2", 60) is not None
    assert ranks[0]._over.wait(60)
    assert answers(6) == [False, False, False]
    bases[1].may.set()
    assert words.get("base/of/1", 60) is not None
    ahead = ranks[0].may_save(9), ranks[0].may_save(10)  # before the others are there
    assert ahead == (False, False)
    assert [rank.may_save(9) for rank in ranks[1:]] == [False, False]
    assert answers(11) == [False, False, False]
    assert answers(12) == [True, True, True]
    assert all(rank.are_stored for rank in ranks)


def test_nobody_waits_for_a_first_rank_that_is_busy() -> None:
    """It may evaluate for hours: the others go on without a save, and none is called lost."""
    ranks = [
        EarlyBase(Base(is_open=True), Alone(), rank=1, world_size=2)  # type: ignore[arg-type]
    ]
    assert not any(rank.may_save(step) for rank in ranks for step in range(3, 40, 3))


@pytest.mark.parametrize("every", [SaveEvery(steps=100), SaveEvery(seconds=60.0), SaveEvery()])
def test_a_save_that_was_put_off_comes_soon(every: SaveEvery) -> None:
    """On all ranks at the same step, whatever the user's interval."""
    words = Alone()
    plans = [SaveSchedule(every, words, rank, 3) for rank in range(3)]
    for plan in plans:
        plan.start(0)
        plan._next = 100
        assert plan.due(100)
        plan.put_off(100, step_s=0.25)
    expected = 103 if every.steps else 104
    for step in range(101, expected):
        assert not any(plan.due(step) for plan in plans)
    assert all(plan.due(expected) for plan in plans)
