"""One step of the training loop, as the script sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import UsageError
from spotguard.runtime.gradients import loss_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.runtime.loader import Share
    from spotguard.runtime.run import Run


class Step:
    """One optimizer step: iterate for this rank's micro-batches, and call `backward` on each."""

    def __init__(self, run: Run, number: int, epoch: int) -> None:
        self._run = run
        self.number = number
        """Steps done before this one: 0 for the first."""
        self.epoch = epoch
        """Passes over the dataset done before this one; 0 for a stream, which has no length."""
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._share: Share | None = None
        self._samples: list[int] = []
        self._waiting = False
        self._complete = False

    @property
    def has_begun(self) -> bool:
        """True once its first micro-batch was handed out."""
        return self._share is not None

    @property
    def loss(self) -> torch.Tensor | None:
        """This rank's part of the global mean loss so far (detached); the ranks' parts add up."""
        parts = [loss * weight for loss, weight in self._losses]
        return torch.stack(parts).sum() if parts else None

    def __iter__(self) -> Iterator[Any]:
        run = self._run
        if not run._job.gate.enter(self.number):
            run._job.leave(halfway=True)
        while not self._complete:
            self._refuse_unused_batch()
            share, batch = run._next_batch()
            self._share = share
            self._waiting = True
            run._gradients.begin(share)
            run._loader.seed_training(share)
            yield batch
            self._refuse_unused_batch()
        run._seed_boundary(self.number, after=True)

    def backward(
        self, loss: torch.Tensor, *, reduction: str = "mean", scaler: Any | None = None
    ) -> None:
        """Add this micro-batch's gradient; after the last one, gradients are the global mean.

        Use it instead of `loss.backward()`: it weights the loss by its share of the global batch.

        Args:
            loss: Scalar loss of this micro-batch.
            reduction: How the loss was reduced over the samples: `mean` or `sum`.
            scaler: A `GradScaler`, to scale the loss before backward.
        """
        share = self._share
        if share is None or not self._waiting:
            raise UsageError("step.backward() needs a micro-batch: call it once per batch")
        weight = loss_weight(share, reduction)
        self._losses.append((loss.detach(), weight))
        if share.weight:
            self._samples.extend(share.indices)
        self._waiting = False
        if share.last:
            self._complete = True
            self._run._trace_step(self)
        loss = loss if scaler is None else scaler.scale(loss)
        self._run._gradients.backward(loss, weight, share)

    def _refuse_unused_batch(self) -> None:
        if self._waiting:
            raise UsageError(
                "a micro-batch went by without step.backward(loss)",
                hint="call step.backward(loss) once for each batch, instead of loss.backward()",
            )
