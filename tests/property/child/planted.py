"""Ways to break the runtime on purpose: the property test must find each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BUGS: dict[str, Callable[[], None]] = {}


def plant(name: str) -> None:
    """Break it in the way of that name."""
    BUGS[name]()
