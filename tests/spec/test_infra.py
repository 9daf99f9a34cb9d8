from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import SpecError
from spotguard.spec.model import JobSpec
from spotguard.spec.setting_layers import Needs, script_needs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.spec.conftest import Resolve


@pytest.mark.parametrize(
    ("raw", "canonical"),
    [
        ("local", "local"),
        ("AWS", "aws"),
        ("aws/us-east-1", "aws/us-east-1"),
        ("gcp/us-central1/us-central1-a", "gcp/us-central1/us-central1-a"),
        (" gcp , aws/us-east-1", "gcp,aws/us-east-1"),
        (["gcp", "aws"], "gcp,aws"),
        ("azure/eastus", "azure/eastus"),
        ("k8s", "kubernetes"),
        ("kubernetes/arn:aws:eks:x:1:cluster/me", "kubernetes/arn:aws:eks:x:1:cluster/me"),
        ("slurm/spotlab/spot", "slurm/spotlab/spot"),
        ("slurm/a/spot,slurm/b/spot", "slurm/a/spot,slurm/b/spot"),
    ],
)
def test_places_have_one_spelling(resolve_job: Resolve, raw: object, canonical: str) -> None:
    """However a place is written, the rest of spotguard sees one form of it."""
    assert resolve_job({"infra": raw}).spec.infra == canonical


@pytest.mark.parametrize(
    "raw",
    [
        *("", "mars", "aws/", "aws//a", "aws/a/b/c", "azure/eastus/1", "local/x", "slurm"),
        *("slurm/a", "slurm/a/b/c", "aws,local", "aws,slurm/a/b", "kubernetes,gcp", "aws,aws"),
        *("aws/us east", "aws/$(x)", "aws/-x", "aws/a\nb", "gcp,", 3, []),
    ],
)
def test_what_is_no_place_is_refused(resolve_job: Resolve, raw: object) -> None:
    """Nothing that SkyPilot would read as something else; kinds of places do not mix."""
    with pytest.raises(SpecError, match=r"^infra: given .*; allowed: local, or clouds"):
        resolve_job(project=f"infra = {json.dumps(raw)}\n")


@pytest.mark.parametrize(
    ("infra", "elsewhere"),
    [
        ("aws", "gcp, aws/us-east-2"),
        ("gcp,aws", "azure/eastus"),
        ("slurm/a/spot", "slurm/b/gpu"),
        ("kubernetes", "k8s/ctx"),
        ("local", "aws"),
    ],
)
def test_on_demand_nodes_may_come_from_elsewhere(
    resolve_job: Resolve, infra: str, elsewhere: str
) -> None:
    """Spelt as any place, of the kind of `infra`; local nodes are bought nowhere."""
    spec = resolve_job({"infra": infra, "on_demand_infra": elsewhere}).spec
    assert spec.on_demand_infra == resolve_job({"infra": elsewhere}).spec.infra
    assert JobSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("raw", ["mars", "aws/", "slurm/a", "aws,slurm/a/b", ""])
def test_what_is_no_on_demand_place_is_refused(resolve_job: Resolve, raw: str) -> None:
    """By the same rules as `infra`."""
    with pytest.raises(SpecError, match=r"^on_demand_infra: given .*; allowed: as for infra"):
        resolve_job({"infra": "aws", "on_demand_infra": raw})


@pytest.mark.parametrize(
    ("infra", "elsewhere"),
    [("aws", "slurm/a/b"), ("slurm/a/b", "kubernetes"), ("kubernetes", "gcp"), ("aws", "local")],
)
def test_on_demand_places_of_another_kind_are_refused(
    resolve_job: Resolve, infra: str, elsewhere: str
) -> None:
    """Nodes and stores are prepared differently there; the sentence names both, and who said it."""
    with pytest.raises(SpecError) as refused:
        resolve_job({"infra": infra}, project=f"on_demand_infra = {json.dumps(elsewhere)}\n")
    assert refused.value.message == (
        f"on_demand_infra: given {elsewhere!r} (spotguard.toml line 1), but infra is {infra!r}, "
        "where nodes and stores are prepared differently"
    )
    assert "of one kind" in refused.value.hint


def test_gpus_decide_the_processes(resolve_job: Resolve) -> None:
    """One process for each GPU, unless the user says otherwise."""
    spec = resolve_job({"gpus": "A100:8"}).spec
    assert (spec.gpus, spec.nproc_per_node) == ("A100:8", 8)
    assert resolve_job({"gpus": "L4"}).spec.gpus == "L4:1"
    assert resolve_job({"gpus": "A100:8", "nproc_per_node": 2}).spec.nproc_per_node == 2
    assert resolve_job({}).spec.nproc_per_node == 1


@pytest.mark.parametrize(
    "raw", ["8", "A100:0", "A100:", "A100:1.5", "A100,A100", "A100,", "{A100: 8}", "a b"]
)
def test_what_is_no_gpu_is_refused(resolve_job: Resolve, raw: str) -> None:
    """One kind for all nodes: steps would wait for the slower one."""
    with pytest.raises(SpecError, match=r"^gpus: given "):
        resolve_job({"gpus": raw})


@pytest.mark.parametrize(
    ("raw", "canonical"),
    [
        ("never", "never"),
        ("Deadline", "deadline"),
        ("fallback-after 20m", "fallback-after 1200s"),
        ("fallback_after 90", "fallback-after 90s"),
    ],
)
def test_on_demand_rules(resolve_job: Resolve, raw: str, canonical: str) -> None:
    """One spelling of each rule."""
    assert resolve_job({"on_demand": raw}).spec.on_demand == canonical


@pytest.mark.parametrize("raw", ["always", "fallback-after", "fallback-after -1s", "never 20m", ""])
def test_what_is_no_rule_is_refused(resolve_job: Resolve, raw: str) -> None:
    """Money is spent by this rule: no guessing."""
    with pytest.raises(SpecError, match=r"^on_demand: given "):
        resolve_job(project=f'on_demand = "{raw}"\n')


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        ("node.cpus", "0"),
        ("node.cpus", "4x"),
        ("node.cpus", True),
        ("node.memory", "-1"),
        ("node.disk_gb", 1),
        ("node.image", "$(x)"),
        ("node.instance_type", "a b"),
        ("node.setup", 3),
    ],
)
def test_a_wrong_node_is_refused_by_name(resolve_job: Resolve, key: str, raw: object) -> None:
    """Before SkyPilot sees it, in spotguard's own words."""
    with pytest.raises(SpecError, match=rf"^{key}: given "):
        resolve_job({key: raw})


def test_a_node_can_be_described_in_files_and_variables(resolve_job: Resolve) -> None:
    """Below `[node]`, or as SPOTGUARD_NODE_*; a key outside the table is told where it belongs."""
    project = '[node]\ncpus = 8\nmemory = "32+"\nsetup = "make data"\n'
    node = resolve_job(project=project, environ={"SPOTGUARD_NODE_DISK_GB": "64"}).spec.node
    assert (node.cpus, node.memory, node.disk_gb) == ("8", "32+", 64)
    assert node.setup == ("make data",)
    with pytest.raises(SpecError) as caught:
        resolve_job(project="cpus = 8\n")
    assert caught.value.hint == "cpus belongs below [node]"


def test_a_script_says_what_it_needs(tmp_path: Path) -> None:
    """`dependencies` and `requires-python` of its PEP 723 block; nothing without a block."""
    lines = ["/// script", 'requires-python = ">=3.11"', 'dependencies = ["a", "b<3"]', "///"]
    block = "".join(f"# {line}\n" for line in lines)
    needs = script_needs(tmp_path / "job.py", block)
    assert needs == Needs(dependencies=("a", "b<3"), python=">=3.11")
    assert script_needs(tmp_path / "job.py", "import torch\n") == Needs()


@pytest.mark.parametrize(
    "toml",
    [
        'dependencies = "torch"',
        "dependencies = [3]",
        'dependencies = ["--index-url=http://x"]',
        'dependencies = ["a\\nb"]',
        "requires-python = 3.11",
    ],
)
def test_needs_that_pip_would_read_as_something_else(tmp_path: Path, toml: str) -> None:
    """A requirement is one line and no option."""
    with pytest.raises(SpecError, match=r"^job.py: given "):
        script_needs(tmp_path / "job.py", f"# /// script\n# {toml}\n# ///\n")
