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

    The last one of them goes Lightning's own way, through all of its hooks; with one micro-batch
    for each rank, that is all there is.
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

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on the micro-batches before the last, and return what the last one gives."""
        fit = self.spotguard
        if fit.step is None:
            return super().training_step(*args, **kwargs)
        if fit.is_manual:
            output = super().training_step(*args, **kwargs)
            fit.step.end_undivided()
            return output
        batch, *rest = args
        earlier: dict[torch.nn.Parameter, torch.Tensor] = {}
        while not fit.on_last_micro_batch:
            if not earlier:
                self._drop_gradients()  # Lightning does so after the forward pass of the last one
            output = super().training_step(batch, *rest, **kwargs)
            self.backward(_loss_of(output), self.optimizers[0])
            batch = fit.next_micro_batch()
            earlier = self._set_gradients_aside()
        fit.earlier = earlier
        output = super().training_step(batch, *rest, **kwargs)
        _loss_of(output)  # Lightning would skip its backward pass, and the step were never done
        return output

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Go backward by the loss's share of the global batch."""
        fit = self.spotguard
        if fit.step is None:
            return cast("torch.Tensor", super().backward(closure_loss, *args, **kwargs))
        for parameter, gradient in fit.earlier.items():
            parameter.grad = gradient
        fit.earlier = {}
        with fit.weighted(closure_loss) as loss:
            return cast("torch.Tensor", super().backward(loss, *args, **kwargs))

    def _parameters(self) -> list[torch.nn.Parameter]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def _drop_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _set_gradients_aside(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Take away the gradients, which Lightning is about to set to zero, and return them."""
        aside = {p: p.grad for p in self._parameters() if p.grad is not None}
        self._drop_gradients()
        return aside


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
