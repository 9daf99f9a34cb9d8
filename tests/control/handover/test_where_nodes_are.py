"""Nodes of a run are looked for wherever they may be, whatever is offered there today."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from spotguard.control.controller.one_run import launcher_for
from spotguard.control.handover.node import VM, check_job
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind
from spotguard.control.journal.stored.published_launch import newest_regions
from spotguard.control.supervisor import skypilot_request
from spotguard.errors import SpecError
from spotguard.events import keys
from spotguard.launch.base import Survey
from spotguard.launch.skypilot import strays
from spotguard.spec.model import JobSpec
from spotguard.testing.stores import MemoryStore
from tests.control.made import created, intended

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def job(infra: str, on_demand_infra: str | None = None) -> JobSpec:
    """Return a job there."""
    return JobSpec(
        script="/job.py",
        workdir="/",
        name="job",
        store="s3://bucket/runs",
        infra=infra,
        on_demand_infra=on_demand_infra,
    )


@pytest.mark.parametrize(
    ("infra", "on_demand_infra"),
    [("aws,gcp", None), ("aws/us-east-1", "gcp"), ("aws", "aws/us-west-2,gcp/us-central1")],
)
def test_every_place_of_the_job_has_to_be_in_the_reach_of_its_controllers_node(
    infra: str, on_demand_infra: str | None
) -> None:
    """Of a living cluster elsewhere it would say that it is gone, and launch a second one."""
    with pytest.raises(SpecError):
        check_job(job(infra, on_demand_infra), VM)
    check_job(job("aws/us-east-1", "aws/us-west-2"), VM)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], list[str]]]:
    """What says in which regions a launcher looks, while nothing is offered anywhere."""
    found: list[Callable[[], list[str]]] = []
    monkeypatch.setattr(strays, "Ec2Strays", found.append)
    survey = Survey(offers=())
    monkeypatch.setattr(skypilot_request, "find_offers", lambda _: survey)
    return found


def test_regions_without_an_offer_are_looked_at_too(
    tmp_path: Path, asked: list[Callable[[], list[str]]]
) -> None:
    """Those that the job names, and those that whoever asks knows of."""
    launcher_for(job("aws/us-east-1,aws", "aws/us-west-2/us-west-2a"), tmp_path, regions=["x"])
    launcher_for(job("gcp", "aws/us-west-2"), tmp_path)
    assert [sorted(each()) for each in asked] == [["us-east-1", "us-west-2", "x"], ["us-west-2"]]


def test_a_region_where_nodes_live_by_the_journal_is_looked_at(
    tmp_path: Path, asked: list[Callable[[], list[str]]]
) -> None:
    """The job names none, and none offers anything now."""
    kind, at, attempt, data = intended(infra="aws")
    data["offer"]["region"] = "eu-north-1"
    with Journal.create(tmp_path / "journal.db") as journal:
        journal.append(Kind.CREATED.value, at=0.0, data=created(job=None))
        journal.append(kind, at=at, attempt=attempt, data=data)
    launcher_for(job("aws"), tmp_path)
    assert asked[0]() == ["eu-north-1"]


def test_the_newest_launches_tell_where_nodes_may_be() -> None:
    """For who adopts a run: the newest may wait for the end of the one before."""
    store = MemoryStore()
    for number, infra in ((1, "aws"), (2, "gcp"), (3, "aws")):
        body = {"infra": infra, "region": f"region-{number}"}
        store.put(keys.launch(number), json.dumps(body).encode())
    assert newest_regions(store) == ["region-3"]
