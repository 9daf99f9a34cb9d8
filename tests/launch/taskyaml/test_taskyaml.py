from __future__ import annotations

import base64
import copy
import fcntl
import inspect
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from spotguard.errors import SpecError
from spotguard.events import env
from spotguard.events.states import Market
from spotguard.launch.base import Offer
from spotguard.launch.taskyaml import (
    CLUSTER_TAG,
    RUN_TAG,
    Machine,
    as_text,
    rendezvous_port,
    secrets_hidden,
    task_yaml,
)
from spotguard.spec.templates import load_template
from tests.launch.taskyaml.task_cases import (
    CASES,
    GOLDEN,
    golden_tasks,
    offers_of,
    request_for,
    task_of,
)

if TYPE_CHECKING:
    from tests.launch.taskyaml.task_cases import Case

HOSTILE = ["$(touch pwned)", "`touch pwned`", "a'b\"c", "new\nline", "--rank=9", "", "${HOME}", "é"]
STORE = "s3://b/runs"
RUN = "gpt-260101-000000-ab12"


def offer(infra: str = "aws", **changes: Any) -> Offer:
    """Return a place without more than its name."""
    fields: dict[str, Any] = {
        "infra": infra,
        "region": None,
        "zone": None,
        "instance_type": None,
        "market": Market.SPOT,
        "price_usd_per_h": None,
        "on_demand_usd_per_h": None,
    }
    return Offer(**{**fields, **changes})


def task(
    machine: Machine | None = None, *, place: Offer | None = None, **request: Any
) -> dict[str, Any]:
    """Return the task for a request with some fields changed."""
    where = place or offer()
    asked = request_for(where, **request)
    return task_yaml(asked, machine or Machine(), load_template(where.infra))


@pytest.mark.parametrize("name", sorted(golden_tasks()))
def test_the_tasks_are_those_that_were_looked_at(name: str) -> None:
    """Clouds x markets x nodes x GPUs; tests.launch.taskyaml.task_cases writes them anew."""
    assert golden_tasks()[name] == yaml.safe_load((GOLDEN / name).read_text())


def test_no_golden_file_is_left_over() -> None:
    """Each file stands for a combination that is still made."""
    assert {path.name for path in GOLDEN.glob("*.yaml")} == set(golden_tasks())


@pytest.mark.parametrize("case", [c for c in CASES if offers_of(c)], ids=lambda case: case.key)
def test_a_task_is_its_templates_scripts_and_data(case: Case) -> None:
    """Set-up and run are the template's own, letter for letter; what differs is data."""
    made = task_of(case)
    assert made is not None
    template = load_template("base")
    assert (made["setup"], made["run"]) == (template["setup"], template["run"])
    assert made["resources"]["autostop"] == {"idle_minutes": 1, "down": True}
    assert "use_spot" not in str(made["resources"]) or case.where not in ("slurm", "kubernetes")


def test_what_users_write_never_reaches_a_script() -> None:
    """Script, arguments, commands and values stand in variables alone, packed or quoted there."""
    machine = Machine(setup=tuple(HOSTILE), requirements=("pwned-package",), python=">=3.11")
    made = task(
        machine,
        script="/code/$(touch pwned).py",
        args=tuple(HOSTILE),
        env={env.STORE: STORE, "TOKEN": "hunter2; touch pwned"},
    )
    assert "pwned" not in str({key: made[key] for key in made if key not in ("envs", "secrets")})
    envs = made["envs"]
    assert envs["JOB_SCRIPT"] == "$(touch pwned).py"
    assert base64.b64decode(envs["JOB_ARGS"]).decode().split("\0") == [*HOSTILE, ""]
    assert base64.b64decode(envs["JOB_REQUIREMENTS"]) == b"pwned-package\n"
    assert base64.b64decode(envs["JOB_SETUP"]).decode() == "".join(f"{h}\n" for h in HOSTILE)
    assert all(isinstance(value, str) for value in envs.values())


def test_the_users_variables_are_secrets() -> None:
    """What spotguard tells the job is shown by SkyPilot; what the user gives it is not."""
    made = task(env={env.STORE: STORE, env.SEED: "3", "HF_TOKEN": "hunter2"})
    assert made["secrets"] == {"HF_TOKEN": "hunter2"}
    assert made["envs"][env.SEED] == "3"
    assert "hunter2" not in as_text(secrets_hidden(made))
    assert "secrets" not in task()


def test_arguments_with_a_secret_are_a_secret() -> None:
    """SkyPilot shows what is in `envs`, and `plan --yaml` shows all of it."""
    made = task(args=("--api-key", "hunter2", "--lr", "1"))
    assert base64.b64decode(made["secrets"]["JOB_ARGS"]) == b"--api-key\0hunter2\0--lr\0001\0"
    assert "JOB_ARGS" not in made["envs"]
    assert made["secrets"]["JOB_ARGS"] not in as_text(secrets_hidden(made))
    assert "secrets" not in task(args=("--lr", "1"))


def test_the_key_of_an_attempt_is_a_secret() -> None:
    """The ranks know each other by it: SkyPilot shows it nowhere, and no YAML of ours does."""
    made = task(env={env.STORE: STORE, env.KEY: "0f" * 32})
    assert made["secrets"] == {env.KEY: "0f" * 32}
    assert env.KEY not in made["envs"]
    assert "0f0f" not in as_text(secrets_hidden(made))


@pytest.mark.parametrize("name", ["SKYPILOT_NODE_RANK", "JOB_ARGS", "SPOTGUARD_X", "A B", "1A", ""])
def test_names_that_nodes_need_are_refused(name: str) -> None:
    """A variable of the user's cannot change what the scripts go by; its value is not repeated."""
    with pytest.raises(SpecError, match="not free on the nodes") as caught:
        task(env={env.STORE: STORE, name: "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert task(env={env.STORE: STORE, "SKYPILOT_DOCKER_USERNAME": "me"})["secrets"]


@pytest.mark.parametrize("store", ["/data/runs", "file:///data/runs", ""])
def test_a_folder_of_this_machine_is_no_store_for_a_cloud(store: str) -> None:
    """Refused before anything costs money, with the way out; on Slurm disks are often shared."""
    with pytest.raises(SpecError, match="nodes on aws cannot reach") as caught:
        task(env={env.STORE: store})
    assert "s3://" in caught.value.hint
    shared = offer("slurm", region="lab", zone="spot")
    assert task(place=shared, env={env.STORE: store})["envs"]["JOB_EXTRAS"] == ""


@pytest.mark.parametrize(
    ("store", "extras"), [("s3://b", "[aws]"), ("GS://b/p", "[gcp]"), ("az://c/p", "[azure]")]
)
def test_nodes_get_what_their_store_needs(store: str, extras: str) -> None:
    """The extra is that of the bucket, wherever the nodes are."""
    assert task(env={env.STORE: store})["envs"]["JOB_EXTRAS"] == extras


def test_only_what_is_below_the_workdir_reaches_the_nodes() -> None:
    """A script or requirements file elsewhere is refused by name, not missed after the launch."""
    assert task(script="/code/a/../b/job.py")["envs"]["JOB_SCRIPT"] == "b/job.py"
    with pytest.raises(SpecError, match=r"^script: /home/me/job.py is not below /code"):
        task(script="/home/me/job.py")
    with pytest.raises(SpecError, match=r"^node.requirements: "):
        task(Machine(requirements_file="/coders/r.txt"))
    made = task(Machine(requirements_file="/code/-r.txt", requirements=("numpy",)))
    assert made["envs"]["JOB_REQUIREMENTS_FILE"] == "./-r.txt"
    assert made["envs"]["JOB_REQUIREMENTS"] == ""


def test_a_workdir_that_skypilot_would_rewrite_is_refused() -> None:
    """SkyPilot replaces `$NAME` in paths by variables: another folder would be copied."""
    with pytest.raises(SpecError, match="workdir"):
        task(workdir="/code/$SPOTGUARD_STORE", script="/code/$SPOTGUARD_STORE/job.py")


def test_a_machine_by_name_needs_no_size() -> None:
    """Sizes of the template or the user would contradict the instance type."""
    place = offer(instance_type="p4d.24xlarge", region="us-east-1")
    made = task(Machine(cpus="8+", memory="32+", disk_gb=500, image="docker:x/y:1"), place=place)
    assert made["resources"] == {
        "autostop": {"idle_minutes": 1, "down": True},
        "disk_size": 500,
        "image_id": "docker:x/y:1",
        "infra": "aws/us-east-1",
        "use_spot": True,
        "instance_type": "p4d.24xlarge",
        "labels": {CLUSTER_TAG: f"{RUN}-1", RUN_TAG: RUN},
    }
    assert task(Machine(cpus="8+"))["resources"]["cpus"] == "8+"


def test_the_lifetime_is_a_deadman_on_the_node() -> None:
    """The job ends then even if all else is dead, and idle nodes take themselves down."""
    assert task(max_lifetime_s=3600.7)["envs"]["JOB_LIFETIME_S"] == "3600"
    assert task(max_lifetime_s=0.2)["envs"]["JOB_LIFETIME_S"] == "1"
    assert task()["envs"]["JOB_LIFETIME_S"] == "0"


def test_two_clusters_on_one_machine_meet_at_different_ports() -> None:
    """On Slurm, attempts of two runs may share a node: the same port would fail the second."""
    ports = {rendezvous_port(f"job-{number}") for number in range(20)}
    assert len(ports) == 20
    assert all(1024 < port < 32_768 for port in ports)
    assert task()["envs"]["JOB_PORT"] == str(rendezvous_port(task()["envs"]["SPOTGUARD_CLUSTER"]))


def test_a_template_is_not_changed() -> None:
    """The same template makes the next attempt's task."""
    template = load_template("slurm")
    before = copy.deepcopy(template)
    place = offer("slurm", region="lab", zone="spot")
    task_yaml(request_for(place, env={env.STORE: "/s"}), Machine(cpus="2"), template)
    assert template == before


def test_names_fit_skypilots() -> None:
    """SkyPilot takes two dashes at most."""
    assert task(cluster="my----run-1")["name"] == "my--run-1"


def test_the_text_is_the_task() -> None:
    """What `plan --yaml` prints is read back as the same data, and scripts stay readable."""
    made = task(args=("é", "$x"))
    assert yaml.safe_load(as_text(made)) == made
    assert "run: |\n" in as_text(made)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder with a python3, a uv and a bash's tools that note how they were called."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("python3", "uv"):
        tool = folder / name
        tool.write_text(
            f'#!/bin/bash\nprintf "%s|" {name} "$@" >> {tmp_path}/calls; echo >> {tmp_path}/calls\n'
            f'[[ "$*" != *find_spec* ]] || exit ${{HAS_TORCH:-1}}\n'
            f'[[ "$*" != *requirements_check* ]] || exit ${{HAS_ALL:-1}}\n'
            'if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "${@: -1}/bin";'
            ' ln -s "$0" "${@: -1}/bin/python"; fi\n'
            f'[[ "$*" != *purelib* ]] || echo {tmp_path}\n'
        )
        tool.chmod(0o755)
    (folder / "sleep").symlink_to("/bin/true")  # whoever waits for hours has waited
    return folder


def _carried_wheel(home: Path) -> Path:
    """Return an empty wheel where SkyPilot puts the launcher's."""
    wheel = home / ".spotguard" / "wheels" / "abc" / "spotguard-1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    return wheel


def _set_up(tmp_path: Path, tools: Path, made: dict[str, Any], **environ: str) -> list[list[str]]:
    cluster = f"test-{tmp_path.name}"
    given = {**made["envs"], env.CLUSTER: cluster, "HOME": str(tmp_path), **environ}
    try:
        subprocess.run(
            ["bash", "-c", made["setup"]],
            env={**given, "PATH": f"{tools}:{os.environ['PATH']}"},
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
        guard = ["pgrep", "-f", f"{tmp_path}/.sky/python_path"]
        while subprocess.run(guard, capture_output=True, check=False).stdout:
            pass
    finally:
        subprocess.run(["rm", "-rf", f"/tmp/spotguard-{os.getuid()}/{cluster}"], check=True)
    calls = (tmp_path / "calls").read_text().replace(cluster, "C").splitlines()
    return [line.strip("|").split("|") for line in calls]


def test_setup_makes_everything_anew_with_uv(tmp_path: Path, tools: Path) -> None:
    """A bare machine: the script's own Python and packages, and spotguard as the launcher's wheel.

    The user's commands run first.
    """
    wheel = _carried_wheel(tmp_path)
    place = f"/tmp/spotguard-{os.getuid()}/C"
    machine = Machine(setup=("echo set up > done",), requirements=("numpy",), python=">=3.11")
    asked = request_for(offer())
    made = task_yaml(asked, machine, load_template("aws"), wheel=wheel)
    calls = [call for call in _set_up(tmp_path, tools, made) if call[0] == "uv"]
    assert calls == [
        ["uv", "venv", "--quiet", "--allow-existing", "--python", ">=3.11", f"{place}/venv"],
        [
            *("uv", "pip", "install", "--quiet", "--python", f"{place}/venv/bin/python"),
            *("-r", f"{place}/requirements.txt", f"spotguard[aws] @ file://{wheel}"),
        ],
    ]
    assert (tmp_path / "done").read_text() == "set up\n"
    (target,) = made["file_mounts"]
    assert target == "~/.spotguard/wheels/abc/spotguard-1-py3-none-any.whl"


def test_setup_keeps_a_machines_own_torch(tmp_path: Path, tools: Path) -> None:
    """An image or a cluster that brings torch: only what is missing is added, without uv.

    The launcher's spotguard is there before pip looks, which takes the machine's own else.
    """
    wheel = _carried_wheel(tmp_path)
    machine = Machine(requirements_file="/code/r.txt")
    made = task_yaml(request_for(offer()), machine, load_template("aws"), wheel=wheel)
    calls = _set_up(tmp_path, tools, made, HAS_TORCH="0")
    assert all(call[0] == "python3" for call in calls)
    unpack, install = [call for call in calls if "install" in call or "zipfile" in call]
    assert unpack == ["python3", "-m", "zipfile", "-e", str(wheel), str(tmp_path)]
    wanted = ["-r", "./r.txt", "spotguard[aws]==1", "--quiet"]
    assert install[install.index("install") + 3 :] == wanted
    assert (tmp_path / "machine.pth").exists()
    look = calls[calls.index(install) - 1]
    asked = install[install.index("install") + 1 : -1]
    assert look[look.index("spotguard.launch.requirements_check") + 1 :] == asked


def test_pip_is_not_called_where_all_is_there(tmp_path: Path, tools: Path) -> None:
    """It takes two seconds to say so, and each resume would wait for them."""
    wheel = _carried_wheel(tmp_path)
    made = task_yaml(request_for(offer()), Machine(), load_template("aws"), wheel=wheel)
    calls = _set_up(tmp_path, tools, made, HAS_TORCH="0", HAS_ALL="0")
    assert not any("install" in call for call in calls)


def test_without_a_wheel_only_pip_can_tell(tmp_path: Path, tools: Path) -> None:
    """What the machine may have of spotguard is not asked whether it is enough."""
    made = task_yaml(request_for(offer()), Machine(), load_template("aws"))
    calls = _set_up(tmp_path, tools, made, HAS_TORCH="0", HAS_ALL="0")
    assert any("install" in call for call in calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lifetime_s", "rank", "begun", "is_set"),
    [
        (3600.0, "0", False, True),
        (3600.0, "0", True, False),
        (3600.0, "1", False, False),
        (None, "0", False, False),
    ],
)
def test_nodes_that_never_begin_end_themselves(
    tmp_path: Path, tools: Path, lifetime_s: float | None, rank: str, begun: bool, is_set: bool
) -> None:
    """SkyPilot's server, gone in the midst of set-up, has told them nothing of an end.

    The first one sets SkyPilot's guard once its time is over, by SkyPilot's own Python there.
    """
    runtime = tmp_path / "runtime-python"
    runtime.write_text(f'#!/bin/bash\nprintf "%s\\n" "$2" > {tmp_path}/guard\n')
    runtime.chmod(0o755)
    told = tmp_path / ".sky" / "python_path"
    told.parent.mkdir()
    told.write_text(f"{runtime}\n")
    place = Path(f"/tmp/spotguard-{os.getuid()}/test-{tmp_path.name}")
    place.mkdir(parents=True)
    if begun:
        (place / "began").touch()
    made = task_yaml(
        request_for(offer(), max_lifetime_s=lifetime_s), Machine(), load_template("aws")
    )
    _set_up(tmp_path, tools, made, SKYPILOT_SETUP_NODE_RANK=rank)
    assert (tmp_path / "guard").exists() is is_set
    if is_set:
        autostop_lib = pytest.importorskip("sky.skylet.autostop_lib")
        signature = inspect.signature(autostop_lib.set_autostop)
        signature.bind(0, "cloudvmray", autostop_lib.AutostopWaitFor.NONE, True)
        call = 'a.set_autostop(0, "cloudvmray", a.AutostopWaitFor.NONE, True)'
        assert (tmp_path / "guard").read_text().strip().endswith(call)


def test_what_a_killed_attempt_left_on_a_node_that_stays_is_removed(
    tmp_path: Path, tools: Path
) -> None:
    """An environment and a checkpoint, once nobody holds its lock; what lives or begins stays."""
    base = Path(f"/tmp/spotguard-{os.getuid()}")
    folders = {name: base / f"{name}-{tmp_path.name}" for name in ("dead", "lives", "begins")}
    for folder in folders.values():
        (folder / "venv" / "bin").mkdir(parents=True)
        (folder / "lock").touch()
        if folder is not folders["begins"]:
            os.utime(folder / "lock", (0, 0))
    try:
        with (folders["lives"] / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            _set_up(tmp_path, tools, task())
        assert {name for name, folder in folders.items() if folder.exists()} == {"lives", "begins"}
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def test_a_command_of_the_users_that_fails_ends_the_setup(tmp_path: Path, tools: Path) -> None:
    """No training on a machine that is half ready."""
    with pytest.raises(subprocess.CalledProcessError):
        _set_up(tmp_path, tools, task(Machine(setup=("false", "true"))))
