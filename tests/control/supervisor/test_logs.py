"""What a run printed is told attempt after attempt, also where a cluster took its log with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control import api
from spotguard.control.journal.stored.logs import LogLine
from spotguard.control.supervisor.logs import RunLog
from spotguard.launch.base import LogChunk, LogGone, Unreachable
from tests.control.made import Line, ended, launched, made, training
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from spotguard.errors import LauncherFailure

GONE = "its cluster is gone, and what it printed with it"
FIRST: tuple[Line, ...] = (*launched(), training())
TAKEN = (*FIRST, ended(9.0, "preempted"))
SECOND = (*TAKEN, *launched(10.0, 2), training(11.0, 2))
DONE = (
    *SECOND,
    ended(20.0, "finished", 2),
    ("settled", 21.0, None, {"state": "finished", "detail": "", "exit_code": 0}),
)


class Cloud:
    """Keeps what a cluster printed for as long as the test lets it, and counts the questions."""

    def __init__(self, **clusters: bytes | LauncherFailure) -> None:
        self.clusters = {name.replace("_", "-"): printed for name, printed in clusters.items()}
        self.asked: list[str] = []

    def read_log(self, cluster: str, node: int, offset: int) -> LogChunk:
        """Return what the test set for node 0; the other one is silent."""
        self.asked.append(cluster)
        printed = self.clusters.get(cluster, LogGone(f"Cluster {cluster!r} does not exist."))
        if not isinstance(printed, bytes):
            raise printed
        return LogChunk(node=node, offset=offset, data=printed[offset:] if node == 0 else b"")


def told(cloud: Cloud, *lines: Line, log: RunLog | None = None, last: bool = True) -> list[LogLine]:
    """Return what is told with this journal."""
    log = log or RunLog(cloud)
    return list(log.lines(made(*lines), last=last))


def line(attempt: int, text: str, node: int | None = 0) -> LogLine:
    """Return a line of a log."""
    return LogLine(attempt=attempt, node=node, text=text)


def test_a_gone_cluster_costs_one_line_and_no_other_log() -> None:
    """Whatever its number of nodes: those of the attempts after it are printed."""
    cloud = Cloud(job_1_2=b"step 8\nstep 9")
    lines = told(cloud, *SECOND)
    assert lines == [line(1, GONE, None), line(2, "step 8"), line(2, "step 9")]


def test_a_run_whose_clusters_are_all_gone_is_told_without_an_error() -> None:
    """A line for each, instead of nothing and exit code 3."""
    assert told(Cloud(), *DONE) == [line(1, GONE, None), line(2, GONE, None)]


def test_a_log_is_followed_over_an_interruption() -> None:
    """The order to take a cluster down cancels what is asked of it: the next attempt is waited for.

    Each line comes once, a lost log costs one, and a log that is read to its end is asked no more.
    """
    cloud = Cloud(job_1_1=b"step 1\nste")
    log = RunLog(cloud)

    def follow(*lines: Line, last: bool = False) -> list[LogLine]:
        return told(cloud, *lines, log=log, last=last)

    assert follow(*FIRST) == [line(1, "step 1")]
    cloud.clusters["job-1-1"] = Unreachable("request is cancelled by another process")
    assert follow(*FIRST) == []
    assert follow(*TAKEN) == [], "it may yet be read"
    del cloud.clusters["job-1-1"]
    assert follow(*TAKEN) == [line(1, GONE, None)]
    assert follow(*TAKEN) == []
    assert follow(*SECOND) == [], "its cluster comes up"
    cloud.clusters["job-1-2"] = b"step 2\n"
    assert follow(*SECOND) == [line(2, "step 2")]
    cloud.clusters["job-1-2"] = b"step 2\nend"
    cloud.asked.clear()
    assert follow(*DONE, last=True) == [line(2, "end")]
    assert set(cloud.asked) == {"job-1-2"}


def test_what_cannot_be_read_now_is_told_with_its_reason() -> None:
    """Who does not follow is told, and nodes that come up have printed nothing."""
    cloud = Cloud(job_1_1=Unreachable("SkyPilot does not answer"))
    assert told(cloud, *SECOND) == [
        line(1, "its log cannot be read now: SkyPilot does not answer", None),
        line(2, "its nodes have printed nothing yet", None),
    ]


def test_the_command_reads_on_after_a_gone_cluster(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the journal of a run to its lines."""
    make_run(home, "job-1", settled=True)
    monkeypatch.setattr(api, "launcher_for", lambda spec, run_dir: Cloud())
    assert list(api.logs("job-1", follow=True)) == []
