"""What SkyPilot's books tell of spotguard's clusters, and of nobody else's."""

from __future__ import annotations

import inspect
import json
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from spotguard.events import env
from spotguard.launch.base import LaunchRequest
from spotguard.launch.skypilot import import_sky
from spotguard.launch.skypilot.cluster_list import our_clusters
from spotguard.launch.taskyaml import Machine, task_yaml
from spotguard.spec.templates import load_template
from spotguard.testing.launcher import FAKE_OFFER

if TYPE_CHECKING:
    from pathlib import Path

NAME = "job-261122-045936-2ef1-2"
CLAIM = {
    "cluster": NAME,
    "infra": "aws",
    "region": "us-east-1",
    "zone": "us-east-1a",
    "instance_type": "m6i.large",
    "market": "spot",
    "nodes": 4,
    "price_usd_per_h": 0.031,
    "intended_at": 1_795_323_802.7,
}
VARIABLES = {
    env.RUN_ID: "job-261122-045936-2ef1",
    env.CLUSTER: NAME,
    env.STORE: "s3://bucket/runs",
    env.CLAIM: json.dumps(CLAIM),
    "MINE": "hunter2",
}
BILL = {"name": NAME, "launched_at": 1_795_323_804, "duration": 3600, "total_cost": 0.12}


class Word(Enum):
    """SkyPilot's states."""

    UP = "UP"


def status(variables: object = VARIABLES, **changes: Any) -> dict[str, Any]:
    """Return one answer of `sky.status()`."""
    plain = {
        "name": NAME,
        "launched_at": 1_795_323_900,
        "status": Word.UP,
        "nodes": 3,
        "cloud": "AWS",
        "region": "us-east-1",
        "last_creation_yaml": yaml.safe_dump({"name": "x", "envs": variables}),
    }
    return {**plain, **changes}


def test_a_cluster_tells_whose_it_is_and_what_it_costs() -> None:
    """From the task that made it: no file of this machine is needed."""
    (cluster,) = our_clusters([status()], [BILL])
    assert cluster.run_id == VARIABLES[env.RUN_ID]
    assert cluster.store == "s3://bucket/runs"
    assert cluster.place == "aws/us-east-1/us-east-1a"
    assert (cluster.instance_type, cluster.market) == ("m6i.large", "spot")
    assert cluster.nodes == 3, "as many as there are, not as were asked for"
    assert cluster.since == BILL["launched_at"], "SkyPilot's status moves it later"
    assert (cluster.price_usd_per_h, cluster.sky_usd) == (0.031, 0.12)
    assert cluster.status == "UP"
    assert "hunter2" not in repr(cluster)


def test_a_node_of_the_controller_tells_its_run_and_its_number() -> None:
    """It trains nothing, so it has none of a job's variables."""
    run = VARIABLES[env.RUN_ID]
    mine = {env.CONTROLLER_RUN: f"s3://bucket/runs/{run}?endpoint=x", env.CONTROLLER_NUMBER: "2"}
    (cluster,) = our_clusters([status(mine, name=f"{run}-c2")], [])
    assert (cluster.run_id, cluster.controller) == (run, 2)
    assert cluster.store == "s3://bucket/runs?endpoint=x"
    assert cluster.place == "aws/us-east-1"
    for number in ("3", "", "x", "0", "2" * 9999):
        other = status(mine | {env.CONTROLLER_NUMBER: number}, name=f"{run}-c2")
        assert our_clusters([other], []) == []


NOT_OURS: dict[str, dict[str, Any]] = {
    "no task is known": status(last_creation_yaml=None),
    "a task without variables": status(last_creation_yaml="name: x"),
    "a task that is no YAML": status(last_creation_yaml=f"{env.CLUSTER}: [}}"),
    "a task that is a list": status(last_creation_yaml=f"[{env.CLUSTER}]"),
    "variables that are none": status([env.CLUSTER]),
    "somebody else's variables": status({"RUN_ID": "x"}),
    "a copy of our task under another name": status(name="mine"),
    "no run": status({env.CLUSTER: NAME}),
    "a run that is a path": status({**VARIABLES, env.RUN_ID: "../../etc"}),
    "a name as ours, and nothing else": status({}),
}


@pytest.mark.parametrize("why", NOT_OURS)
def test_what_does_not_say_that_it_is_ours_is_not(why: str) -> None:
    """A name that looks like ours is not enough: what is not ours is never named as ours."""
    assert our_clusters([NOT_OURS[why]], [BILL]) == []


@pytest.mark.parametrize("claim", ["", "nonsense", "[]", '{"price_usd_per_h": "0.1"}'])
def test_what_the_task_does_not_say_is_unknown(claim: str) -> None:
    """Never zero; where it stands, SkyPilot knows as well."""
    bills = [{**BILL, "total_cost": 0.0, "launched_at": None}]
    (cluster,) = our_clusters([status({**VARIABLES, env.CLAIM: claim})], bills)
    assert (cluster.price_usd_per_h, cluster.sky_usd) == (None, None)
    assert cluster.place == "aws/us-east-1"
    assert cluster.since == 1_795_323_900


def test_without_a_bill_the_cluster_is_told_all_the_same() -> None:
    """SkyPilot's list of costs may not have it yet."""
    (cluster,) = our_clusters([status()], [])
    assert cluster.sky_usd is None


def test_the_installed_skypilot_keeps_what_tells_a_cluster_as_ours() -> None:
    """A task of ours, as SkyPilot writes it into its books; and the calls and words exist."""
    sky = pytest.importorskip("sky")
    from sky.schemas.api.responses import StatusResponse

    request = LaunchRequest(
        cluster=NAME,
        run_id=VARIABLES[env.RUN_ID],
        attempt=2,
        nodes=1,
        nproc_per_node=1,
        script="/job.py",
        args=(),
        workdir="/",
        env=VARIABLES,
        offer=FAKE_OFFER,
        max_lifetime_s=None,
    )
    task = task_yaml(request, Machine(), load_template("base"))
    task["resources"] = {"cpus": "2+"}
    task["workdir"] = None
    kept = sky.Task.from_yaml_config(task).to_yaml_config(use_user_specified_yaml=True)
    (cluster,) = our_clusters([status(last_creation_yaml=yaml.safe_dump(kept))], [BILL])
    assert cluster.price_usd_per_h == 0.031
    assert "hunter2" not in yaml.safe_dump(kept)
    fields = set(StatusResponse.model_fields)
    assert {"last_creation_yaml", "launched_at", "nodes", "cloud", "region"} <= fields
    inspect.signature(sky.status).bind(cluster_names=None, refresh=sky.StatusRefreshMode.NONE)


def test_a_skypilot_that_was_never_used_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking would start its API server; its database, its settings or a server are traces."""
    pytest.importorskip("sky")
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SKYPILOT_API_SERVER_ENDPOINT", raising=False)
    assert not import_sky.in_use()
    (tmp_path / ".sky").mkdir()
    (tmp_path / ".sky" / "state.db").touch()
    assert import_sky.in_use()
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", "https://sky.example.org")
    assert import_sky.in_use()
