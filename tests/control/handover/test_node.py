"""A node for the controller: where it may be had, and what goes there."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotguard.api.controllers import node_for_job
from spotguard.control.handover import node as node_module
from spotguard.control.handover.node import (
    KUBERNETES,
    SLURM,
    VM,
    NodeState,
    SkyHost,
    carried_folders,
    cheapest,
    check_job,
    check_where,
    node_task,
    write_private,
)
from spotguard.control.handover.not_in_store import read_private
from spotguard.control.journal.nodes.controller_node import ControllerNode
from spotguard.control.run_folder import RunFolder
from spotguard.errors import SpecError
from spotguard.events.states import Market
from spotguard.launch.base import ClusterState, ClusterView, Offer, Survey
from spotguard.launch.skypilot.import_sky import check_task
from spotguard.launch.skypilot.sdk import ClusterPhase, LaunchFacts
from spotguard.launch.taskyaml import CLUSTER_TAG
from spotguard.spec.model import JobSpec
from spotguard.spec.templates import load_controller_node
from tests.control.handover.two_homes import NODE_OFFER
from tests.launch.skypilot.fake_sdk import FakeSdk

_WITH_RUN = 'mount -t tmpfs run /run && mkdir /run/sshd && exec "$0" "$@"'
SLURM_OFFER = Offer(
    infra="slurm",
    region="spotlab",
    zone="ondemand",
    instance_type=None,
    gpus=None,
    market=Market.ON_DEMAND,
    price_usd_per_h=None,
    on_demand_usd_per_h=None,
)


def job(folder: Path, infra: str, **more: Any) -> JobSpec:
    """Return a job there, with its script in a folder of this machine."""
    script = folder / "job.py"
    script.write_text("import spotguard.runtime\n")
    given = {"store": "s3://bucket/runs", "workdir": str(folder), **more}
    return JobSpec(script=str(script), name="job", infra=infra, **given)


def task(spec: JobSpec, offer: Offer, private: Path) -> dict[str, Any]:
    """Return the task of the first node of a run of that job."""
    node = ControllerNode(number=1, cluster="job-1-c1", place="x", price_usd_per_h=0.0, since=0.0)
    return node_task(
        spec,
        node,
        offer,
        run_id="job-1",
        place="s3://b/job-1",
        folders=carried_folders(spec),
        private=private,
    )


@pytest.mark.parametrize(
    ("infra", "more", "where", "way_out"),
    [
        ("slurm/lab/spot", {}, VM, "--controller slurm"),
        ("aws/us-east-1", {}, SLURM, "--controller vm"),
        ("slurm/lab/spot", {"on_demand_infra": "aws/us-east-1"}, SLURM, "--controller local"),
        ("slurm/lab/spot,slurm/other/spot", {}, SLURM, "--infra slurm/"),
        ("gcp", {}, VM, "--controller local"),
        ("kubernetes/ctx", {}, VM, "--controller kubernetes"),
        ("kubernetes", {}, KUBERNETES, "--infra kubernetes/CONTEXT"),
        ("kubernetes/a,kubernetes/b", {}, KUBERNETES, "--infra kubernetes/CONTEXT"),
    ],
)
def test_a_job_out_of_its_reach_is_refused_with_the_way_out(
    tmp_path: Path, infra: str, more: dict[str, str], where: str, way_out: str
) -> None:
    """Of a living cluster elsewhere it would say that it is gone, and launch a second one."""
    with pytest.raises(SpecError) as raised:
        check_job(job(tmp_path, infra, **more), where)
    assert way_out in raised.value.hint


def test_a_folder_is_in_reach_on_slurm_where_the_jobs_nodes_have_it_too(tmp_path: Path) -> None:
    """A node in a cloud has no disk of this machine."""
    check_job(job(tmp_path, "slurm/lab/spot", store=str(tmp_path)), SLURM)
    with pytest.raises(SpecError):
        check_job(job(tmp_path, "aws", store=str(tmp_path)), VM)


def test_a_job_in_phases_stays_where_its_folders_would_lie_elsewhere(tmp_path: Path) -> None:
    """What a phase begins with is written down for all machines, with that node's folders."""
    phases = [{"until_step": 5, "infra": "slurm/lab/spot"}, {"infra": "slurm/lab/ondemand"}]
    with pytest.raises(SpecError, match="phases"):
        check_job(job(tmp_path, "slurm/lab/spot", phases=phases), SLURM)
    with pytest.raises(SpecError, match="local, vm, slurm, kubernetes"):
        check_where("moon")
    for where in ("local", VM, SLURM, KUBERNETES):
        check_where(where)


def test_on_slurm_it_asks_for_what_slurm_does_not_preempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the on-demand partition, if there is one; no price in SkyPilot's configuration is none."""
    asked: list[list[str]] = []

    def survey(places: Any, *_: Any, **__: Any) -> Survey:
        asked.append([str(place) for place in places])
        return Survey(offers=(SLURM_OFFER,))

    monkeypatch.setattr(node_module, "survey", survey)
    spec = job(tmp_path, "slurm/lab/spot", on_demand_infra="slurm/lab/ondemand")
    assert cheapest(spec).price_usd_per_h == 0.0
    cheapest(job(tmp_path, "slurm/lab/spot"))
    assert asked == [["slurm/lab/ondemand"], ["slurm/lab/spot"]]


def test_in_a_pod_it_acts_by_that_pods_rights_on_the_context_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two CPUs by no instance type; labels by which others find it; folders by their own paths."""
    offer = replace(SLURM_OFFER, infra="kubernetes", region="arn:aws:eks:x:1:cluster/me", zone=None)
    monkeypatch.setattr(node_module, "survey", lambda *_, **__: Survey(offers=(offer,)))
    spec = job(tmp_path, f"kubernetes/{offer.region}")
    check_job(spec, KUBERNETES)
    found = cheapest(spec)
    assert found.price_usd_per_h is None, "a missing price is not free"
    made = task(spec, found, tmp_path / "private.json")
    asked = made["resources"]
    assert asked["infra"] == f"kubernetes/{offer.region}"
    assert asked["autostop"] == {"idle_minutes": 1, "down": True}
    assert asked["labels"][CLUSTER_TAG] == made["name"] == "job-1-c1"
    assert not {"instance_type", "use_spot", "ordered"} & set(asked)
    assert made["envs"]["CONTROLLER_KUBERNETES"] == offer.region
    assert made["envs"]["CONTROLLER_SLURM"] == ""
    assert made["file_mounts"][str(tmp_path)] == str(tmp_path)
    pytest.importorskip("sky")
    check_task({**made, "file_mounts": {}})
    with pytest.raises(SpecError, match="folder of this machine"):
        check_job(job(tmp_path, f"kubernetes/{offer.region}", store=str(tmp_path)), KUBERNETES)


@pytest.mark.parametrize("price", [None, 0.0, 0.1])
@pytest.mark.parametrize("given", [{}, {"budget_usd": 5.0}])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_pod_of_unknown_price_is_refused_under_a_budget(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    price: float | None,
    given: dict[str, Any],
    allowed: bool,
) -> None:
    """As nodes of the run are: the budget could not be kept. Who allows it, has it."""
    offer = replace(SLURM_OFFER, infra="kubernetes", region="ctx", zone=None, price_usd_per_h=price)
    monkeypatch.setattr(node_module, "survey", lambda *_, **__: Survey(offers=(offer,)))
    spec = job(tmp_path, "kubernetes/ctx", allow_unknown_price=allowed, **given)
    if price is not None or not given or allowed:
        assert node_for_job(spec, KUBERNETES).price_usd_per_h == price
        return
    with pytest.raises(SpecError, match=r"kubernetes/ctx is unknown.*\$5.00") as refused:
        node_for_job(spec, KUBERNETES)
    assert "--allow-unknown-price" in refused.value.hint


def test_in_a_pod_the_task_begins_the_service_and_ends_with_it(tmp_path: Path) -> None:
    """There is no systemd; once there is no more to do, SkyPilot's guard may take the pod."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("this machine has no bash")
    place = tmp_path / ".spotguard" / "controller"
    place.mkdir(parents=True)
    seen = tmp_path / "seen"
    twice = f'echo >> "{seen}"\n[ "$(wc -l < "{seen}")" -lt 2 ] || touch "{place}/over"\n'
    (place / "supervise.sh").write_text(twice)
    for name in ("sleep", "tail"):
        write_program(tmp_path / "bin" / name, "exit 0")
    subprocess.run(
        [bash, "-c", load_controller_node()["run"] + "true\n"],
        env={
            "HOME": str(tmp_path),
            "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
            "CONTROLLER_SLURM": "",
            "CONTROLLER_KUBERNETES": "ctx",
        },
        check=True,
        timeout=20.0,
    )
    assert len(seen.read_text().splitlines()) == 2


def test_on_slurm_the_jobs_folders_lie_below_the_home_and_the_job_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is root there; arguments, and what is no folder of this machine's, stay as they are.

    In a VM each folder lies by its own path.
    """
    work, data = tmp_path / "work", tmp_path / "data"
    work.mkdir()
    data.mkdir()
    spec = job(
        work,
        "slurm/lab/spot",
        args=("--data", f"{work}/x"),
        notify=["https://h"],
        env={"KEY": "v"},
        node={"file_mounts": {"~/d": str(data), "/b": "s3://b/d"}},
    )
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    private = write_private(folder, spec, carried_folders(spec))
    made = task(spec, SLURM_OFFER, private)
    mounts = {there: here for there, here in made["file_mounts"].items() if here != str(private)}
    assert all(there.startswith("~/") for there in mounts)
    assert {each["infra"] for each in made["resources"]["ordered"]} == {"slurm/spotlab/ondemand"}
    assert not {"labels", "use_spot", "instance_type"} & set(made["resources"])

    monkeypatch.setenv("HOME", str(tmp_path / "there"))
    kept = read_private(private)
    monkeypatch.setenv("KEY", kept.env["KEY"])
    there = kept.job(spec.public_json())
    for path, source in ((there.workdir, work), (there.node.file_mounts["~/d"], data)):
        below_home = f"~/{Path(path).relative_to(tmp_path / 'there')}"
        assert mounts[below_home] == str(source)
    assert there.script == f"{there.workdir}/job.py"
    assert there.node.file_mounts["/b"] == "s3://b/d"
    assert (there.args, there.notify, there.env) == (spec.args, spec.notify, spec.env)

    in_vm = job(work, "aws/us-east-1", node={"file_mounts": {"/d": str(data)}})
    made = task(in_vm, NODE_OFFER, private)
    assert made["file_mounts"].items() >= {str(work): str(work), str(data): str(data)}.items()
    assert made["resources"]["labels"]
    kept = read_private(write_private(folder, in_vm, carried_folders(in_vm)))
    assert kept.job(in_vm.public_json()) == in_vm


def own_template(path: Path, mounts: str = "{}") -> str:
    """Write a template that mounts these files, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"resources: {{disk_tier: best}}\nfile_mounts: {mounts}\n")
    return str(path)


def test_a_template_of_ones_own_goes_along_with_the_files_that_it_names(tmp_path: Path) -> None:
    """Each launch reads them, those of phases to come, too. SkyPilot's own buckets have some."""
    mounts = "{/a: /srv/words/, /b: s3://b/d, /c: {source: /srv/tokens}, /d: {source: s3://b/e}}"
    first = own_template(tmp_path / "mine.yaml", mounts)
    later = own_template(tmp_path / "later.yaml", "{/e: {source: [/srv/x, /srv/y]}}")
    phases = [{"until_step": 5, "infra": "aws"}, {"infra": "aws", "template": later}]
    in_vm = job(tmp_path, "aws", workdir="/srv/job", template=first, phases=phases)
    carried = carried_folders(in_vm.in_phase(0), in_vm.phases)
    assert set(carried) == {
        *("/srv/job", first, "/srv/words", "/srv/tokens"),
        *(later, "/srv/x", "/srv/y"),
    }
    assert all(here == there for here, there in carried.items())
    assert task(in_vm, NODE_OFFER, tmp_path)["file_mounts"][first] == first
    with pytest.raises(SpecError, match=r"gone\.yaml cannot be read"):
        carried_folders(job(tmp_path, "aws", template="/srv/gone.yaml"))


def test_on_slurm_a_template_lies_below_the_home_and_its_files_are_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template's own words for them hold on this machine alone."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    template = own_template(tmp_path / "work" / "mine.yaml")
    data = tmp_path / "work" / "data"
    spec = job(
        tmp_path / "work",
        "slurm/lab/spot",
        template=template,
        node={"file_mounts": {"~/d": str(data)}},
    )
    check_job(spec, SLURM)
    private = write_private(folder, spec, carried_folders(spec))
    mounts = task(spec, SLURM_OFFER, private)["file_mounts"]
    monkeypatch.setenv("HOME", str(tmp_path / "there"))
    there = read_private(private).job(spec.public_json())
    assert there.script == f"{there.workdir}/job.py"
    for path, source in ((there.template, template), (there.node.file_mounts["~/d"], str(data))):
        assert mounts[f"~/{Path(path).relative_to(tmp_path / 'there')}"] == source

    own_template(tmp_path / "work" / "mine.yaml", "{/a: /srv/words}")
    with pytest.raises(SpecError, match="has file_mounts from /srv/words") as refused:
        check_job(spec, SLURM)
    assert "--file-mount" in refused.value.hint


def test_what_lies_in_a_carried_folder_goes_to_where_its_link_leads(tmp_path: Path) -> None:
    """SkyPilot fails where a link's place is taken, and copies nothing that git ignores."""
    mounts = {"~/d": "/srv/job/data", "/e": "/srv/jobs", "/f": "/tmp/a", "/g": "/tmp/a/b"}
    spec = job(tmp_path, "aws", workdir="/srv/job", node={"file_mounts": mounts})
    made = task(spec, NODE_OFFER, tmp_path)["file_mounts"]
    carried = {there: here for there, here in made.items() if here in carried_folders(spec)}
    assert carried == {
        "/srv/job": "/srv/job",
        "~/.sky/file_mounts/srv/job/data": "/srv/job/data",
        "/srv/jobs": "/srv/jobs",
        "/tmp/a": "/tmp/a",
        "/tmp/a/b": "/tmp/a/b",
    }
    sky = pytest.importorskip("sky.backends.backend_utils")
    behind = sky.FileMountHelper.wrap_file_mount("/srv/job/data")
    assert behind == "~/.sky/file_mounts/srv/job/data"


@pytest.mark.slow
def test_skypilot_on_a_slurm_node_gets_a_login_there(tmp_path: Path) -> None:
    """By keys that are made there, and an sshd that no port leads to: no key of the user's goes.

    A login that leads to no Slurm fails the set-up, so that the controller stays where it is.
    """
    if shutil.which("ssh") is None or not Path("/usr/sbin/sshd").exists():
        pytest.skip("this machine has no sshd")
    setup: str = load_controller_node()["setup"]
    begin = setup.index('if [ -n "$CONTROLLER_SLURM" ]; then')
    place = tmp_path / ".spotguard" / "controller"
    place.mkdir(parents=True)
    script = f"place={place}\nbase={tmp_path}\nruntime=python3\n" + setup[begin:].split("\nfi\n")[0]
    given = {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:/usr/bin:/bin:/opt/slurm/bin"}
    slurm = {"CONTROLLER_SLURM": "lab", "SLURM_CONF": "/etc/slurm of mine", "SLURM_JOB_ID": "7"}
    begins = ["/usr/bin/ssh"]
    if os.geteuid() == 0 and not Path("/run/sshd").exists():  # which only a root's sshd asks for
        begins = ["unshare", "--mount", "sh", "-c", _WITH_RUN, *begins]
        if subprocess.run([*begins[:-1], "true"], env=given, check=False).returncode:
            pytest.skip("this machine's sshd is not set up for root")
    # A login shell's PATH is the machine's own: it finds the fake Slurm by one more variable.
    (tmp_path / "profile").write_text(f"PATH={tmp_path}/slurm:$PATH\n")
    ssh = f'exec {shlex.join(begins)} "${{@:1:$#-1}}" "env BASH_ENV={tmp_path}/profile ${{!#}}"'
    write_program(tmp_path / "bin" / "ssh", ssh)
    write_program(tmp_path / "slurm" / "squeue", "echo no >&2\nexit 1")
    begin_there = ["bash", "-euc", script + "\nfi"]
    failed = subprocess.run(begin_there, env={**given, **slurm}, capture_output=True, check=False)
    assert failed.returncode
    assert failed.stderr
    write_program(tmp_path / "slurm" / "squeue", "exit 0")
    subprocess.run(begin_there, env={**given, **slurm}, check=True)

    words = ["-F", str(tmp_path / ".slurm" / "config"), "-o", "BatchMode=yes"]
    words += ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    asked = [*begins, *words, "lab", 'echo "$PATH|$SLURM_CONF|$SLURM_JOB_ID"']
    said = subprocess.run(asked, env=given, capture_output=True, text=True, check=False)
    told = f"{given['PATH']}|{slurm['SLURM_CONF']}|"
    assert said.stdout.strip().endswith(told), said.stderr  # a .bashrc may put more before it
    environment = (place / "environment").read_text().splitlines()
    assert "export CONTROLLER_ALLOCATION=7" in environment
    assert any(line.startswith("export SKYPILOT_API_SERVER_LOCAL_PORT=") for line in environment)


def test_an_allocation_ends_with_its_service(tmp_path: Path) -> None:
    """Nobody else may be left who would end it; it is cancelled once there is no more to do."""
    bash = shutil.which("bash")
    if bash is None or shutil.which("flock") is None:
        pytest.skip("this machine has no bash, or no flock")
    setup: str = load_controller_node()["setup"]
    (tmp_path / "serve.sh").write_text(setup.split("<<'SERVE'\n")[1].split("\nSERVE\n")[0])
    (tmp_path / ".spotguard" / "controller").mkdir(parents=True)
    for name in ("skypilot-runtime/bin/sky", "bin/scancel", "bin/serves"):
        path = tmp_path / name
        write_program(path, f'echo "{path.name} $*" >> "{tmp_path}/seen"')
    with (tmp_path / "bin" / "scancel").open("a") as scancel:
        scancel.write(f'[ -e "{tmp_path}/answers" ]\n')
    (tmp_path / "environment").write_text(
        f"export HOME={tmp_path} PATH={tmp_path}/bin:$PATH CONTROLLER_BASE={tmp_path}\n"
        f"export CONTROLLER_PYTHON={tmp_path}/bin/serves CONTROLLER_SLURM=lab\n"
        "export CONTROLLER_ALLOCATION=7\n"
    )
    serve = [bash, str(tmp_path / "serve.sh")]
    assert subprocess.run(serve, check=False, umask=0o022).returncode, "who began it tries again"
    (tmp_path / "answers").touch()
    subprocess.run(serve, check=True)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert [line.split()[0] for line in seen] == ["sky", "serves", "scancel", "scancel"]
    assert seen[-1] == "scancel -- 7"
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_on_slurm_the_task_lasts_until_its_allocation_is_cancelled(tmp_path: Path) -> None:
    """Whoever was to cancel it may have been killed before: it is begun anew."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("this machine has no bash")
    place = tmp_path / ".spotguard" / "controller"
    place.mkdir(parents=True)
    (place / "over").touch()
    seen = tmp_path / "seen"
    cancels = f'echo >> "{seen}"\n[ "$(wc -l < "{seen}")" -lt 2 ] || kill "$PPID"\n'
    (place / "supervise.sh").write_text(cancels)
    for name in ("sleep", "tail"):
        write_program(tmp_path / "bin" / name, "exit 0")
    given = {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = subprocess.run(
        [bash, "-c", load_controller_node()["run"]],
        env={**given, "CONTROLLER_SLURM": "lab"},
        check=False,
        umask=0o022,
        timeout=20.0,
    )
    assert done.returncode == -signal.SIGTERM
    assert (place / "log").stat().st_mode & 0o077 == 0


def write_program(path: Path, script: str) -> None:
    """Write a program of bash's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    path.chmod(0o755)


class ElsewhereStrays:
    """What the cloud says of clusters that this machine's SkyPilot does not know."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def look(self, cluster: str) -> ClusterView:
        """Return it."""
        return ClusterView(state=self._state)

    def down(self, cluster: str) -> None:
        """Take the order."""


@pytest.mark.parametrize(
    ("known", "going_down", "elsewhere", "is_gone"),
    [
        (True, 0, ClusterState.ABSENT, False),
        (False, 1, ClusterState.ABSENT, False),
        (False, 0, ClusterState.UP, False),
        (False, 0, ClusterState.UNREACHABLE, False),
        (False, 0, ClusterState.GONE, True),
        (False, 0, ClusterState.ABSENT, True),
    ],
)
def test_a_node_is_gone_only_where_nobody_may_have_it(
    known: bool, going_down: int, elsewhere: ClusterState, is_gone: bool
) -> None:
    """What another machine's SkyPilot launched is not in the books here, and costs money."""
    sdk = FakeSdk(downs_under_way=going_down)
    node = ControllerNode(number=1, cluster="c1", place="aws", price_usd_per_h=0.1, since=0.0)
    if known:
        sdk.comes_up("c1", nodes=1)
    assert SkyHost(sdk, lambda _: ElsewhereStrays(elsewhere)).is_gone(node) is is_gone
    sdk.away = True
    assert not SkyHost(sdk, lambda _: ElsewhereStrays(elsewhere)).is_gone(node)


@pytest.mark.parametrize("going_down", [0, 1])
def test_a_node_that_is_going_down_is_not_told_to_once_more(going_down: int) -> None:
    """Each order would wait for the cluster's lock, which the one before holds for minutes."""
    sdk = FakeSdk(downs_under_way=going_down)
    node = ControllerNode(number=1, cluster="c1", place="aws", price_usd_per_h=0.1, since=0.0)
    SkyHost(sdk, lambda _: ElsewhereStrays(ClusterState.ABSENT)).down(node)
    assert sdk.asked.count("down") == 1 - going_down


def test_nodes_too_many_of_a_launch_are_ended_and_spoil_it_if_that_is_too_late() -> None:
    """As of a job's nodes; a launch that came to nothing may have left some that EC2 lists late."""
    under_way = LaunchFacts(phase=ClusterPhase.UNDER_WAY)
    sdk = FakeSdk(launches={"c1": under_way}, extra="EC2 launched i-1 once more")
    host = SkyHost(sdk, lambda _: ElsewhereStrays(ClusterState.ABSENT))
    assert host.state("c1") == NodeState(there=True, problem=sdk.extra)
    assert (sdk.asked_for_extra, sdk.asked_for_forgotten) == (["c1"], [])
    sdk.launches["c1"] = LaunchFacts(phase=ClusterPhase.FAILED, problem="no such image")
    assert host.state("c1") == NodeState(there=False, problem="no such image")
    assert (sdk.asked_for_extra, sdk.asked_for_forgotten) == (["c1"], ["c1"])
