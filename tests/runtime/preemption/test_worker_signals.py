from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from spotguard.runtime.preemption.worker_signals import Quiet, leave_workers_to_their_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaders start quiet workers, for the time of a test."""
    monkeypatch.setattr(
        DataLoader, "_get_iterator", DataLoader._get_iterator
    )  # is put back afterwards
    leave_workers_to_their_job()


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """With more than one, torch has a thread in each forked worker before its set-up."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class WhoAmI(Dataset[Any]):
    """Each sample tells the process that read it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, os.getpid()])


def readers_in(batches: list[Any]) -> set[int]:
    """Return the processes that read some batches."""
    return {int(pid) for batch in batches for pid in batch[:, 1]}


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Return whether `condition` came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - a line of the kernel's
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.e2e)])
def test_workers_survive_sigterm_and_end_with_the_reader(how: str) -> None:
    """A SIGTERM to the whole process tree leaves them at work; closing ends every one."""
    loader = DataLoader(WhoAmI(), batch_size=2, num_workers=2, multiprocessing_context=how)
    batches = iter(loader)
    workers = readers_in([next(batches) for _ in range(2)])

    assert len(workers) == 2
    assert os.getpid() not in workers
    for _ in range(3):  # from another process, as torchrun does; and more than once
        subprocess.run(["kill", "-TERM", *map(str, workers)], check=True, timeout=10)
    assert readers_in([next(batches) for _ in range(20)]) == workers
    del batches
    assert wait_for(lambda: not any(alive(worker) for worker in workers))


def test_workers_that_are_threads_are_left_alone() -> None:
    """MONAI's `ThreadDataLoader` has such: they end with the job, whose signals are its own."""
    before = signal.getsignal(signal.SIGTERM)
    said: list[object] = []

    worker = threading.Thread(target=Quiet(said.append), args=(3,))
    worker.start()
    worker.join()
    assert said == [3]
    assert signal.getsignal(signal.SIGTERM) is before


class Stuck(WhoAmI):
    """Reads its first sample, and the second one never."""

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            time.sleep(600)
        return super().__getitem__(index)


@pytest.mark.usefixtures("_threads")
def test_a_stuck_worker_obeys_its_own_job() -> None:
    """What a job does at its exit, terminate workers and wait for them, must not hang for ever."""
    batches = iter(DataLoader(Stuck(), batch_size=1, num_workers=1))
    (worker,) = readers_in([next(batches)])
    assert alive(worker)
    os.kill(worker, signal.SIGTERM)

    assert wait_for(lambda: not alive(worker))
    del batches


class Decoding(WhoAmI):
    """Each sample is read by a program, which is told to end before it does by itself."""

    def __getitem__(self, index: int) -> Any:
        decoder = subprocess.Popen(["sleep", "600"])
        decoder.terminate()
        forked = os.fork()
        if not forked:
            time.sleep(600)
        os.kill(forked, signal.SIGTERM)
        _, status = os.waitpid(forked, 0)
        return torch.tensor([decoder.wait(), -os.WTERMSIG(status)])


def test_programs_that_a_worker_starts_obey_sigterm() -> None:
    """A child inherits what its parent blocks: `terminate` and `wait` would wait for ever."""
    batches = iter(DataLoader(Decoding(), batch_size=1, num_workers=1, timeout=30))
    assert next(batches).tolist() == [[-signal.SIGTERM, -signal.SIGTERM]]


def test_a_worker_whose_job_is_killed_while_it_starts_ends_too(tmp_path: Path) -> None:
    """kill -9 of a rank leaves no worker behind, however early in the worker's life it comes.

    torch itself would wait for ever: it takes whoever adopted the worker for the worker's job.
    """
    told, may_go_on = tmp_path / "worker", tmp_path / "killed"

    def start(_: int) -> None:
        (tmp_path / "half").write_text(str(os.getpid()))
        (tmp_path / "half").rename(told)
        wait_for(may_go_on.exists)

    job = os.fork()
    if job == 0:
        next(iter(DataLoader(WhoAmI(), num_workers=1, worker_init_fn=start)))
        os._exit(1)
    assert wait_for(told.exists)
    worker = int(told.read_text())
    try:
        os.kill(job, signal.SIGKILL)
        os.waitpid(job, 0)
        may_go_on.touch()
        assert wait_for(lambda: not alive(worker))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_a_script_finds_its_loader_as_it_was(tmp_path: Path) -> None:
    """Its own start of workers runs in each; nothing else of the loader or the job is changed."""

    def start(number: int) -> None:
        (tmp_path / str(number)).touch()

    loader = DataLoader(WhoAmI(), num_workers=2, worker_init_fn=start)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    begin = DataLoader._get_iterator
    leave_workers_to_their_job()

    assert len(list(loader)) == 64
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert loader.worker_init_fn is start
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
    assert DataLoader._get_iterator is begin, "asked for again, it is not wrapped again"
