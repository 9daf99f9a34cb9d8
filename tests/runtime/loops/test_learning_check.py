"""Steps that went backward and changed no weight are told, and only where that is certain."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from spotguard.runtime.loop.learning_check import LearningCheck

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.step import Step


def steps(
    train: Callable[[torch.nn.Linear, torch.optim.Optimizer], None],
    *,
    passes: int = 1,
    rate: float = 0.1,
    other: bool = False,
    optimizers: bool = True,
) -> list[dict[str, Any] | None]:
    """Return what is told after each of three steps of a script."""
    model = torch.nn.Linear(3, 1)
    of = torch.nn.Linear(3, 1) if other else model
    optimizer = torch.optim.SGD(of.parameters(), lr=rate)
    check = LearningCheck([model], [optimizer] if optimizers else [])
    told = []
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        train(model, optimizer)
        told.append(check.after(cast("Step", SimpleNamespace(passes_done=passes))))
    return told


def by_optimizer(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """Train as ever."""
    optimizer.step()
    optimizer.zero_grad()


def without_gradients(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """Forget the gradients first."""
    model.zero_grad()
    optimizer.step()


def by_hand(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """Change the weights around the optimizer, in a way that leaves no version behind."""
    assert model.weight.grad is not None
    model.weight.data -= 0.1 * model.weight.grad


def by_closure(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer ask for gradients, which are gone when it begins."""
    optimizer.zero_grad()

    def closure() -> float:
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


def nothing(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """Gather gradients."""


@pytest.mark.parametrize(
    ("train", "how", "seen"),
    [
        (nothing, {}, {"stepped": False, "foreign": False}),
        (without_gradients, {}, {"stepped": True, "foreign": False}),
        (by_optimizer, {"other": True}, {"stepped": True, "foreign": True}),
    ],
)
def test_it_is_told_once_after_two_steps(train: Any, how: Any, seen: dict[str, bool]) -> None:
    """What the optimizers did, for whoever knows the script."""
    first, second, third = steps(train, **how)
    assert first is third is None
    assert second is not None
    assert second["unlearned"] == {"steps": 2, **seen}


def test_complex_weights_are_seen_to_learn() -> None:
    """Without a word of torch's about parts that are left out; a turn in the plane is a change."""
    model = torch.nn.Linear(3, 1, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cast("Step", SimpleNamespace(passes_done=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learns, rests = (LearningCheck([model], [optimizer]) for _ in range(2))
        rests.after(step)
        assert rests.after(step) is not None
        model.weight.data *= 1j
        learns.after(step)
        assert learns.after(step) is None


@pytest.mark.parametrize(
    ("train", "how"),
    [
        (by_optimizer, {}),
        (by_optimizer, {"rate": 0.0}),  # it warms up
        (by_closure, {}),
        (by_hand, {}),
        (nothing, {"passes": 0}),  # it gathers experience, or evaluates
        (nothing, {"optimizers": False}),
    ],
)
def test_what_learns_or_may_have_reasons_is_not_told(train: Any, how: Any) -> None:
    """A wrong word would refuse a script that works."""
    assert steps(train, **how) == [None, None, None]
