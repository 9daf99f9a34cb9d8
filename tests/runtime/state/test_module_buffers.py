"""Buffers on their way between ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spotguard.runtime.state.module_buffers import BufferSync
from tests.runtime.harness.lab import same
from tests.runtime.harness.simulated import SimulatedRank, on_ranks


def test_every_rank_takes_the_first_ones() -> None:
    """Running statistics, which follow from a rank's own samples, are the first rank's on all."""

    def statistics(rank: SimulatedRank) -> list[torch.Tensor]:
        model = nn.BatchNorm1d(3)
        sync = BufferSync([model], rank)
        for _ in range(1 + rank.rank):
            model(torch.full((4, 3), float(rank.rank)) + torch.arange(4.0)[:, None])
        sync.share()
        return [buffer.clone() for buffer in model.buffers()]

    first, *others = on_ranks(3, statistics)
    assert first[2] == 1
    assert all(same(first, other) for other in others)


def test_models_without_buffers_send_nothing() -> None:
    """Neither do ranks meet for them, nor does a single rank copy anything."""
    alone = SimulatedRank(0, 1, None)  # type: ignore[arg-type]
    BufferSync([nn.BatchNorm1d(3)], alone).share()
    others = SimulatedRank(0, 2, None)  # type: ignore[arg-type]
    BufferSync([nn.Linear(2, 2)], others).share()


@pytest.mark.parametrize("swapped", [False, True])
def test_bytes_of_any_dtype_arrive(swapped: bool) -> None:
    """Every dtype and layout that a checkpoint can hold, in any order, to the last bit."""
    dtypes = [
        torch.bool, torch.int8, torch.uint16, torch.uint64, torch.int64, torch.float64,
        torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
    ]  # fmt: skip
    sent = [(torch.arange(3.0) - 1 + i).to(dtype) for i, dtype in enumerate(dtypes)]
    sent += [torch.tensor(4.5), torch.zeros(0), torch.arange(6.0).view(2, 3).t()]
    sent += [torch.ones(2, dtype=torch.complex128).mul(1j).conj()]
    sent = sent[::-1] if swapped else sent

    def shared(rank: SimulatedRank) -> list[torch.Tensor]:
        model = nn.Module()
        for number, tensor in enumerate(sent):
            own = tensor.clone() if not rank.rank else torch.empty_like(tensor)
            model.register_buffer(f"buffer{number}", own)
        BufferSync([model], rank).share()
        return list(model.buffers())

    for came in on_ranks(2, shared):
        assert all(same(one, other) for one, other in zip(sent, came, strict=True))


def test_a_model_that_moves_to_another_device_goes_on() -> None:
    """The room for what is sent is where the buffers are now."""

    def moved(rank: SimulatedRank) -> torch.Tensor:
        model: nn.Module = nn.BatchNorm1d(3)
        sync = BufferSync([model], rank)
        sync.share()
        model.to("meta")
        sync.share()
        return sync._sent

    assert all(sent.is_meta for sent in on_ranks(2, moved))
