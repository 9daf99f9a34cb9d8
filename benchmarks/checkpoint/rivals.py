"""The other ways to checkpoint, each with the settings that serve it best."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.checkpoint.method import Method, Pending, saved, sync_file, when_done

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.checkpoint.state import TrainingState


class TorchSave(Method):
    """`torch.save` to a temporary file, fsync, rename."""

    name = "torch.save + fsync"
    format = "torch.save"

    def save(self, number: int) -> Pending:
        """Write the file and return."""
        with _replacing(self.folder / str(number)) as temp:
            torch.save(self.state.tree(), temp)
        return saved()

    def load(self, number: int, target: TrainingState) -> None:
        """Read the file and copy into the live tensors."""
        found = torch.load(self.folder / str(number), weights_only=True)
        for part, group in target.tree().items():
            for name, tensor in group.items():
                tensor.copy_(found[part][name])


class Safetensors(Method):
    """`save_file` to a temporary file, fsync, rename."""

    name = "safetensors + fsync"
    format = "safetensors"

    def save(self, number: int) -> Pending:
        """Write the file and return."""
        with _replacing(self.folder / str(number)) as temp:
            save_file(self.state.flat(), temp)
        return saved()

    def load(self, number: int, target: TrainingState) -> None:
        """Map the file and copy into the live tensors."""
        with safe_open(self.folder / str(number), "pt") as file:
            for name, tensor in target.flat().items():
                tensor.copy_(file.get_tensor(name))


class DcpSave(Method):
    """torch.distributed.checkpoint, blocking."""

    name = "DCP save"
    note = "FileSystemWriter, which syncs its files"
    format = "DCP"
    unsafe_to_damage = (".metadata",)

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def save(self, number: int) -> Pending:
        """Write the folder and return."""
        state_dict_saver.save(self.state.tree(), checkpoint_id=self.folder / str(number))
        return saved()

    def load(self, number: int, target: TrainingState) -> None:
        """Read straight into the live tensors."""
        state_dict_loader.load(target.tree(), checkpoint_id=self.folder / str(number))


class DcpAsyncThread(DcpSave):
    """DCP's `async_save` with a thread; its staging buffers are kept from save to save."""

    name = "DCP async thread"
    note = "persistent DefaultStager; with CUDA pinned and staged asynchronously"
    background = True
    checkpointer: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        cuda = state.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=self.checkpointer is AsyncCheckpointerType.PROCESS,
                use_async_staging=cuda,
                use_non_blocking_copy=cuda,
            )
        )

    def save(self, number: int) -> Pending:
        """Stage the state and leave the writing to the thread or process."""
        answer: Any = state_dict_saver.async_save(
            self.state.tree(),
            checkpoint_id=self.folder / str(number),
            async_stager=self._stager,
            async_checkpointer_type=self.checkpointer,
        )
        if isinstance(answer, AsyncSaveResponse):
            return Pending(
                durable=when_done(answer.upload_completion),
                wait_until_free=partial(_wait_for, answer.staging_completion),
            )
        return Pending(durable=when_done(answer))

    def close(self) -> None:
        """Let the staging buffers go."""
        self._stager.close()


class DcpAsyncProcess(DcpAsyncThread):
    """DCP's `async_save` with a process of its own, fed through shared memory."""

    name = "DCP async process"
    note = "persistent DefaultStager in shared memory"
    checkpointer = AsyncCheckpointerType.PROCESS


class Torchsnapshot(Method):
    """torchsnapshot's `async_take`."""

    name = "torchsnapshot async"
    note = "does not fsync: durable means handed to the kernel"
    format = "torchsnapshot"
    background = True

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        self._library: Any = importlib.import_module("torchsnapshot")

    def save(self, number: int) -> Pending:
        """Stage the state; the library's thread writes it."""
        taken = self._library.Snapshot.async_take(
            str(self.folder / str(number)), self._parts(self.state)
        )
        durable: Future[float] = Future()

        def wait() -> None:
            try:
                taken.wait()
            except Exception as problem:  # noqa: BLE001  # a thread's top: the waiter raises it
                durable.set_exception(problem)
            else:
                durable.set_result(time.perf_counter())

        threading.Thread(target=wait, daemon=True).start()
        return Pending(durable=durable)

    def load(self, number: int, target: TrainingState) -> None:
        """Read straight into the live tensors."""
        self._library.Snapshot(str(self.folder / str(number))).restore(self._parts(target))

    def _parts(self, state: TrainingState) -> dict[str, Any]:
        return {"state": self._library.StateDict(**state.tree())}


def _wait_for(staging: Future[Any]) -> None:
    staging.result()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; sync it and rename it to `path` at the end."""
    temp = path.with_suffix(".tmp")
    yield temp
    sync_file(temp)
    temp.replace(path)


RIVALS: tuple[type[Method], ...] = (
    TorchSave,
    Safetensors,
    DcpSave,
    DcpAsyncThread,
    DcpAsyncProcess,
    Torchsnapshot,
)
