"""What a step of ours asks of the Trainer's strategy: all micro-batches, and weighted losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from spotguard.errors import UsageError

if TYPE_CHECKING:
    from spotguard.integrations.lightning.fit import TrainerFit


class StepStrategy(Strategy):
    """Goes before the strategy's own class, and trains on all of a rank's micro-batches of a step.

    The first one of them goes Lightning's own way, through all of its hooks; with one micro-batch
    for each rank, that is all there is. The others follow within its backward pass.
    """

    spotguard: TrainerFit

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse what would be restored in the place of our own checkpoint, before it is read."""
        if self.spotguard.is_fitting:
            raise UsageError(
                "Trainer.fit(ckpt_path=...) and SpotguardCallback would both restore",
                hint="leave ckpt_path out: the run resumes by itself; weights to begin with are "
                "for Model.load_from_checkpoint(path) before fit",
            )
        return super().load_checkpoint(*args, **kwargs)

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Return what the script's `training_step` gives for a micro-batch."""
        fit = self.spotguard
        with fit.logging_as_it_counts():
            output = super().training_step(batch, *rest)
        if fit.step is None:
            return output
        fit.beside_batch = rest
        if fit.is_manual:
            fit.step.end_undivided()
        else:
            _loss_of(output)  # Lightning would skip its backward pass, and the step were never done
        return output

    def backward(
        self,
        closure_loss: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Go backward by the loss's share of the global batch, then train on the other batches.

        Gradients add up over a rank's micro-batches as in any loop: Lightning set them to zero
        before the first one's backward pass, and steps when the last one's is done.
        """
        fit = self.spotguard
        if fit.step is None:
            return cast("torch.Tensor", super().backward(closure_loss, optimizer, *args, **kwargs))
        with fit.weighted(closure_loss) as loss:
            gone = cast("torch.Tensor", super().backward(loss, optimizer, *args, **kwargs))
        while not (fit.is_manual or fit.on_last_micro_batch):
            output = fit.train_on_next_micro_batch()
            with fit.weighted(_loss_of(output)) as loss:
                super().backward(loss, optimizer, *args, **kwargs)
        return gone


def extend(strategy: Strategy, fit: TrainerFit) -> None:
    """Have the Trainer's strategy train on steps of ours, whatever its class.

    Raises:
        UsageError: it keeps parts of the model on each rank in a way of its own.
    """
    kind = type(strategy)
    if not isinstance(strategy, StepStrategy):
        if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
            raise UsageError(
                f"SpotguardCallback: {kind.__name__} keeps the training state in a way of its own",
                hint="use strategy='ddp', or a loop of your own with FSDP2: docs/coming-from.md",
            )
        strategy.__class__ = type(kind.__name__, (StepStrategy, kind), {})
    strategy.spotguard = fit  # type: ignore[attr-defined]


def _loss_of(output: Any) -> torch.Tensor:
    """Return the loss of what `training_step` returned.

    Raises:
        UsageError: there is none, and the step cannot go without it.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            "training_step returned no loss for one of a step's micro-batches",
            hint="return a loss for each batch: 0 * loss where one shall not count",
        )
    return loss
