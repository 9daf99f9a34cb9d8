"""Optimizers whose state has another shape than torch's: saved whole, or refused at once."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from spotguard.errors import UnsupportedState
from spotguard.runtime.state.tracked import tracked
from spotguard.runtime.state.tree import Packed
from tests.runtime.harness.lab import Rank, next_attempt, same
from tests.runtime.state.test_tracked import Fp32Moments

if TYPE_CHECKING:
    from collections.abc import Callable


class Moments(Fp32Moments):
    """Takes larger steps; others change what is left of its state."""

    def rate(self) -> float:
        """Return the rate of this step."""
        return 0.1


class Counting(Moments):
    """Has a count of its steps beside the parameters' state, as MADGRAD does."""

    def rate(self) -> float:
        """Return a rate that shrinks from step to step."""
        count: Any = self.state
        if "k" not in count:
            count["k"] = torch.tensor([0], dtype=torch.long)
        count["k"] += 1
        return 0.1 / int(count["k"])


class Lookahead(torch.optim.Optimizer):
    """Has all its state in another optimizer, as timm's does; its own `state` is empty."""

    def __init__(self, params: Any) -> None:
        self.base = Moments(params)
        self.param_groups = self.base.param_groups
        self.defaults = self.base.defaults
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        """Have the other one take a step."""
        self.base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Have the other one throw its gradients away."""
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the other one's state."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the other one take its state."""
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class Slow(Moments):
    """Adds a part of its own to its state dict, as timm's Lookahead once did."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.slow = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step, and half of the way back to where it came from."""
        super().step()
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.add_(parameter - slow, alpha=0.5)
            parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        """Return the slow weights, too."""
        return {"slow_state": dict(enumerate(self.slow)), **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the slow weights back, too."""
        for slow, value in zip(self.slow, state_dict["slow_state"].values(), strict=True):
            slow.copy_(value)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "slow_state"})


class Named(Moments):
    """Saves by names in the place of numbers, by hooks on its state dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.register_state_dict_post_hook(lambda _, state: _renamed(state, "p{}".format))
        self.register_load_state_dict_pre_hook(
            lambda _, state: _renamed(state, lambda n: int(n[1]))
        )


def _renamed(state: dict[str, Any], name: Callable[[Any], Any]) -> dict[str, Any]:
    return {**state, "state": {name(key): entries for key, entries in state["state"].items()}}


KINDS = [Counting, Lookahead, Slow, Named]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take some steps on data that depends on the step only."""
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(5, 3, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps_before", [0, 2], ids=["new", "used"])
def test_training_goes_on_bit_by_bit(kind: Callable[..., Any], steps_before: int) -> None:
    """Its whole state comes back, fp32 moments of bf16 parameters unrounded."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, dtype=torch.bfloat16)
    optimizer = kind(model.parameters())
    train(model, optimizer, range(5))
    rank = Rank()
    rank.start()
    rank.now(5, model=model, optimizer=optimizer)
    train(model, optimizer, range(5, 10))

    other = nn.Linear(3, 4, dtype=torch.bfloat16)
    again = kind(other.parameters())
    train(other, again, range(steps_before))
    next_attempt(rank.store, model=other, optimizer=again)
    train(other, again, range(5, 10))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(again.state_dict(), optimizer.state_dict())


def test_an_optimizers_own_hooks_see_the_exact_state() -> None:
    """What it derives from its moments when it has loaded is derived from unrounded ones."""
    model = nn.Linear(3, 4, dtype=torch.bfloat16)
    optimizer = Moments(model.parameters())
    train(model, optimizer, range(2))
    rank = Rank()
    rank.start()
    rank.now(2, optimizer=optimizer)
    again = Moments(nn.Linear(3, 4, dtype=torch.bfloat16).parameters())
    seen: list[Any] = []
    again.register_load_state_dict_post_hook(
        lambda o: seen.extend(entries["moment"].dtype for entries in o.state.values())
    )
    next_attempt(rank.store, optimizer=again)
    assert seen == [torch.float32, torch.float32]
    assert len(again._optimizer_load_state_dict_post_hooks) == 1, "ours is gone again"


GROUPS = [{"params": [0, 1], "lr": 0.1}]
REFUSED: dict[str, tuple[Any, str]] = {
    "no dict": ([1], 'has no dict "state"'),
    "fp16 wrapper": ({"optimizer_state_dict": {}, "loss_scale": 1.0}, 'has no dict "state"'),
    "no groups": ({"state": {}}, 'has no list "param_groups"'),
    "groups without parameters": ({"state": {}, "param_groups": [{"lr": 1}]}, 'has its "params"'),
    "other groups": (
        {"state": {}, "param_groups": [{"params": [0]}]},
        r"has parameter groups of \[1\] tensors, and the optimizer of \[2\]",
    ),
    "by address": (
        {"state": {140_032_811: {"moment": 1.0}}, "param_groups": GROUPS},
        "has something of a parameter number 140032811, and there are 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_resume_could_load_is_refused_when_it_is_packed(name: str) -> None:
    """Not hours later, by the resume: in one sentence that names the optimizer."""
    form, message = REFUSED[name]

    class Odd(Moments):
        def state_dict(self) -> Any:
            return form

    item = tracked("optimizer", Odd(nn.Linear(3, 4).parameters()))
    with pytest.raises(UnsupportedState, match=rf"optimizer \(Odd\) cannot be .*{message}"):
        item.pack("optimizer", Packed())
