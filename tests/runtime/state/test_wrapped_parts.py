"""Modules of which a part is wrapped: DDP or DataParallel within what is tracked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from spotguard.errors import StateMismatch
from spotguard.runtime.state import changed_setup
from spotguard.runtime.state import tracked as tracked_module
from spotguard.runtime.state.changed_setup import SetUp
from spotguard.runtime.state.module_wrappers import key_before
from spotguard.runtime.state.tracked import tracked
from spotguard.runtime.state.tree import Packed
from tests.runtime.harness.lab import Rank, next_attempt, same

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.storage.base import ObjectStore


def in_ddp(module: nn.Module) -> nn.Module:
    """Return a DDP without ranks, which only has to hold its module."""
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = module
    return wrapped


def compiled(module: nn.Module) -> nn.Module:
    """Return what `torch.compile` returns; nothing is compiled before it is called."""
    made: Any = torch.compile(module, backend="eager")
    assert isinstance(made, nn.Module)
    return made


class Net(nn.Module):
    """A net with a part that it calls as a wrapper would."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)


class Task(nn.Module):
    """A class of a script's own, which wraps its net by itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.scale = nn.Parameter(torch.randn(()))


class Average(nn.Module):
    """Holds its net as `AveragedModel` does, which would copy the DDP that is none."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.module = net
        self.register_buffer("n_averaged", torch.randint(99, ()))


HOLDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "average": Average,
    "task": Task,
    "list": lambda net: nn.ModuleList([Task(net), nn.Linear(1, 1)]),
    "nothing": lambda net: net,
}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda net: net,
    "ddp": in_ddp,
    "data parallel": nn.DataParallel,
    "compiled ddp": lambda net: compiled(in_ddp(net)),
    "ddp of compiled": lambda net: in_ddp(compiled(net)),
}


def made(holder: str, wrapper: str) -> nn.Module:
    """Return a module with weights of its own."""
    return HOLDERS[holder](WRAPPERS[wrapper](Net()))


def values(module: nn.Module) -> list[torch.Tensor]:
    """Return what the module holds, in its order, whatever that is called."""
    return [value.clone() for value in module.state_dict().values()]


def saved(module: nn.Module) -> ObjectStore:
    """Return a store with a checkpoint of the module."""
    rank = Rank()
    rank.start()
    rank.now(1, model=module)
    return rank.store


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("before", WRAPPERS)
@pytest.mark.parametrize("after", ["bare", "ddp", "data parallel", "compiled ddp"])
def test_what_is_wrapped_within_has_its_own_names(holder: str, before: str, after: str) -> None:
    """One checkpoint fits all: on one rank there is no DDP, which is made on several ones."""
    stored, mine = made(holder, before), made(holder, after)
    next_attempt(saved(stored), model=mine)

    assert same(values(mine), values(stored))


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_in_a_checkpoint_are_those_of_the_bare_module(holder: str, wrapper: str) -> None:
    """Tools that read it find what they know, and a script's `module` is no wrapper's."""

    def names(module: nn.Module) -> list[str]:
        packed = Packed()
        tracked("model", module).pack("model", packed)
        return list(packed.leaves)

    assert names(made(holder, wrapper)) == names(made(holder, "bare"))


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("before", WRAPPERS)
@pytest.mark.parametrize("after", ["bare", "ddp", "data parallel"])
def test_checkpoints_with_the_names_of_wrappers_are_restored(
    holder: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before this one stored them, for any number of ranks."""
    stored, mine = made(holder, before), made(holder, after)
    with monkeypatch.context() as earlier:
        earlier.setattr(tracked_module, "plain_keys", lambda module: key_before)
        earlier.setattr(tracked_module, "bare_module", lambda module: module)
        store = saved(stored)
    next_attempt(store, model=mine)

    assert same(values(mine), values(stored))


def test_a_changed_model_is_still_refused_by_name() -> None:
    """A part that is new is no other one that a wrapper has renamed."""
    store = saved(Task(in_ddp(Net())))
    grown = Net()
    grown.second = nn.Linear(1, 1, bias=False)
    with pytest.raises(StateMismatch, match=r"missing from the checkpoint: net\.second\.weight$"):
        next_attempt(store, model=Task(grown))
    two = nn.ModuleDict({"module": nn.Linear(1, 1, bias=False)})
    two.weight = nn.Parameter(torch.ones(1, 1))
    other = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(1, 1, bias=False)})})
    with pytest.raises(StateMismatch, match=r"not in the script: module\.weight, weight"):
        next_attempt(saved(two), model=other)


def thawing(wrapper: str) -> tuple[nn.Module, torch.optim.Optimizer, SetUp]:
    """Return what a script sets up that trains a head, and later the rest."""
    model = made("task", wrapper)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("head" in name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    objects = {"model": tracked("model", model), "opt": tracked("opt", optimizer)}
    return model, optimizer, SetUp(objects)


def told(wrapper: str) -> Any:
    """Return what a checkpoint tells of a loop that thawed all and gave it a group."""
    model, optimizer, set_up = thawing(wrapper)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    model.requires_grad_(True)
    optimizer.add_param_group({"params": frozen})
    return json.loads(json.dumps(set_up.changes()))


@pytest.mark.parametrize(
    ("before", "after", "earlier"),
    [("ddp", "bare", False), ("bare", "ddp", False), ("ddp", "ddp", False), ("ddp", "ddp", True)],
)
def test_what_a_loop_thawed_is_thawed_again_however_it_is_wrapped(
    before: str, after: str, earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters have one name; those that an earlier version told are known for the same."""
    with monkeypatch.context() as of_before:
        if earlier:
            of_before.setattr(changed_setup, "plain_keys", lambda module: key_before)
        changes = told(before)
    model, optimizer, set_up = thawing(after)
    set_up.follow(changes)

    assert all(p.requires_grad for p in model.parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 5]
