"""Gradients of a step's first micro-batches, which a script throws away before the last one.

`zero_grad()` in the loop over the micro-batches does no harm where each rank has one of them. With
fewer ranks each has several, and of what they add up only the last one's part is left, with nothing
to be seen. An optimizer that steps on that is refused; one that does not, as that of a network
whose gradients are but a by-product, may throw away what it likes.

`zero_grad()` takes all that an optimizer has, but a script may rightly mask a part of it, such as a
layer that is not to learn yet. So two of its parameters are watched, and both must have lost their
gradients.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from spotguard.errors import UsageError
from spotguard.runtime.distributed.carried_gradients import has_gradient
from spotguard.runtime.distributed.wrappers import parameters_of
from spotguard.runtime.state.sharding import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

log = logging.getLogger("spotguard")


class _Kept(NamedTuple):
    """A gradient as the last backward pass left it."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int
    was_there: bool | None
    """Whether it was not zero; None if nobody looked."""

    @property
    def is_untouched(self) -> bool:
        """Return whether nobody has written to it; asks no device."""
        now = self.parameter.grad
        return now is self.gradient and now._version == self.version

    @property
    def tells(self) -> bool:
        """Return whether it says anything: one that was zero by itself can lose nothing."""
        return self.parameter.grad is None or self.was_there is not False


class KeptGradients:
    """Looks from one backward pass of a step to the next whether gradients are still there."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._chosen: list[tuple[torch.optim.Optimizer, list[torch.Tensor]]] | None = None
        """Each optimizer's parameters that are watched; None until it is known which have gradients
        in the step."""
        self._kept: list[tuple[torch.optim.Optimizer, list[_Kept]]] = []
        self._touched: set[int] = set()
        """Ids of parameters whose gradients were written to between two passes: by clipping, or by
        `zero_grad(set_to_none=False)`. Only of these the values are looked at."""
        self._harmless: set[int] = set()
        """Ids of those that something was left of: it was clipping, and always will be."""
        self._lost: list[torch.optim.Optimizer] = []
        self._doubtful: list[torch.optim.Optimizer] = []
        """Those whose only gradient was written zeros to, as `zero_grad` or a mask does."""
        self._told = False

    def begin(self) -> None:
        """Take it that the first backward pass over a step's micro-batches begins."""
        self._chosen = None
        self._kept.clear()
        self._lost.clear()
        self._doubtful.clear()

    def take(self, wanted: set[int] | None) -> None:
        """Remember what there is after a backward pass that others follow.

        `wanted`: the ids of the parameters that it is for; None if for all.
        """
        if self._chosen is None:
            self._chosen = [(o, _watched(o, wanted)) for o in self._optimizers]
        self._kept = [(o, self._taken(parameters)) for o, parameters in self._chosen]

    def _taken(self, parameters: Iterable[torch.Tensor]) -> list[_Kept]:
        looked_at = self._touched - self._harmless
        return [
            _Kept(p, p.grad, p.grad._version, has_gradient(p) if id(p) in looked_at else None)
            for p in parameters
            if p.grad is not None
        ]

    def look(self) -> None:
        """Look, before another backward pass of the step, whose gradients were thrown away.

        From here on none is held: the pass needs the memory, and what follows it does, too.
        """
        kept, self._kept = self._kept, []
        for optimizer, gradients in kept:
            if any(each.is_untouched for each in gradients):
                continue  # no zero_grad(): the others are masked, if anything
            gone = [self._is_gone(each) for each in gradients if each.tells]
            if not gone or not all(gone):
                continue
            is_sure = len(gradients) > 1 or gradients[0].parameter.grad is None
            (self._lost if is_sure else self._doubtful).append(optimizer)

    def _is_gone(self, kept: _Kept) -> bool:
        """Return whether nothing is left of a gradient that was written to, as far as is known."""
        parameter = kept.parameter
        self._touched.add(id(parameter))
        if parameter.grad is None or not kept.was_there:
            return parameter.grad is None
        if has_gradient(parameter):
            self._harmless.add(id(parameter))
            return False
        return True

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
        if not self._told and any(optimizer is one for one in self._doubtful):
            self._told = True
            log.warning(
                "an optimizer steps although zeros were written to its only gradient between the "
                "micro-batches of the step. If that was zero_grad(), move it out of the loop over "
                "them: the gradients of those before it are thrown away"
            )


def _watched(optimizer: torch.optim.Optimizer, wanted: set[int] | None) -> list[torch.Tensor]:
    """Return the first and the last parameter that have gradients, or the only one that does."""
    parameters = parameters_of((optimizer,))
    first = _first_with_gradient(parameters, wanted)
    last = _first_with_gradient(reversed(parameters), wanted)
    if first is None or last is None:
        return []
    return [first] if last is first else [first, last]


def _first_with_gradient(
    parameters: Iterable[torch.Tensor], wanted: set[int] | None
) -> torch.Tensor | None:
    for parameter in parameters:
        # FSDP2 keeps what it adds up elsewhere, where no script throws it away.
        if parameter.grad is None or is_dtensor(parameter):
            continue
        if wanted is None or id(parameter) in wanted:
            return parameter
    return None
