"""Small saves for the tests of this folder: a history in a few lines."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.checkpoint.manifest import Manifest, commit
from spotguard.checkpoint.shard import Block, shard_file, write_shard
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.storage.buffers import targets_of
from spotguard.testing import MemoryStore

if TYPE_CHECKING:
    import pytest

    from spotguard.storage.base import ObjectStore, Target


def floats(*values: float) -> bytes:
    """Return little-endian F32 bytes."""
    return struct.pack(f"<{len(values)}f", *values)


def blocks(step: int) -> list[Block]:
    """Return tensors of several forms whose bytes depend on the step."""
    return [
        Block(name="bias", dtype="F32", shape=(3,), data=floats(step, 1, 2)),
        Block(name="flag", dtype="BOOL", shape=(), data=b"\1"),
        Block(name="weight", dtype="BF16", shape=(8, 16), data=bytes([step % 256]) * 256),
        Block(name="empty", dtype="I64", shape=(0, 4), data=b""),
        Block(
            name="part",
            dtype="U8",
            shape=(2, 3),
            data=bytes(range(6)),
            global_shape=(4, 3),
            offsets=(2, 0),
        ),
    ]


def make_manifest(step: int = 10, attempt: int = 1, **changes: Any) -> Manifest:
    """Return a manifest without shards."""
    fields: dict[str, Any] = {
        "run_id": "a-run",
        "attempt": attempt,
        "step": step,
        "kind": CheckpointKind.PERIODIC,
        "created_at": 1_700_000_000.125,
        "parent": None,
        "world_size": 2,
        "shards": (),
        "state": {"model": {"weight": "weight"}},
        "ranks": {"0": {"torch": [1, 2]}},
        "counters": {"train_s": 1.5},
        "versions": {"spotguard": "0"},
    }
    return Manifest(**(fields | changes))


def save(store: ObjectStore, step: int, attempt: int = 1, **changes: Any) -> str:
    """Write two shards and commit them; return the checkpoint's prefix."""
    prefix = keys.checkpoint(step, attempt)
    shards = tuple(
        write_shard(store, prefix, shard_file(rank, 2), blocks(step), metadata={"step": str(step)})
        for rank in range(2)
    )
    return commit(store, make_manifest(step, attempt, shards=shards, **changes))


class CountingStore(MemoryStore):
    """Remembers which ranges were read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []
        """(key, from, to) of each."""

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Note the range, and read it."""
        size = sum(len(view) for view in targets_of(into))
        self.reads.append((key, offset, offset + size))
        super().get_into(key, offset, into)

    def pieces(self) -> list[tuple[str, int]]:
        """Return (key, from) of each piece of 4096 bytes that was read, headers left out."""
        return [
            (key, at) for key, start, end in self.reads if start for at in range(start, end, 4096)
        ]


def cut_into_pieces(patch: pytest.MonkeyPatch, piece_bytes: int = 4096) -> None:
    """Let small tensors have many pieces."""
    patch.setattr("spotguard.checkpoint.shard.piece_bytes_for", lambda _: piece_bytes)


def claim(store: ObjectStore, attempt: int, resumed_from: str | None = None) -> None:
    """Claim an attempt."""
    claim_attempt(store, attempt, resumed_from, {"nodes": 1})


def flip(store: ObjectStore, key: str, bit: int) -> None:
    """Flip one bit of an object; bits count from the start, or from the end if negative."""
    raw = bytearray(store.get(key))
    raw[bit // 8] ^= 1 << bit % 8
    store.put(key, raw)


def sealed(body: Any) -> bytes:
    """Return a manifest with any content whose checksum is right: a forger's work."""
    text = json.dumps(body).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    return b'{"checksum":"sha256:%s","manifest":%s}' % (digest, text)


def body_of(manifest: Manifest) -> Any:
    """Return the inner object as plain JSON."""
    return json.loads(manifest.to_json())["manifest"]
