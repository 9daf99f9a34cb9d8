"""Objects that ought to be small, read from a store into which others may write, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.errors import NotFound
from spotguard.events.untrusted import MOST_BYTES, Refused

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectInfo, ObjectStore


def get_small(
    store: ObjectStore,
    key: str,
    *,
    info: ObjectInfo | None = None,
    most_bytes: int = MOST_BYTES,
) -> bytes:
    """Return the whole object, unless it is larger than what is wanted of its kind.

    Args:
        store: where it is.
        key: what it is called.
        info: what a listing has just said of it, if one did; else the store is asked first.
        most_bytes: a larger one is not read.

    Raises:
        NotFound: there is none.
        Refused: it is larger.
        StoreError: the store cannot be read.
    """
    info = info or store.head(key)
    if info is None:
        raise NotFound(f"there is no {key}")
    if info.size_bytes > most_bytes:
        raise Refused(f"{key} is too large ({info.size_bytes} bytes)")
    return store.get(key)
