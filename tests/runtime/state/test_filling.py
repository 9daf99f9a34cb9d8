from __future__ import annotations

import pytest
import torch

from spotguard.errors import StateMismatch
from spotguard.runtime.state.boundary_copy import BufferShadow
from spotguard.runtime.state.tree import Leaf
from spotguard.testing import MemoryStore
from tests.runtime.harness.lab import Rank, next_attempt


class Masked(torch.nn.Module):
    """Has buffers as `expand` makes them."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("mask", torch.full((1,), value).expand(3))
        self.register_buffer(
            "place", torch.tensor([[value, 1.0], [2.0, 3.0]]).unsqueeze(1).expand(2, 4, 2)
        )
        self.register_buffer("unset", torch.tensor(float("nan")).expand(2, 3))


def saved(module: torch.nn.Module) -> MemoryStore:
    """Return a store with a checkpoint of the module."""
    store = MemoryStore()
    rank = Rank(store)
    rank.start()
    rank.now(10, model=module)
    return store


def test_expanded_buffers_come_back() -> None:
    """Torch saves them and cannot write to them: each place of memory is written once."""
    store, fresh = saved(Masked(5.0)), Masked(7.0)
    next_attempt(store, model=fresh)

    for name, value in Masked(5.0).named_buffers():
        assert torch.equal(fresh.get_buffer(name).nan_to_num(), value.nan_to_num())
        assert fresh.get_buffer(name).stride() == value.stride(), "nobody else's view is cut off"


def test_values_that_differ_along_an_expanded_dimension_are_refused() -> None:
    """They cannot lie in one place: one sentence with the way out, and not torch's own words."""
    module = Masked(5.0)
    module.mask = torch.tensor([1.0, 2.0, 3.0])
    store = saved(module)

    with pytest.raises(StateMismatch, match="expanded from one") as caught:
        next_attempt(store, model=Masked(5.0))
    assert ".clone()" in caught.value.hint


def test_a_boundary_with_expanded_buffers_can_be_gone_back_to() -> None:
    """What a step changed by the tensor behind the view is put back for an emergency save."""
    module = torch.nn.Module()
    base, count = torch.ones(1), torch.zeros(())
    module.register_buffer("mask", base.expand(3))
    module.register_buffer("count", count)
    shadow = BufferShadow([module])
    shadow.take()
    base += 4
    count += 1
    leaves = [Leaf(name, buffer) for name, buffer in module.named_buffers()]
    mask, counted = (leaf.tensor for leaf in shadow.over(leaves))

    assert mask.tolist() == [1.0, 1.0, 1.0]
    assert float(counted) == 0
