"""Gradients that a script keeps from one step for the next, which no checkpoint has.

A script that accumulates by a count of its own steps its optimizer in every fourth step. What the
steps before it have gathered is gone at an interruption: the next attempt goes on behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.runtime.distributed.wrappers import parameters_of
from spotguard.runtime.state.sharding import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from spotguard.runtime.checkpoint.training_state import Keeper

_MESSAGE = (
    "gradients of one step are kept for the next one, but no checkpoint has them: an interruption "
    "loses those of all steps since the optimizer stepped last. Let a step be what it steps on: a "
    "global_batch_size as much larger, and optimizer.step() in every step"
)


class CarriedGradients:
    """Tells once that a step's gradients are there when the next one goes backward first.

    Only where no optimizer has stepped between: a loss that a `GradScaler` skips is thrown away,
    and what a generator gets from its opponent's loss is, too.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        keeper: Keeper,
        tell: Callable[[str], None],
    ) -> None:
        self._optimizers = optimizers
        self._keeper = keeper
        self._tell = tell
        self._told = not optimizers
        self.may_be = False
        """True from the end of a step in which no optimizer stepped to the next backward pass."""

    def end_of_step(self) -> None:
        """Take note whether an optimizer has stepped."""
        self.may_be = not (self._told or self._keeper.has_changed)

    def look(self) -> None:
        """Look whether there are gradients, before the first backward pass of a step."""
        self.may_be = False
        if self._keeper.has_changed:
            return
        if any(map(has_gradient, parameters_of(self._optimizers))):
            self._told = True
            self._tell(_MESSAGE)


def has_gradient(parameter: torch.Tensor) -> bool:
    """Return True if the parameter has a gradient that is not zero; asks its device."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return bool((gradient.to_local() if is_dtensor(gradient) else gradient).any())
