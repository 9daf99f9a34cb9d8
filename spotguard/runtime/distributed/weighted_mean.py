"""The mean over something that micro-batches have unequal numbers of, such as tokens.

How many there are in a step is known when its last micro-batch is: so gradients are added up by
their numbers, and divided by the total of all ranks behind the synchronisation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import UsageError
from spotguard.runtime.distributed.wrappers import parameters_of
from spotguard.runtime.state.sharding import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from spotguard.runtime.data.loader import Share


class WeightedMeans:
    """What the weighted steps of an attempt have in common."""

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        total: Callable[[float], float],
    ) -> None:
        """`total` adds up a number over the ranks; all must call it."""
        self._modules = list(modules)
        self._optimizers = list(optimizers)
        self._total = total
        self._unit: float | None = None

    def begin(self, weight: float) -> WeightedMean:
        """Begin a step, or a phase of one, whose first micro-batch has this weight."""
        if self._unit is None:
            # Gradients of about the size of the mean's do not overflow in fp16. As a power of two
            # the unit leaves all bits alone, so a resume may have another one.
            self._unit = 2.0 ** round(math.log2(max(self._total(weight), 1.0)))
        return WeightedMean(self._unit, self._set_aside())

    def end(self, mean: WeightedMean) -> None:
        """Divide gradients by the total, once they are those of all ranks."""
        with torch.no_grad():
            mean.divide(list(self._parameters()))

    def add_up(self, mean: WeightedMean) -> None:
        """Find the total of the step; blocks until all ranks are at their last micro-batch."""
        mean.total = self._total(mean.mine)

    def _parameters(self) -> Iterator[torch.Tensor]:
        every = {id(p): p for p in parameters_of(self._optimizers)}
        every.update((id(p), p) for module in self._modules for p in module.parameters())
        yield from every.values()

    def _set_aside(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take away what gradients there are already: they are divided."""
        aside = []
        for parameter in self._parameters():
            gradient = parameter.grad
            if gradient is not None:  # a view lies in DDP's own bucket, which is written to
                aside.append((parameter, gradient.clone() if gradient._is_view() else gradient))
                parameter.grad = None
        return aside


class WeightedMean:
    """The weights of one step, or of a phase of it."""

    def __init__(self, unit: float, aside: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._unit = unit
        self._aside = aside
        self.mine = 0.0
        """The sum of this rank's weights so far."""
        self.total: float | None = None
        """The sum of all ranks' weights, once all are known."""

    def factor(self, weight: float, reduction: str) -> float:
        """Take a micro-batch's weight; return what its loss is multiplied by to go backward."""
        self.mine += weight
        return (weight if reduction == "mean" else float(weight > 0)) / self._unit

    def share(self, weight: float, reduction: str, world_size: int) -> float:
        """Return by how much a micro-batch's loss counts, as far as the total is known."""
        total = self.mine * world_size if self.total is None else self.total
        part = weight if reduction == "mean" else float(weight > 0)
        return part / total if total else 0.0

    def own_share(self, world_size: int) -> float:
        """Return the part of all weights that this rank has, as far as they are known."""
        total = self.mine * world_size if self.total is None else self.total
        return self.mine / total if total else 0.0

    def divide(self, parameters: list[torch.Tensor]) -> None:
        """Make sums of gradients their mean, and add what was there before the step."""
        assert self.total is not None
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.total:
            _multiply(gradients, self._unit / self.total)
        for parameter, before in self._aside:
            parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)


def checked_weight(weight: Any, share: Share, reduction: str) -> float:
    """Return a micro-batch's weight as a number; 0 where it only comes again for ranks to meet.

    Raises:
        UsageError: it is no number from 0, or `reduction` has it in it already.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(
            f"step.backward: reduction is {reduction!r}; allowed with weight=: mean, sum"
        )
    value = float(weight)
    if not 0 <= value < math.inf:
        raise UsageError(f"step.backward: weight is {value}, but must be a number from 0")
    return value if share.weight else 0.0


def _multiply(gradients: list[torch.Tensor], factor: float) -> None:
    plain = [g.to_local() if is_dtensor(g) else g for g in gradients]
    dense = [g for g in plain if g.layout is torch.strided]
    if dense:
        torch._foreach_mul_(dense, factor)
    for gradient in plain:
        if gradient.layout is not torch.strided:
            gradient.mul_(factor)
