"""Sharded tensors (FSDP2's DTensors), without paying for their import where there are none.

`torch.distributed.tensor` takes almost half as long to import as torch itself. A script that has
a DTensor has imported it already, so looking into `sys.modules` is enough to tell.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return True if `value` is a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def uses_fsdp() -> bool:
    """Return True if `fully_shard` was applied to anything: it makes a class of each one's."""
    return bool(fsdp_classes())


def fsdp_classes() -> list[type]:
    """Return the classes that `fully_shard` has made so far."""
    module: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else module.FSDPModule.__subclasses__()


def is_fsdp_module(value: object) -> TypeIs[FSDPModule]:
    """Return True if `fully_shard` was applied to the module `value`."""
    module: Any = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(value, module.FSDPModule)


def is_fsdp1_module(value: object) -> bool:
    """Return True if `value` is a `FullyShardedDataParallel`."""
    module: Any = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(value, module.FullyShardedDataParallel)


def is_sharded(module: torch.nn.Module) -> bool:
    """Return True if any parameter lives in parts on several ranks."""
    return is_fsdp_module(module) or any(is_dtensor(p) for p in module.parameters())


def local_part(value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part and where it begins in the whole."""
    # The one private function of torch used; its own DCP places the parts by it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return tuple(shape), tuple(offsets)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor


def address(tensor: torch.Tensor) -> int:
    """Return where this rank's part of a tensor begins in memory."""
    return local_of(tensor).data_ptr()
