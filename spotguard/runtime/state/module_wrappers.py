"""What wraps a module without being part of it: DDP, DataParallel, what `torch.compile` returns.

A checkpoint has the module's own names, so that a run which is compiled goes on uncompiled, on one
rank what was in DDP, and the other way round. So has one of a module that has such a wrapper
within: an average of a model in DDP, or a class of the script's with `self.net = DDP(net)`.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

_COMPILED = "_orig_mod"
"""Under which a compiled module has the one that was compiled, in torch 2.0 to 2.13."""
_PARALLEL = "module"
"""Under which DDP and DataParallel have theirs."""


def bare_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module below all that wraps it, in whatever order that is."""
    while True:
        if _is_parallel(module) or is_compiled(module):
            module = getattr(module, _COMPILED if is_compiled(module) else _PARALLEL)
        else:
            return module


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if `torch.compile` returned the module."""
    # Not imported: whoever has such a module has paid for dynamo already.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _is_parallel(module: torch.nn.Module) -> bool:
    return isinstance(module, (DistributedDataParallel, DataParallel))


def has_adapters(module: torch.nn.Module) -> bool:
    """Return True if PEFT has put adapters (LoRA and its like) into the module, or a part of it."""
    # `get_peft_model` and `add_adapter` both leave their configuration there.
    return any(getattr(part, "peft_config", None) for part in module.modules())


def key_before(key: str) -> str:
    """Return a key without `torch.compile` alone, as versions before this one stored it."""
    if _COMPILED not in key:
        return key
    return ".".join(part for part in key.split(".") if part != _COMPILED)


def plain_keys(module: torch.nn.Module) -> Callable[[str], str]:
    """Return what gives a key of the module's state as it is without all that wraps its parts."""
    wrapped = frozenset(
        f"{path}.{_PARALLEL}" if path else _PARALLEL
        for path, part in module.named_modules(remove_duplicate=False)
        if _is_parallel(part)
    )
    return partial(_plain_key, wrapped) if wrapped else key_before


def _plain_key(wrapped: frozenset[str], key: str) -> str:
    """Leave out those parts of a key that lead into a wrapper; `wrapped` has their whole paths."""
    path, kept = "", []
    for part in key.split("."):
        path = f"{path}.{part}" if path else part
        if part != _COMPILED and path not in wrapped:
            kept.append(part)
    return ".".join(kept)


def by_todays_keys(stored: Iterable[tuple[str, Any]], mine: Iterable[str]) -> dict[str, Any]:
    """Return what a checkpoint has of a module, by the keys that the module has today: `mine`.

    They are the stored ones, unless a version before this one stored a wrapper's name with them,
    or the script names its own parts so. Then what is left over on both sides belongs together if
    it differs in nothing else.
    """
    found = {key_before(key): value for key, value in stored}
    left, missing = _by_core(found.keys() - set(mine)), _by_core(set(mine) - found.keys())
    for core in left.keys() & missing.keys():
        found[missing[core]] = found.pop(left[core])
    return found


def _by_core(keys: Iterable[str]) -> dict[str, str]:
    """Return keys by what they are without any wrapper's name, but for those that share it."""
    cores = {key: ".".join(part for part in key.split(".") if part != _PARALLEL) for key in keys}
    count = Counter(cores.values())
    return {core: key for key, core in cores.items() if count[core] == 1}
