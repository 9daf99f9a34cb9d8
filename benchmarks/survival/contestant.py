"""What a contestant of the survival matrix is: a job to start, and a judge of what it leaves."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.survival import model

GRACE_S = 15.0
"""From the blow to the SIGKILL of all that is left."""
ROOT = Path(__file__).parents[2]
_RESUME_S = 180.0


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
            model.PROGRESS: str(progress),
            **self.variables(output),
        }

    def resume(self, output: Path, progress: Path, found: Found) -> str:
        """Return why a fresh process, alone, cannot train two steps from `found`; empty if it can.

        Blocks for three minutes at most.
        """
        if found.step is None:
            return found.problem or "nothing was saved"
        progress.mkdir()
        variables = {
            **self.environment(output, progress),
            **self.resume_variables(output, found),
            model.UNTIL: str(found.step + 2),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", self.job],
                cwd=ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_RESUME_S,
                check=False,
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            return "the resume hung"
        trained = model.read_progress(progress).get(0)
        if done.returncode or trained is None:
            return f"the resume failed: {done.stdout.strip().splitlines()[-1:]}"
        if trained != (found.step + 1, found.step + 2):
            return f"the resume trained steps {trained}, after a checkpoint of {found.step}"
        return ""
