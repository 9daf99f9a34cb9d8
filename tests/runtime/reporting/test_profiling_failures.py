"""A profile that cannot be made costs nobody but who asked for it, and that one is told why."""

from __future__ import annotations

import tempfile
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import profiler

from spotguard.errors import StoreError
from spotguard.events import keys
from spotguard.events.profile import STEP, ProfileBegin
from spotguard.runtime.checkpoint.captured import Between
from spotguard.runtime.loop.training import Training
from spotguard.runtime.reporting import profiling, recording
from spotguard.runtime.reporting.recording import Recording
from spotguard.testing import MemoryStore
from tests.runtime.reporting.test_profiling import Rank, answer, ask, is_on, names, stored

if TYPE_CHECKING:
    from collections.abc import Callable

REAL_EXIT: Any = profiler.profile.__exit__
BEGINNINGS = [
    getattr(profiler.profile, "_prepare_trace"),  # noqa: B009 - as they are without us
    getattr(profiler.profile, "_start_trace"),  # noqa: B009
]


def begun() -> Rank:
    """Return a rank whose profile is under way: two steps are recorded, and a third is to come."""
    one = Rank()
    ask(one.store, steps=3)
    one.train(5)
    assert is_on()
    return one


def others_begin_as_ever() -> bool:
    """Return whether nothing of ours stands before the script's profilers."""
    profile = profiler.profile
    return [profile._prepare_trace, profile._start_trace] == BEGINNINGS


def no_folder(*_: object, **__: object) -> None:
    """Stand for a temporary folder on a disk that is full."""
    raise OSError(28, "No space left on device")


def broken(*_: object, **__: object) -> None:
    """Stand for a profiler that cannot be had."""
    raise RuntimeError("CUPTI_ERROR " + 1000 * "x")


def ends_badly(own: profiler.profile, *_: object) -> None:
    """Stand for a profiler that ends, and says that it did not."""
    REAL_EXIT(own, None, None, None)
    broken()


@pytest.mark.parametrize(
    ("place", "name", "stands_for"),
    [
        (tempfile, "mkdtemp", no_folder),
        (profiler.profile, "export_chrome_trace", no_folder),
        (profiler.profile, "__enter__", broken),
        (profiler.profile, "__exit__", ends_badly),
        (recording, "record_function", broken),
    ],
)
def test_training_goes_on_without_a_profile(
    place: object, name: str, stands_for: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop comes to its end, where the final save is; torch's profiler is off by then."""
    monkeypatch.setattr(place, name, stands_for)
    one = Rank()
    ask(one.store)
    one.train(20)
    one.end()
    told = answer(one.store)
    assert told.steps == 0
    assert 0 < len(told.problem) <= 500
    assert not is_on()
    assert others_begin_as_ever()


def test_the_end_of_the_loop_cannot_fail_by_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is kept then, nor what is let go when the job ends."""
    one = begun()
    monkeypatch.setattr(profiler.profile, "__exit__", ends_badly)
    one.end()
    assert answer(one.store).problem
    monkeypatch.undo()
    one = begun()
    monkeypatch.setattr(profiler.profile, "__exit__", ends_badly)
    one.profiling.close(1.0)
    assert not is_on()


def test_a_step_that_cannot_be_ended_leaves_no_profiler_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would crash at its end."""
    one = Recording(with_trace=True, give_way=lambda: None)
    monkeypatch.setattr(recording, "_finish_queued", broken)
    with pytest.raises(RuntimeError):
        one.stop()
    assert not is_on()
    assert others_begin_as_ever()


@pytest.mark.parametrize("fails", ["upload", "facts"])
def test_what_cannot_be_stored_is_answered(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the profile would wait for ever."""
    one = Rank()
    if fails == "facts":
        one.profiling.facts = lambda: {"loader": object()}
    else:
        real = MemoryStore.put

        def put(own: MemoryStore, key: str, *args: Any, **more: Any) -> str:
            if key.endswith(".trace.json.gz"):
                raise StoreError("the bucket is full")
            return real(own, key, *args, **more)

        monkeypatch.setattr(MemoryStore, "put", put)
    ask(one.store)
    one.train(20)
    one.end()
    told = answer(one.store)
    assert told.problem
    assert told.trace_bytes == 0


# ---------------------------------------------------------------------- the script's own profilers


def plain() -> Any:
    """Return torch's profiler as all others wrap it."""
    return profiler.profile(use_kineto=True)


def scheduled(wait: int, warmup: int) -> Any:
    """Return one that begins to record some of its steps later."""
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=9),
    )


def whole() -> Any:
    """Return one that records at once."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@pytest.mark.parametrize("make", [plain, whole])
@pytest.mark.parametrize("steps", [2, 5])
def test_the_scripts_profiler_goes_first(make: Callable[[], Any], steps: int) -> None:
    """It begins while ours warms up, or records: ours ends, and theirs has all it is to have."""
    one = Rank()
    ask(one.store)
    one.train(steps)
    assert is_on()
    with make() as own:
        assert others_begin_as_ever()
        one.train(8)
    one.end()
    assert "itself" in answer(one.store).problem
    assert any(event.key == "aten::sum" for event in own.key_averages())
    assert not is_on()


@pytest.mark.parametrize(("wait", "warmup"), [(3, 1), (0, 3)])
def test_one_with_a_schedule_goes_first(wait: int, warmup: int) -> None:
    """It was begun before ours, and waits, or warms up, while ours begins."""
    one = Rank()
    ask(one.store)
    with scheduled(wait, warmup) as own:
        for done in range(1, 9):
            one.train(done)
            own.step()
    one.end()
    assert answer(one.store).problem  # the words differ by the versions of torch
    assert any(event.key == "aten::sum" for event in own.key_averages())
    assert not is_on()


def test_what_the_script_names_may_begin_in_one_step_and_end_in_the_next() -> None:
    """Where that crosses from one recording to another, torch writes into freed memory."""
    one = Rank()
    ask(one.store)
    crossed = []
    for done in range(1, 9):
        before = one.profiling._recording
        started = before._profiler if before is not None else None
        with profiler.record_function("mine"):
            one.train(done)
            after = one.profiling._recording
            ended = after._profiler if after is not None else None
            crossed.append(None not in (started, ended) and started is not ended)
    one.end()
    assert answer(one.store).steps == 3
    assert not any(crossed)


def test_one_in_another_thread_waits_for_the_end_of_the_step() -> None:
    """With two of them the process would crash."""
    one = begun()
    found: list[str] = []

    def profile() -> None:
        with whole() as own:
            torch.ones(4).exp()
        found.extend(event.key for event in own.key_averages())

    thread = threading.Thread(target=profile)
    thread.start()
    ours = one.profiling._recording
    assert ours is not None
    while not ours.is_unwanted:
        assert thread.is_alive()
    one.train(6)
    thread.join(20.0)
    one.end()
    assert "aten::exp" in found
    assert "itself" in answer(one.store).problem


def test_one_that_is_on_in_another_thread_is_seen() -> None:
    """Ours would end it, and crash."""
    one = Rank()
    on, over = threading.Event(), threading.Event()

    def profile() -> None:
        with plain():
            on.set()
            over.wait(20.0)

    thread = threading.Thread(target=profile)
    thread.start()
    on.wait(20.0)
    ask(one.store)
    one.train(3)
    over.set()
    thread.join(20.0)
    one.end()
    assert "itself" in answer(one.store).problem


# ---------------------------------------------------------------------- what would be too large


@pytest.mark.parametrize("within_step", [True, False])
def test_an_evaluation_ends_the_recording(within_step: bool) -> None:
    """Whole steps are kept; of those that were cut there is nothing."""
    one = Rank()
    ask(one.store, steps=5)
    one.train(6)
    if within_step:
        one.profiling.between_steps(one.finished)
    one.profiling.evaluation_begins(one.finished, within_step=within_step)
    assert not is_on()
    one.train(20)
    one.end()
    told = answer(one.store)
    assert (told.first_step, told.steps) == (3, 3)
    assert names(one.store).count("aten::mul") == 3
    assert names(one.store).count(STEP) == 3 + within_step  # the reader leaves it out


@pytest.mark.parametrize(("at", "within_step"), [(1, True), (1, False), (3, True)])
def test_an_evaluation_before_a_whole_step(at: int, within_step: bool) -> None:
    """Ours warms up once more, behind it; steps are as many as were asked for."""
    one = Rank()
    ask(one.store, steps=1)
    one.train(at)
    one.profiling.between_steps(at)  # the warm-up begins, or the step that counts
    behind = at + 1
    one.profiling.evaluation_begins(at if within_step else behind, within_step=within_step)
    assert not is_on()
    one.finished = behind
    one.train(20)
    one.end()
    told = answer(one.store)
    assert (told.first_step, told.steps) == (behind + (2 if within_step else 3), 1)


def test_run_evaluate_ends_the_recording() -> None:
    """With its first batch, before any of it is computed."""
    one = begun()
    training = Training.__new__(Training)
    training.step, training.finished, training._evaluated = None, one.finished, 0
    training._job = SimpleNamespace(  # type: ignore[assignment]
        profiling=one.profiling,
        keeper=SimpleNamespace(at=Between(), finished=one.finished, watch_weights=lambda: None),
        gate=SimpleNamespace(enter_evaluation=lambda *_: True),
    )
    assert [is_on() for _ in training.evaluate(range(2))] == [False, False]
    one.end()
    assert answer(one.store).steps == 2


def test_an_evaluation_in_each_step() -> None:
    """No whole step can be had: it is said after some tries."""
    one = Rank()
    ask(one.store)
    for done in range(20):
        one.profiling.look()
        one.profiling.between_steps(done)
        one.profiling.evaluation_begins(done, within_step=True)
        one.finished += 1
    assert not is_on()
    one.profiling.close(20.0)
    assert "evaluation" in answer(one.store).problem


def test_a_step_that_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before, or let go with its next micro-batch."""
    slow = Rank()
    monkeypatch.setattr(slow.profiling, "_progress", lambda: profiling.Progress(1, 20, 121.0))
    ask(slow.store)
    slow.profiling.look()
    assert ProfileBegin.from_json(slow.store.get(keys.profile_begin(1))).problem

    monkeypatch.setattr(profiling, "_LONGEST_STEP_S", 1e-9)
    one = Rank()
    monkeypatch.setattr(
        profiling.Profiling, "_decided", lambda *_: ProfileBegin(number=1, first_step=2, steps=3)
    )
    ask(one.store)
    one.train(2)
    assert not is_on()
    one.end()
    assert answer(one.store).problem


def test_a_trace_that_became_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up's is answered before any more is recorded, another one before it is packed."""
    monkeypatch.setattr(profiling, "_MOST_RAW_BYTES", 10)
    warm = Rank()
    ask(warm.store)
    warm.train(20)
    warm.end()
    assert answer(warm.store).problem

    monkeypatch.setattr(Recording, "end_warm_up", lambda own: own._stop_profiler() or 5)
    one = Rank()
    ask(one.store)
    one.train(20)
    one.end()
    told = answer(one.store)
    assert (told.steps, told.trace_bytes) == (3, 0)
    assert told.problem
    assert len(stored(one.store)) == 1
