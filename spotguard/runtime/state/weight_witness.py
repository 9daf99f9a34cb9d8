"""A few weights as they were at a boundary: weights that were exchanged since then are noticed.

An evaluation may put averaged weights in the place of the model's, and put those back at its end.
A save within it would take the average for the training's state. So it would where a script goes on
with an average before it evaluates at an epoch's end: the next attempt would average once more.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch

from spotguard.runtime.state.sharding import is_dtensor, is_fsdp_module
from spotguard.runtime.state.tracked import TrackedModule
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.runtime.state.tracked import Tracked

_ELEMENTS = 8
_OPTIMIZERS = _MODULES = 4
_USUAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Numbers that any device compares; a frozen base may be in others."""


class WeightWitness:
    """Keeps some elements of the first and the last weight of each optimizer, and no more.

    So it does of each module, of the weights that no optimizer trains.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        modules: Iterable[torch.nn.Module] = (),
    ) -> None:
        self._weights: list[torch.Tensor] = []
        trained: set[int] = set()
        for optimizer in optimizers:
            weights = [w for group in optimizer.param_groups for w in group["params"]]
            trained |= set(map(id, weights))
            if len(self._weights) < 2 * _OPTIMIZERS:
                self._weights += _outermost(w for w in weights if w.requires_grad)
        for module in islice(modules, _MODULES):
            # FSDP2 shows whole weights at times, whose memory it takes back: its own are DTensors.
            of_parts = any(map(is_fsdp_module, module.modules()))
            others = (
                w
                for w in module.parameters()
                if id(w) not in trained and _is_usual(w) and (is_dtensor(w) or not of_parts)
            )
            self._weights += _outermost(others)
        self._kept: list[torch.Tensor] | None = None

    @classmethod
    def of(cls, objects: Iterable[Tracked]) -> WeightWitness:
        """Return that of all tracked objects."""
        found = list(objects)
        optimizers = (item.value for item in found if isinstance(item, TrackedOptimizer))
        return cls(optimizers, [item.bare for item in found if isinstance(item, TrackedModule)])

    @torch.inference_mode(False)  # what is made within one may not be written to after it
    def take(self) -> None:
        """Keep them as they are. Never waits for a device."""
        if self._kept is None:
            self._kept = [_some(weight).clone() for weight in self._weights]
            return
        for index, weight in enumerate(self._weights):
            some, kept = _some(weight), self._kept[index]
            if _form(some) == _form(kept):
                kept.copy_(some)
            else:  # a wrapper has gathered its parts, or given them back; or a script has cast it
                self._kept[index] = some.clone()

    def differs(self) -> bool:
        """Return True if they are others than at the last `take`. Waits for the device."""
        pairs = [(kept, _some(w)) for kept, w in zip(self._kept or (), self._weights, strict=False)]
        return any(kept.shape == some.shape and not _same(kept, some) for kept, some in pairs)


def _outermost(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first and the last of which this rank holds something."""
    usable = [weight for weight in weights if _some(weight).numel()]
    return list(dict.fromkeys((usable[0], usable[-1]))) if usable else []


def _is_usual(weight: torch.Tensor) -> bool:
    plain = type(weight) is torch.nn.Parameter or is_dtensor(weight)
    return plain and not weight.is_meta and weight.dtype in _USUAL


def _same(kept: torch.Tensor, some: torch.Tensor) -> bool:
    if _form(kept) != _form(some):  # a script has cast or moved its module for the evaluation
        return False
    return torch.allclose(kept, some, rtol=0.0, atol=0.0, equal_nan=True)


def _form(some: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return some.shape, some.dtype, some.device


def _some(weight: torch.Tensor) -> torch.Tensor:
    """Return the last elements of what this rank holds of a weight."""
    local = weight.detach()
    local = local.to_local() if is_dtensor(local) else local
    return local.reshape(-1)[-_ELEMENTS:]
