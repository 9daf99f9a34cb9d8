"""Pieces are hashed while they come: however they come, and however the store tells of it."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from spotguard.checkpoint.reading import ShardReader
from spotguard.checkpoint.shard import Block, write_shard
from spotguard.errors import DamagedCheckpoint
from spotguard.storage import FileStore
from spotguard.storage.buffers import targets_of
from spotguard.testing import MemoryStore
from tests.checkpoint.crashes.savings import cut_into_pieces, flip

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.checkpoint.tensors import ShardInfo
    from spotguard.storage.base import Target

_SIZE = 9 * 4096 + 77


class TalkativeStore(MemoryStore):
    """Fills a few bytes at a time, and tells each time how far it is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill the views in random parts."""
        done = 0
        for view in targets_of(into):
            at = 0
            while at < len(view):
                part = view[at : at + self._chance.choice((1, 7, 4095, 4096, 5000, 20_000))]
                super().get_into(key, offset + done, part)
                at, done = at + len(part), done + len(part)
                if not isinstance(into, memoryview | list) and self._chance.random() < 0.7:
                    into.filled(done)


def shard(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> tuple[ShardInfo, bytes]:
    """Write a shard of ten small pieces; return it and its data."""
    cut_into_pieces(monkeypatch, 4096)
    data = random.Random(1).randbytes(_SIZE)
    block = Block(name="x", dtype="U8", shape=(_SIZE,), data=data)
    return write_shard(store, "p/", "s.safetensors", [block]), data


def random_views(size: int, chance: random.Random) -> list[memoryview]:
    """Return memory of `size` bytes in parts of any length."""
    views = []
    while size:
        views.append(memoryview(bytearray(min(size, chance.choice((1, 3, 4096, 9000, 50_000))))))
        size -= len(views[-1])
    return views


@pytest.mark.parametrize("seed", range(20))
def test_what_is_hashed_on_the_way_is_what_arrived(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of any size, told of or not: good bytes pass, one flipped bit never does."""
    store = TalkativeStore(seed)
    info, data = shard(store, monkeypatch)
    chance = random.Random(seed)
    reader = ShardReader(store, "p/", info)
    assert reader.tensors
    pieces = range(chance.randrange(len(info.piece_hashes)), len(info.piece_hashes))
    start, end = info.span(pieces)
    views = random_views(end - start, chance)

    reader.read_pieces(pieces, views)

    stored = store.get("p/s.safetensors")
    assert stored[info.header_bytes :][: len(data)] == data
    assert b"".join(views) == stored[start:end]
    at = chance.randrange(start, end)
    flip(store, "p/s.safetensors", at * 8 + chance.randrange(8))
    with pytest.raises(DamagedCheckpoint, match="is damaged: the hash of bytes"):
        reader.read_pieces(pieces, random_views(end - start, chance))


class Listener:
    """A sink that compares what it is told of with what is there."""

    def __init__(self, views: list[memoryview], content: bytes) -> None:
        self.views = views
        self.content = content
        self.heard = [0]

    def filled(self, size_bytes: int) -> None:
        """Assert that so many bytes are there."""
        assert b"".join(self.views)[:size_bytes] == self.content[:size_bytes]
        self.heard.append(size_bytes)


SPANS = [(0, 5 << 20), (4096, 3 << 20), (5, 1), (4095, (2 << 20) + 9), (0, 0)]


@pytest.mark.parametrize(("offset", "size"), SPANS)
def test_a_folder_tells_how_far_it_is(tmp_path: Path, offset: int, size: int) -> None:
    """Never ahead of the bytes, about once a megabyte, and of all of them at the end."""
    content = random.Random(2).randbytes((5 << 20) + 100)
    store = FileStore(tmp_path)
    store.put("x", content)
    listener = Listener(random_views(size, random.Random(3)), content[offset : offset + size])

    store.get_into("x", offset, listener)

    assert listener.heard[-1] == size
    steps = [after - before for before, after in pairwise(listener.heard)]
    assert all(0 < step <= 1 << 20 for step in steps)
