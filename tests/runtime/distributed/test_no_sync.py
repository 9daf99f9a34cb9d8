from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from spotguard.errors import UsageError
from spotguard.runtime.data.loader import Share
from spotguard.runtime.distributed.gradients import GradientSync
from spotguard.runtime.distributed.wrappers import Wrappers
from tests.runtime.harness.simulated import Meeting, SimulatedRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

X = torch.ones(4, 2)
LAST = Share(0, 0, 0.5, (0,), True)


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """A group of one, for DDP; what all tests before have left is not looked through."""
    gc.freeze()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.unfreeze()


class Claimed(SimulatedRank):
    """The first of several ranks, whose others bring nothing."""

    def add_up(self, flat: torch.Tensor) -> Callable[[], None]:
        """Leave it as it is."""
        return lambda: None


class Script:
    """A model in DDP, of which `world_size` ranks are said to be."""

    def __init__(self, world_size: int = 2) -> None:
        self.model = DistributedDataParallel(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        ranks = Claimed(0, world_size, Meeting(world_size))
        self.sync = GradientSync([self.model], [optimizer], ranks)

    def train(
        self,
        *,
        last: bool = True,
        forward: AbstractContextManager[None] | None = None,
        backward: AbstractContextManager[None] | None = None,
        looks_again: bool = False,
    ) -> None:
        """Train on a micro-batch, its passes within what is given."""
        share = LAST._replace(last=last)
        self.sync.begin(share)
        with forward or contextlib.nullcontext():
            loss = self.model(X).sum()
        if looks_again:
            with torch.no_grad():
                self.model(X)
        with backward or contextlib.nullcontext():
            self.sync.backward(loss, 0.5, share)


def held_back(script: Script, *, kept: bool) -> Iterator[None]:
    """Enter the model's `no_sync`, and leave it unless it is `kept` for the backward pass."""
    context = script.model.no_sync()
    context.__enter__()
    yield
    if not kept:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("kept", [False, True])
def test_no_sync_for_the_last_micro_batch_is_refused(*, kept: bool) -> None:
    """Around the forward pass alone, too: that is what DDP goes by."""
    script = Script()
    script.train()
    within = contextlib.contextmanager(held_back)(script, kept=kept)
    with pytest.raises(UsageError, match=r"no_sync\(\)"):
        script.train(forward=within)


def test_a_flag_that_the_script_sets_is_seen() -> None:
    """`require_backward_grad_sync = False` is what `no_sync` does."""
    script = Script()

    @contextlib.contextmanager
    def unset() -> Iterator[None]:
        script.model.require_backward_grad_sync = False
        yield

    with pytest.raises(UsageError, match=r"no_sync\(\)"):
        script.train(forward=unset())


def test_alone_no_sync_does_no_harm() -> None:
    """There is nothing to add up, so nothing is refused."""
    script = Script(1)
    script.train(forward=script.model.no_sync())


def test_what_does_no_harm_is_not_refused() -> None:
    """Before the last micro-batch, around the backward pass alone, a look without gradients.

    And where no gradient comes, as of the other network in a phase of an adversarial one.
    """
    script = Script()
    script.train(last=False, forward=script.model.no_sync(), backward=script.model.no_sync())
    script.train(backward=script.model.no_sync())
    script.train(looks_again=True)
    script.sync.begin(LAST)
    with script.model.no_sync():
        script.model(X)
    script.sync.backward(torch.ones((), requires_grad=True), 0.5, LAST)


class Sharded:
    """Takes down what it is told, as an FSDP2 module would."""

    def __init__(self) -> None:
        self.synchronises = True

    def set_requires_gradient_sync(self, synchronises: bool, **_: object) -> None:
        """Take it down."""
        self.synchronises = synchronises


def test_fsdp_adds_up_whatever_the_script_has_told_it() -> None:
    """It looks in the backward pass, and is told once more before the step's last one."""
    script, fsdp = Script(), Sharded()
    script.sync._wrappers = Wrappers([], [fsdp])  # type: ignore[list-item]
    script.sync.begin(LAST)
    fsdp.set_requires_gradient_sync(False)
    script.sync.begin_backward(0.5)
    assert fsdp.synchronises


def test_the_model_has_its_own_again_after_the_run() -> None:
    """Nothing of ours is left in it."""
    script = Script()
    assert "no_sync" in script.model.__dict__
    script.sync.close()
    assert "no_sync" not in script.model.__dict__
