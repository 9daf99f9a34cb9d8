"""A training that was ended before its last step stays ended, wherever the job is interrupted."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from spotguard.checkpoint.lineage import restorable
from spotguard.checkpoint.manifest import load_manifest
from spotguard.events.states import EndReason
from spotguard.runtime.checkpoint.early_end import SAME_MOMENT_S, EarlyEnd
from spotguard.runtime.ending.leaving import Phase
from spotguard.runtime.loop.epochs import epochs_of
from spotguard.runtime.loop.training import Training
from spotguard.runtime.preemption.stop_consensus import StopRequest
from spotguard.runtime.process import clock
from spotguard.shared.units import to_iso
from tests.runtime.checkpoint.test_left_state import Script, claimed
from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import ObjectStore
    from tests.runtime.harness.processes import Jobs

TOLD = StopRequest(reason=EndReason.PREEMPTED, message="a notice", solo=True)


def ended(store: ObjectStore) -> tuple[int, Any]:
    """Return the step of the newest checkpoint, and what it says of an early end."""
    ref = next(iter(restorable(store)))
    return ref.step, load_manifest(store, ref.prefix).counters.get("ended_early")


def asks_for(script: Script, total: int | None = None, epochs: int | None = None) -> None:
    """Say how much it asks for in all, without a checkpoint."""
    assert not script.keeper.early_end.begin(total, epochs, {})


def test_an_early_end_belongs_to_the_boundary_after_its_step() -> None:
    """A step that is given up after `run.end` comes again, and calls it again."""
    store = claimed()
    script = Script(store)
    asks_for(script, 10)
    script.train(1, 7.0)
    script.keeper.early_end.why = "solved"
    script.keeper.save_boundary(TOLD)
    assert ended(store) == (1, None)

    script.train(2, 8.0)
    script.keeper.save_final()
    assert ended(store) == (2, {"why": "solved", "total": 10, "epochs": None})


def test_what_comes_between_two_steps_may_end_the_training() -> None:
    """From where the script asks for the next step on, or for the next epoch."""
    store = claimed()
    script = Script(store)
    asks_for(script, epochs=3)
    script.train(1, 7.0)
    script.keeper.early_end.why = "solved"
    script.keeper.take_boundary_again()
    script.keeper.save_final()
    assert ended(store) == (1, {"why": "solved", "total": None, "epochs": 3})


@pytest.mark.parametrize("told", [True, False], ids=["told to stop", "at its end"])
@pytest.mark.parametrize("saved_before", [True, False])
def test_an_early_end_that_comes_after_the_save_of_its_boundary_is_told_of(
    caplog: pytest.LogCaptureFixture, *, told: bool, saved_before: bool
) -> None:
    """A step is saved once, and the next attempt will train on: who reads the log knows why."""
    script = Script(claimed())
    asks_for(script, 10)
    script.train(1, 7.0)
    if saved_before:
        script.keeper.save_in_background()
        script.keeper.saver.wait()
    script.keeper.early_end.why = "solved"
    script.keeper.take_boundary_again()
    for _ in range(2):
        if told:
            script.keeper.save_boundary(TOLD)
        else:
            script.keeper.save_final()
    assert caplog.text.count("step 1 was saved before the training was ended") == saved_before


def test_without_an_early_end_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The save of the last boundary is enough."""
    script = Script(claimed())
    script.train(1, 7.0)
    script.keeper.save_in_background()
    script.keeper.save_final()
    assert "was saved before" not in caplog.text


def left_by_break(store: ObjectStore, *, told_after_s: float | None) -> Script:
    """Return a script that left its loop after a step, and was told to stop so long after it."""
    script = Script(store)
    asks_for(script, 10)
    script.train(1, 7.0)
    script.train(2, 8.0, to_its_end=False)
    script.keeper.loop_left(copies=True)
    if told_after_s is not None:
        at = clock.now() + told_after_s
        script.keeper.early_end.told(replace(TOLD, warned_at=at))
    script.change(99.0)  # what it loads for its test
    script.keeper.left_early()
    return script


@pytest.mark.parametrize(
    ("told_after_s", "why"),
    [
        (SAME_MOMENT_S + 60.0, "the loop was left early"),
        (SAME_MOMENT_S - 1.0, None),
        (-60.0, None),
    ],
    ids=["long after it", "at that moment", "before it"],
)
def test_a_break_that_nobody_asked_for_ends_the_training(
    told_after_s: float, why: str | None
) -> None:
    """One that may be due to what the script was told does not: more steps are to come."""
    store = claimed()
    script = left_by_break(store, told_after_s=told_after_s)
    script.keeper.save_boundary(TOLD)
    step, found = ended(store)
    assert step == 2
    assert (found and found["why"]) == why


def test_a_request_that_does_not_say_when_it_was_made_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as the user's own: the script cannot have known of it."""
    times = itertools.count(1000.0, 60.0)
    monkeypatch.setattr(clock, "now", lambda: next(times))
    state = EarlyEnd()
    state.loop_left()
    state.told(TOLD)
    state.left_on_purpose()
    assert state.why is not None


def test_a_run_that_is_finished_by_a_break_can_be_taken_up_again() -> None:
    """Nothing is cut short then: who starts it again wants more of it, as in a notebook."""
    store = claimed()
    left_by_break(store, told_after_s=None).keeper.save_final(halfway=True)
    assert ended(store) == (2, None)


def test_a_break_after_run_end_has_ended_the_training() -> None:
    """Also in the midst of a step, in which no weight has changed."""
    store = claimed()
    script = Script(store)
    asks_for(script, 10)
    script.train(1, 7.0)
    script.keeper.early_end.why = "solved"
    script.keeper.loop_left(copies=True)
    script.keeper.left_early()
    script.keeper.save_final(halfway=True)
    step, found = ended(store)
    assert (step, found["why"]) == (1, "solved")


@pytest.mark.parametrize(
    ("asked", "counters", "stays"),
    [
        ((10, None), {"ended_early": {"why": "x", "total": 10, "epochs": None}}, True),
        ((9, None), {"ended_early": {"why": "x", "total": 10, "epochs": None}}, True),
        ((11, None), {"ended_early": {"why": "x", "total": 10, "epochs": None}}, False),
        ((None, 3), {"ended_early": {"why": "x", "total": None, "epochs": 3}}, True),
        ((None, 4), {"ended_early": {"why": "x", "total": None, "epochs": 3}}, False),
        ((None, 4), {"ended_early": {"why": "x", "total": 10, "epochs": None}}, False),
        ((10, None), {}, False),
        ((10, None), {"ended_early": None}, False),
        ((10, None), {"ended_early": {"why": 3, "total": 10}}, False),
        ((10, None), {"ended_early": {"why": "x", "total": "10"}}, False),
        ((10, None), {"ended_early": ["x"]}, False),
    ],
)
def test_who_asks_for_more_trains_on(
    asked: tuple[int | None, int | None], counters: dict[str, Any], stays: bool
) -> None:
    """Checkpoints of earlier versions say nothing; what is not understood counts as nothing."""
    state = EarlyEnd()
    assert state.begin(*asked, counters) is stays
    assert (state.why is not None) is stays
    assert bool(state.counters()) is stays, "the next save says so, too"


@pytest.mark.parametrize(
    ("reason", "finished", "logged", "why"),
    [
        ("enough", 3, "enough", "enough"),
        (None, 3, "ended early", None),
        (None, 9, None, None),
        ("stopped", 9, "stopped", None),
    ],
)
def test_a_framework_ends_for_good_if_it_says_why(
    reason: str | None, finished: int, logged: str | None, why: str | None
) -> None:
    """Without a reason it decides again in the next attempt; after the last step all is done."""
    told = []
    state = EarlyEnd()
    training = Training.__new__(Training)
    keeper = SimpleNamespace(early_end=state, take_boundary_again=lambda _: state.take())
    training._job = cast(
        "Any",
        SimpleNamespace(
            phase=Phase.TRAINING,
            keeper=keeper,
            finish_loop=lambda why, **_: told.append(why),
        ),
    )
    training._errors_end_it = cast("Any", contextlib.nullcontext())
    training._open = contextlib.ExitStack()
    training._of = cast("Any", SimpleNamespace(probe=None))
    training.step, training.finished, training._last, training._top = None, finished, 9, None
    training.finish(reason)
    assert told == [logged]
    assert state.counters().get("ended_early", {}).get("why") == why


class Resumed:
    """A training that resumes after some steps, at an epoch's end or not, ended or not."""

    def __init__(self, finished: int, *, at_epoch_end: bool, end_early: str | None) -> None:
        self.finished = finished
        self.at_epoch_end = at_epoch_end
        self.end_early = end_early
        self.loader = SimpleNamespace(begins_at_epoch_end=False)
        self.step: Any = None
        self.trained: list[int] = []

    @property
    def is_done(self) -> bool:
        """Return whether there is no step to do, of eight."""
        return self.finished >= 8 or self.end_early is not None

    def begin(self, *, at_once: bool) -> Any:
        """Begin a step."""
        self.trained.append(self.finished)
        self.step = object()
        return self.step

    def end(self, *, epoch_until: int) -> None:
        """End it."""
        self.step = None
        self.finished += 1

    def expect_epochs(self) -> None:
        """Do nothing."""

    def begin_epoch(self, number: int) -> None:
        """Do nothing."""

    def begin_epoch_end(self, number: int) -> None:
        """Do nothing."""

    def end_epoch(self) -> None:
        """Take the boundary again."""
        self.at_epoch_end = False

    def finish(self, reason: str | None) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("finished", "at_epoch_end", "end_early", "epochs", "trained"),
    [
        (6, True, "solved", [1], []),
        (6, False, "solved", [], []),
        (4, True, "solved", [0], []),
        (4, True, None, [0, 1], [4, 5, 6, 7]),
        (6, True, None, [1], [6, 7]),
        (8, True, None, [1], []),
    ],
    ids=["cut in an epoch's end", "ended", "at its last step", "to go on", "more asked for", "all"],
)
def test_the_end_of_an_epoch_that_was_cut_comes_again(
    finished: int, at_epoch_end: bool, end_early: str | None, epochs: list[int], trained: list[int]
) -> None:
    """Of two epochs of four steps; one that was ended in its midst has an end, too."""
    training = Resumed(finished, at_epoch_end=at_epoch_end, end_early=end_early)
    seen = []
    for epoch in epochs_of(cast("Any", training), 2, 4):
        seen.append(epoch.number)
        for _ in epoch:
            pass
    assert (seen, training.trained) == (epochs, trained)


SCRIPT = """
import os, signal, time, torch
import spotguard.runtime as spotguard
from spotguard.runtime.checkpoint import early_end

early_end.SAME_MOMENT_S = 0.0
how, told = os.environ["HOW"], os.environ.get("TOLD", "")
run = spotguard.init(save_every="100 steps")
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=6, micro_batch_size=1)


def train(step):
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    print("trained", step.number, flush=True)


def by_epochs():
    for epoch in run.epochs(loader, total=int(os.environ.get("TOTAL", "3"))):
        for step in epoch:
            train(step)
            if step.number == 5:
                run.end("solved")
        for batch in run.evaluate(range(3)):
            if (epoch.number, batch, told) == (1, 1, "in it"):
                if run.rank == run.world_size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                while run._job.watch.agreed is None:
                    signal.sigtimedwait([], 0.01)
        print("end of epoch", epoch.number, flush=True)


def by_steps():
    for step in run.steps(loader, total=int(os.environ.get("TOTAL", "9"))):
        train(step)
        if how == "patience":
            run.best(step.number, patience=5)
        if step.number == 5 and how == "end":
            run.end("solved")
        if step.number == 5 and how == "break":
            break


by_epochs() if how == "epochs" else by_steps()
print("after the loop", flush=True)
if told == "after it":
    time.sleep(600)
print("digest", model.weight.tolist(), flush=True)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("how", ["end", "patience", "break"])
def test_who_is_interrupted_after_the_loop_does_not_train_on(
    jobs: Jobs, tmp_path: Path, how: str, world: int
) -> None:
    """Ended at step 6 of 9, and lost or told to stop in a test: the weights stay those of step 6.

    A run that asks for more steps trains on, on all ranks.
    """
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    calm = jobs.start_ranks(world, script=script, HOW=how, SPOTGUARD_RUN_ID="calm")
    assert [job.wait() for job in calm] == [0] * world, calm[0].said

    notice = jobs.folder / "notice"
    more: dict[str, Any] = {"HOW": how, "TOLD": "after it", "SPOTGUARD_NOTICE_FILE": notice}
    cut = jobs.start_ranks(world, script=script, **more)
    for job in cut:
        job.wait_for("after the loop")
    if how == "break":
        notice.write_text(f'{{"deadline_at": "{to_iso(time.time() + 6)}"}}')
        assert [job.wait() for job in cut] == [75] * world, cut[0].said
    else:
        for job in cut:
            job.kill(signal.SIGKILL)
        for job in cut:
            job.wait()

    notice.unlink(missing_ok=True)
    again = jobs.start_ranks(world, script=script, HOW=how, SPOTGUARD_ATTEMPT=2)
    assert [job.wait() for job in again] == [0] * world, again[0].said
    for job in again:
        assert "trained" not in job.said
        assert digest(job.said) == digest(calm[0].said)

    longer = jobs.start_ranks(world, script=script, HOW="all", TOTAL=11, SPOTGUARD_ATTEMPT=3)
    assert [job.wait() for job in longer] == [0] * world, longer[0].said
    assert all(job.said.count("trained") == 5 for job in longer)


@pytest.mark.e2e
def test_an_epoch_that_was_ended_in_its_midst_has_its_end_again(jobs: Jobs, tmp_path: Path) -> None:
    """On three ranks, told to stop in the evaluation at that epoch's end."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    told = jobs.start_ranks(3, script=script, HOW="epochs", TOLD="in it")
    assert [job.wait() for job in told] == [75] * 3, told[0].said
    assert "end of epoch 1" not in told[0].said

    again = jobs.start_ranks(3, script=script, HOW="epochs", SPOTGUARD_ATTEMPT=2)
    assert [job.wait() for job in again] == [0] * 3, again[0].said
    for job in again:
        assert "trained" not in job.said
        assert job.said.count("end of epoch") == job.said.count("end of epoch 1") == 1
