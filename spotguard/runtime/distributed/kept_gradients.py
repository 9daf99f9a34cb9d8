"""Gradients of a step's first micro-batches, which a script throws away before the last one.

`zero_grad()` in the loop over the micro-batches does no harm where each rank has one of them. With
fewer ranks each has several, and of what they add up only the last one's part is left, with nothing
to be seen. An optimizer that steps on that is refused; one that does not, as that of a network
whose gradients are but a by-product, may throw away what it likes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from spotguard.errors import UsageError
from spotguard.runtime.distributed.carried_gradients import has_gradient
from spotguard.runtime.distributed.wrappers import parameters_of
from spotguard.runtime.state.sharding import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class _Kept(NamedTuple):
    """A gradient as the last backward pass left it; one for each optimizer."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int
    was_there: bool
    """True if it was looked at, and was not zero."""

    @property
    def is_untouched(self) -> bool:
        """Return whether nobody has written to it; asks no device."""
        now = self.parameter.grad
        return now is self.gradient and now._version == self.version


class KeptGradients:
    """Looks from one backward pass of a step to the next whether gradients are still there."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._chosen: list[tuple[torch.optim.Optimizer, torch.Tensor]] | None = None
        """For each optimizer that has one, a parameter with a gradient; None until that is known.
        """
        self._kept: list[_Kept] = []
        self._touched: set[int] = set()
        """Ids of parameters whose gradients were written to between two passes: by clipping, or by
        `zero_grad(set_to_none=False)`. Only of these the values are looked at."""
        self._harmless: set[int] = set()
        """Ids of those that something was left of: it was clipping, and always will be."""
        self._lost: list[torch.optim.Optimizer] = []

    def begin(self) -> None:
        """Take it that the first backward pass over a step's micro-batches begins."""
        self._chosen = None
        self._kept.clear()
        self._lost.clear()

    def take(self, wanted: set[int] | None) -> None:
        """Remember what there is after a backward pass that others follow.

        `wanted`: the ids of the parameters that it is for; None if for all.
        """
        if self._chosen is None:
            found = ((o, _first_with_gradient(o, wanted)) for o in self._optimizers)
            self._chosen = [(o, parameter) for o, parameter in found if parameter is not None]
        looked_at = self._touched - self._harmless
        self._kept = [
            _Kept(o, p, p.grad, p.grad._version, id(p) in looked_at and has_gradient(p))
            for o, p in self._chosen
            if p.grad is not None
        ]

    def look(self) -> None:
        """Look, before another backward pass of the step, whose gradients were thrown away."""
        for kept in self._kept:
            if kept.is_untouched:
                continue
            self._touched.add(id(kept.parameter))
            if kept.parameter.grad is None:
                self._lost.append(kept.optimizer)
            elif kept.was_there and has_gradient(kept.parameter):
                self._harmless.add(id(kept.parameter))
            elif kept.was_there:
                self._lost.append(kept.optimizer)

    def refuse_lost(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if `optimizer` is to step on gradients of which a part was thrown away.

        Raises:
            UsageError: that is so.
        """
        if any(optimizer is lost for lost in self._lost):
            raise UsageError(
                "zero_grad() came between the micro-batches of the step: the gradients of those "
                "before it are thrown away",
                hint="move it out of the loop over the micro-batches, before it or after "
                "optimizer.step()",
            )


def _first_with_gradient(
    optimizer: torch.optim.Optimizer, wanted: set[int] | None
) -> torch.Tensor | None:
    for parameter in parameters_of((optimizer,)):
        # FSDP2 keeps what it adds up elsewhere, where no script throws it away.
        if parameter.grad is None or is_dtensor(parameter):
            continue
        if wanted is None or id(parameter) in wanted:
            return parameter
    return None
