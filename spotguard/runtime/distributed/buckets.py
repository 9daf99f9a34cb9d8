"""Gradients as a few flat tensors, which is how they travel between ranks.

Where a parameter has no gradient, its place holds negative zero: the one value that changes
nothing when it is added, not even the sign of a zero. One flag per parameter follows, so that a
parameter that no rank used stays without a gradient, as on one process: an optimizer skips it,
instead of decaying it by a gradient of zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spotguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BUCKET_BYTES = 25 << 20  # DDP's own default: large enough for bandwidth, small enough to overlap


def cut_into_buckets(parameters: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
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


def flatten(
    bucket: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Return the gradients of the bucket's parameters in one tensor, and their flags.

    Raises:
        UsageError: a gradient is sparse.
    """
    with torch.no_grad():
        parts = [
            torch.zeros_like(parameter).neg_() if gradient is None else _dense(gradient)
            for parameter, gradient in zip(bucket, gradients, strict=True)
        ]
        flags = torch.tensor(
            [gradient is not None for gradient in gradients],
            dtype=bucket[0].dtype,
            device=bucket[0].device,
        )
        return torch.cat([*(part.reshape(-1).to(flags.dtype) for part in parts), flags])


def unflatten(bucket: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gradients in `flat`, shaped like the parameters; None where no rank had one."""
    sizes = [parameter.numel() for parameter in bucket]
    *parts, flags = torch.split(flat, [*sizes, len(bucket)])
    return [
        part.view(parameter.shape) if used else None
        for parameter, part, used in zip(bucket, parts, flags.tolist(), strict=True)
    ]


def own_copy(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return `gradient` in memory of its own, laid out as autograd does: like the parameter.

    The order in memory is the order in which a norm is summed up.
    """
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout != torch.strided:
        raise UsageError(
            "a tracked optimizer's parameter has a sparse gradient, which ranks cannot add up",
            hint="make the embedding with sparse=False",
        )
    return gradient
