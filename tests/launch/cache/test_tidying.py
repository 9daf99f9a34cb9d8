from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spotguard.events import keys
from spotguard.launch.cache.tidying import tidy
from spotguard.storage import FileStore
from spotguard.testing import MemoryStore
from tests.launch.cache.nodes import CACHE, KEY, RUN, Node

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import ObjectStore


def pieces_in(store: ObjectStore) -> int:
    """Return how many pieces are stored."""
    return len(list(store.list(keys.CACHE_PIECES)))


def test_what_nothing_refers_to_goes_when_it_is_old(tmp_path: Path) -> None:
    """A young piece may be waiting for its listing."""
    store = FileStore(tmp_path / "store")
    node = Node(tmp_path / "a", store)
    node.write("old", b"old")
    node.keep()
    (node.folders[0][1] / "old").unlink()
    node.write("new", b"new")
    node.keep()
    assert tidy(store, key=KEY, about=RUN, now=time.time()) == 0
    assert pieces_in(store) == 2
    assert tidy(store, key=KEY, about=RUN, now=time.time() + 7200) == 1
    fresh = Node(tmp_path / "b", store, attempt=2)
    fresh.restore()
    assert fresh.has() == {f"{CACHE}/new": b"new"}


def test_listings_of_attempts_long_ago_go(tmp_path: Path) -> None:
    """The last four attempts' stay, and with them all that they refer to."""
    store = FileStore(tmp_path / "store")
    for attempt in range(1, 7):
        node = Node(tmp_path / str(attempt), store, attempt=attempt)
        node.write("a", f"of attempt {attempt}")
        node.keep()
    assert tidy(store, key=KEY, about=RUN, now=time.time() + 7200) == 4
    assert pieces_in(store) == 4
    attempts = [keys.parse_cache_listing(info.key) for info in store.list(keys.CACHE_LISTINGS)]
    assert attempts == [(number, 0) for number in (3, 4, 5, 6)]


def test_a_store_that_tells_no_times_keeps_its_pieces(tmp_path: Path) -> None:
    """What is not known to be old is not deleted."""
    store = MemoryStore()
    node = Node(tmp_path / "a", store)
    node.write("a", b"a")
    node.keep()
    (node.folders[0][1] / "a").unlink()
    node.keep()
    assert tidy(store, key=KEY, about=RUN, now=time.time() + 7200) == 0
    assert pieces_in(store) == 1


def test_what_was_deleted_meanwhile_is_stored_again(tmp_path: Path) -> None:
    """A file that comes back must not be listed without its pieces."""
    store = FileStore(tmp_path / "store")
    node = Node(tmp_path / "a", store)
    place = node.write("a", b"a")
    node.keep()
    place.unlink()
    node.keep()
    tidy(store, key=KEY, about=RUN, now=time.time() + 7200)
    assert pieces_in(store) == 0
    node.write("a", b"a")
    node.keep()
    fresh = Node(tmp_path / "b", store, attempt=2)
    assert fresh.restore().problems == []
    assert fresh.has() == {f"{CACHE}/a": b"a"}
