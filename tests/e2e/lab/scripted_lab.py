"""What the labs that a script of `infra/` brings up have in common, as tests use them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tests.e2e.lab.far_machine import FarMachine
from tests.e2e.lab.lab_jobs import NO_SMOKE, weights_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.e2e.lab.lab_jobs import Status, Weights

INFRA = Path(__file__).parents[3] / "infra"


def output(
    command: Sequence[str | Path], environ: Mapping[str, str], limit_s: float = 120.0
) -> str:
    """Return what a command prints; fail with its words if it fails, or takes longer."""
    words = " ".join(str(word) for word in command)
    try:
        done = subprocess.run(
            [str(word) for word in command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{words}: not in {limit_s} s\n{late.stdout!r}") from late
    assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environ_of(script: Path, knobs: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a shell that uses the lab of a script."""
    printed = output(["bash", "-c", f'eval "$({script} env)"; env -0'], knobs)
    return dict(line.split("=", 1) for line in printed.split("\0") if line)


class ScriptedLab:
    """A running lab, whose runs are kept in an S3 of its own."""

    script: ClassVar[Path]
    prefix: ClassVar[str]
    """How the names of the script's settings begin."""

    def __init__(self, folder: Path, owner: int) -> None:
        """It comes down by itself once the process `owner` is gone."""
        self.folder = folder
        self.owner = owner
        self.environ: dict[str, str] = {}

    def join(self) -> None:
        """Use a lab that is up."""
        self.environ = environ_of(self.script, self._knobs())

    def down(self) -> None:
        """Take away whatever is there, in whatever state."""
        self.verb("down")

    def verb(self, *words: str, timeout_s: float = 120.0) -> str:
        """Run one of the lab's verbs."""
        return output([self.script, *words], self._knobs(), timeout_s)

    def sky(self, *words: str) -> str:
        """Run SkyPilot's command line."""
        return output([Path(sys.executable).with_name("sky"), *words], self.environ, 400.0)

    def aws(self, *words: str) -> str:
        """Run AWS' command line."""
        return output(["aws", *words], self.environ, 200.0)

    def _knobs(self) -> dict[str, str]:
        given = {
            "DATA": str(self.folder / "data"),
            "HOME": str(self.folder / "home"),
            "VENV": str(Path(sys.executable).parents[1]),
            "FOR_PID": str(self.owner),
        }
        return {**os.environ, **{f"{self.prefix}_{key}": value for key, value in given.items()}}


class BucketMachine(FarMachine):
    """A user's machine that can reach such a lab; its runs are kept in S3."""

    def __init__(self, folder: Path, lab: ScriptedLab, bucket: str) -> None:
        super().__init__(folder)
        self.folder = folder
        self.bucket = bucket
        self.prefix = f"{folder.name}-{time.time():.0f}"
        self._lab = lab

    @property
    def store(self) -> str:
        """Where its runs lie."""
        return f"s3://{self.bucket}/{self.prefix}"

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a shell that uses the lab."""
        given = {**self._lab.environ, "SPOTGUARD_STORE": self.store, **NO_SMOKE}
        return {**given, "SPOTGUARD_HOME": str(self.home), **(more or {})}

    def start_at(self, infra: str, job: Path, *flags: str, args: tuple[str, ...]) -> str:
        """Start a run and return its id."""
        copy = self.work / job.name
        copy.write_text(job.read_text())
        return self.start(copy, "--infra", infra, "--save-every", "5 steps", *flags, args=args)

    def final_weights(self, status: Status) -> Weights:
        """Return every tensor of a finished run's last checkpoint, to the last bit."""
        assert status["state"] == "finished", status
        assert status["saved_step"] == status["total_steps"]
        folder = self.folder / "fetched"
        self._lab.aws("s3", "sync", "--quiet", status["store"], str(folder))
        return weights_at(folder, status["total_steps"])
