"""The staging buffer: a flat, page-aligned copy of the state, laid out as the shard file will be.

The layout is computed once for a set of tensors. What only an optimizer's step can change (its
parameters and moments) is copied by a thread while the next forward and backward run; `copied`
says when the optimizer may go on. Everything else is copied at once. The file is written from the
front while the end is still being copied; whoever has to wait for the copy helps with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash

from spotguard.checkpoint.shard import ShardLayout, TensorSpec
from spotguard.errors import CheckpointError
from spotguard.runtime.state.filling import flat_bytes
from spotguard.runtime.state.tree import DTYPES
from spotguard.runtime.state.weight_witness import TensorSample
from spotguard.storage.buffers import paged_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spotguard.runtime.state.tree import Leaf

_PAGE_BYTES = 4096
_CHUNK_BYTES = 4 << 20
"""Copied by one thread in one go: large enough to be fast, small enough to be shared out."""
_CACHED_BYTES = 1 << 18
"""Copied in one go where a hash follows: what a core's own cache holds twice."""


class WeightsChanged(CheckpointError):
    """Something other than a tracked optimizer's step changed weights while they were copied."""


class Memcpy(NamedTuple):
    """Bytes of a plain CPU tensor to copy: addresses, so that a large tensor can be shared out."""

    target: int
    source: int
    size_bytes: int
    end: int
    """Where the copy ends in the file's data."""

    def run(self) -> None:
        """Copy by this thread alone: torch's helpers would spin on cores that training needs."""
        ctypes.memmove(self.target, self.source, self.size_bytes)

    def in_steps(self) -> Iterator[int]:
        """Copy as much as a cache holds at a time; yield where what is there ends in the data."""
        for done in range(0, self.size_bytes, _CACHED_BYTES):
            size = min(_CACHED_BYTES, self.size_bytes - done)
            ctypes.memmove(self.target + done, self.source + done, size)
            yield self.end - self.size_bytes + done + size


class TensorCopy(NamedTuple):
    """A tensor to copy that lies on another device, or not in one piece."""

    target: torch.Tensor
    source: torch.Tensor
    stream: torch.cuda.Stream | None
    """Of the source's own GPU: torch enqueues a copy where that one works just now."""

    def run(self) -> None:
        """Copy; returns when it is done, also on a GPU."""
        if self.stream is None:
            self.target.copy_(self.source)
            return
        with torch.cuda.stream(self.stream):
            self.target.copy_(self.source, non_blocking=True)


class Chunk(NamedTuple):
    """Copies that one thread makes in one go, and where their bytes begin in the file's data."""

    copies: list[Memcpy | TensorCopy]
    start: int

    def run(self) -> None:
        """Make the copies."""
        for copy in self.copies:
            copy.run()
        streams = {copy.stream for copy in self.copies if isinstance(copy, TensorCopy)}
        for stream in streams - {None}:
            assert stream is not None
            stream.synchronize()

    def run_and_hash(self, data: memoryview, piece_bytes: int, hashes: dict[int, str]) -> None:
        """Make the copies, and hash each piece that lies in this chunk while it is in the cache.

        What other chunks do not copy must be in `data` already. A hash's key is its piece's end.
        """
        first = self.start - self.start % _CHUNK_BYTES
        at, last = first, min(first + _CHUNK_BYTES, len(data))
        digest = xxhash.xxh3_128()
        for ready in self._ends(last):
            while at < ready and (ready == last or ready - at >= _CACHED_BYTES):
                stop = min(ready, at - at % piece_bytes + piece_bytes)
                digest.update(data[at:stop])
                at = stop
                if at % piece_bytes == 0 or at == len(data):
                    hashes[at] = digest.hexdigest()
                    digest.reset()

    def _ends(self, last: int) -> Iterator[int]:
        """Make the copies; yield again and again up to where the bytes are there."""
        for copy in self.copies:
            assert isinstance(copy, Memcpy)
            yield from copy.in_steps()
        yield last


@dataclass(frozen=True)
class Plan:
    """Where each leaf of a state lies in the shard file."""

    leaves: list[Leaf]
    """The very same ones have the same layout; empty if they are not worth being held."""
    signature: tuple[object, ...]
    layout: ShardLayout

    @classmethod
    def of(
        cls,
        leaves: list[Leaf],
        metadata: dict[str, str],
        before: Plan | None,
        *,
        keep: bool = True,
    ) -> Plan:
        """Return the plan for `leaves`: the one before, if their names and forms are the same."""
        if before is not None and same_items(leaves, before.leaves):
            return before
        signature = tuple(
            (leaf.name, leaf.tensor.dtype, leaf.tensor.shape, leaf.global_shape, leaf.offsets)
            for leaf in leaves
        )
        held = leaves if keep else []
        if before is not None and before.signature == signature:
            return cls(held, signature, before.layout)
        return cls(held, signature, layout_of(leaves, metadata))


def layout_of(leaves: Iterable[Leaf], metadata: dict[str, str]) -> ShardLayout:
    """Return what is where in a shard of these leaves."""
    specs = [
        TensorSpec(
            name=leaf.name,
            dtype=DTYPES[leaf.tensor.dtype],
            shape=tuple(leaf.tensor.shape),
            global_shape=leaf.global_shape,
            offsets=leaf.offsets,
        )
        for leaf in leaves
    ]
    return ShardLayout(specs, metadata)


def live_views(leaves: Sequence[Leaf], layout: ShardLayout) -> list[memoryview]:
    """Return the leaves' bytes in the order of the file; those on a CPU are not copied.

    The views do not keep the leaves alive.
    """
    return [bytes_of(leaves[index].tensor) for index in layout.order]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes; those of one that lies on a CPU in one piece are not copied."""
    if not tensor.nbytes:
        return memoryview(b"")
    if not tensor.is_cpu or not tensor.is_contiguous():
        return memoryview(flat_bytes(tensor.cpu()).numpy().data)
    # Eight times faster than by way of numpy, which counts with many small tensors.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


class Staged:
    """One state in the buffer; whole once `copied` is set."""

    def __init__(
        self,
        data: memoryview,
        later: list[Chunk],
        changed: Callable[[], bool] = lambda: False,
        *,
        piece_bytes: int | None = None,
    ) -> None:
        """`changed`: whether a tensor of `later` is another one than when this was made."""
        self.data = data
        self.hashes: dict[int, str] = {}
        """Of the pieces that `copy_rest` has hashed, by where they end."""
        self._piece_bytes = piece_bytes
        self._hurried = False
        self.copied = threading.Event()
        """Set when no source is needed any more, whether or not all went well."""
        self._chunks = later
        self._left = iter(range(len(later)))  # each `next` is one step of the interpreter
        self._done = [False] * len(later)
        self._frontier = 0
        self._changed = changed
        self._ready = threading.Condition()
        self._ready_bytes = later[0].start if later else len(data)
        self._problem: Exception | None = None
        if not later:
            self._complete()

    def copy_rest(self, *, hashing: bool = False) -> None:
        """Copy what was left, in the order of the file, together with whoever else calls this.

        With `hashing` on the way, which in all is less work than later, but not once somebody
        calls who only waits for the copy.
        Returns when nothing is left to begin with; `wait_ready` tells what went wrong.
        """
        self._hurried = self._hurried or not hashing
        for index in self._left:
            chunk = self._chunks[index]
            try:
                if self._problem is not None:
                    pass
                elif hashing and self._piece_bytes and not self._hurried:
                    chunk.run_and_hash(self.data, self._piece_bytes, self.hashes)
                else:
                    chunk.run()
            except RuntimeError as problem:
                self._problem = problem
            self._note_done(index)

    def give_up(self) -> None:
        """Copy nothing more; returns once nobody writes to the buffer any more."""
        if self.copied.is_set():
            return
        self._problem = self._problem or CheckpointError("its copy gave way to a later one")
        self.copy_rest()
        self.copied.wait()

    def wait_ready(self, end: int | None = None) -> None:
        """Block until the first `end` bytes (None: all) may be read; raise what copying raised."""
        if end is None:
            self.copied.wait()
        elif self._ready_bytes < end:
            with self._ready:
                self._ready.wait_for(lambda: self._ready_bytes >= end)
        if self._problem is not None:
            raise self._problem

    def _note_done(self, index: int) -> None:
        with self._ready:
            self._done[index] = True
            while self._frontier < len(self._done) and self._done[self._frontier]:
                self._frontier += 1
            if self._frontier < len(self._done):
                self._ready_bytes = self._chunks[self._frontier].start
            else:
                self._complete()
            self._ready.notify_all()

    def _complete(self) -> None:
        if self._chunks and self._problem is None and self._changed():
            self._problem = WeightsChanged(
                "weights were changed while they were copied, by something other than a "
                "tracked optimizer's step()",
                hint="change weights right after optimizer.step(), or track what changes them",
            )
        self._ready_bytes = len(self.data)
        self._chunks, self._changed = [], lambda: False  # which hold tensors
        self.copied.set()


class StagingBuffer:
    """Memory for one state, reused from save to save; it grows when the state does."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._leaves: list[Leaf] = []
        self._overlap = False
        self._now: list[Chunk] = []
        self._later: list[Chunk] = []
        self._sample = TensorSample(())
        """Of the tensors that are copied later."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._staged: Staged | None = None
        """What was staged last: its save may be over while it is still copied."""

    def stage(self, leaves: list[Leaf], plan: Plan, *, overlap: bool) -> Staged:
        """Copy `leaves`; with `overlap`, steady ones are left to `Staged.copy_rest`.

        The state staged before must not be needed any more.
        """
        if self._staged is not None:
            self._staged.give_up()
        if overlap != self._overlap or not same_items(leaves, self._leaves):
            self._lay_out(leaves, plan, overlap=overlap)
        for device, stream in self._streams.items():  # its copies see all that was enqueued before
            stream.wait_stream(torch.cuda.current_stream(device))
        sample = self._sample
        with self._own_streams():
            sample.take()
        for chunk in self._now:
            chunk.run()
        data = memoryview(self._flat.numpy().data)[: plan.layout.data_bytes]
        # A tensor that is copied as one may reach into the next chunk, which is then not whole;
        # and pieces of more than 16 GB are larger than a chunk.
        whole = all(isinstance(copy, Memcpy) for chunk in self._later for copy in chunk.copies)
        fits = _CHUNK_BYTES % plan.layout.piece_bytes == 0
        pieces = plan.layout.piece_bytes if whole and fits else None

        def changed() -> bool:
            with self._own_streams():  # which do not wait for the training's own work
                return bool(sample.changed())

        staged = Staged(data, self._later, changed, piece_bytes=pieces)
        self._staged = staged
        if not plan.leaves:
            self._leaves, self._now, self._later = [], [], []
            self._sample = TensorSample(())
        return staged

    def gather(self, leaves: list[Leaf], plan: Plan) -> list[memoryview]:
        """Return the bytes of leaves that nobody changes any more, in the order of the file.

        Those of a CPU stay where they are; a GPU's come by way of the pinned buffer.
        """
        if not any(leaf.tensor.is_cuda for leaf in leaves):
            return live_views(leaves, plan.layout)
        return [self.stage(leaves, plan, overlap=False).data]

    def warm(self, leaves: list[Leaf], plan: Plan) -> None:
        """Make the buffer ready for such a state, so that the first save need not wait for it."""
        self._lay_out(leaves, plan, overlap=True)

    def _own_streams(self) -> contextlib.ExitStack:
        """Have what is enqueued within it wait for nothing but the copies."""
        within = contextlib.ExitStack()
        for stream in self._streams.values():
            within.enter_context(torch.cuda.stream(stream))
        return within

    def _lay_out(self, leaves: list[Leaf], plan: Plan, *, overlap: bool) -> None:
        devices = {leaf.tensor.device for leaf in leaves if leaf.tensor.is_cuda}
        self._streams = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in devices
        }
        if plan.layout.data_bytes > len(self._flat):
            self._flat = _memory(plan.layout.data_bytes, pinned=bool(self._streams))
        now, later = _Chunks(), _Chunks()
        sources = []
        for index in plan.layout.order:
            leaf = leaves[index]
            if not leaf.size_bytes:
                continue
            offset = plan.layout.offset(leaf.name)
            put_off = overlap and leaf.steady
            if put_off:
                sources.append(leaf.tensor)
            (later if put_off else now).add(self._copies(leaf, offset), offset)
        self._now, self._later = now.chunks, later.chunks
        self._sample = TensorSample(sources)
        self._leaves, self._overlap = leaves, overlap

    def _copies(self, leaf: Leaf, offset: int) -> Iterator[Memcpy | TensorCopy]:
        tensor = leaf.tensor
        target = self._flat[offset : offset + leaf.size_bytes]
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            shaped = target.view(tensor.dtype).view(tensor.shape)
            yield TensorCopy(shaped, tensor, self._streams.get(tensor.device))
            return
        start = 0
        while start < leaf.size_bytes:  # no copy belongs to two chunks
            size = min(_CHUNK_BYTES - (offset + start) % _CHUNK_BYTES, leaf.size_bytes - start)
            source = tensor.data_ptr() + start
            yield Memcpy(target.data_ptr() + start, source, size, offset + start + size)
            start += size


class _Chunks:
    """Copies in the order of the file, shared out in chunks."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self._number = -1

    def add(self, copies: Iterable[Memcpy | TensorCopy], offset: int) -> None:
        for copy in copies:
            size = copy.size_bytes if isinstance(copy, Memcpy) else copy.target.nbytes
            if offset // _CHUNK_BYTES != self._number:
                self.chunks.append(Chunk([], offset))
                self._number = offset // _CHUNK_BYTES
            self.chunks[-1].copies.append(copy)
            offset += size


def _memory(size_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Return page-aligned memory whose pages are there: not to be faulted in within a save."""
    if pinned:
        size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(paged_memory(size_bytes), dtype=torch.uint8).zero_()


def same_items(some: list[Leaf], others: list[Leaf]) -> bool:
    """Return True if both lists hold the very same leaves."""
    return len(some) == len(others) and all(map(is_, some, others))
