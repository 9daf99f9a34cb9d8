"""Two parts of a step alone: DDP's layout of buckets, and the buffers that forward changes.

`benchmarks.step_overhead` measures them, each beside the same step without it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from spotguard.runtime.distributed.collectives import ProcessGroup
from spotguard.runtime.distributed.wrappers import settle_buckets
from spotguard.runtime.state.boundary_copy import BufferShadow
from spotguard.runtime.state.module_buffers import BufferSync

if TYPE_CHECKING:
    from collections.abc import Callable

_LAYERS = 48
_WIDTH = 384
"""7 million parameters in 96 tensors: three buckets of DDP's own sizes."""
_NORMS = 50
_CHANNELS = 64
_SAMPLES = 4


class Layout:
    """DDP with its buckets laid out before the first step, and as it comes."""

    def __init__(self, *, ranks: int, steps: int) -> None:
        del ranks  # torchrun's
        self._steps = steps
        self._settled, self._own = self._ddp(), self._ddp()
        settle_buckets(self._settled)
        self._x = torch.randn(_SAMPLES, _WIDTH)

    def guarded_block_s(self) -> float:
        """Return the seconds of a block of steps with our layout."""
        return self._block_s(self._settled)

    def bare_block_s(self) -> float:
        """Return the seconds of a block of the same steps with DDP's own."""
        return self._block_s(self._own)

    def finish(self) -> None:
        """There is nothing to end."""

    def _ddp(self) -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
        return DistributedDataParallel(torch.nn.Sequential(*layers))

    def _block_s(self, ddp: DistributedDataParallel) -> float:
        return _seconds(lambda: _train(ddp, self._x), times=self._steps)


class Buffers:
    """Fifty BatchNorms whose statistics are kept and, on several ranks, shared; and left alone."""

    def __init__(self, *, ranks: int, steps: int) -> None:
        self._steps = steps
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(_CHANNELS) for _ in range(_NORMS)))
        self._model = DistributedDataParallel(model) if ranks > 1 else model
        self._sync = BufferSync([model], ProcessGroup(int(os.environ.get("RANK", "0")), ranks))
        self._shadow = BufferShadow([model])
        self._x = torch.randn(_SAMPLES, _CHANNELS, 8)

    def guarded_block_s(self) -> float:
        """Return the seconds of a block of steps with buffers kept and shared."""
        return _seconds(self._guarded_step, times=self._steps)

    def bare_block_s(self) -> float:
        """Return the seconds of a block of the same steps without."""
        return _seconds(self._bare_step, times=self._steps)

    def finish(self) -> None:
        """There is nothing to end."""

    def _guarded_step(self) -> None:
        self._bare_step()
        self._sync.share()
        self._shadow.take()

    def _bare_step(self) -> None:
        _train(self._model, self._x)


def _train(model: torch.nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model.zero_grad()


def _seconds(step: Callable[[], None], *, times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        step()
    return time.perf_counter() - started
