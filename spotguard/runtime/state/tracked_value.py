"""One plain value that can be tracked."""

from __future__ import annotations

from typing import Any


class Box:
    """Holds one plain value, so that it can be saved and restored: a counter, a best loss.

        best = spotguard.Box(float("inf"))
        run.track(model=model, best=best)
        best.value = min(best.value, loss)

    A resume gives back the value that it had.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value
        """The value as it is now."""

    def __repr__(self) -> str:
        return f"Box({self.value!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the saved value."""
        self.value = state["value"]
