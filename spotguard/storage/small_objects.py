"""Objects that ought to be small, read from a store into which others may write, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.errors import NoObject, TooLarge
from spotguard.events.untrusted import MOST_BYTES, Refused

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore


def get_small(store: ObjectStore, key: str, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the whole object, unless it is larger than what is wanted of its kind. One request.

    Args:
        store: where it is.
        key: what it is called.
        most_bytes: of a larger one no more than about so many are fetched.

    Raises:
        NotFound: there is none.
        Refused: it is larger, or no object but a folder or a pipe.
        StoreError: the store cannot be read.
    """
    try:
        return store.get(key, max_bytes=most_bytes)
    except TooLarge:
        raise Refused(f"{key} is too large (more than {most_bytes} bytes)") from None
    except NoObject:
        raise Refused(f"{key} is no plain file") from None
