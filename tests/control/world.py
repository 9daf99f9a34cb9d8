"""A whole controller in memory: fake clock, cloud, job and store, a real journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotguard.control.journal import cost
from spotguard.control.journal.fold import limits_to_json, read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits, RunRecord
from spotguard.control.supervisor.policy import Policy
from spotguard.control.supervisor.supervisor import Supervisor
from spotguard.spec.model import JobSpec
from spotguard.testing.clock import FakeClock
from spotguard.testing.job import FakeJob
from spotguard.testing.launcher import FakeLauncher
from spotguard.testing.stores import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

RUN_ID = "job-1"


class World:
    """Everything that one run needs, and outlives its controllers."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: Limits | None = None,
        policy: Policy | None = None,
        launcher: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None,
        tick_s: float = 0.5,
        **job: Any,
    ) -> None:
        self.folder = folder
        self.tick_s = tick_s  # how often its controllers look: half as often takes half the work
        self.clock = FakeClock()
        self.store = MemoryStore()
        self.job = FakeJob(store=self.store, **job)
        self.launcher = FakeLauncher(self.clock, self.job, **(launcher or {}))
        self.policy = policy or Policy(capacity_patience_s=60.0)
        plain = JobSpec(script="/job.py", workdir="/", name="job", store="/store")
        asked = plain.replace(**(spec or {}))
        begun = asked.in_phase(0)
        with Journal.create(folder / "journal.db") as journal:
            journal.append(
                Kind.CREATED.value,
                at=self.clock.now(),
                data={
                    "run_id": RUN_ID,
                    "name": "job",
                    "store_root": "memory://",
                    "limits": limits_to_json(limits or Limits()),
                    "spec": begun.to_json(),
                    "job": asked.to_json() if asked.phases else None,
                },
            )

    def journal(self) -> Journal:
        """Open the journal."""
        return Journal.open(self.folder / "journal.db")

    def supervisor(self, journal: Journal, **parts: Any) -> Supervisor:
        """Return a new controller on what there is."""
        given: dict[str, Any] = {
            "launcher": self.launcher,
            "store": self.store,
            "clock": self.clock,
            "policy": self.policy,
            "live_path": self.folder / "live.json",
            "tick_s": self.tick_s,
        }
        return Supervisor(journal=journal, **{**given, **parts})

    def run(self) -> RunRecord:
        """Control the run until it settles, through all its phases."""
        with self.journal() as journal:
            record = self.supervisor(journal).run()
            while record.settled is None:
                record = self.supervisor(journal).run(goes_on=True)
            return record

    def run_until(self, at_s: float) -> RunRecord:
        """Control the run for some seconds, then drop the controller."""
        until = self.clock.now() + at_s
        with self.journal() as journal:
            supervisor = self.supervisor(journal)
            while self.clock.now() < until and supervisor.record.settled is None:
                supervisor.tick()
                self.clock.sleep(0.5)
            return supervisor.record

    def write(self, kind: Kind, data: dict[str, Any] | None = None) -> None:
        """Append an event, as a command of the user does."""
        with self.journal() as journal:
            journal.append(kind.value, at=self.clock.now(), data=data)

    def record(self) -> RunRecord:
        """Return what the journal says now."""
        with self.journal() as journal:
            return read_record(journal)

    def kinds(self) -> list[str]:
        """Return the kinds of all journal events."""
        with self.journal() as journal:
            return [entry.kind for entry in journal.events()]

    def spent_usd(self) -> float:
        """Return the known cost by the journal."""
        return cost.known_spent_usd(self.record(), self.clock.now())
