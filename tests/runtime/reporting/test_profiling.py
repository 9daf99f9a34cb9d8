"""A profile of some steps: the ranks record the same ones, store them, and give way to all else."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.events import keys
from spotguard.events.profile import (
    DATA,
    STEP,
    ProfileAnswer,
    ProfileBegin,
    ProfileRequest,
)
from spotguard.runtime.reporting import profiling
from spotguard.runtime.reporting.profiling import Profiling, Progress, RankPlace
from spotguard.shared.node_locks import saving
from spotguard.testing import MemoryStore
from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from spotguard.storage.base import ObjectStore
    from tests.runtime.harness.processes import Jobs

DONE_S = 20.0


@dataclass
class Rank:
    """A rank in a loop of 20 steps, each of which takes a tenth of a second as it says."""

    store: ObjectStore = field(default_factory=MemoryStore)
    rank: int = 0
    world_size: int = 1
    total: int | None = 20
    saving_file: str | None = None
    finished: int = 0
    told: bool = False

    def __post_init__(self) -> None:
        place = RankPlace(
            attempt=1,
            node=0,
            rank=self.rank,
            local_rank=self.rank,
            world_size=self.world_size,
            heartbeat_s=0.2,
            saving_file=self.saving_file,
        )
        self.profiling = Profiling(
            self.store,
            place,
            progress=lambda: Progress(self.finished, self.total, 0.1),
            told_to_stop=lambda: self.told,
        )

    def train(self, until: int) -> None:
        """Do steps, up to so many; ask the store before each."""
        while self.finished < until:
            self.profiling.look()
            self.profiling.between_steps(self.finished)
            with self.profiling.mark(DATA):
                batch = torch.ones(4)
            (batch * 2).sum()
            self.finished += 1

    def end(self) -> None:
        """Leave the loop, and wait for what is being stored."""
        self.profiling.loop_ended(self.finished)
        self.profiling.close(DONE_S)


def ask(store: ObjectStore, steps: int = 3, number: int = 1) -> None:
    """Ask attempt 1 for a profile."""
    asked = ProfileRequest(number=number, steps=steps, asked_at=1.0)
    store.put(keys.profile_request(1), asked.to_json())


def answer(store: ObjectStore, rank: int = 0, number: int = 1) -> ProfileAnswer:
    """Return what a rank answered."""
    return ProfileAnswer.from_json(store.get(keys.profile_answer(1, profile=number, rank=rank)))


def recorded(store: ObjectStore, rank: int = 0, number: int = 1) -> list[dict[str, Any]]:
    """Return the events of a rank's stored trace."""
    packed = store.get(keys.profile_trace(1, profile=number, rank=rank))
    events: list[dict[str, Any]] = json.loads(gzip.decompress(packed))["traceEvents"]
    return events


def names(store: ObjectStore, rank: int = 0) -> list[str]:
    """Return the names of what a rank recorded."""
    return [event["name"] for event in recorded(store, rank) if event["ph"] == "X"]


def stored(store: ObjectStore) -> list[str]:
    """Return the keys of what ranks stored."""
    return [info.key for info in store.list(f"{keys.profiles(1)}0")]


def is_on() -> bool:
    """Return whether torch's profiler is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def test_the_asked_steps_are_recorded_and_no_others() -> None:
    """After a step of warm-up, with what was waited for by name; nobody asks twice for them."""
    one = Rank()
    one.train(4)
    ask(one.store, steps=3)
    one.train(20)
    one.end()

    found = names(one.store)
    assert found.count(STEP) == 3
    assert found.count(DATA) == 3
    assert found.count("aten::mul") == 3
    told = answer(one.store)
    assert (told.first_step, told.steps) == (7, 3)  # asked for within step 5, which 6 warms up
    assert told.duration_s > 0
    assert len(stored(one.store)) == 2
    assert not is_on()


def test_a_second_profile_is_one_more() -> None:
    """Each has its own number and place."""
    one = Rank()
    ask(one.store)
    one.train(8)
    one.profiling.close(DONE_S)
    ask(one.store, steps=2, number=2)
    one = Rank(one.store, finished=8)
    one.train(16)
    one.end()
    assert answer(one.store, number=2).steps == 2
    assert len(stored(one.store)) == 4


class _Silent:
    """Stands for a recording where ranks share a process, which torch's profiler does not."""

    duration_s = cpu_s = step_s = 0.0
    is_unwanted = False
    is_on = True

    def __init__(self, *, with_trace: bool, give_way: Callable[[], None]) -> None:
        self.first: int | None = None

    def end_warm_up(self) -> int:
        self.is_on = False
        return 0

    def begin(self, finished: int) -> None:
        self.first = finished

    def next_step(self) -> None:
        pass

    def stop(self, *, within_step: bool = False) -> None:
        pass

    def mark(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, path: Path) -> None:
        path.write_text("{}")


def test_three_ranks_record_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one says with which all begin; one that hears of it too late says so."""
    monkeypatch.setattr(profiling, "Recording", _Silent)
    store = MemoryStore()
    ranks = [Rank(store, rank, 3, total=60) for rank in range(3)]
    ask(store, steps=5)
    for done in range(1, 40):
        for each in ranks[:2]:
            each.train(done)
    ranks[2].finished = 30
    ranks[2].train(32)
    for each in ranks:
        each.end()

    first = ProfileBegin.from_json(store.get(keys.profile_begin(1)))
    told = [answer(store, rank) for rank in range(3)]
    assert first.first_step > 1.5 * 0.2 / 0.1  # the others look once in a heartbeat
    assert [(t.first_step, t.steps) for t in told[:2]] == [(first.first_step, 5)] * 2
    assert told[2].steps == 0
    assert "heard" in told[2].problem


def test_a_word_to_stop_ends_it() -> None:
    """In the middle of a profile nothing is stored, and the profiler is off at the next step."""
    one = Rank()
    ask(one.store, steps=5)
    one.train(5)
    assert is_on()
    one.told = True
    one.train(6)
    assert not is_on()
    one.end()
    assert not stored(one.store)


def test_the_end_of_the_loop_keeps_what_there_is() -> None:
    """Fewer steps than asked for are a profile, too; a job with none left says so at once."""
    one = Rank(total=8)
    ask(one.store, steps=50)
    one.train(8)
    one.end()
    assert answer(one.store).steps == 5

    late = Rank(total=8, finished=6)
    ask(late.store)
    late.train(8)
    late.end()
    assert "few" in ProfileBegin.from_json(late.store.get(keys.profile_begin(1))).problem
    assert not stored(late.store)


def test_a_loop_that_is_left_early_says_so() -> None:
    """Who waits for the profile need not wait for ever."""
    one = Rank()
    ask(one.store)
    one.train(1)
    one.end()
    assert "ended" in answer(one.store).problem


def test_before_the_first_step_nobody_begins() -> None:
    """In set-up the request stands; the loop takes it up."""
    one = Rank(total=None)
    ask(one.store)
    one.profiling.look()
    assert one.store.head(keys.profile_begin(1)) is None


def test_the_scripts_own_profiler_is_left_alone() -> None:
    """Two profilers of torch in one thread would end each other."""
    one = Rank()
    ask(one.store)
    with torch.autograd.profiler.profile(use_kineto=True) as own:
        one.train(5)
    one.end()
    assert "itself" in answer(one.store).problem
    assert any(event.key == "aten::sum" for event in own.key_averages())


def test_steps_of_many_operations_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step of warm-up takes says how many fit into the largest trace."""
    monkeypatch.setattr(profiling, "_MOST_BYTES", 1)
    one = Rank()
    ask(one.store, steps=10)
    one.train(20)
    one.end()
    assert answer(one.store).steps == 1


def test_a_trace_waits_for_saves(tmp_path: Path) -> None:
    """As long as a rank of the node saves, nothing is sent; at the end of the job it is let go."""
    path = str(tmp_path / "saving")
    one = Rank(saving_file=path)
    ask(one.store)
    with saving(path):
        one.train(12)
        one.profiling.close(0.3)
    assert not stored(one.store)


def test_rubbish_in_the_store_asks_for_nothing() -> None:
    """Whoever can write there cannot break the loop."""
    one = Rank()
    one.store.put(keys.profile_request(1), b'{"number": -1}')
    one.train(6)
    one.end()
    assert not list(one.store.list(keys.profile_begin(1)))


@pytest.mark.e2e
def test_numbers_are_the_same_with_and_without(jobs: Jobs) -> None:
    """Three ranks are profiled while they train and save: weights and buffers stay the same."""
    common: dict[str, Any] = {
        "SPOTGUARD_HEARTBEAT_S": "0.1",
        "PACE_S": "0.02",
        "STEPS": "60",
        "EVERY": "10 steps",
    }
    undisturbed = jobs.start_ranks(3, **common, SPOTGUARD_RUN_ID="plain")
    assert [job.wait() for job in undisturbed] == [0, 0, 0]
    store = jobs.store()
    ask(store, steps=5)
    profiled = jobs.start_ranks(3, **common)
    assert [job.wait() for job in profiled] == [0, 0, 0]

    assert digest(profiled[0].said) == digest(undisturbed[0].said)
    assert [answer(store, rank).steps for rank in range(3)] == [5, 5, 5]
    assert names(store, 2).count("spotguard/ranks") >= 5


@pytest.mark.e2e
def test_a_notice_in_the_middle_of_a_profile_wins(jobs: Jobs) -> None:
    """The job saves and leaves as ever, with the profiler on; Python's end does not crash."""
    store = jobs.store()
    ask(store, steps=100)
    job = jobs.start(
        SPOTGUARD_HEARTBEAT_S="0.1", PACE_S="0.05", STEPS="200", HURT="30:batch:SIGTERM"
    )
    assert job.wait() == 75, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("terminated", 31)
    assert not stored(store)
