"""Two machines' clocks compared through the store, which both can reach and whose clock is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.errors import NotFound
from spotguard.events.untrusted import Refused, parse_object, seconds
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

WRITTEN_AT = "written_at"
"""Where an object says when it was written, by the clock of who wrote it (epoch seconds)."""
_UNSURE_S = 3.0
"""Stores tell whole seconds, twice, and writing takes a moment: less than this is no difference."""


def seconds_ahead(store: ObjectStore, theirs: str, mine: str, clock: Clock) -> float | None:
    """Return by how many seconds `clock` is ahead of the clock of who wrote the object `theirs`.

    The store stamped `theirs` when it was written, and stamps `mine`, which is written now: what
    passed between the two is known by one clock alone. `mine` is removed again. 0 where the
    difference is too small to be told, None where something needed for it is not known.

    Raises:
        StoreError: the store cannot be used.
    """
    try:
        written_at = seconds(parse_object(get_small(store, theirs), theirs), WRITTEN_AT)
        stamped = store.head(theirs)
    except (NotFound, Refused):
        return None
    before = clock.now()
    store.put(mine, b"{}")
    after = clock.now()
    stamped_now = _stamp(store, mine)
    if not stamped or stamped.modified_at is None or stamped_now is None or written_at is None:
        return None
    ahead_s = (before + after) / 2 - (written_at + stamped_now - stamped.modified_at)
    return ahead_s if abs(ahead_s) > _UNSURE_S + (after - before) / 2 else 0.0


def store_now(store: ObjectStore, mine: str) -> float | None:
    """Return what time it is by the store's own clock; None if it does not say.

    The object `mine` is written for that, and removed again.

    Raises:
        StoreError: the store cannot be used.
    """
    store.put(mine, b"{}")
    return _stamp(store, mine)


def _stamp(store: ObjectStore, mine: str) -> float | None:
    """Return when the store says that it wrote the object, and remove that."""
    found = store.head(mine)
    store.delete(mine)
    return None if found is None else found.modified_at
