"""One try of the survival matrix: start a job, let it train, hurt it, judge what is left."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.survival import model
from benchmarks.survival.contestant import GRACE_S, ROOT

if TYPE_CHECKING:
    import random

    from benchmarks.survival.contestant import Contestant

_MARK = "SURVIVAL_TRY"
_START_S = 600.0  # to load a Trainer beside others; nothing has struck it yet
_FIRST_STEPS = 3
_FREEZE_S = 0.5
_POLL_S = 0.01
_ERROR = re.compile(r"^(?:\[rank\d\]:)?\s*([\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)

Strike = Callable[[list[psutil.Process], int], float]
"""Hurts the ranks, one of which is the victim; returns the epoch seconds of the blow."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one try ended."""

    contestant: str
    cell: str
    saved: bool = False
    """The checkpoint is of the last step that a rank with a chance to save finished."""
    loadable: bool = False
    """There is a complete checkpoint, and a fresh process trained on from it."""
    finished: int | None = None
    step: int | None = None
    last_word_s: float | None = None
    """From the blow to the last byte that was written beside the checkpoint."""
    left_s: float | None = None
    """From the blow to the exit of the last of those ranks; None: it had to be killed."""
    detail: str = ""

    @property
    def steps_lost(self) -> int | None:
        """Return the steps that a resume trains again; None if all of them."""
        if not self.loadable or self.finished is None or self.step is None:
            return None
        return self.finished - self.step


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A kind of blow."""

    name: str
    note: str
    strike: Strike
    workers: int = 0
    spares: bool = False
    """One rank is taken out at once and can say nothing more."""


def _term_all(ranks: list[psutil.Process], _: int) -> float:
    # Found first, then signalled back to back, as torchrun does: a search takes longer than a step.
    targets = [process for rank in ranks for process in (*rank.children(recursive=True), rank)]
    struck_at = time.time()
    for process in targets:
        with suppress(psutil.NoSuchProcess):  # a worker of an epoch that just ended
            process.send_signal(signal.SIGTERM)
    return struck_at


def _term_one(ranks: list[psutil.Process], victim: int) -> float:
    struck_at = time.time()
    ranks[victim].send_signal(signal.SIGTERM)
    return struck_at


def _kill_one(ranks: list[psutil.Process], victim: int) -> float:
    struck_at = time.time()
    ranks[victim].kill()
    return struck_at


def _freeze_one(ranks: list[psutil.Process], victim: int) -> float:
    ranks[victim].suspend()
    time.sleep(_FREEZE_S)  # the other is in the collective by now
    return _term_one(ranks, 1 - victim)


CELLS = (
    Cell(name="both", note="SIGTERM to both ranks, as torchrun forwards it", strike=_term_all),
    Cell(
        name="both+workers",
        note="the same with two DataLoader workers per rank, which are signalled too",
        strike=_term_all,
        workers=2,
    ),
    Cell(
        name="one",
        note="SIGTERM to one rank only: the other must hear of it",
        strike=_term_one,
    ),
    Cell(
        name="killed",
        note="kill -9 of one rank: the survivor saves alone",
        strike=_kill_one,
        spares=True,
    ),
    Cell(
        name="frozen",
        note="one rank is stopped (SIGSTOP); the other gets the SIGTERM while it hangs",
        strike=_freeze_one,
        spares=True,
    ),
)


def attempt(
    contestant: Contestant, cell: Cell, chance: random.Random, *, keep: Path | None = None
) -> Outcome:
    """Run one job, hurt it as `cell` says, and return what is left of it.

    What a try that failed left behind is copied below `keep`. Blocks for half an hour at most.
    """
    outcome = Outcome(contestant=contestant.name, cell=cell.name)
    with tempfile.TemporaryDirectory(prefix="survival-") as name:
        folder = Path(name)
        for part in ("output", "progress"):
            (folder / part).mkdir()
        outcome = _Try(contestant, cell, folder).run(outcome, chance)
        if keep is not None and not outcome.saved:
            shutil.copytree(folder, keep / f"{cell.name}-{contestant.name}-{folder.name}")
    return outcome


class _Try:
    def __init__(self, contestant: Contestant, cell: Cell, folder: Path) -> None:
        self._contestant = contestant
        self._cell = cell
        self._output = folder / "output"
        self._progress = folder / "progress"
        self._resumed = folder / "resumed"
        self._log = folder / "log.txt"
        self._mark = uuid.uuid4().hex

    def run(self, outcome: Outcome, chance: random.Random) -> Outcome:
        job = self._start()
        try:
            ranks = self._wait_training(job)
            time.sleep(chance.uniform(0.3, 1.5))
            victim = chance.randrange(model.RANKS)
            struck_at = self._cell.strike(ranks, victim)
            able = [
                rank for rank in range(model.RANKS) if not (self._cell.spares and rank == victim)
            ]
            left_s = _wait_gone([ranks[rank] for rank in able], GRACE_S)
        except (TimeoutError, psutil.NoSuchProcess) as problem:
            return replace(outcome, detail=str(problem))
        finally:
            self._bury(job)
        finished = max(model.read_progress(self._progress)[rank][1] for rank in able)
        return self._judge(replace(outcome, left_s=left_s, finished=finished), struck_at)

    def _start(self) -> subprocess.Popen[bytes]:
        variables = {
            **self._contestant.environment(self._output, self._progress),
            model.WORKERS: str(self._cell.workers),
            _MARK: self._mark,
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [*torchrun, "--nproc-per-node", str(model.RANKS), "-m", self._contestant.job],
                cwd=ROOT,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_training(self, job: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Return the ranks, first rank first, once all are past their first steps."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            done = model.read_progress(self._progress)
            if len(done) == model.RANKS and min(last for _, last in done.values()) >= _FIRST_STEPS:
                ranks = [p for p in psutil.Process(job.pid).children() if "RANK" in p.environ()]
                return sorted(ranks, key=lambda p: int(p.environ()["RANK"]))
            if job.poll() is not None:
                raise TimeoutError(f"the job ended before it trained: {self._last_error()}")
            time.sleep(0.05)
        raise TimeoutError("the job never began to train")

    def _judge(self, outcome: Outcome, struck_at: float) -> Outcome:
        last_word_s = _newest_change(self._output) - struck_at
        found = self._contestant.find(self._output)
        problem = self._contestant.resume(self._output, self._resumed, found)
        if problem:
            return replace(outcome, detail=self._why(outcome, problem))
        assert found.step is not None
        assert outcome.finished is not None
        outcome = replace(outcome, loadable=True, step=found.step, last_word_s=last_word_s)
        if found.step != outcome.finished:
            return replace(outcome, detail="the checkpoint is not of the last finished step")
        return replace(outcome, saved=True)

    def _why(self, outcome: Outcome, problem: str) -> str:
        end = "killed at the end of the grace" if outcome.left_s is None else "left by itself"
        error = self._last_error()
        return f"{problem}; {end}" + (f"; last error: {error}" if error else "")

    def _last_error(self) -> str:
        log = self._log.read_text(encoding="utf-8", errors="replace")
        errors = [e for e in _ERROR.findall(log) if "ChildFailedError" not in e]
        return errors[-1][:160] if errors else ""

    def _bury(self, job: subprocess.Popen[bytes]) -> None:
        """Kill all that the job has started, orphans too: they carry its mark."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark:
                    process.kill()
        job.wait(10)


def _wait_gone(processes: list[psutil.Process], timeout_s: float) -> float | None:
    """Return the seconds until all have ended, None if they have not in time."""
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if not any(_lives(process) for process in processes):
            return time.monotonic() - started
        time.sleep(_POLL_S)
    return None


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _newest_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
