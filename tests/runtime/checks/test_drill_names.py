"""What a drill names of scripts that forget something: the cause, and nothing that follows from it.

The scripts have the shapes of other people's. Each is played undisturbed, and once more with a
resume at its third boundary, by the probe and the comparison of a real drill.
"""

from __future__ import annotations

import collections
import copy
import itertools
import random
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import nn

from spotguard.control.drill.report import Finding, ProbedRun, compare
from spotguard.runtime.checks.fingerprint import Probe
from tests.runtime.harness.lab import adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_STEPS = 7
_RESUMED_AT = 3

calls = 0
"""A counter of a module: of this one, in which the scripts are."""


class Play:
    """One rank's attempt of a script."""

    __module__ = "spotguard.runtime"  # as `run`, it is nothing of the script's

    def __init__(self, path: Path, attempt: int, rank: int, world_size: int, states: Any) -> None:
        self.rank = rank
        self.losses: dict[int, float] = {}
        self._states = states
        """What the first rank had at the boundary to resume from, empty in a first attempt."""
        self._resumes = attempt > 1
        self._keeper = SimpleNamespace(objects={})
        job: Any = SimpleNamespace(
            rank=rank, attempt=attempt, world_size=world_size, keeper=self._keeper
        )
        self.probe = Probe(str(path), job, bitwise=False)
        torch.manual_seed(1)
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def track(self, **objects: Any) -> Iterator[int]:
        """Track these with the model and its optimizer, and resume; return the steps to do."""
        objects = {"model": self.model, "optimizer": self.optimizer, **objects}
        self._keeper.objects = adapters(objects)
        for name, value in objects.items() if self._resumes else ():
            state = copy.deepcopy(self._states[name])
            if isinstance(value, dict):
                value.clear()
                value.update(state)
            else:
                value.load_state_dict(state)
        return iter(range(_RESUMED_AT if self._resumes else 0, _STEPS))

    def train(self, number: int, more: float = 0.0) -> torch.Tensor:
        """Train one step on what the number of the step gives, and `more`."""
        torch.manual_seed(number)
        loss = self.model(torch.randn(3, 2) + more).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        kept: torch.Tensor = loss.detach()
        self.losses[number + 1] = float(kept)
        return kept

    def keep(self, number: int) -> None:
        """Save at the boundary that the other run resumes from."""
        if number == _RESUMED_AT and not self.rank and not self._resumes:
            for name, item in self._keeper.objects.items():
                value = item.value
                state = value if isinstance(value, dict) else value.state_dict()
                self._states[name] = copy.deepcopy(state)


def drilled(
    folder: Path, script: Callable[[Play], Any], *, ranks: int = 1
) -> tuple[list[Finding], list[str]]:
    """Return what a drill finds and notes."""
    runs = []
    for name, attempts in (("calm", (1,)), ("shaken", (1, 2))):
        states: dict[str, Any] = {}
        losses: dict[int, float] = {}
        for attempt, rank in itertools.product(attempts, range(ranks)):
            play = Play(folder / name, attempt, rank, ranks, states)
            script(play)
            play.probe.close()
            if not rank:
                losses |= play.losses
        run = ProbedRun.read(folder / name, folder / "none")
        run.losses = losses
        if name == "shaken":  # the first attempt ended there
            run.lines[1] = {s: of for s, of in run.lines[1].items() if s <= _RESUMED_AT}
        runs.append(run)
    findings, notes, _, _ = compare(*runs)
    return findings, notes


# ---------------------------------------------------------------------- the scripts


def count_of_an_average(play: Play) -> Any:
    """The average is tracked, but not the count that says how fast it follows."""
    average = {k: v.detach().clone() for k, v in play.model.named_parameters()}
    updates = 0.0
    for number in play.track(average=average):
        play.probe.record(number)
        play.keep(number)
        play.train(number)
        updates += 1.0
        for key, value in play.model.named_parameters():
            average[key].lerp_(value.detach(), 1 / (updates + 1))
    return average


def average_of_weights(play: Play) -> Any:
    """An average that nobody tracks, in an object of the script's, and what it made of a batch."""
    holder = SimpleNamespace(shadow=[p.detach().clone() for p in play.model.parameters()])
    for number in play.track():
        play.probe.record(number)
        play.keep(number)
        holder.last = {"loss": play.train(number)}
        for held, now in zip(holder.shadow, play.model.parameters(), strict=True):
            held.lerp_(now.detach(), 0.1)
    return holder


class Metric(nn.Module):
    """Keeps its sum as torchmetrics does: in no state."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def update(self, value: torch.Tensor) -> None:
        """Add a value."""
        self.total = self.total + value


def things_for_a_log(play: Play) -> Any:
    """What a log is made of, in all the shapes that it has."""
    tqdm = pytest.importorskip("tqdm").tqdm
    began, metric, history, tensors = time.time(), Metric(), [], []
    logger = SimpleNamespace(buffer=[])
    for number in (bar := tqdm(play.track(), disable=None)):
        play.probe.record(number)
        play.keep(number)
        loss = play.train(number)
        metric.update(loss)
        history.append(float(loss))
        tensors.append(loss)
        logger.buffer.append({"loss": float(loss)})
        elapsed = time.time() - began
        bar.set_postfix(elapsed=elapsed)
    return metric, history, tensors, logger


def rewards(play: Play) -> Any:
    """The mean of the last rewards is a baseline."""
    recent = collections.deque([0.0], maxlen=50)
    for number in play.track():
        play.probe.record(number)
        play.keep(number)
        baseline = sum(recent) / len(recent)
        recent.append(float(play.train(number, baseline)))
    return recent


def _rising(count: int) -> Callable[[], float]:
    def rise() -> float:
        nonlocal count
        count += 1
        return 0.1 * count

    return rise


def closure(play: Play) -> Any:
    """A schedule counts its calls in a variable of the function that made it."""
    noise = _rising(0)
    for number in play.track():
        play.probe.record(number)
        play.keep(number)
        play.train(number, noise())
    return noise


def shared_variable(play: Play) -> Any:
    """A function beside the loop counts in a variable of the loop's function."""
    count = 0

    def noise() -> float:
        nonlocal count
        count += 1
        return 0.1 * count

    for number in play.track():
        play.probe.record(number)
        play.keep(number)
        play.train(number, noise())
    return noise


class Noise:
    """Counts in its class."""

    calls: ClassVar[int] = 0

    def draw(self) -> float:
        """Return more each time."""
        Noise.calls += 1
        return 0.1 * Noise.calls


def class_attribute(play: Play) -> Any:
    """A counter that all objects of a class share."""
    Noise.calls = 0  # as a new process has it
    noise = Noise()
    for number in play.track():
        play.probe.record(number)
        play.keep(number)
        play.train(number, noise.draw())
    return noise


def tick() -> float:
    """Count in the module."""
    global calls
    calls += 1
    return 0.1 * calls


def module_counter(play: Play) -> Any:
    """A counter that a function has among the variables of its module."""
    global calls
    calls = 0
    for number in play.track():
        play.probe.record(number)
        play.keep(number)
        play.train(number, tick())


class Data(torch.utils.data.Dataset[float]):
    """Has a transform with a generator of its own."""

    def __init__(self) -> None:
        self.transform = SimpleNamespace(rng=random.Random(1))

    def __getitem__(self, index: int) -> float:
        """Return another one each time."""
        return float(self.transform.rng.random())


def generator_in_a_transform(play: Play) -> Any:
    """What is made of it is a batch, which begins anew in each step."""
    data, batch_data = Data(), {"x": torch.zeros(1)}
    for number in play.track():
        play.probe.record(number, [("dataset", data)])
        play.keep(number)
        batch_data = {"x": torch.tensor([data[number]])}
        play.train(number, float(batch_data["x"]))
    return batch_data


def position_of_a_loader(play: Play) -> Any:
    """A loader is iterated by hand, and a dict for `torch.save` is made at times."""
    data = [float(n) for n in range(40)]
    batches = iter(torch.utils.data.DataLoader(data))  # type: ignore[arg-type]
    for number in play.track():
        play.probe.record(number)
        play.keep(number)
        loss = play.train(number, float(next(batches)))
        if number % 2:
            checkpoint = {"model": play.model.state_dict(), "step": number, "loss": loss}
            assert checkpoint
    return batches


def ranks_own(play: Play) -> Any:
    """Each rank counts what it has seen; a resume gives all of them the first rank's."""
    seen = {"samples": 0}
    for number in play.track(seen=seen):
        play.probe.record(number)
        play.keep(number)
        play.train(number)
        seen["samples"] += 1 + (play.rank == 2)
    return seen


def generator_of_a_rank(play: Play) -> Any:
    """Only the last rank draws from a generator of its own."""
    noise = random.Random(play.rank)
    for number in play.track():
        play.probe.record(number)
        play.keep(number)
        play.train(number)
        if play.rank == 2:
            noise.random()
    return noise


@pytest.mark.parametrize(
    ("script", "named", "label"),
    [
        (count_of_an_average, "updates", "a value"),
        (average_of_weights, "holder.shadow", "EMA"),
        (rewards, "recent", "a value"),
        (closure, "noise.<count>", "a value"),
        (shared_variable, "count", "a value"),
        (class_attribute, "Noise.calls", "a value"),
        (module_counter, "calls", "a value"),
        (generator_in_a_transform, "data.transform.rng", "random generator"),
        (position_of_a_loader, "batches", "sampler position"),
    ],
)
def test_what_a_script_forgot_is_named_and_nothing_else(
    tmp_path: Path, script: Any, named: str, label: str
) -> None:
    """Neither a batch, nor a dict that is made for a checkpoint, nor what was computed from it."""
    findings, _ = drilled(tmp_path, script)
    assert [(found.variable, found.label) for found in findings] == [(named, label)]
    assert findings[0].step == _RESUMED_AT + 1
    assert "<" not in findings[0].detail.partition(";")[2], "it says what can be done"
    assert findings[0].rank is None


def test_what_only_a_log_is_made_of_is_no_reason_to_fail(tmp_path: Path) -> None:
    """Metrics, lists of losses and buffers are noted; times and progress bars are not."""
    findings, notes = drilled(tmp_path, things_for_a_log)
    assert findings == []
    told = {note.partition(" starts again")[0] for note in notes}
    assert told == {"metric.total", "history", "tensors", "logger.buffer"}


@pytest.mark.parametrize(
    ("script", "named", "label"),
    [(ranks_own, "seen", "tracked state"), (generator_of_a_rank, "noise", "random generator")],
)
def test_what_another_rank_lost_is_named_with_its_rank(
    tmp_path: Path, script: Any, named: str, label: str
) -> None:
    """A tracked object, or a variable, that differs on the third rank alone."""
    [found], _ = drilled(tmp_path, script, ranks=3)
    assert (found.variable, found.label, found.rank) == (named, label, 2)
    assert "rank 2" in found.detail


class Progress:
    """What a framework keeps beside the weights; of a part it promises nothing."""

    def __init__(self) -> None:
        self.done, self.tokens = 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.done = state["done"]

    def not_promised(self) -> dict[str, Any]:
        """Return what a resume begins anew, as the documentation says."""
        return {"tokens": self.tokens}


def test_what_is_not_promised_is_noted(tmp_path: Path) -> None:
    """A drill passes, and says which counter a resume does not keep."""

    def script(play: Play) -> None:
        progress = Progress()
        for number in play.track(progress=progress):
            play.probe.record(number)
            play.keep(number)
            play.train(number)
            progress.done += 1
            progress.tokens += 7

    findings, notes = drilled(tmp_path, script)
    assert findings == []
    assert "progress.tokens differs after a resume, which does not promise to keep it" in notes
    assert not any("progress.done" in note for note in notes)
