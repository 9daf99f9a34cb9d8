"""Gradients of a global batch, summed over micro-batches and ranks, synchronised once per step.

Each micro-batch's mean loss is weighted by its share of the global batch, so the sum over all
ranks is the mean over the global batch whatever the number of ranks.

- A model in `DistributedDataParallel` or FSDP2 synchronises itself, and divides by the number of
  ranks; the weight is multiplied by it to undo that. Its synchronisation is switched off but for
  the last micro-batch.
- Parameters of a tracked optimizer that nobody synchronises are summed here, in flat buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spotguard.runtime.sharding import is_dtensor, is_fsdp_module

if TYPE_CHECKING:
    from collections.abc import Iterable

_BUCKET_BYTES = 25 << 20  # DDP's own default: large enough for bandwidth, small enough to overlap


class GradientSync:
    """Weights losses and synchronises gradients for the tracked models and optimizers."""

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        world_size: int,
    ) -> None:
        self._world_size = world_size
        modules = list(modules)
        self._ddp = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._fsdp = [m for m in modules if is_fsdp_module(m)]
        self._parameters = _unsynchronised(modules, optimizers) if world_size > 1 else []
        self.managed_elsewhere = bool(self._ddp or self._fsdp)
        if self.managed_elsewhere and self._parameters:
            # A loss that spans both kinds would be scaled for one of them only.
            self._correction = 1.0 / world_size
        else:
            self._correction = 1.0

    def begin(self, *, last: bool) -> None:
        """Prepare for the forward pass of a micro-batch; the last one synchronises."""
        for module in self._ddp:
            module.require_backward_grad_sync = last
        for fsdp in self._fsdp:
            fsdp.set_requires_gradient_sync(last)

    def backward(self, loss: torch.Tensor, weight: float, *, last: bool) -> None:
        """Add the gradient of `weight * loss`; after the last one, gradients are the global mean.

        Blocks until the ranks have met, when `last`.
        """
        scale = weight * self._world_size if self.managed_elsewhere else weight
        (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]
        if last and self._parameters:
            self._reduce()

    def _reduce(self) -> None:
        buckets = list(_buckets(self._parameters))
        flats = [_flatten(bucket) for bucket in buckets]
        works = [dist.all_reduce(flat, async_op=True) for flat in flats]
        for bucket, flat, work in zip(buckets, flats, works, strict=True):
            assert work is not None
            work.wait()
            if self._correction != 1.0:
                flat[: -len(bucket)] *= self._correction
            _unflatten(bucket, flat)

    def broadcast_initial(self, modules: Iterable[torch.nn.Module]) -> None:
        """Give all ranks the first rank's parameters and buffers, as DDP does when it is built."""
        if self._world_size == 1:
            return
        with torch.no_grad():
            for module in modules:
                for tensor in (*module.parameters(), *module.buffers()):
                    if not is_dtensor(tensor):
                        dist.broadcast(tensor.detach(), src=0)


def _unsynchronised(
    modules: list[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """Return the optimizers' parameters that neither DDP nor FSDP synchronises."""
    managed = {
        id(parameter)
        for module in modules
        if isinstance(module, DistributedDataParallel) or is_fsdp_module(module)
        for parameter in module.parameters()
    }
    found: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in managed and not is_dtensor(parameter):
                    found[id(parameter)] = parameter
    return list(found.values())


def _buckets(parameters: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Yield parameters in order, cut where the dtype or device changes or a bucket is full."""
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        if bucket and (
            size + bytes_ > _BUCKET_BYTES
            or bucket[0].dtype != parameter.dtype
            or bucket[0].device != parameter.device
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += bytes_
    if bucket:
        yield bucket


def _flatten(bucket: list[torch.Tensor]) -> torch.Tensor:
    """Return the bucket's gradients in one tensor, followed by one 'has a gradient' flag each.

    The flags keep a parameter that no rank used without a gradient, as on one process: an
    optimizer skips it, instead of decaying it by a gradient of zeros.
    """
    with torch.no_grad():
        parts = [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(p.dtype)
            for p in bucket
        ]
        flags = torch.tensor(
            [p.grad is not None for p in bucket], dtype=bucket[0].dtype, device=bucket[0].device
        )
        return torch.cat([*parts, flags])


def _unflatten(bucket: list[torch.Tensor], flat: torch.Tensor) -> None:
    used = flat[-len(bucket) :].tolist()
    offset = 0
    with torch.no_grad():
        for parameter, flag in zip(bucket, used, strict=True):
            part = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
            if not flag:
                continue
            if parameter.grad is None:
                parameter.grad = part.clone()
            else:
                parameter.grad.copy_(part)
