"""A script that keeps gradients for the next step is warned, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.runtime.distributed.optimizers import OptimizerWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

X = torch.ones(4, 3)


class Script:
    """A model and its tracked optimizer, and the steps of a loop around them."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.told: list[str] = []
        keeper: Any = SimpleNamespace(
            objects={}, current=None, has_changed=False, begin_to_change=self._change
        )
        gradients: Any = SimpleNamespace(catch_up=lambda: None, refuse_lost=lambda _: None)
        self.keeper = keeper
        self.watch = OptimizerWatch(
            [], [self.optimizer], gradients, keeper, 1, tell=self.told.append
        )

    def _change(self, **_: bool) -> None:
        self.keeper.has_changed = True

    def step(
        self, after: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> None:
        """Make one step of two micro-batches: `before` them, and `after` them."""
        before()
        for _ in range(2):
            with self.watch.expected_gradients:
                self.model(X).sum().backward()
        after()
        self.watch.end_of_step()
        self.keeper.has_changed = False


@pytest.fixture
def script() -> Iterator[Script]:
    """A script before its first step; no hook is left behind."""
    script = Script()
    yield script
    script.watch.close()


def test_gradients_kept_for_the_next_step_are_told_once(script: Script) -> None:
    """Its optimizer steps in every fourth step: what the others gathered is in no checkpoint."""

    def train() -> None:
        script.optimizer.step()
        script.optimizer.zero_grad()

    told = []
    for number in range(12):
        script.step(train if (number + 1) % 4 == 0 else lambda: None)
        told.append(len(script.told))
    assert told == [0, *[1] * 11]
    assert "no checkpoint has them" in script.told[0]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["after", "before"])
def test_a_step_that_a_scaler_skips_is_no_kept_one(
    script: Script, when: str, *, to_none: bool
) -> None:
    """Its gradients are thrown away, at the end of the step or at the beginning of the next."""

    def forget() -> None:
        script.optimizer.zero_grad(set_to_none=to_none)

    for _ in range(4):
        if when == "after":
            script.step(forget)
        else:
            script.step(lambda: None, before=forget)
    assert script.told == []


def test_gradients_that_were_stepped_on_may_stay(script: Script) -> None:
    """At the end of its step, by whoever sums them on purpose, or at the beginning of the next."""
    script.step(script.optimizer.step)
    script.step(script.optimizer.step)
    script.step(lambda: None, before=script.optimizer.zero_grad)
    script.step(script.optimizer.zero_grad, before=script.optimizer.step)
    assert script.told == []
