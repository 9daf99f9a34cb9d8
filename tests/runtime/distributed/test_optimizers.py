"""Each parameter's gradient is looked at in the first step that trains it, whichever that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spotguard.errors import UsageError
from spotguard.runtime.distributed.optimizers import GradientCheck, OptimizerWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

X = torch.ones(4, 3)


class Script:
    """Two tracked models with tracked optimizers, and a third model whose optimizer is not."""

    def __init__(self) -> None:
        self.models = [torch.nn.Linear(3, 1) for _ in range(3)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.models]
        names = {id(p): f"model{n}.{k}" for n, m in enumerate(self.models)
                 for k, p in m.named_parameters()}  # fmt: skip
        synchronised = {id(p) for m in self.models[:2] for p in m.parameters()}
        gradients: Any = SimpleNamespace(synchronised=lambda: synchronised)
        self.check = GradientCheck(names, self.models, self.optimizers[:2], gradients)
        self.hook = register_optimizer_step_pre_hook(lambda o, *_: self.check.before_step(o))

    def train(self, number: int, *, rightly: bool = True) -> None:
        """Make one model's gradient, and have its optimizer step on it."""
        self.optimizers[number].zero_grad()
        loss = self.models[number](X).sum()
        if rightly:
            with self.check.expected_gradients():
                loss.backward()
        else:
            loss.backward()
        self.optimizers[number].step()


@pytest.fixture
def script() -> Iterator[Script]:
    """A script before its first step; no hook is left behind."""
    script = Script()
    yield script
    script.check.close()
    script.hook.remove()


def test_what_is_trained_every_fifth_step_is_looked_at_in_the_fifth(script: Script) -> None:
    """A generator's first gradient is each rank's own, when all else has long been right."""
    for _ in range(4):
        script.train(0)
        script.check.end_of_step()
    script.train(0)
    with pytest.raises(UsageError, match=r"model1\.weight got a gradient outside of"):
        script.train(1, rightly=False)


def test_an_optimizer_that_is_not_tracked_is_found_whenever_it_steps_first(script: Script) -> None:
    """Also in a later step than the first."""
    script.train(0)
    script.train(1)
    script.check.end_of_step()
    with pytest.raises(UsageError, match=r"model2\.weight is trained by an optimizer that is not"):
        script.train(2)


def test_a_group_that_is_added_is_looked_at(script: Script) -> None:
    """What is unfrozen in mid-run may be trained wrongly, too."""
    script.train(0)
    script.check.end_of_step()
    added = torch.nn.Parameter(torch.ones(3))
    script.optimizers[0].add_param_group({"params": [added]})
    script.train(0)
    script.check.end_of_step()
    loss: Any = (X @ added).sum()
    loss.backward()
    with pytest.raises(UsageError, match="a parameter got a gradient outside of"):
        script.optimizers[0].step()


def test_what_was_trained_rightly_once_is_looked_at_no_more(script: Script) -> None:
    """No hook is left on it: a step must not cost more for ever."""
    script.train(0)
    assert script.models[0].weight._post_accumulate_grad_hooks
    script.check.end_of_step()
    assert not script.models[0].weight._post_accumulate_grad_hooks
    assert script.models[1].weight._post_accumulate_grad_hooks
    assert script.check.is_looking
    script.train(1)
    script.models[2].requires_grad_(False)
    script.check.end_of_step()
    script.train(1, rightly=False)


@pytest.mark.parametrize(
    ("tracked", "beside", "expected"),
    [(False, False, [{}]), (True, True, [{"done": False}]), (True, False, [])],
)
def test_what_an_optimizer_does_not_train_may_change_once_gradients_are_there(
    *, tracked: bool, beside: bool, expected: list[dict[str, bool]]
) -> None:
    """A script that changes weights by hand says nothing of it: no save reads them from then on.

    What no optimizer has may also be trained by nobody, so the step does not count as done yet.
    """
    changes: list[dict[str, bool]] = []
    keeper: Any = SimpleNamespace(
        objects={}, current=None, begin_to_change=lambda **how: changes.append(how)
    )
    gradients: Any = SimpleNamespace(catch_up=lambda: None, may_be_trained_by_hand=beside)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    watch = OptimizerWatch([], [optimizer] if tracked else [], gradients, keeper, 1, tell=print)

    watch.gradients_are_there()
    assert changes == expected
    watch.close()
