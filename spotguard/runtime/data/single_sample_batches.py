"""Said in the first step, not at the end of an epoch: BatchNorm1d cannot train on one sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spotguard.runtime.data.loader import ElasticLoader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.runtime.data.loader import Loader


def warning_of_lone_sample(
    modules: Iterable[torch.nn.Module], loader: Loader, first: int, last: int
) -> str | None:
    """Return what to say if BatchNorm1d is to train on one sample, on this rank.

    torch raises an error there, unless a sample has several positions to take statistics of. All
    steps but the last of an epoch are alike, so only that one is looked at.

    Args:
        modules: What is trained.
        loader: What it is trained on.
        first: The step (from 0) that this attempt begins with.
        last: The step that it does not do any more.
    """
    if not isinstance(loader, ElasticLoader) or first >= last:
        return None
    step = loader.first_step_of(loader.epoch_of(first) + 1) - 1
    if not first < step < last or not _has_lone(loader, step) or _has_lone(loader, first):
        return None  # what fails at once needs no warning
    for module in modules:
        for name, layer in module.named_modules():
            if isinstance(layer, torch.nn.BatchNorm1d) and layer.training:
                return (
                    f"step {step + 1}, the last of its epoch, has a micro-batch of one sample, of "
                    f"which BatchNorm1d ({name or 'the model'}) cannot take statistics: torch will "
                    "end the script there (pass drop_last=True to run.loader, or another "
                    "micro_batch_size)"
                )
    return None


def _has_lone(loader: Loader, step: int) -> bool:
    return any(len(share.indices) == 1 for share in loader.shares(step))
