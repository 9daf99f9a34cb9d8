"""What a way to checkpoint must offer to be measured."""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.checkpoint.api import CheckpointException

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.checkpoint.state import TrainingState

FAILURES = (Exception, CheckpointException)
"""What a method may raise; DCP's own is not an `Exception`."""


def _at_once() -> None:
    """Nothing to wait for."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A save under way."""

    durable: Future[float]
    """When the checkpoint is complete and synced: that instant, by `time.perf_counter`."""
    wait_until_free: Callable[[], object] = field(default=_at_once)
    """Blocks until the state may be changed: what an optimizer step has to wait for."""


class Contestant(ABC):
    """Whatever gets a row in the table, working on `state` in `folder`."""

    name: ClassVar[str]
    note: ClassVar[str] = ""
    format: ClassVar[str] = ""
    """Methods of the same format restore by the same code; the floors have none."""

    def __init__(self, folder: Path, state: TrainingState) -> None:
        self.folder = folder
        self.state = state

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """Let threads and processes go."""


class Method(Contestant):
    """One way to checkpoint."""

    background: ClassVar[bool] = False
    """True if training goes on while it saves."""
    unsafe_to_damage: ClassVar[tuple[str, ...]] = ()
    """Files in which a flipped bit could run code (pickles): they are left alone."""

    @abstractmethod
    def save(self, number: int) -> Pending:
        """Begin to save the state as checkpoint `number`, higher than all before."""

    @abstractmethod
    def load(self, number: int, target: TrainingState) -> None:
        """Restore checkpoint `number` into the live tensors of `target`."""

    def files(self) -> list[Path]:
        """Return the files of all checkpoints that are kept."""
        return [path for path in sorted(self.folder.rglob("*")) if path.is_file()]

    def clear(self) -> None:
        """Remove all checkpoints; the next save finds the method as warm as before."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def saved() -> Pending:
    """Return a save that is done."""
    durable: Future[float] = Future()
    durable.set_result(time.perf_counter())
    return Pending(durable=durable)


def when_done(future: Any) -> Future[float]:
    """Return a future with the instant at which `future` (of any library) was done."""
    durable: Future[float] = Future()

    def note(done: Any) -> None:
        at = time.perf_counter()
        problem = done.exception()
        if problem is None:
            durable.set_result(at)
        else:
            durable.set_exception(problem)

    future.add_done_callback(note)
    return durable


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_from_cache(path: Path) -> None:
    """Make the next read of a file come from the disk."""
    sync_file(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def bring_into_cache(path: Path) -> None:
    """Make the next read of a file come from the page cache, however it was written."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
