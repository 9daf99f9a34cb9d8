"""Optimizers that skip torch's own set-up, so that no hook would be called before their steps."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from spotguard.errors import UsageError
from spotguard.runtime.data.batch_scaling import LearningRateScale
from spotguard.runtime.distributed.optimizers import OptimizerWatch, hook_steps
from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.runtime.harness.processes import Jobs

X = torch.ones(4, 3)


class Lookahead(Optimizer):
    """As timm has it: `super().__init__()` is left out on purpose, and groups are shared."""

    def __init__(self, base_optimizer: Optimizer, alpha: float = 0.5, k: int = 6) -> None:
        defaults = {"lookahead_alpha": alpha, "lookahead_k": k, "lookahead_step": 0}
        self._base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.defaults.update(defaults)
        self.state = defaultdict(dict)
        for name, default in defaults.items():
            for group in self._base_optimizer.param_groups:
                group.setdefault(name, default)

    @torch.no_grad()
    def update_slow(self, group: dict[str, Any]) -> None:
        """Draw the weights back to the slow ones, half of the way."""
        for fast in group["params"]:
            state = self._base_optimizer.state[fast]
            if "lookahead_slow_buff" not in state:
                state["lookahead_slow_buff"] = fast.detach().clone()
            slow = state["lookahead_slow_buff"]
            slow.add_(fast - slow, alpha=group["lookahead_alpha"])
            fast.copy_(slow)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step by the base optimizer; every few steps look back."""
        loss = self._base_optimizer.step(closure)
        for group in self._base_optimizer.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                self.update_slow(group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's."""
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give it to the base optimizer."""
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups


class Script:
    """A model whose tracked optimizer is a Lookahead, and what stands before its steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 1)
        base = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = Lookahead(base, k=2)
        self.weight_at_change: list[torch.Tensor] = []
        self.keeper: Any = SimpleNamespace(
            objects={}, current=None, has_changed=False, begin_to_change=self._change
        )

    def _change(self, **_: bool) -> None:
        self.weight_at_change.append(self.model.weight.detach().clone())

    def watch(self) -> OptimizerWatch:
        """Stand before its steps, as a loop does."""
        gradients: Any = SimpleNamespace(catch_up=lambda: None, refuse_lost=lambda _: None)
        return OptimizerWatch([], [self.optimizer], gradients, self.keeper, 1, tell=print)

    def train(self) -> torch.Tensor:
        """Do a step; return the weight before it."""
        before = self.model.weight.detach().clone()
        self.model(X).sum().backward()
        self.optimizer.step()
        return before


def test_a_lookahead_is_noticed_before_it_changes_weights() -> None:
    """Else a save would read them meanwhile, and store a torn state as a whole one."""
    script = Script()
    hooked = hook_steps([script.optimizer])
    watch = script.watch()
    before = [script.train() for _ in range(3)]
    assert len(script.weight_at_change) == 3
    assert all(map(torch.equal, script.weight_at_change, before))
    watch.close()
    hooked.close()
    assert "step" not in script.optimizer.__dict__, "it is the script's own again"
    script.train()
    assert len(script.weight_at_change) == 3


def test_a_scheduler_that_was_made_before_counts_on() -> None:
    """It has put a step of its own in place, which would pass hooks by, and looks for its mark."""
    script = Script()
    scheduler = StepLR(script.optimizer, 1, gamma=0.5)
    of_scheduler = script.optimizer.__dict__["step"]
    hooked = hook_steps([script.optimizer])
    watch = script.watch()
    script.train()
    scheduler.step()  # pytest makes an error of its warning
    assert len(script.weight_at_change) == 1
    assert script.optimizer.param_groups[0]["lr"] == 0.05
    watch.close()
    hooked.close()
    assert script.optimizer.__dict__["step"] is of_scheduler


def test_a_scheduler_that_is_made_after_keeps_the_hooks() -> None:
    """Its own step goes around ours, and stays when ours would go."""
    script = Script()
    hooked = hook_steps([script.optimizer])
    watch = script.watch()
    scheduler = StepLR(script.optimizer, 1)
    script.train()
    scheduler.step()
    assert len(script.weight_at_change) == 1
    hooked.close()
    watch.close()
    script.train()
    scheduler.step()


def test_a_closure_is_seen_too() -> None:
    """Weights may change before it: such an optimizer is not one of torch's."""
    script = Script()
    hook_steps([script.optimizer])
    watch = script.watch()

    def closure() -> float:
        script.model.zero_grad()
        loss = script.model(X).sum()
        loss.backward()
        return float(loss.detach())

    told = float(script.model(X).sum().detach())
    assert script.optimizer.step(closure) == pytest.approx(told)
    assert len(script.weight_at_change) == 2, "before the closure, and after it"
    watch.close()


def test_one_of_torchs_own_is_left_alone() -> None:
    """It calls hooks already: each would be called twice."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    hook_steps([optimizer])
    assert "step" not in optimizer.__dict__


class Wrapped:
    """One of torch's own whose step the script has put a step of its own around."""

    def __init__(self, wrapper: Callable[..., Any] | None = None) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.weight.grad = torch.ones(1)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        own = self.optimizer.step
        step: Any = wrapper or (lambda *args, **kwargs: own(*args, **kwargs))
        self.optimizer.__dict__["step"] = step
        self.hooked = hook_steps([self.optimizer])
        self.changes = 0
        self.optimizer.register_step_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.changes += 1

    def train(self) -> float:
        """Return by how much the weight fell."""
        before = self.weight.item()
        self.optimizer.step()
        return before - self.weight.item()


def test_a_step_around_one_of_torchs_calls_hooks_once() -> None:
    """That one calls them as well; a rate that is scaled twice would grow with each step."""
    script = Wrapped()
    scale = LearningRateScale("linear", reference=1, warmup_steps=0)
    scale.begin(2, 0)
    scale.attach([script.optimizer], lambda: 0)
    assert [script.train() for _ in range(4)] == [2.0] * 4
    assert script.changes == 4
    assert script.optimizer.param_groups[0]["lr"] == 1.0


def test_a_step_in_the_place_of_one_of_torchs_calls_hooks_too() -> None:
    """A patched one never gets to the class's own."""
    script = Wrapped(lambda: None)
    script.train()
    assert script.changes == 1


def test_hooks_are_there_again_after_a_step_that_fails() -> None:
    """Such as one that runs out of memory, which a script may try again."""
    broken = iter([True])

    def step() -> None:
        if next(broken, False):
            raise RuntimeError("out of memory")

    script = Wrapped(step)
    with pytest.raises(RuntimeError, match="out of memory"):
        script.train()
    script.train()
    assert script.changes == 2


def test_a_hook_that_a_step_of_the_scripts_own_registers_stays() -> None:
    """As some do in their first step."""
    first, calls = iter([True]), list[int]()

    def step() -> None:
        if next(first, False):
            script.optimizer.register_step_post_hook(lambda *_: calls.append(1))

    script = Wrapped(step)
    for _ in range(3):
        script.train()
    assert len(calls) == 3, "the step that registers it is over after it"
    assert script.changes == 3


class Sealed(Lookahead):
    """Has a step that nobody can replace."""

    step = property(lambda self: self.update_slow)


def test_a_step_that_cannot_be_watched_is_refused() -> None:
    """In one sentence, with the way out."""
    sealed = Sealed(Script().optimizer._base_optimizer)
    with pytest.raises(UsageError, match=r"Sealed: nobody can tell when its step\(\)") as told:
        hook_steps([sealed])
    assert "track the optimizer that it steps by" in told.value.hint


def test_a_step_that_is_another_optimizers_calls_that_ones_hooks_only() -> None:
    """So it gets its own, too."""
    script = Script()
    base = script.optimizer._base_optimizer
    script.optimizer.__dict__["step"] = base.step
    hook_steps([script.optimizer])
    watch = script.watch()
    script.train()
    assert len(script.weight_at_change) == 1
    watch.close()


JOB = """
import os, signal, sys, torch
sys.path.insert(0, {here!r})
import spotguard.runtime as spotguard
from test_hooked_steps import Lookahead


class Sharing(Lookahead):
    state = property(lambda self: self._base_optimizer.state, lambda self, _: None)


run = spotguard.init(save_every="100 steps")
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(28, 3), torch.randn(28, 1))
model = torch.nn.Linear(3, 1)
base = torch.optim.AdamW(model.parameters(), lr=0.1)
optimizer, inner = Sharing(base, k=3), base.step


def step(closure=None):
    assert run._job.keeper.changing, "a save could read the weights now"
    return inner(closure)


base.step = step
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=2), total=9):
    if str(step.number) == os.environ.get("TOLD") and run.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    if str(step.number) == os.environ.get("TOLD"):
        while run._job.watch.agreed is None:
            signal.sigtimedwait([], 0.01)
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
print("digest", model.weight.tolist(), flush=True)
"""


@pytest.mark.e2e
def test_a_job_with_a_lookahead_goes_on_where_it_was(jobs: Jobs) -> None:
    """On three ranks, told to stop between two looks back: to the last bit as if undisturbed."""
    script = jobs.folder / "script.py"
    script.write_text(JOB.format(here=str(Path(__file__).parent)))
    calm = jobs.start_ranks(3, script=script, SPOTGUARD_RUN_ID="calm")
    assert [job.wait() for job in calm] == [0] * 3, calm[0].said
    told = jobs.start_ranks(3, script=script, TOLD=4)
    assert [job.wait() for job in told] == [75] * 3, told[0].said
    resumed = jobs.start_ranks(3, script=script, SPOTGUARD_ATTEMPT=2)
    assert [job.wait() for job in resumed] == [0] * 3, resumed[0].said
    assert {digest(job.said) for job in resumed} == {digest(calm[0].said)}
