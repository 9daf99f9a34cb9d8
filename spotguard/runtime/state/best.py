"""The best value of a metric so far, as `run.best` is told, and for how long it was that."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class BestState(NamedTuple):
    """What is part of the training state."""

    value: float | None = None
    """None until there is one."""
    is_new: bool = False
    """True from a better value until the state that goes with it is being saved."""
    mark: float | None = None
    """The last value that was better by more than `min_delta`."""
    since: int = 0
    """How often `run.best` was called after that one."""

    @classmethod
    def of(cls, counters: Mapping[str, Any]) -> BestState:
        """Return what the counters of a checkpoint say; earlier versions did not count."""
        value, is_new = counters.get("best"), counters.get("best_is_new") is True
        mark, since = counters.get("best_mark", value), counters.get("best_since", 0)
        return cls(value, is_new, mark, since)

    def counters(self) -> dict[str, Any]:
        """Return what `of` reads."""
        return {
            "best": self.value,
            "best_is_new": self.is_new,
            "best_mark": self.mark,
            "best_since": self.since,
        }


class Best:
    """Remembers the best value; `now` is part of the training state."""

    def __init__(self, state: BestState = BestState()) -> None:  # noqa: B008  # it is immutable
        self.now = state
        self._kept = None if state.is_new else state.value
        self.at_boundary = BestState()
        """As it was at the last step boundary, to which a step given up goes back."""

    @property
    def value(self) -> float | None:
        """Return the best value; None until there is one."""
        return self.now.value

    @property
    def is_new(self) -> bool:
        """True from a better value until the state that goes with it is being saved."""
        return self.now.is_new

    def take(self) -> None:
        """Keep it as it is now: a step has just ended."""
        self.at_boundary = self.now

    def is_being_saved(self) -> None:
        """Take note that the state that goes with the best value is kept from here on."""
        self.now = self.now._replace(is_new=False)
        self._kept = self.now.value
        self.take()

    def is_lost(self) -> None:
        """Take note that the state that goes with the best value can't be kept.

        What was kept before stays the best of all that is kept.
        """
        self.now = self.now._replace(value=self._kept, is_new=False)
        self.take()

    def offer(self, value: float, mode: str, *, min_delta: float = 0.0) -> bool:
        """Take `value` if it is better (`mode` is `min` or `max`); return whether it was.

        One that is better by `min_delta` or less is the best, too, but no progress.
        """
        now = self.now
        progress = _is_better(value, now.mark, mode, min_delta)
        better = _is_better(value, now.value, mode, 0.0)
        self.now = BestState(
            value if better else now.value,
            now.is_new or better,
            value if progress else now.mark,
            0 if progress else now.since + 1,
        )
        return better


def _is_better(value: float, than: float | None, mode: str, by_more_than: float) -> bool:
    if not math.isfinite(value):
        return False
    if than is None:
        return True
    gain = than - value if mode == "min" else value - than
    return gain > by_more_than
