"""How many ranks the Trainer has: as many as were launched, whatever the script says.

A script names `devices` and `num_nodes` for the cluster that it was written for. Under torchrun,
and so under `spotguard up`, the launcher's numbers count, which differ from attempt to attempt.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist


def follow_launcher(is_ours: type[pl.Callback]) -> None:
    """Have each Trainer with such a callback take its `devices` and `num_nodes` from torchrun."""
    if not dist.is_torchelastic_launched() or hasattr(pl.Trainer.__init__, "_spotguard"):
        return
    original = pl.Trainer.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        callbacks = _listed(given.get("callbacks"))
        if any(isinstance(each, is_ours) for each in callbacks):
            given.update(launched(), callbacks=callbacks)
        given.pop("self", None)
        original(self, **given.pop("kwargs", {}), **given)

    init._spotguard = True  # type: ignore[attr-defined]
    pl.Trainer.__init__ = init  # type: ignore[method-assign]


def _listed(callbacks: Any) -> list[Any]:
    """Return the callbacks that a Trainer is given: none, one, or any sequence of them.

    Hydra's `ListConfig` is no `list`, nor is a tuple, which Lightning itself does not take.
    """
    if callbacks is None or isinstance(callbacks, pl.Callback):
        return [] if callbacks is None else [callbacks]
    return list(callbacks)


def launched() -> dict[str, int]:
    """Return `devices` and `num_nodes` of this attempt, as torchrun told it."""
    local, world = (int(os.environ.get(n, "1")) for n in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return {"devices": local, "num_nodes": max(1, world // local)}
