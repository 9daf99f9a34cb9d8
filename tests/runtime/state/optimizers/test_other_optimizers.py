"""Optimizers of other packages: each is saved exactly, or refused in words after its first step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from spotguard.errors import UnsupportedState
from spotguard.runtime.state.tree import Packed, unpack
from tests.runtime.harness.lab import Rank, adapters, next_attempt, same

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIMIZERS: dict[str, tuple[str, Callable[[Any, Any], torch.optim.Optimizer]]] = {
    "torchao AdamW8bit": ("torchao.optim", lambda package, p: package.AdamW8bit(p, lr=0.01)),
    "torchao AdamW4bit": ("torchao.optim", lambda package, p: package.AdamW4bit(p, lr=0.01)),
    "torchao AdamWFp8": ("torchao.optim", lambda package, p: package.AdamWFp8(p, lr=0.01)),
    "bitsandbytes AdamW8bit": (
        "bitsandbytes",
        lambda package, p: package.optim.AdamW8bit(p, lr=0.01),
    ),
    "bitsandbytes Lion8bit": (
        "bitsandbytes",
        lambda package, p: package.optim.Lion8bit(p, lr=0.01),
    ),
    "transformers Adafactor": (
        "transformers.optimization",
        lambda package, p: package.Adafactor(p, beta1=0.9),
    ),
    "schedulefree AdamW": (
        "schedulefree",
        lambda package, p: package.AdamWScheduleFree(p, lr=0.01),
    ),
    "schedulefree SGD": ("schedulefree", lambda package, p: package.SGDScheduleFree(p, lr=0.01)),
    "pytorch-optimizer SOAP": ("pytorch_optimizer", lambda package, p: package.SOAP(p)),
    "pytorch-optimizer Shampoo": ("pytorch_optimizer", lambda package, p: package.Shampoo(p)),
}
REFUSED = {
    "pytorch-optimizer ScalableShampoo": (
        "pytorch_optimizer",
        lambda package, p: package.ScalableShampoo(p),
    ),
}


def made(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Return such an optimizer; the test is skipped where its package is not installed."""
    module, make = {**OPTIMIZERS, **REFUSED}[name]
    pytest.importorskip(module.partition(".")[0], reason=f"{name} is not installed")
    found: torch.optim.Optimizer = make(importlib.import_module(module), parameters)
    return found


def net() -> nn.Sequential:
    """Return a net with tensors large enough to be kept in 8 bits."""
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Take some steps on data that depends on the step only."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.e2e  # some compile their step, and their packages take seconds to import
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_by_bit(name: str) -> None:
    """Restored into new objects, the next steps give the very weights of an undisturbed run."""
    torch.manual_seed(0)
    model = net()
    optimizer = made(name, model.parameters())
    train(model, optimizer, range(5))
    rank = Rank()
    rank.start()
    rank.now(5, model=model, optimizer=optimizer)
    train(model, optimizer, range(5, 10))

    torch.manual_seed(9)
    other = net()
    again = made(name, other.parameters())
    next_attempt(rank.store, model=other, optimizer=again)
    train(other, again, range(5, 10))
    assert same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_is_refused_after_the_first_step(name: str) -> None:
    """It keeps objects in its state, which only a pickle could hold: the message names one."""
    model = net()
    optimizer = made(name, model.parameters())
    train(model, optimizer, range(1))
    with pytest.raises(UnsupportedState, match=r"pre_conditioner.*neither a tensor nor a plain"):
        adapters({"optimizer": optimizer})["optimizer"].pack("optimizer", Packed())


@pytest.mark.parametrize(
    "kind", ["torch.Tensor", "os.system", "torchao.optim.subclass_8bit.Nothing", "x"]
)
def test_a_checkpoint_names_no_class_of_its_own(kind: str) -> None:
    """Only classes that are known to hold numbers are made, and nothing is imported for it."""
    tree = {"$": "quantized", "kind": kind, "parts": {}, "made_by": []}
    with pytest.raises(ValueError, match="there is no tensor class"):
        unpack(tree, lambda _: torch.zeros(()))
