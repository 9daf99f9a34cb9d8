"""Reading shards: only the pieces that are needed, each proven before anyone sees its bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import xxhash

from spotguard.checkpoint.header import parse_header
from spotguard.checkpoint.outside import BaseFiles, OutsideData
from spotguard.errors import ArchivedCheckpoint, DamagedCheckpoint, NotFound, StoreError
from spotguard.storage.buffers import copy_bytes, paged_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from spotguard.checkpoint.tensors import ShardInfo, TensorInfo
    from spotguard.storage.base import ObjectStore, Reads, Target


class _Source(Protocol):
    """What is asked of whoever has a shard's data: the store, or files outside it."""

    def best_reads(self, key: str) -> Reads:
        """Return how it is read fastest."""
        ...

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill `into` with its bytes from `offset`."""
        ...


class ShardReader:
    """One shard of a checkpoint; every byte that it gives is proven by the manifest.

    Data is read from the store `near`, if it has a good copy, else from `store`; that of a base
    which lies outside of it, from the files `named`, or from where they were.
    """

    def __init__(
        self,
        store: ObjectStore,
        checkpoint_prefix: str,
        info: ShardInfo,
        *,
        near: ObjectStore | None = None,
        named: BaseFiles | None = None,
    ) -> None:
        self._store = store
        self._near = None if info.outside else near
        self._named = named
        self._outside: OutsideData | None = None
        self._key = info.key(checkpoint_prefix)
        self.info = info
        self._tensors: dict[str, TensorInfo] | None = None

    @cached_property
    def best_reads(self) -> Reads:
        """How the shard is read fastest, as it looks at the first question."""
        return (self._near or self._data).best_reads(self._key)

    def check_size(self) -> None:
        """Raise `DamagedCheckpoint` if the file is missing, archived or of another size. Cheap."""
        found = self._store.head(self._key)
        if found is None:
            raise DamagedCheckpoint(f"{self._key} is missing")
        if found.size_bytes != self.info.stored_bytes:
            raise DamagedCheckpoint(
                f"{self._key} has {found.size_bytes} bytes, its manifest says "
                f"{self.info.stored_bytes}"
            )
        if not found.readable:
            raise ArchivedCheckpoint(
                f"{self._key} is archived; bringing it back takes hours",
                hint="docs/stores.md says how, for each cloud",
            )

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """What is in the shard: tensors, or parts of them, by name. Reads the header once.

        Not a `cached_property`: before Python 3.12 all shards share its lock, and would be read
        one after the other.

        Raises:
            DamagedCheckpoint: missing, of another size or hash, or no such header.
            StoreError: it could not be read at all, which says nothing about its bytes.
        """
        if self._tensors is None:
            self._tensors = self._header()
        return self._tensors

    def _header(self) -> dict[str, TensorInfo]:
        self.check_size()  # before memory is taken for whatever size the manifest claims
        head = memoryview(bytearray(self.info.header_bytes))
        self._fetch(self._store, 0, [head])
        self._check(xxhash.xxh3_128_hexdigest(head), self.info.header_hash, "its header")
        tensors = parse_header(head, self.info.size_bytes, what=self._key)
        for name, tensor in tensors.items():
            if tensor.start < self.info.header_bytes:
                raise DamagedCheckpoint(f"{self._key}: tensor {ascii(name)[:80]} is in the header")
        if self.info.outside:
            named = self._named or BaseFiles()
            self._outside = OutsideData(head, tensors, named, what=self._key)
        return tensors

    @property
    def _data(self) -> _Source:
        """Where the data is read: in the store, or in the files that the header names."""
        if not self.info.outside:
            return self._store
        assert self.tensors is not None  # reads the header
        assert self._outside is not None
        return self._outside

    def read_pieces(self, pieces: range, into: Sequence[memoryview]) -> None:
        """Read pieces that follow each other and prove them.

        `into` are the places of all their bytes, in order.

        Raises:
            DamagedCheckpoint: missing, too short, or of another hash; `into` holds garbage.
            BaseNotFound: a file outside the store, to which it refers, is missing or has changed.
            StoreError: it could not be read at all, which says nothing about its bytes.
        """
        if self._near is not None:
            try:
                self._read_pieces(self._near, pieces, into)
            except (DamagedCheckpoint, StoreError):
                self._near = None  # no copy, or not a good one: what is far away is what counts
            else:
                return
        self._read_pieces(self._data, pieces, into)

    def _read_pieces(self, store: _Source, pieces: range, into: Sequence[memoryview]) -> None:
        hashed = _Hashed(into, self.info.piece_bytes)
        self._fetch(store, self.info.span(pieces)[0], hashed)
        for index, found in zip(pieces, hashed.pieces(), strict=True):
            low, high = self.info.piece(index)
            self._check(found, self.info.piece_hashes[index], f"bytes {low} to {high}")

    def _fetch(self, store: _Source, start: int, into: Target) -> None:
        try:
            store.get_into(self._key, start, into)
        except NotFound as problem:
            raise DamagedCheckpoint(f"{self._key} vanished while it was read") from problem

    def _check(self, found: str, promised: str, what: str) -> None:
        if found != promised:
            raise DamagedCheckpoint(
                f"{self._key} is damaged: the hash of {what} is {found}, "
                f"its manifest says {promised}"
            )


class _Hashed:
    """Pieces to be read (a `Sink`): hashed as they come, while the CPU has them at hand."""

    def __init__(self, views: Sequence[memoryview], piece_bytes: int) -> None:
        self.views = list(views)
        self._left = [view for view in reversed(self.views) if view]
        self._size_bytes = sum(map(len, self.views))
        self._piece_bytes = piece_bytes
        self._hashed_bytes = 0
        self._digest = xxhash.xxh3_128()
        self.digests: list[str] = []

    def filled(self, size_bytes: int) -> None:
        """Hash on to there."""
        while self._hashed_bytes < size_bytes:
            view = self._left.pop()
            piece_left = self._piece_bytes - self._hashed_bytes % self._piece_bytes
            part = view[: min(piece_left, size_bytes - self._hashed_bytes)]
            if len(part) < len(view):
                self._left.append(view[len(part) :])
            self._digest.update(part)
            self._hashed_bytes += len(part)
            if len(part) == piece_left or self._hashed_bytes == self._size_bytes:
                self.digests.append(self._digest.hexdigest())
                self._digest.reset()

    def pieces(self) -> list[str]:
        """Return the hash of each piece; what nobody spoke of is hashed now."""
        self.filled(self._size_bytes)
        return self.digests


class Want(NamedTuple):
    """Bytes of a shard, and where they shall go."""

    start: int
    """Offset of the first byte in the file."""
    target: memoryview
    """Flat and writable; as many bytes as are wanted."""


def read_wanted(wanted: Iterable[tuple[ShardReader, Sequence[Want]]]) -> None:
    """Fill all targets: several threads read, prove and copy the pieces that are needed.

    Blocks until all is there. Each thread needs memory for one read of the store's best size.

    Raises:
        DamagedCheckpoint: a piece is not as its manifest says; some targets are filled already.
        StoreError: the store failed, which says nothing about the bytes.
    """
    tasks = [task for reader, wants in wanted for task in _tasks(reader, wants)]
    most = max((task.reader.best_reads.threads for task in tasks), default=1)
    left = iter(tasks)  # a list's iterator: each `next` is one step of the interpreter
    problems: list[BaseException] = []

    def work() -> None:
        scratch = memoryview(b"")
        try:
            for task in left:
                if problems:
                    return
                if len(scratch) < task.size_bytes:
                    scratch = paged_memory(task.size_bytes)
                task.run(scratch)
        except BaseException as problem:  # noqa: BLE001  # a thread's top: raised by the caller
            problems.append(problem)

    threads = [
        threading.Thread(target=work, name="spotguard-read", daemon=True)
        for _ in range(min(most, len(tasks)) - 1)
    ]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def holds_already(reader: ShardReader, wants: Sequence[Want]) -> bool:
    """Return True if the targets are all of a shard's data, and have its very bytes as they are.

    A script that loads a frozen base by itself has them; then they need not be read once more.
    """
    info = reader.info
    ordered = sorted(wants, key=lambda want: want.start)
    at = info.header_bytes
    for start, target in ordered:
        if start != at:
            return False
        at += len(target)
    if at != info.size_bytes:
        return False
    found = _Hashed([target for _, target in ordered], info.piece_bytes)
    for number, promised in enumerate(info.piece_hashes):
        found.filled(info.piece(number)[1] - info.header_bytes)
        if found.digests[number] != promised:
            return False
    return True


def check_intact(reader: ShardReader) -> None:
    """Raise `DamagedCheckpoint` unless every byte of the shard is as promised; reads all of it."""
    for _ in proven_pieces(reader):
        pass


def proven_pieces(reader: ShardReader) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in the file, bytes) of all data, in order; each is valid until the next."""
    assert reader.tensors is not None  # proves the header
    scratch = memoryview(b"")
    for pieces in _runs(reader, range(len(reader.info.piece_hashes))):
        start, end = reader.info.span(pieces)
        if len(scratch) < end - start:
            scratch = paged_memory(end - start)
        data = scratch[: end - start]
        reader.read_pieces(pieces, [data])
        yield start, data


@dataclass
class _Task:
    """Pieces to read in one go, and what to do with their bytes."""

    reader: ShardReader
    pieces: range
    copies: list[tuple[int, int, memoryview]] = field(default_factory=list)
    """(from, to) in what is read, and the target of just these bytes."""

    @property
    def size_bytes(self) -> int:
        start, end = self.reader.info.span(self.pieces)
        return end - start

    def run(self, scratch: memoryview) -> None:
        """Read straight into the targets; what nobody wants, and second copies, via `scratch`."""
        views: list[memoryview] = []
        at = 0
        self.copies.sort(key=lambda copy: copy[:2])
        if any(after[0] < before[1] for before, after in pairwise(self.copies)):
            self.reader.read_pieces(self.pieces, [scratch[: self.size_bytes]])
            for low, high, target in self.copies:
                copy_bytes(target, scratch[low:high])
            return
        for low, high, target in self.copies:
            views += [scratch[at:low], target]
            at = high
        views.append(scratch[at : self.size_bytes])
        self.reader.read_pieces(self.pieces, [view for view in views if view])


def _tasks(reader: ShardReader, wants: Sequence[Want]) -> list[_Task]:
    info = reader.info
    ends = [(start, start + len(target), target) for start, target in wants if len(target)]
    needed: set[int] = set()
    for start, end, _ in ends:
        needed.update(range(info.piece_at(start), info.piece_at(end - 1) + 1))
    tasks = [_Task(reader, pieces) for pieces in _runs(reader, sorted(needed))]
    of_piece = {index: task for task in tasks for index in task.pieces}
    for start, end, target in ends:
        at = start
        while at < end:
            task = of_piece[info.piece_at(at)]
            first, last = info.span(task.pieces)
            stop = min(end, last)
            task.copies.append((at - first, stop - first, target[at - start : stop - start]))
            at = stop
    return tasks


def _runs(reader: ShardReader, needed: Sequence[int]) -> Iterator[range]:
    """Yield the pieces in runs that are read in one go: adjacent ones, some megabytes at most."""
    most = max(1, reader.best_reads.size_bytes // reader.info.piece_bytes)
    first = 0
    for at in range(1, len(needed) + 1):
        if at == len(needed) or needed[at] != needed[at - 1] + 1 or at - first == most:
            yield range(needed[first], needed[at - 1] + 1)
            first = at
