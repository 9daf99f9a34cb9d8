"""What the machine itself can do: no checkpoint is faster than these."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from benchmarks.checkpoint.method import Contestant, drop_from_cache
from spotguard.storage.buffers import paged_memory

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.checkpoint.state import TrainingState

_PAGE_BYTES = 4096
_CHUNK_BYTES = 16 << 20
_READ_BYTES = 1 << 19
_READ_THREADS = 4


class Floor(Contestant):
    """One limit of the machine, for as many bytes as the state has."""

    bounds: ClassVar[str]
    """Which of a method's samples it is the floor of: `stall_s`, `durable_s` or `cold_s`."""

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        self.size_bytes = -(-state.size_bytes // _PAGE_BYTES) * _PAGE_BYTES

    @abstractmethod
    def measure_s(self) -> float:
        """Return the seconds that it takes now."""


class Memcpy(Floor):
    """One copy of the bytes into memory that is paged in, by one thread; from the GPU if there."""

    name = "memcpy"
    bounds = "stall_s"
    note = "one flat copy into warm memory, one thread (with CUDA: device to pinned memory)"

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        self._cuda = state.device.type == "cuda"
        self._source = torch.ones(self.size_bytes, dtype=torch.uint8, device=state.device)
        self._target = torch.ones(self.size_bytes, dtype=torch.uint8, pin_memory=self._cuda)

    def measure_s(self) -> float:
        """Return the seconds of one copy."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        started = time.perf_counter()
        self._target.copy_(self._source)
        if self._cuda:
            torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - started
        torch.set_num_threads(threads)
        return elapsed_s


class _Write(Floor):
    """Writes of large pieces from page-aligned memory, then fsync."""

    bounds = "durable_s"
    flags = 0

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        self._memory = _filled(self.size_bytes)

    def measure_s(self) -> float:
        """Return the seconds until the bytes are durable in a new file."""
        view = self._memory
        path = self.folder / "floor"
        mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self.flags
        descriptor = os.open(path, mode, 0o600)
        try:
            started = time.perf_counter()
            os.posix_fallocate(descriptor, 0, self.size_bytes)
            offset = 0
            while offset < self.size_bytes:
                offset += os.pwrite(descriptor, view[offset : offset + _CHUNK_BYTES], offset)
            os.fsync(descriptor)
            return time.perf_counter() - started
        finally:
            os.close(descriptor)
            path.unlink()


class BufferedWrite(_Write):
    """The usual way to write a file."""

    name = "write + fsync"
    note = "fallocate, 16 MiB buffered writes, fsync"


class DirectWrite(_Write):
    """Past the page cache: the shortest way to durable bytes."""

    name = "O_DIRECT"
    note = "fallocate, 16 MiB direct writes from aligned memory, fsync"
    flags = getattr(os, "O_DIRECT", 0)


class DirectRead(Floor):
    """Past the page cache: the shortest way from the disk, into memory that stays in the CPU's."""

    name = "O_DIRECT read"
    bounds = "cold_s"
    note = "512 KiB direct reads by four threads, each into huge pages of its own; no hash, no copy"

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        self._path = self.folder / "floor"
        self._path.write_bytes(_filled(self.size_bytes))
        self._memory = [_filled(_READ_BYTES) for _ in range(_READ_THREADS)]

    def measure_s(self) -> float:
        """Return the seconds until all bytes have come."""
        drop_from_cache(self._path)
        descriptor = os.open(self._path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        starts = iter(range(0, self.size_bytes, _READ_BYTES))

        def read(into: memoryview) -> None:
            for start in starts:
                os.preadv(descriptor, [into], start)

        threads = [threading.Thread(target=read, args=(into,)) for into in self._memory]
        try:
            started = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return time.perf_counter() - started
        finally:
            os.close(descriptor)


def _filled(size_bytes: int) -> memoryview:
    memory = paged_memory(size_bytes)
    memory[:] = b"\1" * len(memory)
    return memory


FLOORS: tuple[type[Floor], ...] = (Memcpy, BufferedWrite, DirectWrite, DirectRead)
