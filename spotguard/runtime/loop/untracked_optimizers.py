"""Optimizers that step in the loop and that no checkpoint knows of: a resume begins them anew.

Nothing would fail: momentum and step counts would be zero again, at each interruption. On several
ranks such an optimizer's gradients may not even be synchronised, which `GradientCheck` looks at.

An optimizer that a script makes anew for each step or for each evaluation (a meta-learner's inner
one, a linear probe's) has nothing to lose. So one is refused when it steps a second time, after
another boundary. The base optimizer within a wrapper (timm's Lookahead) is known by its state,
which the wrapper's `state_dict()` has; that of most SAMs is not in there.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import UsageError
from spotguard.runtime.distributed.gradients import count_parameters
from spotguard.runtime.distributed.wrappers import parameters_of
from spotguard.runtime.loop.untracked_parameters import KnownParameters
from spotguard.runtime.state.tracked import TrackedModule, TrackedStateful
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spotguard.runtime.checkpoint.training_state import Keeper
    from spotguard.runtime.state.tracked import Tracked


@dataclass
class _Seen:
    """An optimizer that stepped and is not tracked."""

    parameters: int
    trained: str | None
    """A tracked parameter that it trains, by name."""
    finished: int
    """Steps that were done when it first stepped."""
    is_settled: bool = False


class UntrackedOptimizers:
    """Stands before the steps of optimizers that are not tracked."""

    def __init__(self, keeper: Keeper, tell: Callable[[str], None]) -> None:
        """`keeper` hears when tracked weights are about to change, and `tell` of the script."""
        self._keeper, self._tell = keeper, tell
        self._objects: Mapping[str, Tracked] = keeper.objects
        self._tracked = {
            id(item.value) for item in self._objects.values() if isinstance(item, TrackedOptimizer)
        }
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = (
            weakref.WeakKeyDictionary()
        )

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Look at an optimizer of which the process-wide hook tells.

        Raises:
            UsageError: it trains what is tracked, and a resume would begin it anew.
        """
        if id(optimizer) in self._tracked:
            return
        seen = self._seen.get(optimizer)
        if seen is None or seen.parameters != count_parameters((optimizer,)):
            seen = self._seen[optimizer] = self._look_at(optimizer)
        if seen.trained is not None:
            self._keeper.begin_to_change()
        if not seen.is_settled and seen.finished != self._keeper.finished:
            seen.is_settled = True
            self._judge(optimizer, seen)

    def _look_at(self, optimizer: torch.optim.Optimizer) -> _Seen:
        parameters = parameters_of((optimizer,))
        held = KnownParameters(self._objects.values())
        named = next((self._name_of(p) for p in parameters if p in held), None)
        before = self._seen.get(optimizer)
        finished = before.finished if before is not None else self._keeper.finished
        return _Seen(count_parameters((optimizer,)), named, finished)

    def _name_of(self, parameter: torch.Tensor) -> str:
        for name, item in self._objects.items():
            if isinstance(item, TrackedModule):
                for key, own in item.bare.named_parameters():
                    if own is parameter:
                        return f"{name}.{key}"
        return "a tracked parameter"

    def _judge(self, optimizer: torch.optim.Optimizer, seen: _Seen) -> None:
        if self._is_saved(optimizer):
            return
        kind = type(optimizer).__name__
        if seen.trained is not None:
            raise UsageError(
                f"{seen.trained} is trained by {kind}, an optimizer that is not tracked: a resume "
                "would begin its state anew",
                hint="call run.track(optimizer=optimizer) before the loop; of one within another "
                "track both: run.track(optimizer=sam, base_optimizer=sam.base_optimizer)",
            )
        self._tell(
            f"{kind}, an optimizer that is not tracked, trains {seen.parameters} parameters that "
            "nothing tracked holds: a resume begins both anew. Track them, unless that is meant"
        )

    def _is_saved(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if something tracked has the optimizer's state in its own."""
        items = self._objects.values()
        if any(isinstance(i, TrackedStateful) and _has_groups(i.read()) for i in items):
            return True  # an object of the script's own saves an optimizer
        wrappers = [item for item in items if isinstance(item, TrackedOptimizer)]
        groups = {id(group) for item in wrappers for group in item.value.param_groups}
        if not all(id(group) in groups for group in optimizer.param_groups):
            return False
        saved = KnownParameters([TrackedStateful(item.value) for item in wrappers])
        entries = [e for e in optimizer.state.values() if isinstance(e, dict)]
        kept = [value for each in entries for value in each.values()]
        return all(value in saved for value in kept if isinstance(value, torch.Tensor))


def _has_groups(state: Any) -> bool:
    """Return True if there is an optimizer's state dict somewhere in a state."""
    if isinstance(state, dict):
        return "param_groups" in state or any(map(_has_groups, state.values()))
    return isinstance(state, (list, tuple)) and len(state) < 100 and any(map(_has_groups, state))
