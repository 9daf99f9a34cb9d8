"""The best value of a metric so far, as `run.best` is told."""

from __future__ import annotations

import math


class Best:
    """Remembers the best value; `value` is part of the training state."""

    def __init__(self, value: float | None = None) -> None:
        self.value = value
        """None until there is one."""
        self.is_new = False
        """True from a better value until the state that goes with it is being saved."""

    def offer(self, value: float, mode: str) -> bool:
        """Take `value` if it is better (`mode` is `min` or `max`); return whether it was."""
        if math.isnan(value):
            return False
        better = self.value is None or (value < self.value if mode == "min" else value > self.value)
        if better:
            self.value = value
            self.is_new = True
        return better
