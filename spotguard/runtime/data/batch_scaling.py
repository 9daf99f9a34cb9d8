"""A global batch that follows the number of ranks, and a learning rate that follows the batch.

With k times the batch, `linear` takes k times the rate (P. Goyal et al., "Accurate, Large
Minibatch SGD", 2017), `sqrt` its root; either way in small steps over a warm-up.

The script's schedule is left alone: the factor is in the optimizer's groups only while its
`step()` runs. So schedulers compute with, and checkpoints hold, the rate of the reference.

How an epoch is cut then depends on where the number of ranks changed, so the place is no longer
a matter of the step number alone. Within an attempt it is, counted from where the attempt began;
this place is saved with every checkpoint, and the next attempt goes on from what it says.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError
from spotguard.runtime.data.loader import ElasticLoader, check_sizes
from spotguard.shared.batching import EpochPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
_WARMUP_STEPS = 100


class LearningRateScale:
    """Scales the rate of optimizers by `world_size / reference`, with a warm-up after a change.

    Its state belongs to the run: it goes on with a warm-up that a resume interrupts, and with
    another number of ranks it starts from the factor that was reached.

    Args:
        rule: `linear` or `sqrt`.
        reference: The number of ranks for which the script's rate is right.
        warmup_steps: Steps from one factor to another (default 100); 0 changes it at once.

    Raises:
        UsageError: another rule, or a number makes no sense.
    """

    def __init__(self, rule: str, *, reference: int | None, warmup_steps: int | None) -> None:
        if rule not in _RULES:
            raise UsageError(f"run.loader: lr_scaling is {rule!r}; allowed: {', '.join(_RULES)}")
        self.rule = rule
        self.reference = _whole("reference_world_size", reference, at_least=1)
        self.warmup_steps = _whole(
            "lr_warmup_steps", _WARMUP_STEPS if warmup_steps is None else warmup_steps, at_least=0
        )
        self.before = self.after = 1.0
        self._since = 0
        self._hooks: list[Any] = []

    def begin(self, world_size: int, step: int) -> bool:
        """Aim at the factor for so many ranks, from `step` on; return whether it is another."""
        aim = _RULES[self.rule](world_size / self.reference)
        if aim == self.after:
            return False
        self.before, self.after, self._since = self.factor(step), aim, step
        return True

    def factor(self, step: int) -> float:
        """Return the factor in step `step`, counted from 0."""
        passed = step - self._since
        if passed >= self.warmup_steps:
            return self.after
        return self.before + (self.after - self.before) * passed / self.warmup_steps

    def attach(self, optimizers: Iterable[torch.optim.Optimizer], step: Callable[[], int]) -> None:
        """Scale the optimizers' rates while they step; `step` tells the number of the step."""
        for optimizer in optimizers:
            rates: list[Any] = []

            def scale(optimizer: torch.optim.Optimizer, *_: Any, rates: list[Any] = rates) -> None:
                factor = self.factor(step())
                rates[:] = [group["lr"] for group in optimizer.param_groups]
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor

            def put_back(
                optimizer: torch.optim.Optimizer, *_: Any, rates: list[Any] = rates
            ) -> None:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate

            self._hooks += [
                optimizer.register_step_pre_hook(scale),
                optimizer.register_step_post_hook(put_back),
            ]

    def detach(self) -> None:
        """Scale no rates any more."""
        while self._hooks:
            self._hooks.pop().remove()

    def state(self) -> list[float]:
        """Return the warm-up's state, for a checkpoint."""
        return [self.before, self.after, self._since]

    def restore(self, state: list[float]) -> None:
        """Go on from a checkpoint's state."""
        self.before, self.after = state[0], state[1]
        self._since = int(state[2])


class ScaledElasticLoader(ElasticLoader):
    """Gives each rank the same part of a global batch, on any number of ranks.

    Args:
        dataset: Map-style.
        scale: Scales the rate with the batch.
        global_batch_size: On `scale.reference` ranks: whole micro-batches for each of them.
        micro_batch_size: By default all that a rank has in a step.
        world_size: Ranks of this attempt.
        **rest: As of `ElasticLoader`.

    Raises:
        UsageError: the global batch cannot be shared out so.
    """

    any_world = False

    def __init__(
        self,
        dataset: Any,
        *,
        scale: LearningRateScale,
        global_batch_size: int,
        micro_batch_size: int | None,
        world_size: int,
        **rest: Any,
    ) -> None:
        check_sizes(global_batch_size, micro_batch_size)
        unit = scale.reference * (micro_batch_size or 1)
        if global_batch_size % unit:
            raise UsageError(
                f"run.loader: global_batch_size is {global_batch_size}, which is not a whole number"
                f" of micro-batches for each of the {scale.reference} ranks of"
                " reference_world_size",
                hint=f"with lr_scaling, use a multiple of {unit}",
            )
        of_rank = global_batch_size // scale.reference
        super().__init__(
            dataset,
            global_batch_size=of_rank * world_size,
            micro_batch_size=micro_batch_size or of_rank,
            world_size=world_size,
            **rest,
        )
        self.scale: LearningRateScale = scale
        self._reference_batch = self._batch_before = global_batch_size

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a save and a resume."""
        return {
            **super().identity(),
            "global_batch_size": self._reference_batch,
            "lr_scaling": self.scale.rule,
            "reference_world_size": self.scale.reference,
        }

    def keep(self, finished: int) -> None:
        """Take down where this attempt began and how it goes on; with the step, that is all."""
        super().keep(finished)
        self.shared = {
            "order": self.shared,
            "first": list(self._plan.first),
            "global_batch_size": self.global_batch_size,
            "rate": self.scale.state(),
        }

    def restore(self, shared: Any, own: dict[int, Any], world_size: int) -> str | None:
        """Cut the epochs as the attempt did that saved; `begin` goes on from there."""
        self._batch_before = shared["global_batch_size"]
        self._plan = replace(
            self._plan, global_batch=self._batch_before, first=EpochPlace(*shared["first"])
        )
        self.scale.restore(shared["rate"])
        return super().restore(shared["order"], own, world_size)

    def begin(self, first: int) -> dict[str, Any] | None:
        """Cut what is left of the epoch, and later ones, for this number of ranks."""
        self._plan = self._plan.continued(first, self.global_batch_size)
        self.begins_at_epoch_end = self._plan.begins_at_epoch_end
        if not self.scale.begin(self._world_size, first):
            return None
        before, scale = self._batch_before, self.scale
        return {
            "step": first,
            "global_batch_size": self.global_batch_size,
            "global_batch_size_before": before,
            "lr_factor": scale.after,
            "lr_factor_before": scale.before,
            "lr_warmup_steps": scale.warmup_steps,
            "message": f"global batch {before} → {self.global_batch_size}, learning rate times"
            f" {scale.after:.3g} instead of {scale.before:.3g}, over {scale.warmup_steps} steps",
        }


def learning_rate_scale(
    rule: str | None,
    *,
    reference: int | None,
    warmup_steps: int | None,
    stream: bool,
    bitwise: bool,
) -> LearningRateScale | None:
    """Return what `run.loader` was asked for; None if the global batch is to stay the same.

    Raises:
        UsageError: it makes no sense, or cannot be had with a stream or in bitwise mode.
    """
    if rule is None:
        if reference is not None or warmup_steps is not None:
            raise UsageError(
                "run.loader: reference_world_size and lr_warmup_steps say nothing without"
                " lr_scaling",
                hint='pass lr_scaling="linear" or "sqrt", too, or leave them out',
            )
        return None
    scale = LearningRateScale(rule, reference=reference, warmup_steps=warmup_steps)
    if stream:
        raise UsageError(
            "run.loader: lr_scaling needs samples with indices: a stream cannot be cut anew",
            hint="pass a map-style dataset, or leave lr_scaling out",
        )
    if bitwise:
        raise UsageError(
            'run.loader: lr_scaling and exact="bitwise" exclude each other: other batches give'
            " other weights",
            hint="leave one of them out",
        )
    return scale


def _whole(name: str, value: int | None, *, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise UsageError(
            f"run.loader: {name} is {value!r}, but lr_scaling needs a whole number from {at_least}"
        )
    return value
