"""The best value of a metric so far, as `run.best` is told."""

from __future__ import annotations

import math


class Best:
    """Remembers the best value; `value` is part of the training state."""

    def __init__(self, value: float | None = None, *, is_new: bool = False) -> None:
        self.value = value
        """None until there is one."""
        self.is_new = is_new
        """True from a better value until the state that goes with it is being saved."""
        self.at_boundary: tuple[float | None, bool] = (None, False)
        """Value and `is_new` at the last step boundary, to which a step given up goes back."""

    @property
    def now(self) -> tuple[float | None, bool]:
        """Return value and `is_new`."""
        return self.value, self.is_new

    def take(self) -> None:
        """Keep value and `is_new` as they are now: a step has just ended."""
        self.at_boundary = self.now

    def is_being_saved(self) -> None:
        """Take note that the state that goes with the best value is kept from here on."""
        self.is_new = False
        self.take()

    def offer(self, value: float, mode: str) -> bool:
        """Take `value` if it is better (`mode` is `min` or `max`); return whether it was."""
        if math.isnan(value):
            return False
        better = self.value is None or (value < self.value if mode == "min" else value > self.value)
        if better:
            self.value = value
            self.is_new = True
        return better
