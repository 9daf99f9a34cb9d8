"""Numbers that are asked of a device by threads that must go on when it has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def number_of(value: Callable[[], Any]) -> float | None:
    """Return a number that is asked for; None if there is none, or its device has failed.

    CUDA answers with an error to whatever is asked of a GPU after a kernel failed there.
    """
    try:
        found = value()
        return None if found is None else float(found)
    except RuntimeError:
        return None
