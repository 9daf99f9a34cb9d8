"""Ranks that are late together store one copy of what each of them holds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.errors import SpotguardError, StoreError
from spotguard.events.states import CheckpointKind
from spotguard.runtime.ending.late_save import save_by_one
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

    def leave(self, patience_s: float = 20.0) -> SpotguardError | None:
        """Do what the watcher does."""
        return save_by_one(
            self.rank.coordinator,
            self.rank.saver,
            self.save,
            rank=self.rank.rank,
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
    dead.rank.coordinator.first("late-save/9", "0")
    if gone == "told":
        survivor.rank.saver.alone.set()
    if gone == "no contact":
        words.lose(1)

    assert survivor.leave(0.01 if gone == "silent" else 20.0) is None
    assert survivor.tried == 1
    assert restored(store) == [7.0] * 5


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
