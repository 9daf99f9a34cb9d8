"""What a job is told of its run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.record import Limits
from spotguard.control.supervisor.request import (
    BUCKET_HEARTBEAT_S,
    cluster_name,
    heartbeat_s,
    launch_request,
    may_go_on_in_place,
)
from spotguard.spec.model import JobSpec, build_spec
from tests.control.made import launched, made

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("store", "given", "expected"),
    [
        ("s3://bucket/x", {}, BUCKET_HEARTBEAT_S),
        ("az://box@account/x", {}, BUCKET_HEARTBEAT_S),
        ("s3://bucket/x", {"heartbeat_s": 3}, 3.0),
        ("./runs", {}, 1.0),
    ],
)
def test_a_bucket_hears_less_often_unless_asked_to(
    tmp_path: Path, store: str, given: dict[str, float], expected: float
) -> None:
    """Each sign of life costs money there; what the user says counts."""
    script = tmp_path / "job.py"
    script.write_text("")
    fields = {"name": "n", "script": str(script), "workdir": str(tmp_path), "store": store}
    assert heartbeat_s(build_spec({**fields, **given})) == expected


@pytest.mark.parametrize(
    ("infra", "nodes", "expected"),
    [("local", 2, True), ("local", 1, False), ("aws", 2, False), ("slurm", 2, False)],
)
def test_nodes_go_on_in_place_where_they_outlive_each_other(
    infra: str, nodes: int, expected: bool
) -> None:
    """SkyPilot ends the job with the first node that goes: to wait there is to pay for it."""
    record = made(*launched(infra=infra, nodes=nodes), limits=Limits(nodes_min=1, nodes_max=3))
    assert may_go_on_in_place(record, record.attempts[0]) is expected
    unwanted = replace(record, spec={"in_place": False})
    assert not may_go_on_in_place(unwanted, record.attempts[0])


def test_a_clusters_name_is_not_used_again_after_a_refusal() -> None:
    """SkyPilot would take the old request's answer for the new one's."""
    names = {cluster_name("r", 2), cluster_name("r", 2, 1), cluster_name("r", 2, 2)}
    assert len(names) == 3


@pytest.mark.parametrize(("now", "expected"), [(0.0, 60.0), (20.0, 40.0), (70.0, 1.0)])
def test_an_attempt_that_is_launched_late_ends_no_later(now: float, expected: float) -> None:
    """A controller that died in between costs the attempt time, and the user no money."""
    record = made(*launched(down_at=60.0, max_lifetime_s=60.0))
    spec = JobSpec(script="/job.py", workdir="/", name="job", store="/store")

    request = launch_request(record, record.attempts[0], spec, now=now)

    assert request.max_lifetime_s == expected
    assert float(request.env["SPOTGUARD_DOWN_AT"]) == 60.0
    assert request.env["SPOTGUARD_CLOCK"] == "attempts/000001/launch.json"
