"""What a script throws away between the micro-batches of a step, and then steps on."""

from __future__ import annotations

import copy
import gc
import logging
import re
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from spotguard.errors import UsageError
from spotguard.runtime.data.loader import ElasticLoader, Share
from spotguard.runtime.distributed import kept_gradients
from spotguard.runtime.distributed.bitwise_reduce import BitwiseSync
from spotguard.runtime.distributed.gradients import GradientSync
from spotguard.runtime.distributed.optimizers import OptimizerWatch
from tests.runtime.harness.simulated import SimulatedRank, on_ranks, simulated_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

X = torch.ones(4, 3)
MODEL = nn.Linear(3, 1)
REFUSED = re.escape("zero_grad() came between the micro-batches of the step")


class Script:
    """A script on one rank: a model, its optimizer and what stands before its steps."""

    def __init__(
        self, ranks: SimulatedRank | None = None, *, exact: bool = False, ddp: bool = False
    ) -> None:
        self.ranks = ranks or simulated_ranks(1)[0]
        self.bare = copy.deepcopy(MODEL)
        self.model: nn.Module = (
            DistributedDataParallel(self.bare, gradient_as_bucket_view=True) if ddp else self.bare
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.other = nn.Linear(3, 1)
        self.of_other = torch.optim.SGD(self.other.parameters(), lr=0.1)
        both = [self.model, self.other], [self.optimizer, self.of_other]
        loader = ElasticLoader(
            range(48), global_batch_size=12, micro_batch_size=2, shuffle=False, drop_last=False,
            seed=5, reseed=False, collate_fn=list, num_workers=0, options={},
            rank=self.ranks.rank, world_size=self.ranks.world_size,
        )  # fmt: skip
        self.sync: GradientSync | BitwiseSync = (
            BitwiseSync(*both, self.ranks, loader) if exact else GradientSync(*both, self.ranks)
        )
        keeper: Any = SimpleNamespace(
            objects={}, current=None, has_changed=False, begin_to_change=lambda **_: None
        )
        self.watch = OptimizerWatch([], both[1], self.sync, keeper, 1, tell=print)

    def loss(self) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        loss: torch.Tensor = self.model(X).square().sum()
        return loss

    def backward(
        self,
        between: Callable[[], object] = lambda: None,
        *,
        count: int = 2,
        loss: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Go through the micro-batches of a step, each of which begins with `between`."""
        for number in range(count):
            share = Share(0, number, 1 / count, (number,), number == count - 1)
            self.sync.begin(share)
            between()
            self.sync.backward((loss or self.loss)(), share.weight, share)

    def zero(self, *, to_none: bool = True) -> Callable[[], None]:
        """Return what throws the gradients away."""
        return lambda: self.optimizer.zero_grad(set_to_none=to_none)

    def close(self) -> None:
        """Leave no hook behind."""
        self.watch.close()


@pytest.fixture
def script() -> Iterator[Script]:
    """A script on one rank before its first step."""
    script = Script()
    yield script
    script.close()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group, for DDP; what all tests before have left is not looked through."""
    gc.freeze()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.unfreeze()


def test_gradients_that_were_thrown_away_in_the_loop_are_not_stepped_on(script: Script) -> None:
    """`zero_grad()` in the loop over the micro-batches: refused before any weight changes."""
    before = script.bare.weight.clone()
    script.backward(script.zero())
    with pytest.raises(UsageError, match=REFUSED) as refused:
        script.optimizer.step()
    assert "out of the loop" in refused.value.hint
    assert torch.equal(script.bare.weight, before)


def test_so_is_a_gradient_that_is_set_to_none_by_hand_or_by_the_module(script: Script) -> None:
    """Whoever does it, the gradient is gone."""
    script.backward(script.model.zero_grad)
    with pytest.raises(UsageError, match=REFUSED):
        script.optimizer.step()


def test_zeroing_in_place_is_found_in_the_second_step(script: Script) -> None:
    """The first one tells that somebody writes to them, so that from then on values count."""
    script.backward(script.zero(to_none=False))
    script.optimizer.step()
    script.backward(script.zero(to_none=False))
    with pytest.raises(UsageError, match=REFUSED):
        script.optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
def test_with_one_micro_batch_it_does_no_harm(script: Script, *, to_none: bool) -> None:
    """As before the loop, or after it: nothing was there to be lost."""
    for _ in range(3):
        script.backward(script.zero(to_none=to_none), count=1)
        script.optimizer.step()
        script.zero(to_none=to_none)()
        script.backward(count=3)
        script.optimizer.step()
        script.zero(to_none=to_none)()


def test_only_before_the_first_micro_batch_is_right(script: Script) -> None:
    """`if i == 0: optimizer.zero_grad()` in the loop loses nothing."""
    for _ in range(3):
        places = iter([script.optimizer.zero_grad, lambda: None, lambda: None])
        script.backward(lambda places=places: next(places)(), count=3)  # type: ignore[misc]
        script.optimizer.step()


def test_a_step_whose_pass_was_right_is_not_held_to_the_one_before(script: Script) -> None:
    """What was thrown away counts for the pass in which that was done."""
    script.backward(script.zero())
    script.optimizer.zero_grad()
    script.backward()
    script.optimizer.step()


def test_gradients_that_nobody_steps_on_may_be_thrown_away(script: Script) -> None:
    """A generator's loss gives the discriminator gradients, too, which its loop throws away."""
    for _ in range(3):
        script.backward(
            script.of_other.zero_grad,
            loss=lambda: script.other(X).sum() + script.loss(),
        )
        script.optimizer.step()
    with pytest.raises(UsageError, match=REFUSED):
        script.of_other.step()


def test_clipping_between_the_micro_batches_is_the_scripts_own_matter(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes to gradients, too; values are asked for once, and never again."""
    asked = 0

    def counted(parameter: torch.Tensor) -> bool:
        nonlocal asked
        asked += 1
        return parameter.grad is not None and bool(parameter.grad.any())

    monkeypatch.setattr(kept_gradients, "has_gradient", counted)
    seen = []
    for _ in range(4):
        script.backward(lambda: nn.utils.clip_grad_norm_(script.model.parameters(), 0.1), count=3)
        script.optimizer.step()
        script.optimizer.zero_grad()
        seen.append(asked)
    assert seen == [4, 4, 4, 4], "of two parameters, before and after"


def test_gradients_that_are_zero_by_themselves_are_not_lost(script: Script) -> None:
    """A micro-batch that is masked as a whole, clipped like all others."""
    for _ in range(3):
        script.backward(
            lambda: nn.utils.clip_grad_norm_(script.model.parameters(), 0.1),
            loss=lambda: script.loss() * 0,
            count=3,
        )
        script.optimizer.step()
        script.optimizer.zero_grad()


def test_without_anybody_who_writes_no_value_is_asked_for(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would have to be waited for, at each micro-batch."""
    monkeypatch.setattr(kept_gradients, "has_gradient", lambda _: pytest.fail("asked"))
    for _ in range(3):
        script.backward(count=4)
        script.optimizer.step()
        script.optimizer.zero_grad()


@pytest.mark.usefixtures("group_of_one")
def test_ddp_writes_to_no_gradient_between_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are views of a bucket; and what is thrown away there is found, too."""
    script = Script(ddp=True)
    with monkeypatch.context() as patch:
        patch.setattr(kept_gradients, "has_gradient", lambda _: pytest.fail("asked"))
        for _ in range(3):
            script.backward(count=3)
            script.optimizer.step()
            script.optimizer.zero_grad()
    script.backward(script.zero())
    with pytest.raises(UsageError, match=REFUSED):
        script.optimizer.step()
    script.close()


def test_bitwise_sums_lose_nothing() -> None:
    """Each micro-batch's gradients are taken out before a script could throw them away."""
    steps = []
    for between in (lambda script: lambda: None, Script.zero):
        script = Script(exact=True)
        script.backward(between(script), count=6)
        script.optimizer.step()
        steps.append(script.bare.weight.detach().clone())
        script.close()
    assert torch.equal(*steps)


def test_a_phase_looks_at_its_own_optimizers_only(script: Script) -> None:
    """What others get in it is thrown away anyway, and they have back what they had."""
    sync = script.sync
    with sync.only([script.of_other]):
        script.backward(loss=lambda: script.other(X).sum())
    with sync.only([script.optimizer]):
        script.backward(
            script.of_other.zero_grad, loss=lambda: script.other(X).sum() + script.loss()
        )
    script.of_other.step()
    script.optimizer.step()


def test_a_closure_that_throws_gradients_away_is_refused(script: Script) -> None:
    """Its passes are those before the step that asks for them."""

    def closure() -> float:
        script.backward(script.zero())
        return 0.0

    with pytest.raises(UsageError, match=REFUSED):
        script.optimizer.step(closure)


def test_of_three_ranks_those_with_several_micro_batches_refuse() -> None:
    """They have 1, 2 and 3; the one with a single micro-batch cannot know."""

    def train(ranks: SimulatedRank) -> bool:
        script = Script(ranks)
        try:
            script.backward(script.zero(), count=ranks.rank + 1)
            script.optimizer.step()
        except UsageError:
            return True
        finally:
            script.close()
        return False

    assert on_ranks(3, train) == [False, True, True]


def test_no_gradient_is_held_beyond_the_steps_last_pass() -> None:
    """That of an LLM's embedding takes gigabytes, which the next forward pass is to have."""
    script = Script()
    script.backward(count=3)
    gradients = [weakref.ref(p.grad) for p in script.bare.parameters() if p.grad is not None]
    script.optimizer.step()
    script.optimizer.zero_grad()
    assert len(gradients) == 2
    assert [each() for each in gradients] == [None, None]
    script.close()


def drop(parameter: torch.Tensor) -> Callable[[], None]:
    """Return what throws away the gradient of this one alone."""

    def by_none() -> None:
        parameter.grad = None

    return by_none


def blank(parameter: torch.Tensor) -> Callable[[], None]:
    """Return what writes zeros to the gradient of this one alone."""

    def in_place() -> None:
        if parameter.grad is not None:
            parameter.grad[:] = 0

    return in_place


@pytest.mark.parametrize("mask", [drop, blank])
@pytest.mark.parametrize("number", [0, 1])
def test_a_mask_over_one_parameter_is_the_scripts_own_matter(
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    mask: Callable[[torch.Tensor], Callable[[], None]],
    number: int,
) -> None:
    """Such as of a last layer that is not to learn yet, or of tokens; no value is asked for."""
    monkeypatch.setattr(kept_gradients, "has_gradient", lambda _: pytest.fail("asked"))
    for _ in range(3):
        script.backward(mask(list(script.bare.parameters())[number]), count=3)
        script.optimizer.step()
        script.optimizer.zero_grad()


def test_gradients_that_are_zero_by_themselves_hide_no_loss(script: Script) -> None:
    """Of two that are watched, the other one tells."""
    for _ in range(2):
        script.backward(script.zero(to_none=False), loss=lambda: script.model(X - 1).sum())
        if _ == 0:
            script.optimizer.step()
    with pytest.raises(UsageError, match=REFUSED):
        script.optimizer.step()


def test_zeros_in_a_single_parameter_are_told_of_and_not_refused(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """As where one embedding is trained: it may be a mask, and it may be `zero_grad`."""
    script.bare.bias.requires_grad_(False)
    with caplog.at_level(logging.WARNING, logger="spotguard"):
        for _ in range(4):
            script.backward(script.zero(to_none=False))
            script.optimizer.step()
    assert caplog.text.count("zeros were written to its only gradient") == 1


def test_a_single_parameter_without_its_gradient_is_refused(script: Script) -> None:
    """No mask does that to all there is."""
    script.bare.bias.requires_grad_(False)
    script.backward(drop(script.bare.weight))
    with pytest.raises(UsageError, match=REFUSED):
        script.optimizer.step()
