"""Whether a smoke's steps learn anything: they went backward, and no weight has changed.

Only what is certain is told: a script without a tracked optimizer may have reasons of its own, and
so may one that goes backward in some steps only. Weights that a script changes by hand count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from spotguard.runtime.distributed.wrappers import parameters_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.runtime.step import Step

STEPS: Final = 2
_PLAIN = (torch.nn.Parameter, torch.Tensor)


class LearningCheck:
    """Looks at the first steps of a process; for the loop's thread."""

    def __init__(
        self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Look from now on, until `STEPS` steps have ended."""
        self._trained = [p for m in modules for p in m.parameters() if p.requires_grad]
        self._is_known = bool(optimizers) and all(type(p) in _PLAIN for p in self._trained)
        held = {id(parameter) for parameter in parameters_of(optimizers)}
        self._foreign = held.isdisjoint(map(id, self._trained))
        """No optimizer has a parameter of the models."""
        self._before = self._sums() if self._is_known else []
        self._steps = 0
        self._stepped = self._with_gradients = False
        self._hooks = [o.register_step_post_hook(self._after_optimizer) for o in optimizers]

    def close(self) -> None:
        """Look at nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def after(self, step: Step) -> dict[str, Any] | None:
        """Take note that a step has ended; return what there is to tell, once."""
        self._steps += 1
        self._is_known = self._is_known and step.passes_done > 0
        if self._steps != STEPS:
            return None
        self.close()
        if not self._is_known or self._with_gradients or self._sums() != self._before:
            return None
        how = "steps have no gradients" if self._stepped else "do not step"
        return {
            "message": f"after {STEPS} steps no weight has changed: the optimizers {how}",
            "unlearned": {"steps": STEPS, "stepped": self._stepped, "foreign": self._foreign},
        }

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped = True
        if any(parameter.grad is not None for parameter in parameters_of((optimizer,))):
            self._with_gradients = True

    def _sums(self) -> list[float]:
        return [float(_real(p.detach()).sum(dtype=torch.float64)) for p in self._trained]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, a complex one as its real and imaginary parts."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
