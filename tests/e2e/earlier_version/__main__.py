"""Makes the archives of one earlier version: `python -m tests.e2e.earlier_version PYTHON NAME`.

PYTHON is an interpreter that has that version; what it makes goes to `runs/NAME`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.earlier_version import fixture
from tests.e2e.lab.lab_jobs import Lab, Said, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

_STEP = 12
"""Runs are cut short from here on, of 40 steps."""


class EarlierLab(Lab):
    """A machine with an earlier version on it."""

    def __init__(self, folder: Path, python: str) -> None:
        super().__init__(folder)
        self._python = python
        (self.work / fixture.JOB.name).write_bytes(fixture.JOB.read_bytes())

    def spotguard(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 400.0
    ) -> Said:
        """Run one command of that version."""
        return self.run(
            self._python, "-m", "spotguard.cli", *arguments, env=env, timeout_s=timeout_s
        )

    def begin(self) -> str:
        """Start the job, wait until it is in the middle, and return the run's id."""
        store = self.home.parent / "store"
        run = self.start(Path(fixture.JOB.name), *_flags(store), args=("--pause", "0.3"))
        self.wait_for_step(run, _STEP)
        return run

    def lose_power(self) -> None:
        """Kill everything at once."""

        def all_killed() -> bool:
            processes = self.processes()
            for process in processes:
                process.kill()
            return not processes

        wait_until(all_killed, "all processes are gone")


def _flags(store: Path) -> tuple[str | Path, ...]:
    return ("--nodes", "2", "--save-every", "5 steps", "--store", store)


def main(python: str, name: str) -> None:
    """Make `runs/NAME`."""
    to = fixture.FOLDER / name
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="spotguard-earlier-") as made:
        calm = EarlierLab(Path(made) / "calm", python)
        status = calm.up(Path(fixture.JOB.name), *_flags(Path(made) / "calm" / "store"))
        (to / "undisturbed.json").write_text(json.dumps(fixture.outcome(status), indent=2) + "\n")
        stopped = EarlierLab(Path(made) / "stopped", python)
        said = stopped.spotguard("stop", stopped.begin())
        assert said.code == 0, said.err
        fixture.pack(stopped, to / "stopped.tar.gz")
        killed = EarlierLab(Path(made) / "killed", python)
        killed.begin()
        killed.lose_power()
        fixture.pack(killed, to / "killed.tar.gz")


if __name__ == "__main__":
    main(*sys.argv[1:])
