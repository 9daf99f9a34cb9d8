from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.errors import UnsupportedState, UsageError
from spotguard.runtime.checkpoint.captured import Between
from spotguard.runtime.data.drawn_by_script import DrawnLoader
from spotguard.runtime.loop.epochs import _epoch_of
from spotguard.runtime.preemption.stop_consensus import StopGate
from spotguard.runtime.state.tracked import tracked, tracked_slot
from tests.runtime.harness.lab import same, through_a_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.runtime.harness.processes import Jobs


def drawn(draw: Callable[[int], Any] | None, rank: int, world: int, **over: Any) -> DrawnLoader:
    """Return a rank's loader of what is drawn."""
    common: dict[str, Any] = {"global_batch_size": 7, "micro_batch_size": 2, "reseed": True}
    return DrawnLoader(draw, seed=3, rank=rank, world_size=world, **{**common, **over})


def read(loader: DrawnLoader, steps: range) -> dict[tuple[int, int], Any]:
    """Return what a rank's micro-batches are, by step and number; not those of weight zero."""
    batches = loader.read(steps.start, steps.stop)
    return {(share.step, share.number): batch for share, batch in batches if share.weight}


def test_draws_depend_on_the_step_and_not_on_the_ranks() -> None:
    """The same samples on 1, 3 and 5 ranks, wherever the run was resumed."""

    def draw(samples: int) -> Any:
        return torch.randint(1000, (samples,)).tolist()

    alone = read(drawn(draw, 0, 1), range(4))
    assert [len(alone[0, number]) for number in range(4)] == [2, 2, 2, 1]
    assert len({str(batch) for batch in alone.values()}) == 16
    for world in (3, 5):
        several: dict[tuple[int, int], Any] = {}
        for rank in range(world):
            torch.manual_seed(rank)
            several |= read(drawn(draw, rank, world), range(2, 4))
        assert several == {key: batch for key, batch in alone.items() if key[0] >= 2}


def test_episodes_are_numbered_through_the_run() -> None:
    """Each number comes once, however many ranks share a step's episodes."""
    numbers: list[int] = []
    for rank in range(3):
        for batch in read(drawn(None, rank, 3), range(5)).values():
            numbers += batch
    assert sorted(numbers) == list(range(35))


def test_what_is_drawn_refuses_epochs_and_what_is_no_function() -> None:
    """One sentence, with the way out."""
    with pytest.raises(UsageError, match="has no length") as refused:
        drawn(None, 0, 1).first_step_of(1)
    assert "steps_per_epoch" in refused.value.hint
    with pytest.raises(UsageError, match="a function that draws"):
        drawn([1, 2], 0, 1)  # type: ignore[arg-type]


class Holder:
    """Has plain values."""

    best = 1.5
    seen = 3
    history: list[Any]

    def __init__(self) -> None:
        self.history = [1, (2, None), {"a": True}]


@pytest.mark.parametrize("holder", [Holder(), {"best": 1.5, "seen": 3, "history": [1, "x"]}])
def test_plain_values_come_back_where_they_were(holder: Any) -> None:
    """Attributes of an object and keys of a dict, such as a script's globals."""
    names = ("best", "seen", "history")
    slots = [tracked_slot(holder, name) for name in names]
    before = [slot.value.read() for slot in slots]
    after = [through_a_checkpoint(value) for value in before]
    for slot, value in zip(slots, after, strict=True):
        slot.value.write(None)
        slot.value.write(value)
    assert same([slot.value.read() for slot in slots], before)


def test_what_is_kept_of_a_boundary_does_not_follow_a_list_that_grows() -> None:
    """A step that is given up must not leave its own entry in the history."""
    holder = Holder()
    held = tracked_slot(holder, "history").value.read()
    holder.history.append(9)
    assert 9 not in held


@pytest.mark.parametrize("value", [torch.ones(2), object(), [torch.ones(1)], {"a": object()}])
def test_what_is_no_plain_value_is_refused_at_once(value: Any) -> None:
    """The message names it and says what to do."""
    with pytest.raises(UnsupportedState, match="x is a") as refused:
        tracked_slot({"x": value}, "x")
    assert "run.track(x=...)" in refused.value.hint
    with pytest.raises(UsageError, match="has no 'y'"):
        tracked_slot({"x": 1}, "y")


def test_a_number_that_is_tracked_as_an_object_is_told_the_way() -> None:
    """`run.track(best=1e9)` cannot work; the hint is the line that does."""
    with pytest.raises(UnsupportedState) as refused:
        tracked("best", 1e9)
    assert 'run.track_values(globals(), "best")' in refused.value.hint


def test_a_rank_that_has_evaluated_less_does_not_pass_a_stop_in_the_evaluation() -> None:
    """Others leave at a later batch of it: this one has no batch to join them at."""
    gate = StopGate()
    gate.start(4)
    gate._stop_at = (4, 3)
    assert gate.passes(4)
    assert not gate.passes(4, evaluated=True)
    gate._stop_at = (5, 0)
    assert gate.passes(4, evaluated=True)


def test_what_was_under_way_is_read_from_untrusted_counters() -> None:
    """Anything but true is no evaluation; checkpoints of earlier versions say nothing."""
    assert Between.of({}, None) == Between()
    assert Between.of({"evaluating": 1, "epoch_end": "yes"}, None) == Between()
    both = Between(evaluating=True, epoch_end=True)
    assert Between.of({"evaluating": True, "epoch_end": True}, None) == both


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_the_epoch_of_a_step_follows_from_where_epochs_begin(steps: int) -> None:
    """Also of the step after the last one."""
    for step in range(5 * steps + 1):
        assert _epoch_of(step, 5, lambda epoch: epoch * steps) == step // steps


START = """
import torch
import spotguard.runtime as spotguard
run = spotguard.init()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
loader = run.loader([torch.ones(3)] * 8, global_batch_size=4, micro_batch_size=2)
def train(step):
    for x in step:
        step.backward(model(x).sum())
    optimizer.step()
"""
MISUSES = {
    "begun twice": (
        "run.restore(loader, total=2); run.begin_step(); run.begin_step()",
        "run.begin_step() came while step 0 is under way",
    ),
    "ended without a step": (
        "run.restore(loader, total=2); run.end_step()",
        "run.end_step() came without a step under way",
    ),
    "not restored": ("run.begin_step()", "run.begin_step() came before run.restore()"),
    "an epoch left early": (
        "for epoch in run.epochs(loader, total=2):\n    for step in epoch:\n        break",
        "the loop over epoch 0 was left before its last step",
    ),
    "epochs without a length": (
        "for epoch in run.epochs(run.episodes(2), total=2): pass",
        "steps_per_epoch",
    ),
    "no epochs": ("next(run.epochs(loader, total=0))", "0 epochs in all, but must be 1 or more"),
    "count too late": (
        "for step in run.steps(loader, total=2):\n    for x in step: step.count(len)",
        "call step.count() or step.read_ahead() before the loop",
    ),
    "evaluated too early": (
        "for step in run.steps(loader, total=2):\n    train(step)\n    list(run.evaluate([1]))",
        "call run.end_step() after the optimizer's step",
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_told_in_one_sentence(jobs: Jobs, name: str) -> None:
    """It names the call and the way out, and the process ends with 2, without a traceback."""
    body, words = MISUSES[name]
    script = jobs.folder / "job.py"
    script.write_text(START + body + "\n")
    said = jobs.run(script, code=2)
    assert words in said
    assert "Traceback" not in said


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("body", "steps"),
    [
        (
            "run.restore(loader, total=9)\nwhile s := run.begin_step(): train(s); run.end_step()",
            9,
        ),
        ("run.restore(loader, total=9)\ntrain(run.begin_step()); run.end_step(); run.finish()", 1),
        ("run.restore(loader, total=9)\ntrain(run.begin_step()); run.finish('enough')", 1),
        ("run.restore(loader, total=9)\ntrain(run.begin_step()); run.end_step()", 1),
        (
            "for s in run.steps(loader, total=9):\n"
            "    train(s); run.end_step(); list(run.evaluate([1]))",
            9,
        ),
        (
            "for epoch in run.epochs(loader, total=9, steps_per_epoch=3):\n"
            "    for s in epoch: train(s)\n"
            "    if epoch.number: break",
            6,
        ),
        (
            "for epoch in run.epochs(loader, total=9):\n"
            "    for s in epoch:\n"
            "        train(s)\n"
            "        if s.number == 2: run.end('enough')\n"
            "    assert list(run.evaluate([1])) == [1] and run.best(1.0) in (True, False)",
            3,
        ),
        (
            "for s in run.steps(loader, total=9):\n"
            "    if s.number == 2:\n"
            "        for x in s: s.backward(model(x).sum()); break\n"
            "        break\n"
            "    train(s)\n"
            "optimizer.step()",
            2,
        ),
    ],
    ids=[
        "to the end",
        "finished",
        "in a step",
        "never finished",
        "in steps",
        "epochs",
        "ended",
        "left halfway, and tuned after it",
    ],
)
def test_each_way_to_end_saves_the_final_state(jobs: Jobs, body: str, steps: int) -> None:
    """Asked for nothing more, finished early, or simply left: the run is finished, and saved."""
    script = jobs.folder / "job.py"
    script.write_text(START + body + "\n")
    jobs.run(script)
    [end] = jobs.ends()
    assert (end["reason"], end["step"], end["saved_step"]) == ("finished", steps, steps)
