"""Weights that a script changes by hand, on three ranks with uneven shares: one training."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from spotguard.runtime.data.loader import Share
from spotguard.runtime.distributed.gradients import GradientSync
from tests.runtime.harness.simulated import SimulatedRank, Training, on_ranks, simulated_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
MODEL = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
SIZES: dict[str, Any] = {"samples": 50, "global_batch": 29, "micro_batch": 3}
BOTH = pytest.mark.parametrize("exact", [False, True])


def losses(net: nn.Module, batch: list[int]) -> torch.Tensor:
    """Return each sample's loss."""
    out: torch.Tensor = net(DATA[batch])
    return (out.sum(1) - DATA[batch].sum(1)).square()


def put_in_place(model: nn.Module) -> None:
    """Train by hand: a new parameter in the place of each old one."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.grad is not None:
                setattr(module, name, nn.Parameter(parameter.detach() - 0.1 * parameter.grad))


def add_layer(model: nn.Module) -> None:
    """Train by hand, and have one more layer from now on."""
    put_in_place(model)
    if len(list(model.children())) == 3:
        layer = nn.Linear(1, 4)
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 0.25)
        model.add_module("later", layer)


def weights_after(
    training: Training, change: Callable[[nn.Module], None], *, optimizer: bool = False
) -> torch.Tensor:
    """Return all weights after three steps."""
    for number in range(3):
        training.gradients(number)
        change(training.model)
        if optimizer:
            training.sync.catch_up()
            training.optimizer.step()
        training.model.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in training.model.parameters()])


def check_one_training(do: Callable[[SimulatedRank], torch.Tensor]) -> None:
    """Three ranks train as one process does, but for rounding, and to the last bit alike."""
    [alone] = on_ranks(1, do)
    found = on_ranks(3, do)
    assert all(torch.equal(mine, found[0]) for mine in found)
    assert torch.dist(found[0], alone) <= 1e-5 * alone.norm()


@BOTH
@pytest.mark.parametrize("change", [put_in_place, add_layer])
def test_new_parameters_are_trained_together(
    change: Callable[[nn.Module], None], *, exact: bool
) -> None:
    """Those in the place of old ones, in each step, and those of a layer that comes later."""
    check_one_training(
        lambda ranks: weights_after(
            Training(ranks, MODEL, losses, exact=exact, by_hand=True, **SIZES), change
        )
    )


@BOTH
def test_what_is_beside_an_optimizer_is_trained_together(*, exact: bool) -> None:
    """The head has a tracked optimizer, the rest is changed by hand; both are one training."""

    def both(ranks: SimulatedRank) -> torch.Tensor:
        training = Training(
            ranks, MODEL, losses, exact=exact, trained=lambda m: list(m.parameters())[2:], **SIZES
        )

        def change(model: nn.Module) -> None:
            with torch.no_grad():
                for parameter in list(model.parameters())[:2]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)

        weights = weights_after(training, change, optimizer=True)
        rest = set(map(id, list(training.model.parameters())[:2]))
        assert not training.sync.synchronised() & rest, "by an optimizer, which is to be tracked"
        return weights

    check_one_training(both)


def test_what_thaws_beside_an_optimizer_is_trained_together() -> None:
    """It was frozen in the first step, so that nobody had a gradient; old gradients count once."""

    def thaws(ranks: SimulatedRank) -> torch.Tensor:
        training = Training(
            ranks, MODEL, losses, exact=False, trained=lambda m: list(m.parameters())[2:], **SIZES
        )
        rest = list(training.model.parameters())[:2]
        for parameter in rest:
            parameter.requires_grad_(False)
        training.gradients(0)
        for parameter in rest:
            parameter.requires_grad_()
            parameter.grad = torch.ones_like(parameter)
        return torch.cat([g.reshape(-1) for g in training.gradients(1) if g is not None])

    check_one_training(thaws)


def test_a_layer_that_comes_into_a_ddp_is_synchronised_beside_it() -> None:
    """DDP looks at no parameter that it was not made with; what is saved waits for its own, too."""

    def comes_later(ranks: SimulatedRank) -> torch.Tensor:
        training = Training(ranks, MODEL, losses, exact=False, by_hand=True, **SIZES)
        ddp = DistributedDataParallel.__new__(DistributedDataParallel)
        nn.Module.__init__(ddp)
        ddp.module, ddp.static_graph, ddp.parameters_to_ignore = training.model, False, set()
        training.sync = sync = GradientSync([ddp], [], ranks)
        later = nn.Linear(1, 4)
        for parameter in later.parameters():
            nn.init.constant_(parameter, 0.25)
        training.model.add_module("later", later)
        gradient = training.gradients(0)[-2]
        assert gradient is not None
        later.zero_grad()
        assert sync.may_be_trained_by_hand
        return gradient

    check_one_training(comes_later)


def steps(sync: GradientSync, loss: Callable[[], torch.Tensor], count: int = 2) -> None:
    """Run steps of one micro-batch for each rank."""
    for number in range(count):
        share = Share(number, 0, 1 / sync._ranks.world_size, (0,), True)
        sync.begin(share)
        sync.backward(loss(), share.weight, share)


def test_what_nobody_trains_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher that is not frozen is asked for in each step, a moving average not even that."""
    sent: list[int] = []
    add_up = SimulatedRank.add_up

    def counted(self: SimulatedRank, flat: torch.Tensor) -> Callable[[], None]:
        sent.append(flat.numel() if not self.rank else 0)
        return add_up(self, flat)

    monkeypatch.setattr(SimulatedRank, "add_up", counted)

    def train(ranks: SimulatedRank, beside: type[nn.Module] | None) -> None:
        model = copy.deepcopy(MODEL)
        teacher = [] if beside is None else [beside(copy.deepcopy(MODEL))]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps(GradientSync([model, *teacher], [optimizer], ranks), lambda: model(DATA).sum())

    def numbers_sent(beside: type[nn.Module] | None) -> int:
        sent.clear()
        on_ranks(3, lambda ranks: train(ranks, beside))
        return sum(sent)

    plain = numbers_sent(None)
    assert numbers_sent(nn.Sequential) == plain + 2
    assert numbers_sent(AveragedModel) == plain


def test_a_model_that_an_optimizer_has_wholly_is_not_walked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step costs no more than before where nothing is trained by hand."""
    from spotguard.runtime.distributed import by_hand

    model = copy.deepcopy(MODEL)
    [ranks] = simulated_ranks(1)
    sync = GradientSync([model], [torch.optim.SGD(model.parameters(), lr=0.1)], ranks)
    monkeypatch.setattr(by_hand, "_parameters_in", None)
    steps(sync, lambda: model(DATA).sum())


@BOTH
def test_the_first_rank_says_once_how_many_are_synchronised(
    caplog: pytest.LogCaptureFixture, *, exact: bool
) -> None:
    """A script's own `all_reduce` would count them as often as there are ranks."""

    def train(ranks: SimulatedRank) -> None:
        training = Training(ranks, MODEL, losses, exact=exact, by_hand=True, **SIZES)
        training.gradients(0)
        training.gradients(1)

    with caplog.at_level(logging.WARNING, "spotguard"):
        on_ranks(1, train)
        assert not caplog.records
        on_ranks(3, train)
    [record] = caplog.records
    assert record.args == (4, "0.weight")
