"""An optimizer that is not tracked is forgotten at a resume: it is refused, or told of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spotguard.errors import UsageError
from spotguard.runtime.loop.untracked_optimizers import UntrackedOptimizers
from tests.runtime.harness.lab import adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.runtime.checkpoint.training_state import Keeper

X = torch.ones(4, 3)
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "stateless": lambda params: torch.optim.SGD(params, lr=0.1),
}


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, of which it saves the state (Lookahead), or not (SAM)."""

    def __init__(self, params: Any, *, saves: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups
        if saves:
            self.state = self.base.state

    def step(self, closure: Any = None) -> Any:
        """Step by the base optimizer."""
        self.base.step()


class Agent:
    """An object of the script's that saves its own optimizer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.optimizer.load_state_dict(state["optimizer"])


class Loop:
    """A loop of one rank with a tracked model; counts what is done before weights change."""

    def __init__(self, **objects: Any) -> None:
        self.model, self.other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        self.finished = 0
        self.changes = 0
        self.told: list[str] = []
        self.hook: Any = None

    def begin(self, **objects: Any) -> Loop:
        """Begin with these tracked beside the model."""

        self.objects = adapters({"model": self.model, **objects})
        watch = UntrackedOptimizers(cast("Keeper", self), self.told.append)
        self.hook = register_optimizer_step_pre_hook(watch.before_step)
        return self

    def begin_to_change(self) -> None:
        """Count it, as a keeper would take note of it."""
        self.changes += 1

    def step(self, optimizer: torch.optim.Optimizer, *, ends: bool = True) -> None:
        """Train both models' gradients by it; a boundary follows."""
        for model in (self.model, self.other):
            model.zero_grad()
            model(X).sum().backward()
        optimizer.step()
        self.finished += ends


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A loop that has not begun; no hook is left behind."""
    made = Loop()
    yield made
    if made.hook is not None:
        made.hook.remove()


@pytest.mark.parametrize("kind", MAKE)
def test_what_trains_a_tracked_model_and_is_not_tracked_is_refused(kind: str, loop: Loop) -> None:
    """On one rank, once it has stepped after another boundary; a save meanwhile knew of it."""
    optimizer = MAKE[kind](loop.model.parameters())
    loop.begin()
    loop.step(optimizer)
    assert loop.changes == 1, "no save reads the weights while it steps"
    with pytest.raises(
        UsageError, match=r"model\.weight is trained by \w+, an optimizer that is n"
    ):
        loop.step(optimizer)


def test_what_takes_the_place_of_a_tracked_one_is_refused(loop: Loop) -> None:
    """A script that goes from Adam to SGD in mid-run resumes with an Adam that it steps no more."""
    adam = torch.optim.AdamW(loop.model.parameters(), lr=0.1)
    loop.begin(optimizer=adam)
    for _ in range(3):
        loop.step(adam)
    assert loop.changes == 0, "its own hook does that"
    later = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9)
    loop.step(later)
    with pytest.raises(UsageError, match="SGD, an optimizer that is not tracked"):
        loop.step(later)


def test_one_that_is_made_anew_has_nothing_to_lose(loop: Loop) -> None:
    """A meta-learner's inner optimizer takes three steps within each step; a probe's likewise."""
    outer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.begin(optimizer=outer)
    for _ in range(3):
        inner = torch.optim.AdamW(loop.model.parameters(), lr=0.1)
        probe = torch.optim.AdamW(loop.other.parameters(), lr=0.1)
        for _ in range(3):
            loop.step(inner, ends=False)
            loop.step(probe, ends=False)
        loop.step(outer)
    assert not loop.told
    assert loop.changes == 9


def test_what_trains_a_model_that_is_not_tracked_either_is_told_once(loop: Loop) -> None:
    """A discriminator, or an online probe: both begin anew at a resume, which may be meant."""
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    beside = torch.optim.AdamW(loop.other.parameters(), lr=0.1)
    loop.begin(optimizer=optimizer)
    for _ in range(4):
        loop.step(optimizer, ends=False)
        loop.step(beside)
    [told] = loop.told
    assert told.startswith("AdamW, an optimizer that is not tracked, trains 2 parameters")
    assert loop.changes == 0


def test_an_optimizer_within_a_tracked_one_is_known_by_its_state(loop: Loop) -> None:
    """Lookahead's is saved with it."""
    wrapper = Wrapper(loop.model.parameters(), saves=True)
    loop.begin(optimizer=wrapper)
    for _ in range(3):
        loop.step(wrapper)
    assert not loop.told


def test_an_optimizer_within_one_that_forgets_it_is_refused(loop: Loop) -> None:
    """Most SAMs save their own state alone: the momentum of what they step by is lost."""
    wrapper = Wrapper(loop.model.parameters(), saves=False)
    loop.begin(optimizer=wrapper)
    loop.step(wrapper)
    with pytest.raises(UsageError, match="a resume would begin its state anew") as caught:
        loop.step(wrapper)
    assert "base_optimizer=sam.base_optimizer" in str(caught.value.hint)


def test_an_object_that_saves_its_optimizer_is_enough(loop: Loop) -> None:
    """An agent with a `state_dict` of its own, from the first step on."""
    agent = Agent(loop.model)
    loop.begin(agent=agent)
    for _ in range(3):
        loop.step(agent.optimizer)
    assert loop.changes == 3


def test_a_group_that_is_added_is_looked_at(loop: Loop) -> None:
    """An optimizer of nobody's parameters that gets a tracked one."""
    beside = torch.optim.SGD(loop.other.parameters(), lr=0.1)
    loop.begin()
    loop.step(beside)
    beside.add_param_group({"params": list(loop.model.parameters())})
    with pytest.raises(UsageError, match=r"model\.weight"):
        loop.step(beside)
