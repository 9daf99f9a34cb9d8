"""What a contestant of the survival matrix is: a job to start, and a judge of what it leaves."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.survival import model

GRACE_S = 15.0
"""From the blow to the SIGKILL of all that is left."""
ROOT = Path(__file__).parents[2]
_IMPORTS_S = 600.0
"""For a resume to reach its first step: beside others, a Trainer's imports alone take a minute."""
_RESUME_S = 120.0
"""From there on; one that has not ended by then hangs."""
_FRAME = re.compile(r"^Current thread.*\n\s*(File .*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest checkpoint in what a try left, or why there is none."""

    step: int | None = None
    where: str = ""
    problem: str = ""


class Contestant(ABC):
    """A framework with its best settings for the loss of a machine."""

    name: ClassVar[str]
    package: ClassVar[str]
    """What must be importable; its version is reported."""
    settings: ClassVar[str]
    job: ClassVar[str]
    """The module that trains."""

    @abstractmethod
    def variables(self, output: Path) -> dict[str, str]:
        """Return what to tell the job, beside what every job is told."""

    @abstractmethod
    def find(self, output: Path) -> Found:
        """Return the newest complete checkpoint."""

    def resume_variables(self, output: Path, found: Found) -> dict[str, str]:
        """Return what to tell a job that shall go on from `found`."""
        return {**self.variables(output), model.RESUME: found.where}

    def missing(self) -> str:
        """Return why it cannot take part; empty if it can."""
        if importlib.util.find_spec(self.package) is None:
            return f"left out: `{self.package}` is not installed"
        return ""

    def version(self) -> str:
        """Return the installed version."""
        return importlib.metadata.version(self.package)

    def environment(self, output: Path, progress: Path) -> dict[str, str]:
        """Return the whole environment of a job."""
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONFAULTHANDLER": "1",
            model.PROGRESS: str(progress),
            **self.variables(output),
        }

    def resume(self, output: Path, progress: Path, found: Found) -> str:
        """Return why a fresh process, alone, cannot train two steps from `found`; empty if it can.

        Blocks for twelve minutes at most. One that hangs is told with the place in its code.
        """
        if found.step is None:
            return found.problem or "nothing was saved"
        progress.mkdir()
        variables = {
            **self.environment(output, progress),
            **self.resume_variables(output, found),
            model.UNTIL: str(found.step + 2),
        }
        log = progress.with_name("resumed.txt")
        with log.open("wb") as said:
            job = subprocess.Popen(
                [sys.executable, "-m", self.job],
                cwd=ROOT,
                env=variables,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            hung = _where_it_hung(job, progress)
        words = log.read_text(encoding="utf-8", errors="replace")
        if hung:
            frame = _FRAME.search(words)
            return f"the resume hung {hung}, at {frame[1] if frame else 'a place unknown'}"
        trained = model.read_progress(progress).get(0)
        if job.returncode or trained is None:
            return f"the resume failed: {words.strip().splitlines()[-1:]}"
        if trained != (found.step + 1, found.step + 2):
            return f"the resume trained steps {trained}, after a checkpoint of {found.step}"
        return ""


def _where_it_hung(job: subprocess.Popen[bytes], progress: Path) -> str:
    """Wait for the end of a resume; return how far it was when it had to be killed, else nothing.

    It writes where each of its threads was when it is.
    """
    ends = {"before its first step": _IMPORTS_S, "after its first step": _RESUME_S}
    for stage, limit_s in ends.items():
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if job.poll() is not None:
                return ""
            if stage.startswith("before") and model.read_progress(progress):
                break
            time.sleep(0.1)
        else:
            job.send_signal(signal.SIGABRT)
            job.wait()
            return stage
    return ""
