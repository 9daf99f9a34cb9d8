from __future__ import annotations

import base64
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

import spotguard
from spotguard.errors import EnvironmentFailure, SpecError
from spotguard.events.env import JOB_VARIABLES
from spotguard.spec import templates
from spotguard.spec.templates import load_template, template_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TASK_KEYS = {"name", "resources", "num_nodes", "workdir", "envs", "setup", "run", "config"}
RESOURCE_KEYS = {"infra", "accelerators", "cpus", "use_spot", "disk_size"}
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
    assert spot == {"base", "aws", "gcp", "azure"}


def test_all_templates_start_a_job_the_same_way() -> None:
    """The run block exists once for each template, and must not drift apart."""
    assert len({load_template(name)["run"] for name in template_names()}) == 1


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


def _run(tmp_path: Path, **environ: str) -> list[str]:
    """Run the templates' run block as SkyPilot would; return what python was called with."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\0" "node=$SPOTGUARD_NODE" "$@"\n')
    python.chmod(0o755)
    task: dict[str, Any] = load_template("base")
    node = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        env={**task["envs"], **node, **environ},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


def test_arguments_reach_the_script_as_they_are(tmp_path: Path) -> None:
    """No shell ever reads the job's name or arguments, whatever they hold."""
    packed = base64.b64encode(b"".join(arg.encode() + b"\0" for arg in HOSTILE)).decode()
    argv = _run(tmp_path, JOB_SCRIPT="my job.py", JOB_ARGS=packed)
    assert argv[-len(HOSTILE) - 1 :] == ["my job.py", *HOSTILE]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("gpus", "asked", "processes"), [("0", "", "1"), ("8", "", "8"), ("8", "2", "2")]
)
def test_ranks_meet_at_the_first_node(
    tmp_path: Path, gpus: str, asked: str, processes: str
) -> None:
    """Every node joins the first one's address under its own rank, one process for each GPU."""
    argv = _run(tmp_path, SKYPILOT_NUM_GPUS_PER_NODE=gpus, JOB_NPROC_PER_NODE=asked)
    options = dict(zip(argv[3:-1:2], argv[4:-1:2], strict=True))
    assert argv[:3] == ["node=1", "-m", "torch.distributed.run"]
    assert options == {
        "--nnodes": "2",
        "--node-rank": "1",
        "--master-addr": "10.0.0.1",
        "--master-port": "29500",
        "--nproc-per-node": processes,
        "--max-restarts": "0",
    }
    assert argv[-1] == "train.py"
