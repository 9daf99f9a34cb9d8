"""A learning rate that follows the number of ranks, for a global batch that follows it.

With k times the batch, `linear` takes k times the rate (P. Goyal et al., "Accurate, Large
Minibatch SGD", 2017), `sqrt` its root; either way in small steps over a warm-up.

The scripts' schedule is left alone: the factor is in the optimizer's groups only while its
`step()` runs. So schedulers compute with, and checkpoints hold, the rate of the reference.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}


class LearningRateScale:
    """Scales the rate of optimizers by `world_size / reference`, with a warm-up after a change.

    Its state belongs to the run: it goes on with a warm-up that a resume interrupts, and with
    another number of ranks it starts from the factor that was reached.

    Args:
        rule: `linear` or `sqrt`.
        reference: The number of ranks for which the script's rate is right.
        warmup_steps: Steps from one factor to another; 0 changes it at once.

    Raises:
        UsageError: another rule, or a number makes no sense.
    """

    def __init__(self, rule: str, *, reference: int, warmup_steps: int) -> None:
        if rule not in _RULES:
            raise UsageError(f"lr_scaling is {rule!r}; allowed: {', '.join(_RULES)}")
        if reference < 1 or warmup_steps < 0:
            raise UsageError(
                f"lr_scaling: reference is {reference} ranks and warmup_steps {warmup_steps};"
                " allowed: from 1, and from 0"
            )
        self._rule = rule
        self._reference = reference
        self._warmup_steps = warmup_steps
        self._before = self._after = 1.0
        self._since = 0

    def begin(self, world_size: int, step: int) -> str | None:
        """Aim at the factor for so many ranks, from `step` on; return what changes, if anything."""
        aim = _RULES[self._rule](world_size / self._reference)
        if aim == self._after:
            return None
        self._before, self._after, self._since = self.factor(step), aim, step
        return (
            f"learning rate times {aim:.4g} instead of {self._before:.4g}, over"
            f" {self._warmup_steps} steps: {world_size} ranks, set for {self._reference}"
        )

    def factor(self, step: int) -> float:
        """Return the factor in step `step`, counted from 0."""
        passed = step - self._since
        if passed >= self._warmup_steps:
            return self._after
        return self._before + (self._after - self._before) * passed / self._warmup_steps

    def attach(self, optimizers: Iterable[torch.optim.Optimizer], step: Callable[[], int]) -> None:
        """Scale the optimizers' rates while they step; `step` tells the number of the step."""
        for optimizer in optimizers:
            rates: list[Any] = []

            def scale(optimizer: torch.optim.Optimizer, *_: Any, rates: list[Any] = rates) -> None:
                factor = self.factor(step())
                rates[:] = [group["lr"] for group in optimizer.param_groups]
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor

            def restore(
                optimizer: torch.optim.Optimizer, *_: Any, rates: list[Any] = rates
            ) -> None:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate

            optimizer.register_step_pre_hook(scale)
            optimizer.register_step_post_hook(restore)

    def state_dict(self) -> dict[str, Any]:
        """Return the warm-up's state, for a checkpoint."""
        return {"before": self._before, "after": self._after, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self._before, self._after = float(state["before"]), float(state["after"])
        self._since = int(state["since"])
