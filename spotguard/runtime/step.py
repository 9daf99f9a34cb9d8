"""One step of the training loop, as the script sees it."""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import UsageError
from spotguard.runtime.distributed.gradients import loss_weight
from spotguard.runtime.distributed.weighted_mean import checked_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from spotguard.runtime.data.loader import Loader, Share
    from spotguard.runtime.distributed.bitwise_reduce import BitwiseSync
    from spotguard.runtime.distributed.collectives import ProcessGroup
    from spotguard.runtime.distributed.gradients import GradientSync
    from spotguard.runtime.distributed.optimizers import OptimizerWatch
    from spotguard.runtime.distributed.weighted_mean import WeightedMean, WeightedMeans
    from spotguard.runtime.job import Job


_MIXED = "step.backward: some micro-batches of the step have a weight=, and some have none"


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """What the steps of a training loop have in common."""

    job: Job
    loader: Loader
    batches: Iterator[tuple[Share, Any]]
    """This rank's micro-batches, step after step."""
    gradients: GradientSync | BitwiseSync
    optimizers: OptimizerWatch
    ranks: ProcessGroup
    weights: WeightedMeans
    count_of: Callable[[int], int]
    """Returns how many micro-batches this rank has in a step."""
    trained_once: Callable[[Step], None]
    """Called when all micro-batches of a step were handed out and trained on for the first time."""
    ended: Callable[[Step], None]
    """Called when the script is done with a step's micro-batches, in each phase."""


class _Pass:
    """One time through a step's micro-batches; gradients are synchronised with the last one."""

    def __init__(self, phase: str | None = None) -> None:
        self.phase = phase
        self.losses: list[tuple[Share, torch.Tensor, float]] = []
        self.mean: WeightedMean | None = None
        """What the losses are weighted by, if not by samples."""
        self.reductions: list[str] = []
        """How each of the losses was reduced, if they are weighted."""
        self.share: Share | None = None
        """The micro-batch that was handed out last."""
        self.waiting = False
        """True while that one has had no backward."""
        self.complete = False
        self.has_ended = False
        """True once what comes after the last micro-batch has begun."""

    @property
    def salt(self) -> int:
        """Return what tells its randomness from that of other phases, not of its own repetition."""
        return zlib.crc32(self.phase.encode()) if self.phase else 0

    def refuse_unused_batch(self) -> None:
        """Raise if the last micro-batch was not trained on."""
        if self.waiting:
            raise UsageError(
                "a micro-batch went by without step.backward(loss)",
                hint="call step.backward(loss) once for each batch, instead of loss.backward()",
            )


class Step:
    """One optimizer step: iterate for this rank's micro-batches, and call `backward` on each."""

    def __init__(self, loop: TrainingLoop, number: int, epoch: int) -> None:
        self._loop = loop
        self.number = number
        """Steps done before this one: 0 for the first."""
        self.epoch = epoch
        """Passes over the dataset done before this one; 0 for a stream, which has no length."""
        self._pass = _Pass()
        self._in_phase = False
        self.passes_done = 0
        """How often all micro-batches were trained on."""
        self._kept: list[tuple[Share, Any]] = []
        """This rank's micro-batches, for the phases to come."""
        self.samples: list[int] = []
        """Indices of what this rank trains on."""
        self.done = 0
        """Micro-batches whose backward pass has begun on this rank, over all phases."""

    @property
    def has_begun(self) -> bool:
        """True once its first micro-batch was handed out."""
        return self.passes_done > 0 or self._pass.share is not None

    @property
    def is_halfway(self) -> bool:
        """True while gradients are those of some of this rank's micro-batches only."""
        return bool(self._pass.losses) and not self._pass.complete

    @property
    def counts(self) -> bool:
        """False while its latest micro-batch counts nowhere: it comes again, so that ranks meet."""
        share = self._pass.share
        return share is None or share.weight > 0

    @property
    def is_complete(self) -> bool:
        """True once all micro-batches were trained on, in each phase."""
        return self._pass.complete and not self._in_phase

    @property
    def has_changed_weights(self) -> bool:
        """True once an optimizer has stepped in it, or has begun to."""
        return self._loop.job.keeper.has_changed

    @property
    def ends_epoch(self) -> bool:
        """True for the last step of a pass over the dataset; never for a stream, which has none."""
        return self._loop.loader.epoch_of(self.number + 1) != self.epoch

    @property
    def loss(self) -> torch.Tensor | None:
        """This rank's part of the global mean loss so far (detached); the ranks' parts add up.

        With several phases, that of the latest.
        """
        parts = [loss * weight for _, loss, weight in self._weighted_losses()]
        return torch.stack(parts).sum() if parts else None

    @property
    def own_loss(self) -> torch.Tensor | None:
        """The mean loss over this rank's own samples so far (detached); None if it had none.

        Asks no other rank: an estimate of the global mean. With several phases, that of the latest.
        """
        now, loss = self._pass, self.loss
        share = sum(share.weight for share, _, _ in now.losses)
        if now.mean is not None:
            share = now.mean.own_share(self._loop.job.world_size)
        return None if loss is None or not share else loss / share

    def _weighted_losses(self) -> list[tuple[Share, torch.Tensor, float]]:
        """Return the losses so far, each with its share of the global mean."""
        now = self._pass
        if now.mean is None:
            return now.losses
        world_size = self._loop.job.world_size
        return [
            (share, loss, now.mean.share(weight, reduction, world_size))
            for (share, loss, weight), reduction in zip(now.losses, now.reductions, strict=True)
        ]

    def mean_loss(self) -> torch.Tensor:
        """Return the mean loss over the global batch, to the last bit the same on all ranks.

        Blocks until all ranks have called it. With several phases, that of the latest.

        Raises:
            UsageError: this rank has not trained on all of its micro-batches.
        """
        if not self._pass.complete:
            raise UsageError("step.mean_loss() comes after the loop over the micro-batches")
        loop = self._loop
        if loop.job.world_size == 1 and len(self._pass.losses) == 1:
            [(_, loss, weight)] = self._weighted_losses()
            whole = loss.clone() if weight == 1.0 else loss * weight
            return whole if whole.dim() == 0 else whole.reshape(())
        count = max(part.stop for part in loop.loader.ranges(self.number))
        # Each part in a place of its own, so that they are added up in one order everywhere.
        parts = self._pass.losses[0][1].new_zeros(count)
        for share, loss, weight in self._weighted_losses():
            if share.weight:
                parts[share.number] = (loss * weight).reshape(())
        if loop.job.world_size > 1:
            loop.ranks.add_up(parts)()
        return parts.sum()

    @contextlib.contextmanager
    def phase(self, name: str, *optimizers: torch.optim.Optimizer) -> Iterator[None]:
        """Loop over the step's micro-batches once more, with a backward pass for each.

        For steps of several backward passes: adversarial networks, sharpness-aware minimisation,
        closures. Each phase has the same micro-batches; after its last one gradients are the
        global mean, as ever, and its optimizer may step. All ranks must have the same phases.

            with step.phase("discriminator", discriminator_optimizer):
                for x, y in step:
                    step.backward(discriminator_loss(x))
            discriminator_optimizer.step()

        Args:
            name: For messages. Phases of one name have the same random numbers, as a closure
                needs that is evaluated again.
            *optimizers: Those that step on these gradients: what other parameters get is not
                synchronised, and thrown away. Without any, all tracked parameters count.

        Raises:
            UsageError: the step has begun without a phase, or the phase is left too early.
        """
        self._refuse_phase(name)
        self._pass, self._in_phase = _Pass(name), True
        try:
            with self._loop.gradients.only(optimizers):
                yield
                if not self._pass.complete:
                    raise UsageError(
                        f"step.phase({name!r}) ended before all its micro-batches were trained on",
                        hint="loop over them within it: for batch in step: ... step.backward(loss)",
                    )
        finally:
            self._in_phase = False
        # What comes before the next phase may change weights, by an optimizer or by hand.
        self._loop.job.keeper.begin_to_change(done=False)

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        self._enter()
        now = self._pass
        if now.share is not None:
            raise UsageError(
                "a step's micro-batches are looped over a second time",
                hint='give each loop a phase: with step.phase("name"): for batch in step: ...',
            )
        if self.passes_done:
            loop.job.keeper.keep_copies()
        for share, batch in self._micro_batches():
            now.refuse_unused_batch()
            now.share, now.waiting = share, True
            loop.gradients.begin(share)
            loop.loader.seed_training(share, now.salt)
            yield batch
            now.refuse_unused_batch()
        self._ended()

    def _enter(self) -> None:
        """Enter the step, or leave the process, saved, if all ranks agreed to stop before it."""
        if not self._loop.job.gate.enter(self.number):
            self._loop.job.leaving.at_agreed_step(halfway=True)

    def _micro_batches(self) -> Iterator[tuple[Share, Any]]:
        yield from tuple(self._kept)
        if self._kept and self._kept[-1][0].last:
            return
        for share, batch in self._read_on():
            if self._in_phase:
                self._kept.append((share, batch))
            yield share, batch

    def _read_on(self) -> Iterator[tuple[Share, Any]]:
        """Yield this rank's micro-batches from the data, up to the step's last one."""
        for share, batch in self._loop.batches:
            yield share, batch
            if share.last:
                return

    def backward(
        self,
        loss: torch.Tensor,
        *,
        reduction: str = "mean",
        weight: Any | None = None,
        scaler: Any | None = None,
    ) -> None:
        """Add this micro-batch's gradient; after the last one, gradients are the global mean.

        Use it instead of `loss.backward()`: it weights the loss by its share of the global batch.

        Args:
            loss: Scalar loss of this micro-batch.
            reduction: How the loss was reduced over the samples: `mean` or `sum`. Or `part`, if it
                is this micro-batch's part of the global mean already, divided by a `count` over
                the whole global batch: then all parts are only added up.
            weight: How many tokens, or whatever else the loss is a mean (or `sum`) over, this
                micro-batch has: gradients are then the global mean over them, on any number of
                ranks. All micro-batches of a step need one; one with 0 may have any loss. It
                waits for the other ranks once more in a step.
            scaler: A `GradScaler`, to scale the loss before backward.

        Raises:
            UsageError: there was no micro-batch for it, or an argument makes no sense.
        """
        if weight is not None:
            self._backward_by_weight(loss, weight, reduction, scaler)
            return
        share, weight = self._take_loss(loss, reduction)
        loss = loss if scaler is None else scaler.scale(loss)
        with self._loop.optimizers.expected_gradients:
            self._loop.gradients.backward(loss, weight, share)
        self._went_backward(share)

    def _backward_by_weight(
        self, loss: torch.Tensor, weight: Any, reduction: str, scaler: Any | None
    ) -> None:
        loop, now = self._loop, self._pass
        share = self._awaited()
        value = checked_weight(weight, share, reduction)
        if now.mean is None:
            if now.losses:
                raise UsageError(_MIXED)
            now.mean = loop.weights.begin(value)
        factor = now.mean.factor(value, reduction)
        now.losses.append((share, loss.detach() if value else loss.new_zeros(()), value))
        now.reductions.append(reduction)
        if share.last:
            loop.weights.add_up(now.mean)
        self._trained()
        if value or loop.gradients.managed_elsewhere:
            _refuse_infinite(loss, value)
            loss = loss if scaler is None else scaler.scale(loss)
            with loop.optimizers.expected_gradients:
                loop.gradients.backward(loss, factor, share)
        else:  # nothing to add: what a mean over no token is does no harm
            if scaler is not None:
                scaler.scale(loss.new_zeros(()))  # its first call makes what its step asks for
            loop.gradients.begin_backward(0.0)
            loop.gradients.end_backward(share)
        if share.last:
            loop.weights.end(now.mean)
        self._went_backward(share)

    def _went_backward(self, share: Share) -> None:
        if share.last:
            self._loop.optimizers.gradients_are_there()

    def weighted(
        self, loss: torch.Tensor, *, reduction: str = "mean"
    ) -> AbstractContextManager[torch.Tensor]:
        """Give `loss` as it is to go backward, where somebody else calls `backward()` on it.

        What `backward` does, for frameworks that have a call of their own for it:

            for x, y in step:
                with step.weighted(loss_fn(model(x), y)) as loss:
                    accelerator.backward(loss)

        Within it exactly one backward pass of the given tensor is run, with any scaling that the
        optimizer's step undoes. On leaving it after the last micro-batch gradients are the global
        mean; that blocks until the ranks have met. A framework must not divide the loss by its
        number of accumulated batches: its share of the global batch is in it already. Of a step
        that is not divided (`per_rank="one"`) there may be several, then comes `end_undivided`.

        Args:
            loss: As for `backward`.
            reduction: As for `backward`.
        """
        undivided = self._loop.loader.undivided
        if undivided and self._pass.complete and self._pass.share is not None:
            share = self._pass.share
            weight = loss_weight(share, reduction)
        else:
            share, weight = self._take_loss(loss, reduction)
        return _Weighted(self._loop, loss, share, weight, self._went_backward_elsewhere)

    def _went_backward_elsewhere(self, share: Share) -> None:
        self._went_backward(share)
        if share.last and not self._loop.loader.undivided:
            self._ended()  # a framework may not ask for another micro-batch

    def end_undivided(self) -> None:
        """Take the rank's only micro-batch of the step as trained on, by however many passes."""
        if self._pass.waiting:
            self._trained()
        self._ended()

    def _ended(self) -> None:
        if not self._pass.has_ended:
            self._pass.has_ended = True
            self._loop.ended(self)

    def count(self, of: Callable[[Any], Any]) -> float:
        """Return the sum of `of(batch)` over all micro-batches of the step, on all ranks.

        For losses that are a mean over something else than samples, such as tokens that count:

            tokens = step.count(lambda batch: (batch["labels"] != -100).sum())
            for batch in step:
                step.backward(loss_sum(model, batch) / tokens, reduction="part")

        Blocks until all ranks have called it. It reads all of this rank's micro-batches of the
        step, and keeps them until the step ends; none is trained on by that.
        """
        return self.total(sum(of(batch) for batch, weight in self.read_ahead() if weight))

    def read_ahead(self) -> list[tuple[Any, float]]:
        """Return this rank's micro-batches of the step, each with its share of the global batch.

        For frameworks that look at a whole step before they train on its first micro-batch. It
        keeps them until the step ends; none is trained on by that. A weight of 0 is that of a
        micro-batch which is another one's, or comes again, so that ranks meet: it counts nowhere.

        Raises:
            UsageError: some were handed out already.
            SystemExit: with code 75, saved: the process was told to stop.
        """
        self._enter()
        if not self._kept or not self._kept[-1][0].last:
            if self.has_begun:
                raise UsageError(
                    "a step's micro-batches are read ahead after its first one",
                    hint="call step.count() or step.read_ahead() before the loop over them",
                )
            self._kept += self._read_on()
        return [(batch, share.weight) for share, batch in self._kept]

    def total(self, value: Any) -> float:
        """Return the sum of a number, or a tensor of one, over all ranks; the same on each.

        Blocks until all ranks have called it: episodes, rewards, correct answers.
        """
        loop = self._loop
        whole = torch.as_tensor(value, dtype=torch.float64, device=loop.job.device).reshape(1)
        if loop.job.world_size > 1:
            whole = whole.detach().clone()
            loop.ranks.add_up(whole)()
        return float(whole)

    def __len__(self) -> int:
        """Return how many micro-batches this rank trains on in the step, 1 at least."""
        return self._loop.count_of(self.number)

    def _take_loss(self, loss: torch.Tensor, reduction: str) -> tuple[Share, float]:
        """Take down the loss of the micro-batch that was given last, and return its weight."""
        now = self._pass
        share = self._awaited()
        if now.mean is not None:
            raise UsageError(_MIXED)
        weight = loss_weight(share, reduction)
        now.losses.append((share, loss.detach(), weight))
        self._trained()
        return share, weight

    def _awaited(self) -> Share:
        """Return the micro-batch that was given last, which is to be trained on."""
        now = self._pass
        if now.share is None or not now.waiting:
            raise UsageError(
                "step.backward() needs a micro-batch: call it once per batch",
                hint="add up the losses of a batch; where weights change between two backward"
                ' passes, give each a phase: with step.phase("name"): for batch in step: ...',
            )
        return now.share

    def _trained(self) -> None:
        """Take note that the micro-batch given last is trained on."""
        now = self._pass
        share = now.share
        assert share is not None
        self.done += 1
        if share.weight and not self.passes_done:
            self.samples.extend(share.indices)
        now.waiting = False
        if share.last:
            now.complete = True
            if not self.passes_done:
                self._loop.trained_once(self)
            self.passes_done += 1

    def forget_batches(self) -> None:
        """Let go of the micro-batches: the step has ended."""
        self._kept.clear()

    def _refuse_phase(self, name: str) -> None:
        if self._in_phase:
            raise UsageError(
                f"step.phase({name!r}) begins within step.phase({self._pass.phase!r})",
                hint="end one phase before the next begins",
            )
        if self._pass.phase is None and self._pass.share is not None:
            raise UsageError(
                f"step.phase({name!r}) comes after micro-batches that had no phase",
                hint="give the loop before it a phase of its own, too",
            )


class _Weighted:
    """Around a backward pass that somebody else runs; a class, as each micro-batch has one."""

    def __init__(
        self,
        loop: TrainingLoop,
        loss: torch.Tensor,
        share: Share,
        weight: float,
        done: Callable[[Share], None],
    ) -> None:
        self._gradients = loop.gradients
        self._expected = loop.optimizers.expected_gradients
        self._loss = loss
        self._share = share
        self._weight = weight
        self._done = done

    def __enter__(self) -> torch.Tensor:
        self._expected.__enter__()  # looks at the gradients before anything is done to them
        try:
            factor = self._gradients.begin_backward(self._weight)
            return self._loss if factor == 1.0 else self._loss * factor
        except BaseException as error:
            self._expected.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self._gradients.end_backward(self._share)
        finally:
            self._expected.__exit__(*error)
        if error[0] is None:
            self._done(self._share)


def _refuse_infinite(loss: torch.Tensor, weight: float) -> None:
    """Raise if a loss that counts nothing is NaN: DDP and FSDP2 take it backward all the same."""
    if not weight and not bool(loss.detach().isfinite().all()):
        raise UsageError(
            f"step.backward: a micro-batch of weight 0 has the loss {float(loss.detach())}",
            hint="a mean over no token is NaN: divide by max(tokens, 1), so that it is 0",
        )
