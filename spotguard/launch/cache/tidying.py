"""Deletes what no listing refers to any more. By one node of an attempt, now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spotguard.errors import NotFound
from spotguard.events import keys
from spotguard.events.untrusted import Refused
from spotguard.launch.cache.listing import MOST_BYTES, CacheListing
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore

_ATTEMPTS_KEPT: Final = 4
"""The newest may have kept little yet; and in place, one may follow another within seconds."""
_YOUNG_S: Final = 3600.0
"""A piece comes before the listing that refers to it: a young one may be waiting for its own."""


def tidy(store: ObjectStore, *, key: str, about: str, now: float) -> int:
    """Delete listings that newer attempts have replaced, and pieces without any; return how many.

    Only what can be seen to be old goes: a store that does not tell when an object was written
    keeps all pieces.

    Raises:
        StoreError: the store failed; what remains is whole.
    """
    listings = {
        info.key: parsed[0]
        for info in store.list(keys.CACHE_LISTINGS)
        if (parsed := keys.parse_cache_listing(info.key)) is not None
    }
    kept = sorted(set(listings.values()))[-_ATTEMPTS_KEPT:]
    needed: set[str] = set()
    old = [name for name, attempt in listings.items() if attempt not in kept]
    for name, attempt in listings.items():
        if attempt not in kept:
            continue
        try:
            raw = get_small(store, name, most_bytes=MOST_BYTES)
            needed |= CacheListing.opened(raw, key, about).pieces
        except (NotFound, Refused):  # of another key: no node will ever believe it
            continue
    for name in old:
        store.delete(name)
    useless = [
        info.key
        for info in store.list(keys.CACHE_PIECES)
        if info.key.rpartition("/")[2] not in needed
        and info.modified_at is not None
        and now - info.modified_at > _YOUNG_S
    ]
    for name in useless:
        store.delete(name)
    return len(old) + len(useless)
