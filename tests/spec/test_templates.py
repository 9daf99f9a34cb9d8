from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import spotguard
from spotguard.errors import EnvironmentFailure, SpecError
from spotguard.events.env import JOB_VARIABLES
from spotguard.spec import templates
from spotguard.spec.templates import load_template, merged, template_names

if TYPE_CHECKING:
    from collections.abc import Iterator

TASK_KEYS = {"name", "resources", "num_nodes", "workdir", "envs", "setup", "run", "config"}
RESOURCE_KEYS = {"infra", "cpus", "use_spot", "disk_size", "autostop"}
HOSTILE = ["--name", "two words", "$(touch pwned)", "`x`", "a'b\"c", "new\nline", "*", "", "-n"]


@pytest.fixture
def forget_templates() -> Iterator[None]:
    """Look for the templates anew, before and after."""
    for cached in (templates._folder, template_names):
        cached.cache_clear()
    yield
    for cached in (templates._folder, template_names):
        cached.cache_clear()


def test_the_shipped_templates_are_these() -> None:
    """One for each kind of cluster, and a base."""
    assert template_names() == ("aws", "azure", "base", "gcp", "kubernetes", "slurm")


@pytest.mark.parametrize("name", template_names())
def test_a_template_is_a_skypilot_task(name: str) -> None:
    """Only keys of SkyPilot's task schema, all texts where it wants texts, job variables known."""
    task = load_template(name)
    assert set(task) <= TASK_KEYS
    assert set(task["resources"]) <= RESOURCE_KEYS
    assert all(isinstance(value, str) for value in task["envs"].values())
    own = {variable for variable in task["envs"] if variable.startswith("SPOTGUARD_")}
    assert own <= JOB_VARIABLES


def test_the_market_is_named_only_where_skypilot_takes_it() -> None:
    """SkyPilot refuses `use_spot` on Slurm, and on Kubernetes a node pool decides."""
    spot = {name for name in template_names() if load_template(name)["resources"].get("use_spot")}
    assert spot == {"aws", "gcp", "azure"}


def test_all_templates_start_a_job_the_same_way() -> None:
    """Set-up and run exist once, whatever the kind of cluster, and each begins with the base."""
    for part in ("setup", "run"):
        assert len({load_template(name)[part] for name in template_names()}) == 1
    assert load_template("slurm")["resources"]["autostop"] == {"idle_minutes": 1, "down": True}


def test_tables_are_merged_and_the_rest_is_replaced() -> None:
    """Merging changes neither of the two."""
    below = {"a": {"x": 1, "y": 2}, "b": [1]}
    assert merged(below, {"a": {"y": 3}, "b": [2]}) == {"a": {"x": 1, "y": 3}, "b": [2]}
    assert below == {"a": {"x": 1, "y": 2}, "b": [1]}


def test_a_template_is_fresh_on_every_call() -> None:
    """Merging settings into a template does not change the next one."""
    load_template("aws")["resources"].clear()
    assert load_template("aws")["resources"]["infra"] == "aws"


def test_an_unknown_template_gets_the_nearest() -> None:
    """Names are never paths, so nothing outside the folder can be read."""
    with pytest.raises(SpecError) as caught:
        load_template("kubernets")
    assert caught.value.hint == "did you mean 'kubernetes'?"
    with pytest.raises(SpecError):
        load_template("../pyproject")


@pytest.mark.usefixtures("forget_templates")
def test_templates_are_found_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package carries its templates inside; a broken one says what to do."""
    package = tmp_path / "site-packages" / "spotguard"
    package.mkdir(parents=True)
    source = templates._folder()
    templates._folder.cache_clear()
    monkeypatch.setattr(spotguard, "__file__", str(package / "__init__.py"))
    with pytest.raises(EnvironmentFailure, match="missing from this installation"):
        template_names()
    shutil.copytree(source, package / "task_templates")
    assert "aws" in template_names()
    assert load_template("aws")["resources"]["infra"] == "aws"


def _run(tmp_path: Path, *, set_up_at: float | None = None, **environ: str) -> list[str]:
    """Run the templates' run block as SkyPilot would; return what python was called with."""
    task: dict[str, Any] = load_template("base")
    # Other workers, and the tests of another Python beside these, call their folders the same.
    envs = {**task["envs"], "SPOTGUARD_CLUSTER": f"test-{secrets.token_hex(8)}"}
    place = Path(f"/tmp/spotguard-{os.getuid()}") / envs["SPOTGUARD_CLUSTER"]
    python = place / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    told = "$SPOTGUARD_NODE $SPOTGUARD_METADATA${SPOTGUARD_NODE_UP_AT+ up at $SPOTGUARD_NODE_UP_AT}"
    told += "${SPOTGUARD_ALLOCATION:+ of $SPOTGUARD_ALLOCATION}"
    python.write_text(f'#!/bin/sh\nprintf "%s\\0" "{told}" "$@"\n')
    python.chmod(0o755)
    if set_up_at is not None:
        (place / "setup.sh").touch()
        os.utime(place / "setup.sh", (set_up_at, set_up_at))
    node = {
        "PATH": os.environ["PATH"],
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    }
    try:
        done = subprocess.run(
            ["bash", "-c", task["run"]],
            env={**envs, **node, **environ},
            cwd=tmp_path,
            capture_output=True,
            check=True,
        )
    finally:
        shutil.rmtree(place)
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


def test_only_a_node_of_slurm_knows_its_allocation(tmp_path: Path) -> None:
    """It cancels that at its end; one of another cloud may carry the variable by accident."""
    told = {"cloud": "Slurm"}, {"cloud": "AWS"}
    for info in told:
        argv = _run(tmp_path, SKYPILOT_CLUSTER_INFO=json.dumps(info), SLURM_JOB_ID="52")
        assert (" of 52" in argv[0]) == (info["cloud"] == "Slurm")


def test_arguments_reach_the_script_as_they_are(tmp_path: Path) -> None:
    """No shell ever reads the job's name or arguments, whatever they hold."""
    packed = base64.b64encode(b"".join(arg.encode() + b"\0" for arg in HOSTILE)).decode()
    argv = _run(tmp_path, JOB_SCRIPT="my job.py", JOB_ARGS=packed)
    assert argv[-len(HOSTILE) - 1 :] == ["my job.py", *HOSTILE]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("info", "cloud"),
    [
        ('{"cluster_name": "c", "cloud": "AWS", "region": "r"}', "aws"),
        ('{"cluster_name": "c", "cloud": "GCP", "region": "r"}', "gcp"),
        ('{"cluster_name": "c", "cloud": "Azure", "region": "r"}', "azure"),
        ('{"cluster_name": "c", "cloud": "Slurm", "region": "r"}', "detect"),
        ('{"cluster_name": "c", "cloud": "Kubernetes", "region": "r"}', "none"),
        ("", "detect"),
    ],
)
def test_skypilot_says_whose_notices_count(tmp_path: Path, info: str, cloud: str) -> None:
    """A task with candidates on several clouds listens to the one that it came to lie on."""
    assert _run(tmp_path, SKYPILOT_CLUSTER_INFO=info)[0] == f"1 {cloud}"


def test_the_job_is_told_since_when_the_node_is_up(tmp_path: Path) -> None:
    """From the beginning of its set-up: what recoveries count as provisioned."""
    assert _run(tmp_path, set_up_at=1234.5)[0] == "1 detect up at 1234.500000000"


@pytest.mark.parametrize(
    ("gpus", "asked", "processes"), [("0", "", "1"), ("8", "", "8"), ("8", "2", "2")]
)
def test_ranks_meet_at_the_first_node(
    tmp_path: Path, gpus: str, asked: str, processes: str
) -> None:
    """Every node joins the first one's address under its own rank, one process for each GPU."""
    argv = _run(tmp_path, SKYPILOT_NUM_GPUS_PER_NODE=gpus, JOB_NPROC_PER_NODE=asked)
    split = argv.index("--")
    options = dict(zip(argv[3:split:2], argv[4:split:2], strict=True))
    assert argv[:3] == ["1 detect", "-m", "spotguard.launch.agent"]
    assert Path(options.pop("--place")).name.startswith("test-")
    assert options == {
        "--nodes": "2",
        "--node": "1",
        "--nproc": processes,
        "--master": "10.0.0.1:29500",
        "--lifetime": "0",
    }
    assert argv[split + 1 :] == ["train.py"]
