"""Several kinds of GPU, and a template of one's own: from the settings to what is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.supervisor import skypilot_request
from spotguard.control.supervisor.placement.seen_places import accelerator_of, place_name
from spotguard.control.supervisor.request import launch_request
from spotguard.control.supervisor.skypilot_request import find_offers, task_for, template_for
from spotguard.errors import SpecError
from spotguard.launch.base import LaunchRequest, Offer, Skipped, Survey
from spotguard.spec.model import JobSpec, build_spec
from tests.control.made import launched, made

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from spotguard.events.states import Market
    from spotguard.launch.skypilot.prices import Place
    from spotguard.launch.taskyaml import Machine

CATALOGUE = {"A100:8": 11.9, "H100:8": 9.5, "H100:4": 4.0}
"""USD of a spot node and hour; what is not there is nowhere."""


@pytest.fixture
def spec(home: Path, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """A job for AWS, whose catalogue is a small one."""

    def survey(
        places: Sequence[Place],
        machine: Machine,
        *,
        market: Market,
        on_demand_places: Sequence[Place] = (),
    ) -> Survey:
        price = CATALOGUE.get(machine.gpus or "")
        if price is None:
            return Survey(offers=(), skipped=(Skipped(place="aws", market=market, why="none"),))
        return Survey(
            offers=(
                Offer(
                    infra="aws",
                    region="us-east-1",
                    zone=None,
                    instance_type=f"with-{machine.gpus}".replace(":", "-"),
                    market=market,
                    price_usd_per_h=price,
                    on_demand_usd_per_h=price * 3,
                ),
            )
        )

    monkeypatch.setattr(skypilot_request, "survey", survey)
    script = home.parent / "job.py"
    script.write_text("")
    fields = {"script": str(script), "workdir": str(home.parent), "name": "job"}
    return build_spec({**fields, "store": "s3://b/x", "infra": "aws", "gpus": "A100:8,H100:8"})


def request_of(spec: JobSpec, offer: Offer) -> LaunchRequest:
    """Return what is launched of an offer."""
    record = made(*launched(infra="aws", nodes=1))
    attempt = replace(record.attempts[0], offer=offer)
    return launch_request(record, attempt, spec, now=0.0)


def test_the_cheapest_kind_is_first_each_at_its_own_price(spec: JobSpec) -> None:
    """What was had is what is billed."""
    found = find_offers(spec)
    assert [(each.gpus, each.price_usd_per_h) for each in found.offers] == [
        ("H100:8", 9.5),
        ("A100:8", 11.9),
    ]
    assert found.skipped == ()


def test_a_kind_that_is_nowhere_says_which_it_is(spec: JobSpec) -> None:
    """The other is had all the same."""
    found = find_offers(spec.replace(gpus="A100:8,FOO:8"))
    assert [each.gpus for each in found.offers] == ["A100:8"]
    assert [each.why for each in found.skipped] == ["FOO:8: none"]


def test_each_place_of_the_task_asks_for_its_own_kind(spec: JobSpec) -> None:
    """In the order of the offers: SkyPilot keeps it."""
    offers = find_offers(spec).offers
    task = task_for(spec, request_of(spec, offers[0]), offers)
    assert [each["accelerators"] for each in task["resources"]["ordered"]] == ["H100:8", "A100:8"]
    alone = task_for(spec, request_of(spec, offers[1]))
    assert alone["resources"]["accelerators"] == "A100:8"
    assert alone["resources"]["instance_type"] == "with-A100-8"


@pytest.mark.parametrize(("told", "expected"), [(None, 4), (2, 2)])
def test_processes_follow_the_gpus_that_were_had(
    spec: JobSpec, told: int | None, expected: int
) -> None:
    """Unless the user said how many."""
    asked = {"gpus": "A100:8,H100:4", "nproc_per_node": told or 8}
    job = spec.replace(**asked)
    (offer,) = (each for each in find_offers(job).offers if each.gpus == "H100:4")
    assert request_of(job, offer).nproc_per_node == expected


def test_hazards_and_places_are_those_of_the_kind_that_was_had(spec: JobSpec) -> None:
    """Where a place has no types of machines, its GPUs tell two offers of it apart."""
    record = made(*launched())
    record.spec["gpus"] = "A100:8,H100:4"
    (offer,) = find_offers(spec.replace(gpus="H100:4")).offers
    assert accelerator_of(record, offer) == ("H100", 4)
    assert accelerator_of(record) == ("A100", 8)
    pod = replace(offer, infra="kubernetes", instance_type=None)
    assert place_name(pod).endswith("H100:4")


@pytest.mark.parametrize("key", ["price_usd_per_h", "on_demand_usd_per_h"])
def test_one_price_for_several_kinds_is_refused(spec: JobSpec, key: str) -> None:
    """It could only be right for one of them, and would be billed for all."""
    with pytest.raises(SpecError, match="several kinds"):
        spec.replace(**{key: 2.0})
    assert spec.replace(**{key: 2.0, "infra": "local"}).gpus == "A100:8,H100:8"


def test_a_template_of_ones_own_is_on_top_of_the_places(spec: JobSpec, tmp_path: Path) -> None:
    """And below what spotguard fills in."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "resources: {disk_tier: best, labels: {team: vision}}\n"
        "envs: {NCCL_DEBUG: INFO}\nfile_mounts: {/data: s3://b/data}\n"
    )
    own = spec.replace(template=str(mine), gpus="A100:8")
    offers = find_offers(own).offers
    task = task_for(own, request_of(own, offers[0]), offers)
    plain = task_for(spec, request_of(spec, offers[0]), offers)
    assert task["resources"]["disk_tier"] == "best"
    assert task["resources"]["labels"] == {**plain["resources"]["labels"], "team": "vision"}
    assert task["resources"]["accelerators"] == "A100:8"
    assert task["envs"]["NCCL_DEBUG"] == "INFO"
    assert task["file_mounts"]["/data"] == "s3://b/data"
    assert (task["run"], task["setup"]) == (plain["run"], plain["setup"])
    assert template_for(spec)["run"] == task["run"]
