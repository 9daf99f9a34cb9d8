"""The time of a smoke: what counts for its limit, and what is not begun any more."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.drill.smoke import run as smoke_run
from spotguard.control.drill.smoke.process import Facts, Stint
from spotguard.events.event import Event, JobEvent
from spotguard.spec.sources import resolve
from spotguard.testing import FakeClock
from tests.control.drill.smoke.broken_scripts import GOOD

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.spec.model import JobSpec


class Machine:
    """A machine on which every process takes its time; all that it runs works."""

    def __init__(self, *, each_s: float, looks_s: float) -> None:
        self.clock = FakeClock()
        self.began: list[Stint] = []
        self.told: list[str] = []
        self._each_s = each_s
        self._looks_s = looks_s

    def lacking(self, spec: JobSpec) -> str:
        """Take the time of a look at what is installed."""
        self.clock.advance(self._looks_s)
        return ""

    def run_stint(self, spec: JobSpec, folder: Path, stint: Stint) -> Facts:
        """Take the time of a process that does what it is to do."""
        self.began.append(stint)
        self.clock.advance(min(self._each_s, stint.limit_s))
        steps = stint.stop_after
        events = [
            Event(kind=JobEvent.STARTED.value, at=1.0, attempt=1, data={"resumed_step": steps - 1}),
            Event(
                kind=JobEvent.ENDED.value,
                at=1.0,
                attempt=1,
                data={"reason": "preempted", "saved_step": steps, "step": steps},
            ),
        ]
        return Facts(
            exit_code=75, steps=steps, in_loop=True, seconds=self._each_s, events=tuple(events)
        )


@pytest.fixture
def smoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what runs a smoke of 50 s on such a machine."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(GOOD)
    given = {"infra": "aws", "store": "s3://nowhere/runs", "smoke.limit": "50s"}
    spec = resolve("train.py", flags=given, args=()).spec

    def run(machine: Machine) -> Any:
        now = SimpleNamespace(monotonic=machine.clock.monotonic, time=time.time)
        monkeypatch.setattr(smoke_run, "time", now)
        monkeypatch.setattr(smoke_run, "lacking", machine.lacking)
        monkeypatch.setattr(smoke_run, "run_stint", machine.run_stint)
        return smoke_run.run_smoke(spec, machine.told.append)

    return run


def test_what_comes_before_its_processes_counts_too(smoked: Any) -> None:
    """A look at all installed packages takes seconds on a busy machine."""
    machine = Machine(each_s=5.0, looks_s=12.0)
    assert smoked(machine).smoke is not None
    assert [stint.limit_s for stint in machine.began] == [38.0, 33.0]


def test_no_process_is_begun_that_cannot_end_in_time(smoked: Any) -> None:
    """It would only import torch, and be ended beyond the limit: nothing is proven, and told."""
    machine = Machine(each_s=45.0, looks_s=0.0)
    assert "too little time" in smoked(machine).skipped
    assert len(machine.began) == 1
    assert not any("restoring" in words for words in machine.told)
