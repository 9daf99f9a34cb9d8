"""What a user puts on the nodes beside the workdir: buckets, files of this machine, volumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import SpecError
from spotguard.events.states import Market
from spotguard.launch.base import Offer
from spotguard.launch.taskyaml import Machine, task_yaml
from spotguard.spec.templates import load_template
from tests.launch.taskyaml.task_cases import ask_skypilot, make_home, request_for, sky_python

if TYPE_CHECKING:
    from pathlib import Path

OFFER = Offer(
    infra="aws",
    region="us-east-1",
    zone=None,
    instance_type=None,
    market=Market.SPOT,
    price_usd_per_h=None,
    on_demand_usd_per_h=None,
)


def task(**machine: Any) -> dict[str, Any]:
    """Return the task of a node like that."""
    return task_yaml(request_for(OFFER), Machine(**machine), load_template("aws"))


def test_mounts_and_volumes_stand_in_the_task(tmp_path: Path) -> None:
    """As SkyPilot takes them, beside the template's own; without any, there is no such key."""
    (tmp_path / "words").mkdir()
    made = task(
        file_mounts={"/data": "s3://b/d", "~/words": str(tmp_path / "words")},
        volumes={"/mnt/big": "my-volume"},
    )
    assert made["file_mounts"] == {"/data": "s3://b/d", "~/words": str(tmp_path / "words")}
    assert made["volumes"] == {"/mnt/big": "my-volume"}
    assert "volumes" not in task()
    assert "file_mounts" not in task()


@pytest.mark.slow
def test_skypilot_takes_them(tmp_path: Path) -> None:
    """Its own schema and checks, offline."""
    python = sky_python()
    if python is None:
        pytest.skip("SkyPilot is not installed")
    (tmp_path / "words").write_text("a")
    home = tmp_path / "home"
    home.mkdir()
    made = task(file_mounts={"~/words": str(tmp_path / "words")}, image="docker:pytorch/pytorch")
    made["workdir"] = str(tmp_path)
    verdict = ask_skypilot(python, make_home(home), tasks={"mounted": made})["verdicts"]["mounted"]
    assert verdict["problem"] is None


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"file_mounts": {"/data": "/no/such/folder"}}, "for /data: there is no /no/such/folder"),
        ({"file_mounts": {"~/.spotguard/wheels": "s3://b/x"}}, "which is spotguard's"),
        ({"file_mounts": {"~/.ssh": "s3://b/x"}}, "which is spotguard's or SkyPilot's"),
        ({"volumes": {"~/sky_workdir/x": "v"}}, "which is spotguard's or SkyPilot's"),
        (
            {"volumes": {"/data": "v"}, "file_mounts": {"/data/": "s3://b/x"}},
            "in both of file_mounts and volumes",
        ),
    ],
)
def test_what_cannot_be_put_there_is_refused(machine: dict[str, Any], said: str) -> None:
    """Before anything is launched, by the name of the setting and of the place."""
    with pytest.raises(SpecError) as problem:
        task(**machine)
    assert said in problem.value.message
    assert problem.value.message.startswith("node.")
