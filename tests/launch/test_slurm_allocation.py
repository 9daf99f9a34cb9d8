"""Who has done its part gives its Slurm allocation back, and when that is somebody else's to do."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.events import env
from spotguard.events.event import JobEvent
from spotguard.launch.slurm_allocation import LINGER_S, give_back, scancel
from spotguard.testing.clock import FakeClock
from tests.launch.test_agent import agent, events_of, impatient_agent, run_variables

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


class Slurm:
    """What `scancel` is asked for, and when."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.began_at = self.clock.monotonic()
        self.cancelled: list[tuple[str, float]] = []

    def cancel(self, allocation: str) -> bool:
        """Be asked to cancel, and do it."""
        self.cancelled.append((allocation, self.clock.monotonic() - self.began_at))
        return True

    def leave(self, *, told_s: float = math.inf, over_s: float = math.inf) -> bool:
        """Leave as a node does that is told after so long, with a guard due after so long."""
        return give_back(
            "52",
            told=lambda: self.clock.monotonic() - self.began_at >= told_s,
            over_at=self.began_at + over_s,
            clock=self.clock,
            cancel=self.cancel,
        )


def test_nobody_else_ended_it_so_the_node_does() -> None:
    """Controller and SkyPilot may both be dead: idle nodes of Slurm would cost money for hours."""
    slurm = Slurm()
    assert slurm.leave()
    ((allocation, after_s),) = slurm.cancelled
    assert allocation == "52"
    assert LINGER_S <= after_s < LINGER_S + 1.0


def test_who_is_told_to_leave_cancels_nothing() -> None:
    """Others of the allocation may still be saving, in a grace longer than Slurm's own."""
    slurm = Slurm()
    assert not slurm.leave(told_s=10.0)
    assert slurm.cancelled == []
    assert slurm.clock.monotonic() - slurm.began_at < 11.0


@pytest.mark.parametrize("over_s", [0.0, 30.0])
def test_the_leak_guard_is_nobody_else(over_s: float) -> None:
    """It tells the node to leave because nobody did: then idle nodes must not stay behind."""
    slurm = Slurm()
    assert slurm.leave(told_s=max(0.0, over_s - 1.0), over_s=over_s)
    ((_, after_s),) = slurm.cancelled
    assert after_s <= over_s


def test_a_slurm_that_does_not_hear_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job's exit code must still be passed on, so nothing is raised."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not scancel("52")
    program = tmp_path / "scancel"
    program.write_text('#!/bin/sh\necho "$@"; exit 1\n')
    program.chmod(0o755)
    assert not scancel("53")
    said = capfd.readouterr()
    assert said.out == "-- 53\n"
    assert [f"job {number} was not cancelled" in said.err for number in (52, 53)] == [True, True]


def test_a_node_of_slurm_stays_until_somebody_ends_it(tmp_path: Path) -> None:
    """For a minute, in which the controller fetches logs; then its exit code is the job's."""
    script = "print('done', flush=True)\nraise SystemExit(7)"
    with agent(tmp_path, script, **{env.ALLOCATION: "52", "PATH": os.devnull}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        else:
            raise AssertionError("it left at once")
        assert process.wait(30) == 7


FROZEN = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(300)"
DONE = "pass"


@pytest.mark.parametrize("job", [FROZEN, DONE])
def test_when_its_time_is_over_nobody_keeps_the_allocation(tmp_path: Path, job: str) -> None:
    """Not a job that hears nothing, nor the minute in which a node waits for its controller."""
    program = tmp_path / "scancel"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nkill -KILL 0\n')
    program.chmod(0o755)
    store = tmp_path / "store"
    told = {
        **run_variables(store),
        env.ALLOCATION: "52",
        env.DOWN_AT: str(time.time() + 6.0),
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }
    with impatient_agent(tmp_path, job, **told) as process:
        process.wait(50)
    assert (tmp_path / "asked").read_text() == "-- 52\n"


def test_that_it_was_given_back_is_written_down(tmp_path: Path) -> None:
    """It bounds the bill: SkyPilot may be asked hours later when the nodes were gone."""
    program = tmp_path / "scancel"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    store = tmp_path / "store"
    told = {**run_variables(store), env.ALLOCATION: "52", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    with agent(tmp_path, "raise SystemExit(1)", "--lifetime=1", **told) as process:
        assert process.wait(30) == 1
    (event,) = events_of(store, JobEvent.GIVEN_BACK)
    assert (event.attempt, event.data) == (4, {"allocation": "52"})
