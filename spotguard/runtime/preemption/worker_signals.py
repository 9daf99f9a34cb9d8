"""SIGTERM to the whole process tree does not end the worker processes of data loaders.

torchrun, Slurm, a machine that shuts down and our own agent send SIGTERM to all processes of a job.
torch's workers die of it, and torch answers the death of one with an exception in the midst of
whatever the job does just then, as in its last save. So a worker ends with its job, or by the
SIGTERM of that job alone.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

_LOADERS = {
    "torch.utils.data": "DataLoader",
    "torchdata.stateful_dataloader": "StatefulDataLoader",
}
_CAN_WAIT = hasattr(signal, "sigwaitinfo")
"""macOS has no way to wait for a signal: there SIGTERM ends a worker."""
_ours: set[Any] = set()
"""What stands in the place of a class's `_get_iterator` by now."""


def leave_workers_to_their_job() -> None:
    """Have all data loaders of this process start such workers, from now on; once suffices.

    The script's own are meant, too: one that it keeps for its evaluations may have workers all the
    time. A class that is imported later is left as it is, unless this is called again.
    """
    for module, name in _LOADERS.items():
        kind = getattr(sys.modules.get(module), name, None)
        # All starts go through it; torchdata's `state_dict` starts workers before any `__iter__`.
        begin = getattr(kind, "_get_iterator", None)
        if begin is not None and begin not in _ours:
            begin = _with_quiet_workers(begin)
            _ours.add(begin)
            kind._get_iterator = begin  # type: ignore[union-attr]


def _with_quiet_workers(begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the method that starts a loader's workers."""

    @functools.wraps(begin)
    def iterate(loader: Any) -> Any:
        if not loader.num_workers:
            return begin(loader)
        given = loader.worker_init_fn
        loader.worker_init_fn = Quiet(given)
        try:
            with _born_with_sigterm_held(loader):
                return begin(loader)
        finally:
            loader.worker_init_fn = given

    return iterate


@contextlib.contextmanager
def _born_with_sigterm_held(loader: Any) -> Iterator[None]:
    """Block SIGTERM in this thread: a worker that begins has it blocked in all threads to come.

    One that blocks it later may have another thread by then that does not: torch makes one after
    each fork in a job that has called `torch.set_num_threads`, numpy as it is imported.

    A fork server would hand it on to children that are none of ours: its workers block it late.
    """
    how = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if not _CAN_WAIT or how == "forkserver":
        yield
        return
    if how == "spawn":
        resource_tracker.ensure_running()  # it unblocks SIGTERM as it starts, in the midst of this
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Quiet:
    """Worker start: from here on a worker ends with its own job, or by that job's SIGTERM.

    Ignoring SIGTERM altogether would let a job hang at its exit, which terminates its workers and
    waits for them.

    torch looks for a worker's job, too, but begins after all set-up: a worker whose job was killed
    before that takes whoever adopted it for the job, and waits for work for ever.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Begin as worker number `worker`."""
        if threading.current_thread() is threading.main_thread():  # some loaders' are threads
            _leave_with_job()
        if self._then is not None:
            self._then(worker)


def _leave_with_job() -> None:
    job = multiprocessing.parent_process()  # getppid() may be whoever adopted this worker
    assert job is not None
    assert job.pid is not None
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a fork server's has it not
        _hand_on_nothing_blocked()
        threading.Thread(target=_obey, args=(job.pid,), daemon=True).start()
    threading.Thread(target=_end_with, args=(job,), daemon=True).start()


def _hand_on_nothing_blocked() -> None:
    """Let what this worker starts, such as a decoder, heed SIGTERM: a child inherits the mask.

    While a program starts, a SIGTERM may reach the worker itself: it is heard, and does nothing.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    begin = subprocess.Popen.__init__

    @functools.wraps(begin)
    def unblocked(*args: Any, **options: Any) -> None:
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            begin(*args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    subprocess.Popen.__init__ = unblocked  # type: ignore[method-assign]
    os.register_at_fork(after_in_child=_be_as_usual)


def _be_as_usual() -> None:
    """Heed SIGTERM: this process was forked from a worker, and is none."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _obey(job: int) -> None:
    """End this worker when its job, the process `job`, sends it SIGTERM."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != job:
        pass
    os._exit(0)


def _end_with(job: BaseProcess) -> None:
    """End this worker when its job is gone, however it went."""
    job.join()
    os._exit(0)
