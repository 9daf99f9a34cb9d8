from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from spotguard.errors import LauncherFailure, SpecError
from spotguard.launch.base import ClusterState, NodeEnd
from spotguard.launch.local import LocalLauncher, LocalOptions, find_strays, sweep
from spotguard.launch.local.cluster import ClusterFolder, ClusterOrder, Record
from spotguard.launch.local.processes import find_processes, kill_all
from tests.launch.local.local_lab import Lab, wait_for, wait_until_gone

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow


class Killed(BaseException):
    """Stands for a kill -9 of the controller at one point."""


def cloud_processes(lab: Lab) -> list[psutil.Process]:
    """Return the living cloud processes of the lab's clusters."""
    found = []
    for process in psutil.process_iter():
        try:
            if "spotguard.launch.local.cloud" in (line := process.cmdline()) and (
                process.status() != psutil.STATUS_ZOMBIE and str(lab.run_dir) in line[-1]
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_cloud(lab: Lab) -> None:
    """Kill -9 the one cloud process."""
    (cloud,) = cloud_processes(lab)
    cloud.kill()
    folder = ClusterFolder(lab.run_dir / "local" / "clusters" / "c1")
    wait_for(lambda: not folder.has_cloud(), "the cloud process dead")


def test_a_cluster_lives_from_absent_to_gone(lab: Lab) -> None:
    """ABSENT before, UP while it runs, GONE with the exit codes and the last step after."""
    launcher = lab.launcher()
    assert launcher.observe("c1").state is ClusterState.ABSENT

    launcher.launch(lab.request(nodes=2, steps=30, exit_code=3))
    during = launcher.observe("c1")
    view = wait_until_gone(launcher)

    assert during.state in (ClusterState.STARTING, ClusterState.UP)
    assert [(n.end, n.exit_code, n.detail) for n in view.nodes] == [
        (NodeEnd.EXITED, 3, "exited with 3")
    ] * 2
    assert view.last_step == 30
    assert view.job_over
    assert view.gone_at is not None
    assert time.time() - 15 < view.gone_at <= time.time()
    assert not list(find_processes(lab.run_dir))


def test_a_node_has_its_own_machine_and_only_its_own_settings(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own home, temporary folder and log; the user's variables, but no stale SPOTGUARD_ ones."""
    monkeypatch.setenv("SPOTGUARD_BUDGET", "7")
    monkeypatch.setenv("USERS_OWN", "kept")
    launcher = lab.launcher(metadata="azure")
    launcher.launch(lab.request(nodes=2, steps=1, env={"SPOTGUARD_RUN_ID": "r1", "MINE": "x"}))
    wait_until_gone(launcher)

    first, second = sorted(lab.notes("start"), key=lambda note: note.node)
    one, other = first.body["env"], second.body["env"]
    for name in ("HOME", "TMPDIR", "SPOTGUARD_METADATA", "SPOTGUARD_PROGRESS", "SPOTGUARD_NODE"):
        assert one[name] != other[name], name
    assert one["SPOTGUARD_METADATA"].startswith("azure=http://127.0.0.1:")
    assert one["SPOTGUARD_CLUSTER"] == "c1"
    assert one["SPOTGUARD_GRACE_S"] == "2"
    assert (one["USERS_OWN"], one["MINE"], one["SPOTGUARD_RUN_ID"]) == ("kept", "x", "r1")
    assert "SPOTGUARD_BUDGET" not in one
    assert first.body["cwd"] == str(lab.workdir)
    assert launcher.read_log("c1", 0, 0).data == b"hello from node 0\n"


def test_a_node_takes_its_disk_along(lab: Lab) -> None:
    """Home and temporary folder are gone with the node; TMPDIR is short enough for sockets."""
    launcher = lab.launcher()
    launcher.launch(lab.request(steps=1))
    wait_until_gone(launcher)

    variables = lab.notes("start")[0].body["env"]
    assert not Path(variables["HOME"]).exists()
    assert not Path(variables["TMPDIR"]).exists()
    system = os.environ.get("TMPDIR", "/tmp")
    assert len(variables["TMPDIR"]) - len(system) < 30


def test_a_log_is_read_piece_by_piece(lab: Lab) -> None:
    """From any byte on; at the end, or of a node that is not there, nothing."""
    launcher = lab.launcher()
    launcher.launch(lab.request(steps=1))
    wait_until_gone(launcher)

    assert launcher.read_log("c1", 0, 6).data == b"from node 0\n"
    assert launcher.read_log("c1", 0, 18).data == b""
    assert launcher.read_log("c1", 7, 0).data == b""
    assert launcher.read_log("nothing", 0, 0).data == b""


@pytest.mark.parametrize("step", ["create", "order", "_spawn"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_launch_killed_half_way_is_completed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    """Killed between any two steps and asked again, a launch starts each node exactly once."""
    launcher = lab.launcher()
    owner = LocalLauncher if step == "_spawn" else ClusterFolder
    do = getattr(owner, step)

    def die(*args: object) -> None:
        if when == "after":
            do(*args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, die)
        with pytest.raises(Killed):
            launcher.launch(lab.request(nodes=2, steps=5))
    again = lab.launcher()
    again.launch(lab.request(nodes=2, steps=5))
    view = wait_until_gone(again)
    again.launch(lab.request(nodes=2, steps=5))

    assert [node.exit_code for node in view.nodes] == [0, 0]
    assert sorted(note.node for note in lab.notes("start")) == [0, 1]


def test_concurrent_launches_start_one_cluster(lab: Lab) -> None:
    """Of several who ask at the same time for one name, one is heard."""
    barrier = threading.Barrier(4)

    def ask() -> None:
        launcher = lab.launcher()
        barrier.wait()
        launcher.launch(lab.request(steps=5))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    view = wait_until_gone(lab.launcher())

    assert view.nodes[0].exit_code == 0
    assert len(lab.notes("start")) == 1


def test_a_cluster_survives_its_controller(lab: Lab) -> None:
    """kill -9 of the process that launched it, and of its whole session, changes nothing."""
    launcher = lab.launcher()
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from tests.launch.local.local_lab import Lab
Path.mkdir = lambda *a, _mkdir=Path.mkdir, **k: _mkdir(*a, **{{**k, "exist_ok": True}})
lab = Lab(Path({str(lab.workdir.parent)!r}))
lab.launcher().launch(lab.request(steps=60))
print("launched", flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"launched\n"
        os.killpg(controller.pid, signal.SIGKILL)

    assert wait_until_gone(launcher).nodes[0].exit_code == 0
    assert len(lab.notes("start")) == 1


def test_nodes_go_on_without_their_cloud_process(lab: Lab) -> None:
    """kill -9 of the cloud process: what still runs is seen, and `down` still ends it."""
    launcher = lab.launcher()
    launcher.launch(lab.request(nodes=2))
    wait_for(lambda: len(lab.notes("start")) == 2, "both nodes")
    kill_cloud(lab)

    orphaned = launcher.observe("c1")
    launcher.launch(lab.request(nodes=2))
    launcher.down("c1")
    view = launcher.observe("c1")

    assert orphaned.state is ClusterState.UP
    assert orphaned.detail == "its cloud process died"
    assert [node.end for node in orphaned.nodes] == [NodeEnd.RUNNING] * 2
    assert view.state is ClusterState.GONE
    assert [node.end for node in view.nodes] == [NodeEnd.LOST] * 2
    assert len(lab.notes("start")) == 2
    assert not list(find_processes(lab.run_dir))


def test_the_end_comes_though_the_cloud_process_dies_on_the_way(lab: Lab) -> None:
    """kill -9 of the cloud process right after it was asked for the end: a look finishes it."""
    launcher = lab.launcher()
    launcher.launch(lab.request())
    wait_for(lambda: lab.notes("start"), "the job's start")
    launcher.down("c1")
    kill_cloud(lab)

    view = launcher.observe("c1")

    assert view.state is ClusterState.GONE
    assert not list(find_processes(lab.run_dir))


def test_orphaned_nodes_that_end_are_noticed(lab: Lab) -> None:
    """Without cloud process, a cluster whose processes have ended is GONE, and stays so."""
    launcher = lab.launcher()
    launcher.launch(lab.request(steps=50))
    wait_for(lambda: lab.notes("start"), "the job's start")
    kill_cloud(lab)

    view = wait_until_gone(launcher)

    assert view.nodes[0].end is NodeEnd.LOST
    assert "unseen" in view.nodes[0].detail
    assert launcher.observe("c1").gone_at == view.gone_at
    assert lab.notes("end")


def test_down_returns_at_once_and_ends_the_deaf(lab: Lab) -> None:
    """`down` does not wait; a job that ignores SIGTERM is killed 2 s later."""
    launcher = lab.launcher()
    launcher.launch(lab.request(children=1))
    wait_for(lambda: lab.notes("start"), "the job's start")
    began_at = time.time()
    launcher.down("c1")
    took_s = time.time() - began_at
    view = wait_until_gone(launcher)

    assert took_s < 0.5
    assert len(lab.notes("term")) == 1
    assert view.gone_at is not None
    assert 1.9 < view.gone_at - began_at < 8
    assert (view.nodes[0].end, view.nodes[0].detail) == (NodeEnd.LOST, "released")


def test_down_before_the_start_prevents_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that was ordered but not yet started never runs once it was asked to end."""
    launcher = lab.launcher()
    with monkeypatch.context() as patch:
        patch.setattr(LocalLauncher, "_spawn", lambda *_: None)
        launcher.launch(lab.request())
    launcher.down("c1")
    launcher.launch(lab.request())
    view = wait_until_gone(launcher)

    assert view.nodes[0].detail == "never started"
    assert not lab.notes("start")


def test_down_of_what_is_not_there_is_nothing(lab: Lab) -> None:
    """Ending a cluster that never was, or is gone, does nothing."""
    launcher = lab.launcher()
    launcher.down("c9")
    launcher.launch(lab.request(steps=1))
    gone = wait_until_gone(launcher)
    launcher.down("c1")

    assert launcher.observe("c9").state is ClusterState.ABSENT
    assert launcher.observe("c1") == gone


def test_the_leak_guard_ends_a_forgotten_cluster(lab: Lab) -> None:
    """A cluster that outlives its time goes away by itself, and says why."""
    launcher = lab.launcher()
    launcher.launch(lab.request(on_term="die", max_lifetime_s=0.5))

    node = wait_until_gone(launcher).nodes[0]

    assert node.end is NodeEnd.LOST
    assert "leak guard: the cluster was meant to live 0.5 s" in node.detail


def test_the_leak_guard_counts_from_the_order(lab: Lab) -> None:
    """However long this machine took to start the cloud: that time is paid, too."""
    launcher = lab.launcher()
    request = lab.request(on_term="die", max_lifetime_s=600.0)
    folder = ClusterFolder(lab.run_dir.resolve() / "local" / "clusters" / request.cluster)
    folder.create()
    ordered_at = time.time() - 600.0
    options = LocalOptions(runner="python", speed_up=120.0, seed=0)
    folder.order(ClusterOrder(request=request, options=options, ordered_at=ordered_at))
    launcher.launch(request)

    node = wait_until_gone(launcher).nodes[0]

    assert node.end is NodeEnd.LOST
    assert "the cluster was meant to live 600 s" in node.detail


def test_a_node_that_cannot_start_is_explained(lab: Lab) -> None:
    """A working folder that is not there ends the cluster at once, with its name."""
    launcher = lab.launcher()
    launcher.launch(lab.request(nodes=2, workdir=str(lab.workdir / "nowhere")))

    view = wait_until_gone(launcher)

    assert "No such file or directory" in view.detail
    assert "nowhere" in view.detail
    assert [node.end for node in view.nodes] == [NodeEnd.LOST] * 2


def test_a_machine_without_disk_is_a_launcher_failure(lab: Lab) -> None:
    """What the machine refuses is told as such, with the cluster's name."""
    launcher = lab.launcher()
    (lab.run_dir / "local").mkdir(parents=True)
    (lab.run_dir / "local" / "clusters").write_text("in the way")

    with pytest.raises(LauncherFailure, match="cannot start c1"):
        launcher.launch(lab.request())


def test_a_cluster_that_cannot_be_read_is_unreachable(lab: Lab) -> None:
    """A damaged record is neither life nor death."""
    launcher = lab.launcher()
    folder = lab.run_dir / "local" / "clusters" / "c1"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{")

    assert launcher.observe("c1").state is ClusterState.UNREACHABLE


def test_a_cloud_that_does_not_start_says_why(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the cloud process fails at once, its last words are in the error, and a retry works."""
    launcher = lab.launcher()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(LauncherFailure, match="did not start"):
            launcher.launch(lab.request(steps=1))
    launcher.launch(lab.request(steps=1))

    assert wait_until_gone(launcher).nodes[0].exit_code == 0


def test_strays_are_found_and_swept(lab: Lab) -> None:
    """A process that still carries the mark of a cluster that is gone is found, and killed."""
    folder = ClusterFolder(lab.run_dir / "local" / "clusters" / "c1")
    folder.create()
    folder.write_record(Record(state=ClusterState.GONE, nodes=(), gone_at=1.0))
    mark = {"SPOTGUARD_PROGRESS": str(folder.node(0).progress)}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **mark}) as process:
        wait_for(lambda: find_strays(lab.run_dir), "the stray")
        killed = sweep(lab.run_dir)
        assert process.wait() == -signal.SIGKILL

    assert [(s.pid, s.cluster, s.node, s.command) for s in killed] == [
        (process.pid, "c1", "node-0", "sleep 60")
    ]
    assert find_strays(lab.run_dir) == []


def test_looking_is_cheap(lab: Lab) -> None:
    """A look at a running cluster takes some milliseconds at most."""
    launcher = lab.launcher()
    launcher.launch(lab.request(nodes=2, on_term="die"))
    took_s = []
    for _ in range(20):
        began_at = time.perf_counter()
        launcher.observe("c1")
        took_s.append(time.perf_counter() - began_at)
    launcher.down("c1")

    assert min(took_s) < 0.005


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metadata": "ibm"}, "metadata: 'ibm' is not one of aws, gcp, azure, none"),
        ({"runner": "perl"}, "runner: 'perl' is not one of torchrun, python"),
        ({"speed_up": 0.0}, "speed_up: must be a number above 0, not 0.0"),
        ({"mtbf_s": -1.0}, "mtbf: must be a number above 0, not -1.0"),
        ({"price_usd_per_h": float("nan")}, "price: must be a number above 0, not nan"),
        ({"interruptions": ("x",)}, "interrupt: 'x'"),
        ({"trace": "/nowhere.json"}, "trace: /nowhere.json cannot be read"),
    ],
)
def test_options_that_make_no_sense_are_refused_early(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    """The launcher does not even begin with options that it cannot keep."""
    with pytest.raises(SpecError) as caught:
        LocalLauncher(tmp_path, LocalOptions(**options))  # type: ignore[arg-type]

    assert caught.value.message.startswith(words)


@pytest.mark.e2e
def test_torchrun_spans_the_nodes(lab: Lab) -> None:
    """Each node has its own torchrun agent, and all ranks find each other on loopback."""
    lab.script.write_text(
        "import os, torch.distributed as d\n"
        "d.init_process_group('gloo')\n"
        "sizes = [None] * d.get_world_size()\n"
        "d.all_gather_object(sizes, os.environ['SPOTGUARD_NODE'])\n"
        "print('nodes', ''.join(sizes), flush=True)\n"
        "d.destroy_process_group()\n"
    )
    launcher = lab.launcher(runner="torchrun")
    launcher.launch(lab.request(nodes=2, nproc_per_node=1, max_lifetime_s=150.0))
    view = wait_until_gone(launcher, timeout_s=160)

    logs = [launcher.read_log("c1", node, 0).data.decode() for node in (0, 1)]
    assert [node.exit_code for node in view.nodes] == [0, 0], logs
    assert all("nodes 01" in log for log in logs)


def _moved(lab: Lab) -> None:
    lab.run_dir = lab.run_dir.rename(lab.run_dir.with_name("moved"))


def _copied(lab: Lab) -> None:
    copied = lab.run_dir.with_name("copied")
    shutil.copytree(lab.run_dir, copied, symlinks=True)
    lab.run_dir = copied


def _copied_and_removed(lab: Lab) -> None:
    original = lab.run_dir
    _copied(lab)
    shutil.rmtree(original)


@pytest.mark.parametrize("change", [_moved, _copied, _copied_and_removed])
def test_a_cluster_whose_folder_moved_is_gone_when_its_nodes_are(
    lab: Lab, change: Callable[[Lab], None]
) -> None:
    """They go on where they were started; only that keeps a second cluster from being launched."""
    first = lab.run_dir
    lab.launcher().launch(lab.request(args=("die", "1", "600", "0", "0")))
    wait_for(lambda: lab.notes("start"), "the job running")
    try:
        change(lab)
        assert lab.launcher().observe("c1").state is ClusterState.UP
        assert list(find_processes(first)), "it runs on"

        lab.launcher().down("c1")
        wait_until_gone(lab.launcher())
        assert not list(find_processes(first))
    finally:
        kill_all(first)
