"""Reading shards: only the pieces that are needed, each proven before anyone sees its bytes."""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from spotguard.checkpoint.header import parse_header
from spotguard.errors import DamagedCheckpoint, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from spotguard.checkpoint.tensors import ShardInfo, TensorInfo
    from spotguard.storage.base import ObjectStore

_THREADS = max(2, min(8, os.cpu_count() or 2))


class ShardReader:
    """One shard of a checkpoint; every byte that it gives is proven by the manifest."""

    def __init__(self, store: ObjectStore, checkpoint_prefix: str, info: ShardInfo) -> None:
        self._store = store
        self._key = checkpoint_prefix + info.file
        self.info = info

    def check_size(self) -> None:
        """Raise `DamagedCheckpoint` if the file is missing or has another size. Cheap."""
        found = self._store.head(self._key)
        if found is None:
            raise DamagedCheckpoint(f"{self._key} is missing")
        if found.size_bytes != self.info.size_bytes:
            raise DamagedCheckpoint(
                f"{self._key} has {found.size_bytes} bytes, its manifest says "
                f"{self.info.size_bytes}"
            )

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """What is in the shard: tensors, or parts of them, by name. Reads the header once.

        Raises:
            DamagedCheckpoint: missing, of another size or hash, or no such header.
            StoreError: it could not be read at all, which says nothing about its bytes.
        """
        self.check_size()  # before memory is taken for whatever size the manifest claims
        head = memoryview(bytearray(self.info.header_bytes))
        self._read(0, head, self.info.header_hash, "its header")
        tensors = parse_header(head, self.info.size_bytes, what=self._key)
        for name, tensor in tensors.items():
            if tensor.start < self.info.header_bytes:
                raise DamagedCheckpoint(f"{self._key}: tensor {ascii(name)[:80]} is in the header")
        return tensors

    def read_piece(self, index: int, into: memoryview) -> memoryview:
        """Read one piece into the front of `into` and prove it; return that part of `into`.

        Raises:
            DamagedCheckpoint: missing, too short, or of another hash; `into` holds garbage.
            StoreError: it could not be read at all, which says nothing about its bytes.
        """
        start, end = self.info.piece(index)
        piece = into[: end - start]
        self._read(start, piece, self.info.piece_hashes[index], f"bytes {start} to {end}")
        return piece

    def _read(self, start: int, into: memoryview, promised: str, what: str) -> None:
        try:
            self._store.get_into(self._key, start, into)
        except NotFound as problem:
            raise DamagedCheckpoint(f"{self._key} vanished while it was read") from problem
        found = xxhash.xxh3_128_hexdigest(into)
        if found != promised:
            raise DamagedCheckpoint(
                f"{self._key} is damaged: the hash of {what} is {found}, "
                f"its manifest says {promised}"
            )


class Want(NamedTuple):
    """Bytes of a shard, and where they shall go."""

    start: int
    """Offset of the first byte in the file."""
    target: NDArray[np.uint8]
    """Flat; as many bytes as are wanted."""


def read_wanted(wanted: Iterable[tuple[ShardReader, Sequence[Want]]]) -> None:
    """Fill all targets: several threads read, prove and copy the pieces that are needed.

    Blocks until all is there. Needs one piece of memory for each thread.

    Raises:
        DamagedCheckpoint: a piece is not as its manifest says; some targets are filled already.
        StoreError: the store failed, which says nothing about the bytes.
    """
    tasks = [task for reader, wants in wanted for task in _tasks(reader, wants)]
    if not tasks:
        return
    scratches = threading.local()

    def run(task: _Task) -> None:
        size = min(task.reader.info.piece_bytes, task.reader.info.size_bytes)
        if len(getattr(scratches, "view", b"")) < size:
            scratches.view = piece_memory(size)
        task.run(scratches.view)

    with ThreadPoolExecutor(min(_THREADS, len(tasks)), "spotguard-read") as pool:
        running = [pool.submit(run, task) for task in tasks]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def check_intact(reader: ShardReader) -> None:
    """Raise `DamagedCheckpoint` unless every byte of the shard is as promised; reads all of it."""
    for _ in proven_pieces(reader):
        pass


def proven_pieces(reader: ShardReader) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in the file, bytes) of all data, in order; each is valid until the next."""
    assert reader.tensors is not None  # proves the header
    scratch = piece_memory(min(reader.info.piece_bytes, reader.info.size_bytes))
    for index in range(len(reader.info.piece_hashes)):
        yield reader.info.piece(index)[0], reader.read_piece(index, scratch)


def piece_memory(size_bytes: int) -> memoryview:
    """Return page-aligned memory, fit for direct reads."""
    return memoryview(mmap.mmap(-1, max(size_bytes, 1)))


@dataclass
class _Task:
    """One piece to read, and what to do with its bytes."""

    reader: ShardReader
    index: int
    copies: list[tuple[int, int, NDArray[np.uint8]]] = field(default_factory=list)
    """(from, to) in the piece, and the target of just these bytes."""

    def run(self, scratch: memoryview) -> None:
        piece = np.frombuffer(self.reader.read_piece(self.index, scratch), np.uint8)
        for low, high, target in self.copies:
            target[:] = piece[low:high]  # numpy lets other threads run meanwhile


def _tasks(reader: ShardReader, wants: Sequence[Want]) -> Iterable[_Task]:
    found: dict[int, _Task] = {}
    info: Any = reader.info
    for start, target in wants:
        if not len(target):
            continue
        end = start + len(target)
        for index in range(info.piece_at(start), info.piece_at(end - 1) + 1):
            first, last = info.piece(index)
            low, high = max(start, first), min(end, last)
            task = found.setdefault(index, _Task(reader, index))
            task.copies.append((low - first, high - first, target[low - start : high - start]))
    return found.values()
