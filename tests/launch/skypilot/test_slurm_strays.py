from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import LauncherFailure
from spotguard.launch.base import ClusterState, ClusterView, NodeEnd, Unreachable
from spotguard.launch.skypilot.launcher import SkyPilotLauncher
from spotguard.launch.skypilot.slurm_strays import SlurmStrays, ask_login_node
from spotguard.launch.skypilot.strays import Everywhere, regions_of
from spotguard.testing.clock import FakeClock
from spotguard.testing.launcher import FAKE_OFFER
from tests.launch.skypilot.fake_sdk import FakeSdk

if TYPE_CHECKING:
    from pathlib import Path

NAME = "job-1-1"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the user a configuration of Slurm."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".slurm" / "config"
    path.parent.mkdir()
    path.write_text("Host lab\n")
    return path


@dataclass
class Slurm:
    """A Slurm's login node: what its list of jobs holds, and what was cancelled."""

    jobs: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    away: bool = False

    def ask(self, cluster: str, command: str) -> str:
        """Answer as it does."""
        if self.away:
            raise Unreachable("no route")
        if command.startswith("scancel -- "):
            self.cancelled.append(f"{cluster} {command.removeprefix('scancel -- ')}")
            return ""
        assert command.startswith("squeue ")
        return "".join(f"{line}\n" for line in self.jobs)

    def launcher(self, *, clusters: tuple[str, ...] = ("lab",)) -> SkyPilotLauncher:
        """Return a launcher of a machine that may have adopted the run."""
        return SkyPilotLauncher(
            FakeSdk(),
            offers=lambda: [FAKE_OFFER],
            task=lambda _: {},
            strays=SlurmStrays(lambda: clusters, ask=self.ask),
            clock=FakeClock(),
            in_background=False,
        )

    def seen(self) -> ClusterView:
        """Return what it says of the cluster."""
        return self.launcher().observe(NAME)


def test_an_allocation_that_another_machine_asked_for_is_seen_and_cancelled() -> None:
    """No other job is: neither one with a longer name, nor an array of somebody else's."""
    slurm = Slurm(
        [
            f"7|CANCELLED|2|{NAME}-0a1b2c3d",
            f"12|RUNNING|2|{NAME}-0a1b2c3d",
            f"13|RUNNING|1|{NAME}1-0a1b2c3d",
            "9_[1-4]|PENDING|1|of|somebody",
        ]
    )
    view = slurm.seen()
    assert view.state is ClusterState.UP
    assert [node.end for node in view.nodes] == [NodeEnd.RUNNING] * 2
    slurm.launcher().down(NAME)
    assert slurm.cancelled == ["lab 12"]


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        ("PENDING", ClusterState.STARTING),
        ("SUSPENDED", ClusterState.UP),
        ("PREEMPTED", ClusterState.GONE),
        ("TIMEOUT", ClusterState.GONE),
    ],
)
def test_what_may_cost_lives(state: str, seen: ClusterState) -> None:
    """A word that nobody knows is no end."""
    assert Slurm([f"12|{state}|1|{NAME}-0a1b2c3d"]).seen().state is seen


def test_nodes_that_slurm_takes_back_are_lost_and_unlisted_ones_absent() -> None:
    """Until the allocation is over, it is there."""
    going = Slurm([f"12|COMPLETING|2|{NAME}-0a1b2c3d"]).seen()
    assert [node.end for node in going.nodes] == [NodeEnd.LOST] * 2
    assert Slurm().seen().state is ClusterState.ABSENT


def test_a_slurm_that_does_not_answer_proves_nothing() -> None:
    """Taken for absent, the cluster would be launched a second time; so where none is known."""
    away = Slurm(away=True)
    assert away.seen().state is ClusterState.UNREACHABLE
    with pytest.raises(Unreachable):
        away.launcher().down(NAME)
    nowhere = Slurm().launcher(clusters=())
    assert nowhere.observe(NAME).state is ClusterState.UNREACHABLE


@pytest.mark.parametrize("clusters", [("lab",), ()])
def test_where_no_slurm_is_configured_nobody_is_asked(
    config: Path, clusters: tuple[str, ...]
) -> None:
    """SkyPilot's server is elsewhere then, and knows its clusters: no look would ever succeed."""
    config.unlink()
    launcher = Slurm(away=True).launcher(clusters=clusters)
    assert launcher.observe(NAME).state is ClusterState.ABSENT
    launcher.down(NAME)


def test_a_list_that_does_not_answer_keeps_no_other_one_from_being_asked() -> None:
    """Nothing is known where none of the others has it; what lives elsewhere is ended."""
    away = SlurmStrays(lambda: ["a"], ask=Slurm(away=True).ask)
    slurm = Slurm([f"2|RUNNING|1|{NAME}-0a"])
    there = SlurmStrays(lambda: ["b"], ask=slurm.ask)
    assert Everywhere([away, there]).look(NAME).state is ClusterState.UP
    with pytest.raises(Unreachable):
        Everywhere([away, there]).down(NAME)
    assert slurm.cancelled == ["b 2"]
    for jobs in ([], [f"1|FAILED|1|{NAME}-0a"]):
        with pytest.raises(Unreachable):
            Everywhere([away, SlurmStrays(lambda: ["c"], ask=Slurm(jobs).ask)]).look(NAME)


def test_of_several_lists_the_one_where_it_lives_counts() -> None:
    """One that says that it is gone, or that it has none, takes nothing back."""
    gone = SlurmStrays(lambda: ["a"], ask=Slurm([f"1|FAILED|1|{NAME}-0a"]).ask)
    there = SlurmStrays(lambda: ["b"], ask=Slurm([f"2|RUNNING|1|{NAME}-0a"]).ask)
    absent = SlurmStrays(lambda: ["c"], ask=Slurm().ask)
    assert Everywhere([absent, gone, there]).look(NAME).state is ClusterState.UP
    assert Everywhere([absent, gone]).look(NAME).state is ClusterState.GONE
    assert Everywhere([absent]).look(NAME).state is ClusterState.ABSENT


def test_only_clusters_of_slurm_are_asked() -> None:
    """Each once."""
    offers = [
        FAKE_OFFER.__class__(**{**FAKE_OFFER.__dict__, "infra": infra, "region": region})
        for infra, region in (("slurm", "a"), ("aws", "b"), ("slurm", "a"), ("slurm", None))
    ]
    assert regions_of("slurm", offers) == ["a"]


@pytest.mark.parametrize(("code", "error"), [(255, Unreachable), (1, LauncherFailure)], ids=str)
def test_an_ssh_that_finds_nobody_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    """Slurm's own refusal comes with another code."""
    program(tmp_path / "bin" / "ssh", f"echo no >&2\nexit {code}")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    with pytest.raises(error) as raised:
        ask_login_node("lab", "squeue -h")
    assert isinstance(raised.value, Unreachable) is (error is Unreachable)


def test_slurms_commands_are_found_where_only_a_login_shell_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SkyPilot finds them; what has signs of the shell's in it arrives as it is."""
    program(tmp_path / "bin" / "ssh", 'for last; do :; done\nexec sh -c "$last"')
    program(tmp_path / "slurm" / "squeue", 'echo "$*"')
    (tmp_path / ".bash_profile").write_text(f"PATH={tmp_path}/slurm:$PATH\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    said = ask_login_node("lab", "squeue --format='%i|%T of $HOME'")
    assert said.splitlines()[-1] == "--format=%i|%T of $HOME"


def program(path: Path, script: str) -> None:
    """Write a program of the shell's."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
