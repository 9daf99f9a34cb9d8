"""State that a training carries on and that no checkpoint has: found in the first steps."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import random
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from spotguard.runtime.checks.liveness import live_names
from spotguard.runtime.checks.untracked_state import UntrackedState
from tests.runtime.harness.lab import adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Net(nn.Module):
    """Has some of everything beside its weights; what is called `carry` is carried on."""

    kept: torch.Tensor

    def __init__(self, carry: str = "") -> None:
        super().__init__()
        self.carry = carry
        self.layer = nn.Linear(2, 2)
        self.average = torch.zeros(())
        self.calls = 0
        self.recent: collections.deque[float] = collections.deque(maxlen=3)
        self.history: list[float] = []
        self.noise = random.Random(1)
        self.sums: dict[str, Any] = {"x": torch.zeros(()), "n": 0}
        self.allocator = SimpleNamespace(importance={"w": torch.zeros(2)})
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.zeros(2))
        # What a step makes anew is no state:
        self.fake: torch.Tensor | None = None
        self.features: dict[str, torch.Tensor] = {}
        self.outputs: list[float] = []
        self.began = 0.0
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Change what it has."""
        y: torch.Tensor = self.layer(x)
        now = y.detach()
        self.fake = now * 2
        self.features["layer"] = now
        self.outputs = []
        self.outputs.append(float(now.sum()))
        self.began = random.random()
        self.kept += now.sum(0)
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x))
        if self.carry == "average":
            self.average = 0.9 * self.average + 0.1 * now.mean()
        if self.carry == "calls":
            self.calls += 1
        if self.carry == "recent":
            self.recent.append(float(now.sum()))
        if self.carry == "history":
            self.history.append(float(now.sum()))
        if self.carry == "noise":
            self.noise.random()
        if self.carry == "sums":
            self.sums["n"] += 1
        if self.carry == "mean":
            self.mean += now.mean(0)  # type: ignore[operator]
        return y

    def allocate(self) -> None:
        """Average an importance, as AdaLoRA's allocator does after each step."""
        held = self.allocator.importance
        held["w"] = 0.9 * held["w"] + self.layer.weight.detach().sum(0)


def train(
    objects: dict[str, Any],
    each: Callable[[int], None] = lambda _: None,
    *,
    epochs: tuple[int, ...] = (0,) * 4,
) -> list[str]:
    """Train for some steps; return what is told."""
    told: list[str] = []
    check = UntrackedState(adapters(objects), told.append)
    model, optimizer = objects["model"], objects["optimizer"]
    for number, epoch in enumerate(epochs):
        model(torch.randn(3, 2)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        each(number)
        if not check.after_step(epoch):
            break
    return told


def made(carry: str = "") -> dict[str, Any]:
    """Return a model and its optimizer."""
    model = Net(carry)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True)}


CARRIED = ["average", "calls", "recent", "history", "noise", "sums", "mean"]


@pytest.mark.parametrize("carry", CARRIED)
def test_what_a_tracked_model_carries_beside_its_state_is_named(carry: str) -> None:
    """By its path, in one sentence; what each step makes anew is not."""
    [sentence] = train(made(carry))
    assert sentence.startswith(f"model.{carry} changes in each step"), sentence
    assert "state_dict()" in sentence


def test_an_allocator_within_a_model_is_named() -> None:
    """AdaLoRA keeps the averages that ranks follow from in an object beside the weights."""
    objects = made()
    [sentence] = train(objects, lambda _: objects["model"].allocate())
    assert sentence.startswith("model.allocator.importance changes"), sentence


def test_a_clean_model_is_told_nothing() -> None:
    """Neither caches, nor what was made of the last batch, nor what is saved, over two epochs."""
    assert train(made(), epochs=(0, 0, 0, 0, 1, 1, 1, 1, 2)) == []


def test_what_begins_with_the_second_epoch_is_seen() -> None:
    """A warm-up may last an epoch; after the first that begins nothing is looked at any more."""
    objects = made()

    def each(number: int) -> None:
        if number >= 4:
            objects["model"].carry = "calls"

    [sentence] = train(objects, each, epochs=(0, 0, 0, 0, 1, 1, 1, 1))
    assert "model.calls" in sentence


class Metric(nn.Module):
    """Keeps its states as torchmetrics does: out of `state_dict()` unless it is told."""

    def __init__(self, *, is_persistent: bool) -> None:
        super().__init__()
        self.total = torch.zeros(())
        self.values: list[torch.Tensor] = []
        self.is_persistent = is_persistent

    def persistent(self, mode: bool = True) -> None:
        """Change it."""
        self.is_persistent = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return its states if they are persistent."""
        state = super().state_dict(*args, **kwargs)
        if self.is_persistent:
            prefix = kwargs.get("prefix", "")
            state[f"{prefix}total"] = self.total.clone()
            state[f"{prefix}values"] = list(self.values)
        return state

    def update(self, value: torch.Tensor) -> None:
        """Count a value."""
        self.total = self.total + value
        self.values.append(value)


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_metric_whose_states_are_not_persistent_is_named(is_persistent: bool) -> None:
    """Tracked by itself or within a model; with the way out that it has."""
    objects = {**made(), "metric": Metric(is_persistent=is_persistent)}
    told = train(objects, lambda _: objects["metric"].update(torch.rand(())))
    if is_persistent:
        assert told == []
    else:
        [sentence] = told
        assert "metric.total" in sentence
        assert "persistent(True)" in sentence


class Stateful:
    """An average whose state leaves out how often it was updated."""

    def __init__(self, model: nn.Module, *, whole: bool) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.updates = 0
        self._whole = whole

    def update(self, model: nn.Module) -> None:
        """Follow the weights."""
        self.updates += 1
        for held, now in zip(self.shadow, model.parameters(), strict=True):
            held.lerp_(now.detach(), min(0.1, 1 / self.updates))

    def state_dict(self) -> dict[str, Any]:
        """Return its state, or a part of it."""
        return {"shadow": self.shadow, **({"updates": self.updates} if self._whole else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_state_dict_leaves_out_is_named(whole: bool) -> None:
    """An average's count of its updates says how fast it follows."""
    objects = made()
    objects["ema"] = Stateful(objects["model"], whole=whole)
    told = train(objects, lambda _: objects["ema"].update(objects["model"]))
    assert [sentence.partition(" changes")[0] for sentence in told] == (
        [] if whole else ["ema.updates"]
    )


@dataclasses.dataclass
class Holder:
    """A script's trainer."""

    model: nn.Module
    updates: int = 0
    loss: float = 0.0

    def step(self) -> None:
        """Count a step, and keep its loss, which the next one overwrites."""
        self.updates += 1
        self.loss = random.random()


def _forever(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def script(plant: str) -> list[str]:
    """Play a script that forgets one thing, and has much that looks alike."""
    objects = made()
    model = objects["model"]
    told: list[str] = []
    check = UntrackedState(adapters(objects), told.append)
    schedule = None
    if plant == "schedule":  # it is stepped once an epoch, such as never in these steps
        schedule = torch.optim.lr_scheduler.ExponentialLR(objects["optimizer"], 0.9)
    shadows = [p.detach().clone() for p in model.parameters()]
    average = copy.deepcopy(model)
    trainer = Holder(model)
    noise, drawn = np.random.default_rng(1), functools.partial(random.Random(2).random)
    own = torch.Generator()
    other = iter(torch.utils.data.DataLoader(list(range(40))))  # type: ignore[arg-type]
    again = _forever(torch.utils.data.DataLoader(list(range(4))))  # type: ignore[arg-type]
    count, cycle = itertools.count(), itertools.cycle([1, 2, 3])
    running, total, history = 0.0, torch.zeros(()), []
    for number in range(3):
        own.manual_seed(number)
        torch.rand((), generator=own)
        loss = model(torch.randn(3, 2)).pow(2).mean()
        loss.backward()
        objects["optimizer"].step()
        running += float(loss.detach())
        total += loss.detach()
        history.append(running)
        if plant == "shadows":
            for held, now in zip(shadows, model.parameters(), strict=True):
                held.lerp_(now.detach(), 0.1)
        if plant == "average":
            for held, now in zip(average.parameters(), model.parameters(), strict=True):
                held.data.lerp_(now.data, 0.1)
        if plant == "trainer.updates":
            trainer.step()
        if plant == "noise":
            noise.random()
        if plant == "drawn":
            drawn()
        if plant in ("other", "again"):
            next(other if plant == "other" else again)
        if plant in ("count", "cycle"):
            next(count if plant == "count" else cycle)
        check.after_step(0)
    assert all((shadows, average, trainer, drawn, noise, history))
    assert (schedule is None) == (plant != "schedule")
    assert next(count) + next(cycle) + len(str((total, other, again, own))) > 0
    return told


PLANTS = [
    *("schedule", "shadows", "average", "trainer.updates", "noise", "drawn", "other", "again"),
    *("count", "cycle"),
]


@pytest.mark.parametrize("plant", PLANTS)
def test_what_the_loop_itself_carries_is_named(plant: str) -> None:
    """Schedules, averages, generators, positions; not the sums and lists of its log."""
    [sentence] = script(plant)
    assert sentence.startswith(plant), sentence


def test_a_script_that_forgets_nothing_is_told_nothing() -> None:
    """Sums of losses, a history, a generator that each step seeds: none is state."""
    assert script("") == []


def test_a_variable_is_alive_while_it_may_be_read_before_it_is_written() -> None:
    """Only then it can be state: a batch is assigned anew, a sum is read first."""
    found: list[frozenset[str]] = []

    def steps() -> Iterator[int]:
        for number in range(3):
            found.append(live_names(sys._getframe(1)))
            yield number

    def loop() -> Any:
        total, previous, checkpoint, shared = 0, None, None, 0
        for number in steps():
            batch = [number]
            with contextlib.suppress(ValueError):
                total += batch[0]
            if number == 1:
                checkpoint = {"batch": batch}
                found.append(frozenset(checkpoint))
            shift = batch if previous is None else previous
            previous = shift

            def later() -> int:
                return shared

        return later() + total

    loop()
    alive = found[1] & {"total", "previous", "checkpoint", "shared", "batch", "shift", "number"}
    assert alive == {"total", "previous", "shared"}
