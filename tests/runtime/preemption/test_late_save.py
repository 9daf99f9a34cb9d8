"""Ranks that are late together store few copies of what each of them holds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.errors import SpotguardError, StoreError
from spotguard.events.states import CheckpointKind
from spotguard.runtime.ending.late_save import LateRank, patience_for_others_s, save_by_few
from spotguard.shared.units import to_iso
from spotguard.testing import FakeRendezvous, MemoryStore
from tests.runtime.harness.lab import Rank, adapters, next_attempt, together
from tests.runtime.preemption.test_ways_out import script

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.runtime.harness.processes import Jobs

WORLD = 4


class Late:
    """A rank whose main thread is late, and what its watcher does."""

    def __init__(self, rank: Rank, fails: Callable[[Late], None]) -> None:
        self.rank = rank
        self.tried = 0
        self._fails = fails

    def save(self) -> SpotguardError | None:
        """Save alone, as the keeper does."""
        self.tried += 1
        try:
            self._fails(self)
        except SpotguardError as problem:
            return problem
        state = adapters({"s": {"weights": torch.full((5,), 7.0)}})
        saver = self.rank.saver
        capture = saver.capture(9, CheckpointKind.EMERGENCY, state, {}, solo=True)
        saver.save_now(capture, solo=True)
        return None

    def leave(
        self, patience_s: float = 20.0, *, node: int = 0, can_save: bool = True
    ) -> SpotguardError | None:
        """Do what the watcher does."""
        return save_by_few(
            self.rank.coordinator,
            self.rank.saver,
            self.save,
            of=LateRank(self.rank.rank, node, can_save),
            step=9,
            patience_s=patience_s,
        )


def late_ranks(
    words: FakeRendezvous, store: MemoryStore, fails: Callable[[Late], None] = lambda _: None
) -> list[Late]:
    """Return the ranks of one attempt."""
    claim_attempt(store, 1, None)
    return [Late(Rank(store, r, WORLD, coordinator=words.rank(r)), fails) for r in range(WORLD)]


def restored(store: MemoryStore) -> list[float]:
    """Return the weights of the newest checkpoint."""
    fresh: dict[str, Any] = {"weights": torch.zeros(5)}
    next_attempt(store, s=fresh)
    weights: list[float] = fresh["weights"].tolist()
    return weights


def test_one_rank_saves_and_all_know_it() -> None:
    """The first one writes the end, whoever has saved."""
    store = MemoryStore()
    late = late_ranks(FakeRendezvous(), store)

    assert together(*(rank.leave for rank in late)) == [None] * WORLD
    assert sum(rank.tried for rank in late) == 1
    last = [rank.rank.saver.last for rank in late]
    assert len({saved.checkpoint for saved in last if saved is not None}) == 1
    assert {saved.step for saved in last if saved is not None} == {9}
    assert None not in last
    assert restored(store) == [7.0] * 5


def test_if_the_first_to_save_fails_the_others_do_so() -> None:
    """A node whose network is gone is not the only one that could have saved."""
    store, once = MemoryStore(), threading.Lock()

    def fails(_: Late) -> None:
        if once.acquire(blocking=False):
            raise StoreError("its network is gone")

    late = late_ranks(FakeRendezvous(), store, fails)
    problems = together(*(rank.leave for rank in late))

    assert [type(p) for p in problems if p is not None] == [StoreError]
    assert [rank.tried for rank in late] == [1] * WORLD
    assert restored(store) == [7.0] * 5


@pytest.mark.parametrize("gone", ["told", "silent", "no contact"])
def test_nobody_relies_on_a_rank_that_is_gone(gone: str) -> None:
    """It was to save, and died: the ring says so, or it says nothing any more."""
    store, words = MemoryStore(), FakeRendezvous()
    dead, survivor, *_ = late_ranks(words, store)
    dead.rank.coordinator.first("late-save/9/0", "0/0")
    if gone == "told":
        survivor.rank.saver.alone.set()
    if gone == "no contact":
        words.lose(1)

    assert survivor.leave(0.01 if gone == "silent" else 20.0) is None
    assert survivor.tried == 1
    assert survivor.rank.saver.alone.is_set() == (gone != "silent")
    assert restored(store) == [7.0] * 5


def test_a_node_that_stalls_is_not_the_only_one_that_saves() -> None:
    """It may be the one that goes, and there is no time for a second try: two begin at once."""
    store, others_left = MemoryStore(), threading.Event()

    def stalls(late: Late) -> None:
        if late.rank.rank == 0:
            others_left.wait(20)

    late = late_ranks(FakeRendezvous(), store, stalls)
    stalled, *others = late
    stalled.rank.coordinator.first("late-save/9/0", "0/0")

    def the_others() -> list[Any]:
        try:
            return [rank.leave(2.0, node=rank.rank.rank % 2) for rank in others]
        finally:
            others_left.set()

    problems = together(stalled.leave, the_others)

    assert problems == [None, [None] * 3]
    assert [rank.tried for rank in late] == [1, 1, 0, 0]
    assert restored(store) == [7.0] * 5


def test_who_could_not_save_takes_the_word_of_the_other_who_did() -> None:
    """The end says that the step is saved, whichever rank writes it."""
    store = MemoryStore()

    def fails(late: Late) -> None:
        if late.rank.rank == 0:
            raise StoreError("its network is gone")

    first, second, *_ = late_ranks(FakeRendezvous(), store, fails)
    first.rank.coordinator.first("late-save/9/0", "0/0")

    assert together(first.leave, lambda: second.leave(node=1)) == [None, None]
    assert first.rank.saver.last is not None


def test_a_rank_without_the_state_is_not_elected() -> None:
    """Its weights are neither old nor new: it waits for one that has them, if there is one."""
    store = MemoryStore()
    without, other, *_ = late_ranks(FakeRendezvous(), store)

    assert together(lambda: without.leave(can_save=False), other.leave) == [None, None]
    assert [without.tried, other.tried] == [0, 1]
    assert restored(store) == [7.0] * 5


def test_ranks_without_the_state_do_not_wait_for_each_other() -> None:
    """Nobody is elected: each of them says itself that there is nothing to save."""
    words = FakeRendezvous(patience_s=0.01)
    late = late_ranks(words, MemoryStore())

    together(*(lambda rank=rank: rank.leave(can_save=False) for rank in late))
    assert [rank.tried for rank in late] == [1] * WORLD
    assert all(rank.rank.saver.alone.is_set() for rank in late)
    assert not [key for key in words.words if key.startswith("late-save")]


def test_the_others_wait_as_long_as_a_save_of_their_own_has_time() -> None:
    """Where there is no time for two, the one under way is not disturbed."""
    assert patience_for_others_s(110.0, 12.0) == 98.0
    assert patience_for_others_s(12.5, 12.0) == 12.5


@pytest.mark.e2e
def test_a_notice_in_a_step_that_hangs_stores_the_state_once(jobs: Jobs) -> None:
    """All watchers give up the step at the same moment; the shard that lies there is of one."""
    notice = jobs.folder / "notice"
    hangs = "print('hangs', flush=True); time.sleep(600)"
    ranks = jobs.start_ranks(3, script=script(jobs, at_12=hangs), SPOTGUARD_NOTICE_FILE=notice)
    for rank in ranks:
        rank.wait_for("hangs")
    notice.write_text(f'{{"deadline_at": "{to_iso(time.time() + 6)}"}}')

    assert [rank.wait() for rank in ranks] == [75] * 3, ranks[0].said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"], end["saved"]) == ("preempted", 12, True)
    files = [item.key for item in jobs.store().list(end["checkpoint"])]
    assert len([key for key in files if key.endswith(".safetensors")]) == 1, files
