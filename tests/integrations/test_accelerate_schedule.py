"""Schedules of a script on Accelerate that goes on with another number of processes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR, StepLR

from spotguard.errors import UsageError
from spotguard.integrations.accelerate_schedule import Schedule, step_once
from spotguard.runtime.checks.schedules_beside import schedules_beside
from tests.runtime.harness.lab import through_a_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 200
"""Of the optimizer in the whole run."""


def stable_then_decay(length: int) -> Callable[[int], float]:
    """Warm up in a twentieth of the length, stand still, fall in the last tenth, stay there."""
    warm, decay = length // 20, length // 10

    def rate(step: int) -> float:
        if step < warm:
            return step / warm
        return max(0.1, min(1.0, (length - step) / decay))

    return rate


def decay_alone(length: int) -> Callable[[int], float]:
    """Stand still from the first step on, and fall in the last tenth."""
    return lambda step: max(0.1, min(1.0, (length - step) / (length // 10)))


def piecewise(length: int) -> Callable[[int], float]:
    """Two falls, and nothing else ever changes."""
    return lambda step: 1.0 if step < length * 0.7 else 0.5 if step < length * 0.9 else 0.1


def cosine(length: int) -> Callable[[int], float]:
    """Change at each step, warmed up in a share of the length that is rounded."""
    warm = int(0.03 * length) + 1
    return lambda step: min(
        step / warm, 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - warm) / (length - warm)))
    )


def table(length: int) -> Callable[[int], float]:
    """Read rates that were made before, of which there is none after the last step."""
    rates = [1.0 if step < length * 0.8 else 0.1 for step in range(length)]

    def rate(step: int) -> float:
        assert step < length, "the run is over"
        return rates[step]

    return rate


SHAPES = [stable_then_decay, decay_alone, piecewise, cosine, table]


def schedule(function: Any, processes: int) -> Schedule:
    """Return what a script's schedule becomes."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    accelerated = SimpleNamespace(
        scheduler=LambdaLR(optimizer, function), step_with_optimizer=True, split_batches=False
    )
    return Schedule(accelerated, processes, STEPS)


def stepped(schedule: Schedule, steps: int) -> list[float]:
    """Return the rate after each of some steps of the optimizer."""
    rates = []
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    return rates


def resumed(before: Schedule, after: Schedule) -> Schedule:
    """Return `after` with the state of `before`, as it comes out of a checkpoint."""
    after.load_state_dict(through_a_checkpoint(before.state_dict()))
    return after


@pytest.mark.parametrize("done", [1, 60, 195])
@pytest.mark.parametrize("worlds", [(3, 2), (2, 3), (16, 15), (3, 1, 4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_length_in_steps_of_all_processes_is_followed(
    shape: Any, worlds: tuple[int, ...], done: int
) -> None:
    """Left anywhere, on a plateau, too: the rates to come are those of the first attempt."""
    calm = stepped(schedule(shape(STEPS * worlds[0]), worlds[0]), STEPS - 1)
    now = schedule(shape(STEPS * worlds[0]), worlds[0])
    stepped(now, done)
    for world in worlds[1:]:
        now = resumed(now, schedule(shape(STEPS * world), world))

    assert stepped(now, STEPS - 1 - done) == pytest.approx(calm[done:], abs=0.1)


@pytest.mark.parametrize("done", [1, 22, 130])
@pytest.mark.parametrize("worlds", [(3, 2), (2, 3), (16, 15), (3, 1, 4)])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape is not table])
def test_a_length_in_steps_of_one_process_is_kept(
    shape: Any, worlds: tuple[int, ...], done: int
) -> None:
    """Such a schedule is over before the run is; it goes on as in the first attempt."""
    calm = stepped(schedule(shape(STEPS), worlds[0]), STEPS)
    now = schedule(shape(STEPS), worlds[0])
    stepped(now, done)
    for world in worlds[1:]:
        now = resumed(now, schedule(shape(STEPS), world))

    assert stepped(now, STEPS - done) == calm[done:]


class Falling:
    """A function with a length of its own, which is part of the schedule's state."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, step: int) -> float:
        """Return the rate."""
        return max(0.0, 1 - step / self.length)


def test_a_length_that_comes_with_the_state_is_kept() -> None:
    """The place is of the length that is restored, whatever the script has made today."""
    calm = stepped(schedule(Falling(3 * STEPS), 3), STEPS)
    before = schedule(Falling(3 * STEPS), 3)
    stepped(before, 60)
    now = resumed(before, schedule(Falling(2 * STEPS), 2))

    assert stepped(now, STEPS - 60) == calm[60:]


def test_a_checkpoint_without_rates_is_read_as_before() -> None:
    """What a version before this one saved: the rate of the moment is all there is to tell by."""
    for length, moved in ((3 * STEPS, True), (STEPS * 2, False)):
        before = schedule(Falling(length).__call__, 3)
        stepped(before, 60)
        state = before.state_dict()
        del state["rates"]
        state["scheduler"]["lr_lambdas"] = [None]
        after = schedule(Falling(length // 3 * 2 if moved else length).__call__, 2)
        after.load_state_dict(state)
        assert after.last_epoch == (120 if moved else 180)


def test_what_a_schedule_tells_is_small_and_is_looked_up_once() -> None:
    """Each boundary's copy asks for the state; hundreds of groups mostly share one function."""
    asked = []
    length = 3 * 100_000

    def rate(step: int) -> float:
        asked.append(step)
        return stable_then_decay(length)(step)

    parameters = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(200)]
    accelerated = SimpleNamespace(
        scheduler=LambdaLR(torch.optim.SGD(parameters, lr=0.1), rate),
        step_with_optimizer=True,
        split_batches=False,
    )
    made = Schedule(accelerated, 3, 100_000)
    told = made.state_dict()["rates"]
    assert len(told["steps"]) < 50
    assert [len(rates) for rates in told["rates"]] == [len(told["steps"])]
    asked.clear()
    assert made.state_dict()["rates"] == told
    assert not asked


def test_schedules_that_the_framework_does_not_know_are_found() -> None:
    """Those of the optimizers are, once each: not those that they are made of, nor others'."""
    mine, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0) for _ in range(2))
    prepared = StepLR(mine, 3)
    inner = [LinearLR(mine), StepLR(mine, 3)]
    chain = SequentialLR(mine, inner, [2])
    of_other = StepLR(other, 3)
    assert schedules_beside([mine], [prepared]) == [chain]
    assert schedules_beside([mine], [prepared, chain]) == []
    assert schedules_beside([other], []) == [of_other]


def test_a_schedule_that_the_script_steps_takes_one_step_for_each_of_the_optimizer() -> None:
    """With each of three batches, or after them: its place is that of one batch a step.

    Where batches are accumulated, nobody can tell what the script means: that is refused.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
    schedule, is_last = StepLR(optimizer, 1, 0.5), [True]
    kept = schedule.state_dict()
    step_once(schedule, lambda: is_last[0], 1)
    assert isinstance(schedule, StepLR)
    assert schedule.state_dict() == kept
    optimizer.step()
    for is_last[0] in (False, False, True, False, False, True):
        schedule.step()
    assert schedule.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == 0.25

    accumulating = StepLR(optimizer, 1, 0.5)
    step_once(accumulating, lambda: is_last[0], 3)
    accumulating.step()
    is_last[0] = False
    with pytest.raises(UsageError, match="its rate would follow the number of ranks"):
        accumulating.step()
