"""The process around a job: its device, process group, log, progress file and last breath."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import mmap
import os
import re
import struct
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from spotguard.errors import SpotguardError
from spotguard.events.states import EXIT_CODE_OF_JOB_TOLD_TO_STOP
from spotguard.runtime.distributed.rendezvous import LostContact

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from spotguard.runtime.process.settings import Settings

log = logging.getLogger("spotguard")

_exits: list[threading.Timer] = []
_hooks: list[tuple[Any, Any]] = []
"""`sys.excepthook` before and after torch made a process group: it hangs in one, for good."""
_left_group = False
"""True while the process group is of a run that is over."""
_PEER_WORDS = re.compile(r"gloo|nccl|processgroup|connection (closed|reset)|broken pipe", re.I)


class ProgressFile:
    """The node's 16-byte progress file: steps done and steps in all, int64 little-endian."""

    def __init__(self, path: str | None) -> None:
        self._map: mmap.mmap | None = None
        if path:
            with open(path, "r+b") as file:  # noqa: PTH123 - mmap wants a file descriptor
                self._map = mmap.mmap(file.fileno(), 16)

    def write(self, step: int, total: int) -> None:
        """Say how far the job is; costs less than a microsecond."""
        if self._map is not None:
            struct.pack_into("<qq", self._map, 0, step, total)


def device_of(local_rank: int) -> torch.device:
    """Return the rank's GPU, made current, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def ensure_process_group(settings: Settings, backend: str | None) -> bool:
    """Create the process group unless the script has; return True if it is ours to destroy."""
    global _left_group
    left, _left_group = _left_group, False
    atexit.unregister(destroy_group)
    if not dist.is_available() or dist.is_initialized():
        return left
    before = sys.excepthook
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if settings.world_size > 1:
        dist.init_process_group(backend)
    else:  # so that DDP, FSDP and collectives work in a script that runs alone
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    _hooks.append((before, sys.excepthook))
    return True


def destroy_group() -> None:
    """Destroy the process group, if it is there."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_group(world_size: int) -> None:
    """Let go of the process group that is ours, as the run is over and the process goes on.

    That of several ranks stays, for the next run or the process's end: a second one would read the
    addresses of the first in the same store, and hang (torch 2.13).
    """
    global _left_group
    if world_size == 1:
        destroy_group()
        before, torchs = _hooks.pop()
        if sys.excepthook is torchs:
            sys.excepthook = before
        return
    _left_group = True
    atexit.register(destroy_group)


def speaks_of_peers(error: BaseException) -> bool:
    """Return True if a collective or the rendezvous failed because another rank is gone."""
    if isinstance(error, (LostContact, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_WORDS.search(str(error)))


def place_in_script(trace: TracebackType | None) -> str:
    """Return `script.py:12: ` for the innermost line that is the script's own, else nothing.

    That is neither spotguard's, nor an installed package's, unless there is no other.
    """
    ours = str(Path(__file__).parents[2])
    others = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(ours)]
    lines = [f for f in others if "site-packages" not in Path(f.filename).parts] or others
    return f"{lines[-1].filename}:{lines[-1].lineno}: " if lines else ""


class _QuietHandler(logging.StreamHandler):  # type: ignore[type-arg]  # 3.10 has no [ ] for it
    """Writes to stderr, and does not mind when nobody reads it any more."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: at a preemption the log pipe often dies first."""


def log_to_stderr() -> None:
    """Show our own lines unless the script has set up logging for us."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = _QuietHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("spotguard: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def tell_uncaught_in_a_sentence() -> None:
    """Let an error of ours that nobody catches end the script in one sentence, with its exit code.

    As a `Job` does once there is one. Other errors are left to Python.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SpotguardError):
            before(kind, error, trace)
            return
        log_to_stderr()
        log.error("%s%s", place_in_script(trace), sentence(error))
        if not at_prompt():
            raise SystemExit(error.exit_code)

    sys.excepthook = hook


def exit_soon(seconds: float, code: int = EXIT_CODE_OF_JOB_TOLD_TO_STOP) -> None:
    """End the process even if the script's own clean-up hangs in a collective."""
    timer = threading.Timer(seconds, exit_now, [code])
    timer.daemon = True
    timer.start()
    _exits.append(timer)


def cancel_exits() -> None:
    """Take back each `exit_soon`."""
    while _exits:
        _exits.pop().cancel()


def at_prompt() -> bool:
    """Return True in a notebook and the like: who types there wants to go on after an error."""
    return hasattr(sys, "ps1")


def exit_now(code: int = EXIT_CODE_OF_JOB_TOLD_TO_STOP) -> NoReturn:
    """End the process at once; the usual code is that of a job that was told to stop."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the log pipe may be dead already
            stream.flush()
    os._exit(code)


def free_device(patience_s: float = 5.0) -> None:
    """End collectives that wait for a rank that is gone, on a GPU; blocks `patience_s` at most.

    NCCL's kernels wait for ever, and with them all that is queued behind: also the copies of a
    save. On CPUs nothing is queued.
    """
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not on_gpu or not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)  # not in all versions
    if abort is not None:
        thread = threading.Thread(target=abort, name="spotguard-abort", daemon=True)
        thread.start()
        thread.join(patience_s)


def sentence(problem: SpotguardError) -> str:
    """Return what went wrong and the way out, as one sentence."""
    return f"{problem.message} ({problem.hint})" if problem.hint else problem.message


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from walking all objects, again and again, as many are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_garbage() -> None:
    """Have Python end without collecting garbage: for the last handler before the process ends.

    It would walk all objects several times, which takes a second of processor time and more where
    big libraries are loaded, of the grace of a node that is taken away. Everything that is to run
    at the end still runs.
    """
    gc.disable()
    gc.freeze()
