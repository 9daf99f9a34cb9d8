"""What the levers against a profile's costs depend on, beside the trace itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from spotguard.runtime.state.module_wrappers import is_compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.runtime.data.loader import Loader


def facts_of(loader: Loader, values: Sequence[Any]) -> dict[str, Any]:
    """Return plain values on the loader, the optimizers and the models among `values`."""
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    optimizers = [value for value in values if isinstance(value, torch.optim.Optimizer)]
    kinds = {p.dtype for module in modules for p in module.parameters()}
    return {
        "loader": {
            **loader.reading(),
            "global_batch_size": loader.global_batch_size,
            "micro_batch_size": loader.micro_batch_size,
        },
        "optimizers": [_optimizer(each) for each in optimizers],
        "compiled": any(is_compiled(part) for module in modules for part in module.modules()),
        "parameter_kinds": sorted(str(kind).removeprefix("torch.") for kind in kinds),
        "threads": torch.get_num_threads(),
    }


def _optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = optimizer.param_groups
    group = groups[0] if groups else {}
    return {
        "name": type(optimizer).__name__,
        "foreach": group.get("foreach"),
        "fused": group.get("fused"),
        "tensors": sum(len(each["params"]) for each in groups),
    }
