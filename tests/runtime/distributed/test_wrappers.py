from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from spotguard.errors import UsageError
from spotguard.runtime.distributed.wrappers import find_wrappers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """Without one there can be no wrapper, and nobody looks for any."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
