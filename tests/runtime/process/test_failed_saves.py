"""A store that is away: training goes on, one save waits, and the patience has an end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from spotguard.errors import StoreError, StoreUnavailable
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint.captured import Saved
from spotguard.runtime.process import failed_saves
from spotguard.runtime.process.failed_saves import FailedSaves, SaveTurns
from spotguard.testing import FakeClock, FakeRendezvous, FaultyStore, MemoryStore

SAVED = replace(Saved.by_other(30, "checkpoints/30"), kind=CheckpointKind.PERIODIC, duration_s=2.0)
AWAY = StoreUnavailable("the bucket does not answer")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock that only moves when it is told to."""
    clock = FakeClock()
    monkeypatch.setattr(failed_saves, "time", clock)
    return clock


def test_a_store_that_is_away_ends_no_job_before_the_users_patience(clock: FakeClock) -> None:
    """However many saves fail meanwhile; it is told what would be lost, and for how long more."""
    failed = FailedSaves(patience_s=600.0)
    for step in range(40, 240, 10):
        told = failed.note(AWAY, SAVED, step, 0)
        failed.check(SAVED)
        clock.advance(25.0)
    assert "training goes on" in told
    assert "200 steps since step 30 are done again" in told
    assert "2 min 05 s more" in told
    clock.advance(200.0)
    with pytest.raises(StoreError, match="nothing could be saved for 11 min 40 s"):
        failed.check(SAVED)
    failed.check(replace(SAVED, step=240))  # a save that came through ends it


def test_a_store_that_refuses_ends_a_job_at_the_third_time(clock: FakeClock) -> None:
    """No rights and no room do not mend by themselves."""
    failed = FailedSaves()
    for _ in range(3):
        failed.check(None)
        failed.note(StoreError("access denied"), None, 10, 0)
    with pytest.raises(StoreError, match="3 saves in a row failed"):
        failed.check(None)


@pytest.mark.parametrize(("away_s", "comes"), [(10.0, True), (180.0, True), (1e9, False)])
def test_the_last_save_waits_for_its_store(clock: FakeClock, away_s: float, comes: bool) -> None:
    """What all steps came to is not lost for three minutes without a store, nor paid for ever."""
    tries: list[int] = []
    back_at = clock.monotonic() + away_s

    def save() -> None:
        if clock.monotonic() < back_at:
            raise AWAY

    failed = FailedSaves(patience_s=600.0)
    if comes:
        failed.despite(save, again=lambda: tries.append(1))
        assert len(tries) == pytest.approx(away_s / 5.0, abs=1)
        return
    with pytest.raises(StoreUnavailable):
        failed.despite(save)
    assert sum(clock.slept) == pytest.approx(600.0)


def test_an_attempt_waits_for_its_store_before_it_restores(clock: FakeClock) -> None:
    """Nodes that come up within an outage do not end the run."""
    store = FaultyStore(MemoryStore()).fail("head", times=4)
    FailedSaves(patience_s=600.0).await_store(store, 2)
    assert store.calls["head"] == 5


def test_a_save_that_is_stuck_holds_up_no_rank_and_all_of_them_know(clock: FakeClock) -> None:
    """Once per outage the loop waits for seconds; then each save that is due is put off at once."""
    words = FakeRendezvous()
    ranks = [SaveTurns(words.rank(rank), rank, 3) for rank in range(3)]
    waited: list[float] = []
    in_flight = True

    def wait(seconds: float) -> bool:
        if in_flight:
            waited.append(seconds)
            clock.advance(seconds)
        return not in_flight

    for step in range(40, 100, 3):
        assert [rank.may_save(step, wait, SAVED) for rank in ranks] == [False] * 3
    assert sum(waited) == 6.0  # three times as long as the last save took
    assert all(rank.is_stuck for rank in ranks)
    in_flight = False
    assert [rank.may_save(100, wait, SAVED) for rank in ranks] == [True] * 3


def test_no_rank_waits_for_the_word_of_one_that_leaves_at_this_boundary() -> None:
    """A stop agreed for the boundary at which two ranks ask whether to save: the first has left."""
    words = FakeRendezvous()
    leaves = threading.Event()
    ranks = [SaveTurns(words.rank(rank), rank, 3, leaves.is_set) for rank in range(3)]
    told = threading.Timer(0.3, leaves.set)
    told.start()
    began = time.monotonic()
    assert not any(rank.may_save(40, lambda _: True, SAVED) for rank in ranks[1:])
    assert time.monotonic() - began < 30.0
    assert not any(rank.is_stuck for rank in ranks)
