from __future__ import annotations

import gc
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from spotguard.errors import UsageError
from spotguard.runtime.distributed import wrappers
from spotguard.runtime.distributed.model_parallel import groups_of_some_ranks, words_on_groups
from spotguard.runtime.distributed.wrappers import LateWrappers, find_wrappers
from spotguard.runtime.loop.agreement import check_ranks_have_one_model
from spotguard.testing import FakeRendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """Without one there can be no wrapper, and nobody looks for any.

    What all tests before have left is not looked through: a million objects, each time.
    """
    gc.freeze()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.unfreeze()


def ddp_around(net: nn.Module, *, static_graph: bool = False) -> DistributedDataParallel:
    """Return a DDP without a process group."""
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.module = net
    ddp.static_graph = static_graph
    return ddp


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer over the net."""
    return torch.optim.SGD(net.parameters(), lr=0.1)


def test_ddp_is_found_wherever_it_is() -> None:
    """Tracked itself, compiled, within a module, around one, or around an optimizer's parameters.

    One that has nothing to do with what is tracked is left alone.
    """
    net, stranger = nn.Linear(2, 2), ddp_around(nn.Linear(2, 2))
    ddp = ddp_around(net)
    tracked = [ddp, torch.compile(ddp, backend="eager"), nn.Sequential(ddp), net]
    for module in tracked:
        assert find_wrappers([module], []).ddp == [ddp]  # type: ignore[list-item]
    assert find_wrappers([], [sgd(net)]).ddp == [ddp]
    assert find_wrappers([nn.Linear(2, 2)], []).modules == []
    assert find_wrappers([stranger, net], []).ddp == [stranger, ddp]


def test_a_ddp_of_somebody_elses_class_is_found() -> None:
    """Frameworks derive from DDP, and others from them."""

    class Theirs(DistributedDataParallel):
        pass

    class Derived(Theirs):
        pass

    model = nn.Linear(2, 1)
    ddp = Derived(model)
    assert find_wrappers([model], []).ddp == [ddp]


def test_ddp_comes_in_the_order_of_what_is_tracked() -> None:
    """Whatever order they were made in: all ranks have to meet in the same one."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    later, earlier = ddp_around(second), ddp_around(first)
    assert find_wrappers([first, second], []).ddp == [earlier, later]
    assert find_wrappers([], [sgd(second), sgd(first)]).ddp == [later, earlier]


def test_a_static_graph_is_refused() -> None:
    """DDP with a static graph synchronises after the first micro-batch, whatever it is told."""
    net = nn.Linear(1, 1)
    kept = ddp_around(net, static_graph=True)
    with pytest.raises(UsageError, match="static_graph"):
        find_wrappers([net], [])
    assert kept.static_graph


@pytest.fixture
def no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where all living objects are looked through in a script that has no use of FSDP."""

    def scan() -> list[object]:
        raise AssertionError("a scan takes seconds where a script holds many samples")

    monkeypatch.setattr(wrappers, "_living", scan)
    monkeypatch.setattr(wrappers, "uses_fsdp", lambda: False)  # a test before may have imported it


def late(modules: list[nn.Module], *optimizers: torch.optim.Optimizer) -> LateWrappers:
    """Return what looks for wrappers from now on, with those known that are in the modules."""
    parts = [part for module in modules for part in module.modules()]
    return LateWrappers(modules, optimizers, [p for p in parts if wrappers._synchronises(p)])


@pytest.mark.usefixtures("no_scan")
def test_without_a_late_wrapper_nothing_is_looked_through() -> None:
    """Also with a DDP that was there before, and layers that came since."""
    net, known = nn.Linear(2, 2), ddp_around(nn.Linear(2, 2))
    looks = late([net, known], sgd(net))
    net.add_module("more", nn.Linear(2, 2))
    looks.refuse()


@pytest.mark.parametrize("track", [True, False])
def test_a_late_ddp_is_found(*, track: bool) -> None:
    """Around a bare tracked module, or around what an optimizer alone is tracked for."""
    net = nn.Linear(2, 2)
    looks = late([net] if track else [], sgd(net))
    ddp = DistributedDataParallel(net)
    with pytest.raises(UsageError):
        looks.refuse()
    assert ddp.module is net


def test_a_late_ddp_of_something_else_is_none_of_ours() -> None:
    """It shares no parameter with what is tracked."""
    looks = late([nn.Linear(2, 2)])
    stranger = ddp_around(nn.Linear(2, 2))
    looks.refuse()
    assert stranger


class FSDPModule:
    """Stands for torch's, whose import takes a second."""


class Sharded(FSDPModule, nn.Sequential):
    """What `fully_shard` makes of a module."""


@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_late_fsdp_is_found(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes a module's class, and puts its parameters in the place of the module's."""
    inner = nn.Linear(2, 2)
    part = nn.Sequential(inner)
    net = nn.Sequential(part)
    looks = late([net])
    monkeypatch.setitem(
        sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=FSDPModule)
    )
    outer = nn.Sequential(net)
    sharded = outer if where == "around" else part
    sharded.__class__ = Sharded
    inner.weight, inner.bias = nn.Parameter(inner.weight + 0), nn.Parameter(inner.bias + 0)
    with pytest.raises(UsageError):
        looks.refuse()


def test_a_thread_that_fills_a_tuple_meanwhile_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython ends it with a SystemError if anybody else holds the tuple, as a list of all does."""
    there = DistributedDataParallel(nn.Linear(1, 1))
    begun, goes_on = threading.Event(), threading.Event()
    filled: list[tuple[int, ...]] = []

    def numbers() -> Iterator[int]:
        yield 0
        begun.set()
        goes_on.wait(30.0)
        yield from range(1, 100)

    thread = threading.Thread(target=lambda: filled.append(tuple(numbers())))
    thread.start()
    assert begun.wait(30.0)

    def judge(_: object) -> bool:
        goes_on.set()
        thread.join(30.0)
        return False

    monkeypatch.setattr(wrappers, "_synchronises", judge)
    wrappers._living()
    assert there is not None
    assert filled == [tuple(range(100))]


@pytest.fixture
def four_ranks(process_group: None) -> Iterator[None]:
    """Be the first of four ranks, of which the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def test_ranks_that_hold_one_model_together_are_refused(four_ranks: None) -> None:
    """At 2x2: tensor parallelism, alone and below FSDP2, and what is over some ranks only. FSDP2
    and HSDP over all ranks are data parallel; process groups of the script's own are told."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    whole = init_device_mesh("cpu", (4,))

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def cut(mesh: object) -> nn.Module:
        return parallelize_module(net(), mesh, {"0": ColwiseParallel()})  # type: ignore[arg-type]

    def sharded(module: nn.Module, mesh: object) -> nn.Module:
        fully_shard(module, mesh=mesh)  # type: ignore[call-overload]
        return module

    def found(module: nn.Module) -> list[list[int]]:
        find_wrappers([module], [sgd(module)])
        return groups_of_some_ranks([module])

    one_model = {
        r"DTensor placed": cut(whole),
        r"fully_shard is over 2 of 4": sharded(cut(halves["model"]), halves["data"]),
        r"fully_shard is over 2": sharded(net(), halves["data"]),
        r"DistributedDataParallel is over 2 of 4": DistributedDataParallel(
            net(), process_group=halves["data"].get_group()
        ),
    }
    for words, module in one_model.items():
        with pytest.raises(UsageError, match=words) as refused:
            find_wrappers([module], [sgd(module)])
        assert "HSDP) over all ranks" in refused.value.hint
    assert found(sharded(net(), halves)) == [], "HSDP"
    assert found(sharded(net(), whole)) == [[0, 2], [0, 1]]
    assert "ranks 0, 2; 0, 1" in words_on_groups([[0, 2], [0, 1]])


def test_ranks_with_other_parameters_are_refused() -> None:
    """Of three ranks the third has another stage of a pipeline: by name, or by shape."""
    words = FakeRendezvous()
    shapes = {"head": {"weight": (2, 2)}, "model": {"0.weight": (8, 8), "0.bias": (8,)}}
    for rank in range(2):
        check_ranks_have_one_model(words.rank(rank), rank, shapes)
    others = ({"1.weight": (8, 8), "1.bias": (8,)}, {"0.weight": (8, 4), "0.bias": (8,)})
    for stage in others:
        with pytest.raises(UsageError, match=r"model has 2 tensors of .* numbers on rank 2"):
            check_ranks_have_one_model(words.rank(2), 2, {**shapes, "model": stage})
