"""What wraps a module without being part of it: DDP, and what `torch.compile` returns.

A checkpoint has the module's own names, so that a run which is compiled goes on uncompiled, on one
rank what was in DDP, and the other way round.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    import torch

_COMPILED = "_orig_mod"
"""Under which a compiled module has the one that was compiled, in torch 2.0 to 2.13."""


def bare_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module below any DDP and any `torch.compile`, in whatever order they are."""
    while True:
        if isinstance(module, DistributedDataParallel) or is_compiled(module):
            module = getattr(module, _COMPILED if is_compiled(module) else "module")
        else:
            return module


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if `torch.compile` returned the module."""
    # Not imported: whoever has such a module has paid for dynamo already.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def plain_key(key: str) -> str:
    """Return a state dict's key as it is without `torch.compile`, also of a part of a module."""
    if _COMPILED not in key:
        return key
    return ".".join(part for part in key.split(".") if part != _COMPILED)
