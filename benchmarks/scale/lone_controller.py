"""A real controller in a process of its own, on a made-up cloud: it tells when it looked.

python -m benchmarks.scale.lone_controller HOME LOOKS

Its run has a journal, a live file and a store below HOME, as any other; its job trains for ever and
saves every few seconds. Each look is a line of LOOKS: seconds of the steady clock. SIGTERM ends it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.run_folder import RunFolder
from spotguard.control.supervisor.policy import Policy
from spotguard.control.supervisor.supervisor import Supervisor
from spotguard.shared.units import SystemClock
from spotguard.spec.model import JobSpec
from spotguard.storage import PrefixedStore, open_store
from spotguard.testing.job import FakeJob
from spotguard.testing.launcher import FakeLauncher

if TYPE_CHECKING:
    from typing import TextIO

RUN_ID = "lone-run-260301-000000-abcd"


class Watched(Supervisor):
    """A supervisor that writes down when it looks."""

    looks: TextIO

    def tick(self, *, alone: bool = False) -> None:
        """Look, and say so."""
        self.looks.write(f"{time.monotonic():.6f}\n")
        super().tick(alone=alone)


def main() -> None:
    """Control the run until SIGTERM."""
    home, told = Path(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = RunFolder(home / "runs" / RUN_ID)
    folder.path.mkdir(parents=True)
    root = open_store(str(home / "store")).url
    spec = JobSpec(script="/job.py", workdir="/", name="lone", store=root)
    store, clock = PrefixedStore(open_store(root), RUN_ID), SystemClock()
    with (
        contextlib.suppress(SystemExit),
        told.open("w", buffering=1) as looks,
        Journal.create(folder.journal_path) as journal,
        folder.control(patience_s=0.0),
    ):
        created = {
            "run_id": RUN_ID,
            "name": "lone",
            "store_root": root,
            "limits": limits_to_json(Limits()),
            "spec": spec.to_json(),
        }
        journal.append(Kind.CREATED.value, at=clock.now(), data=created)
        job = FakeJob(store=store, total_steps=1_000_000, step_s=0.5, save_every=10)
        supervisor = Watched(
            journal=journal,
            launcher=FakeLauncher(clock, job),
            store=store,
            clock=clock,
            policy=Policy(),
            live_path=folder.live_path,
        )
        supervisor.looks = looks
        supervisor.run()


if __name__ == "__main__":
    main()
