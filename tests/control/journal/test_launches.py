"""What is launched stands in a file of its own before it is launched, and until it is gone."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.launches import Launches, forget_wish
from spotguard.control.journal.record import Kind, Limits
from spotguard.errors import LaunchesDamaged
from spotguard.testing.job import JobFate
from spotguard.testing.stores import SimulatedCrash
from tests.control.world import RUN_ID, World

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.launch.base import LaunchRequest


def file_of(world: World) -> Path:
    """Return where the run's launches stand: in the run's folder, which has the run's name."""
    folder = world.folder / RUN_ID
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder / "launches.json"


def named(world: World) -> dict[str, int]:
    """Return the clusters that the file names."""
    launches = Launches.read(file_of(world))
    return {} if launches is None else launches.clusters


def play(world: World, **parts: Any) -> None:
    """Control the run to its end, each launch checked."""
    with world.journal() as journal:
        launches = Launches.of(file_of(world), world.record())
        world.supervisor(journal, launches=launches, **parts).run()


class Witness:
    """A launcher that looks into the file whenever it is asked to launch."""

    def __init__(self, world: World, *, dies: bool = False) -> None:
        self._world = world
        self._dies = dies

    def __getattr__(self, name: str) -> Any:
        """Be the real one otherwise."""
        return getattr(self._world.launcher, name)

    def launch(self, request: LaunchRequest) -> None:
        """Launch what is named."""
        assert named(self._world)[request.cluster] == request.attempt
        if self._dies:
            raise SimulatedCrash
        self._world.launcher.launch(request)


def test_each_cluster_is_named_before_its_launch_and_until_it_is_gone(tmp_path: Path) -> None:
    """Also those that are refused at once, later, or were never there."""
    world = World(
        tmp_path,
        limits=Limits(nodes_min=1, nodes_max=3),
        launcher={"capacity": 2},
        total_steps=12,
        fates={1: JobFate(how="lose", at_s=5)},
    )
    world.launcher.refuse_late("none left")
    play(world, launcher=Witness(world))

    assert len(world.launcher.started) == 3
    assert named(world) == {}
    assert stat.S_IMODE(file_of(world).stat().st_mode) == 0o600


def test_a_controller_that_dies_at_a_launch_leaves_its_name(tmp_path: Path) -> None:
    """The next one keeps it: it may have been launched."""
    world = World(tmp_path)
    with pytest.raises(SimulatedCrash):
        play(world, launcher=Witness(world, dies=True))
    assert named(world) == {f"{RUN_ID}-1": 1}

    assert Launches.of(file_of(world), world.record()).clusters == {f"{RUN_ID}-1": 1}
    play(world)
    assert named(world) == {}


def test_a_run_of_an_older_version_gets_its_file_at_the_next_start(tmp_path: Path) -> None:
    """It names what lives by the journal."""
    world = World(tmp_path, total_steps=1000)
    world.run_until(10.0)
    assert not file_of(world).exists()
    Launches.of(file_of(world), world.record())
    assert named(world) == {f"{RUN_ID}-1": 1}


def test_what_the_journal_does_not_know_stays_named(tmp_path: Path) -> None:
    """It may have been put back from a backup; what it knows to be over goes."""
    world = World(tmp_path, total_steps=3)
    launches = Launches.of(file_of(world), world.record())
    launches.remember(f"{RUN_ID}-1", 1)
    launches.remember(f"{RUN_ID}-7", 7)
    world.run()
    assert Launches.of(file_of(world), world.record()).clusters == {f"{RUN_ID}-7": 7}


def test_the_variables_of_the_job_are_not_in_it(tmp_path: Path) -> None:
    """They may be secrets, and no launcher's end needs them; nor the addresses of webhooks."""
    world = World(tmp_path)
    record = world.record()
    record.spec.update(env={"TOKEN": "hunter2"}, notify=["https://example.org/hunter2"])
    Launches.of(file_of(world), record)
    assert "hunter2" not in file_of(world).read_text()


@pytest.mark.parametrize("wish", [Kind.USER_STOP, Kind.USER_DOWN])
def test_a_wish_of_a_time_without_journal_is_heard(tmp_path: Path, wish: Kind) -> None:
    """The next controller ends the run instead of launching again; a `resume` takes it back."""
    world = World(tmp_path, total_steps=1000)
    world.run_until(10.0)
    Launches.of(file_of(world), world.record()).ask(wish)
    world.launcher.down(f"{RUN_ID}-1")
    play(world)
    assert world.kinds().count(wish.value) == 1
    assert world.launcher.started == [f"{RUN_ID}-1"]

    forget_wish(file_of(world))
    launches = Launches.read(file_of(world))
    assert launches is not None
    assert launches.wish is None


GOOD: dict[str, Any] = {f"{RUN_ID}-1": 1, f"{RUN_ID}-2r3": 2}
HOSTILE: dict[str, Any] = {
    "another run's cluster": {"clusters": {"other-1": 1}},
    "a path": {"clusters": {f"{RUN_ID}-1/../../x": 1}},
    "a name that goes on": {"clusters": {f"{RUN_ID}-1\n": 1}},
    "no number": {"clusters": {f"{RUN_ID}-1": "1"}},
    "a huge number": {"clusters": {f"{RUN_ID}-1": 10**30}},
    "a list": {"clusters": [f"{RUN_ID}-1"]},
    "nothing named": {"clusters": None},
    "another run": {"run_id": "other"},
    "another version": {"schema": 2},
    "no store": {"store_root": 5},
    "no job": {"spec": {}},
    "a job of nonsense": {"spec": {"schema": 1, "script": 5}},
    "a wish of nonsense": {"wish": "settled"},
    "a wish that is a list": {"wish": []},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_makes_no_sense_is_refused(tmp_path: Path, what: str) -> None:
    """By its own error, which names the file; nothing is ended by such a name."""
    world = World(tmp_path)
    launches = Launches.of(file_of(world), world.record())
    body = json.loads(launches.path.read_text())
    launches.path.write_text(json.dumps({**body, "clusters": GOOD}))
    assert named(world) == GOOD
    launches.path.write_text(json.dumps({**body, "clusters": GOOD, **HOSTILE[what]}))
    with pytest.raises(LaunchesDamaged, match=r"launches\.json cannot be read"):
        Launches.read(launches.path)


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_torn_file_is_refused_and_a_controller_makes_a_new_one(tmp_path: Path, cut: int) -> None:
    """Ours is replaced as a whole, so a torn one is the work of others; it is kept aside."""
    world = World(tmp_path, total_steps=1000)
    world.run_until(10.0)
    path = file_of(world)
    Launches.of(path, world.record())
    raw = path.read_bytes()
    path.write_bytes(raw[:cut])
    with pytest.raises(LaunchesDamaged):
        Launches.read(path)
    forget_wish(path)  # a `resume` is not in its way
    Launches.of(path, world.record())
    assert path.read_bytes() == raw
    assert path.with_suffix(".damaged").read_bytes() == raw[:cut]
