"""SkyPilot itself judges every task, offline, in one process of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.events import env
from spotguard.launch.taskyaml import Machine, infra_of, task_yaml
from spotguard.launch.wheel import build_wheel
from spotguard.spec.templates import load_template
from tests.control.handover.test_node import SLURM_OFFER, job
from tests.control.handover.test_node import task as node_task
from tests.launch.taskyaml.task_cases import (
    CASES,
    GOLDEN,
    SKY_PYTHON,
    ask_skypilot,
    make_home,
    offers_of,
    request_for,
    sky_python,
    survey_questions,
    task_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.launch.base import Offer
    from tests.launch.taskyaml.task_cases import Case

pytestmark = pytest.mark.slow

VM_OFFER = replace(
    SLURM_OFFER, infra="aws", region="us-east-1", zone=None, instance_type="m7i.xlarge"
)
TASKS = {case.key: case for case in CASES if task_of(case) is not None}
BY_CLOUD = {key: case for key, case in TASKS.items() if case.where not in ("slurm", "kubernetes")}
MORE_SURVEYS = {
    "unknown region": {"places": ["aws/mars"], "machine": {"gpus": "L4:1"}},
    "unknown zone": {"places": ["gcp/us-central1/us-central1-x"], "machine": {"gpus": "L4:1"}},
    "too many": {"places": ["aws/us-east-1"], "machine": {"gpus": "A100:4"}},
    "unknown machine": {"places": ["aws"], "machine": {"instance_type": "p4d.xl"}},
    "by name": {"places": ["azure/eastus"], "machine": {"instance_type": "Standard_D4s_v5"}},
    "on demand only, elsewhere": {
        "places": ["slurm/spotlab/spot"],
        "on_demand_places": ["slurm/spotlab/ondemand"],
        "machine": {"cpus": "1+"},
        "market": "on_demand",
    },
    "on demand at another cloud": {
        "places": ["aws/us-west-2"],
        "on_demand_places": ["gcp/us-central1"],
        "machine": {"gpus": "L4:1"},
    },
    "unpriced partition": {"places": ["slurm/spotlab/other"], "machine": {"cpus": "1+"}},
}
PLACES_LOOKED_UP: dict[str, tuple[str, str, str, list[str]] | None] = {
    "aws": None,
    "kubernetes": None,
    "aws/us-east-1": None,
    "aws/us-east-1/us-east-1b": None,
    "azure/eastus": None,
    "gcp/us-central1/us-central1-a": None,
    "kubernetes/ctx": None,
    "slurm/spotlab/spot": None,
    "aws/us-east-9": ("region", "us-east-9", "aws", ["us-east-1", "us-west-2"]),
    "azure/mars": ("region", "mars", "azure", ["eastus", "westeurope", "westus2"]),
    "gcp/us-central1/us-central1-x": (
        *("zone", "us-central1-x", "gcp/us-central1"),
        ["us-central1-a", "us-central1-b"],
    ),
    "aws/us-east-1/mars": ("zone", "mars", "aws/us-east-1", ["us-east-1a", "us-east-1b"]),
    "kubernetes/arn:aws:eks:x:1:cluster/me": (
        *("context", "arn:aws:eks:x:1:cluster/me", "kubernetes"),
        ["ctx"],
    ),
    "slurm/lab/spot": ("cluster", "lab", "slurm", ["spotlab"]),
    "slurm/spotlab/sport": ("partition", "sport", "slurm/spotlab", ["spot", "ondemand"]),
}
"""What is not there, and what SkyPilot has instead; None: it is there."""


def _whole_task(folder: Path) -> dict[str, Any]:
    """Return a task that uses all there is."""
    (folder / "job.py").touch()
    (offer, *_) = offers_of(CASES[0])
    machine = Machine(setup=("echo $HOME",), requirements=("numpy",), python=">=3.10", disk_gb=64)
    request = request_for(
        offer,
        nodes=2,
        script=str(folder / "job.py"),
        workdir=str(folder),
        args=("--lr", "$(x)"),
        env={env.STORE: "s3://b/runs", "HF_TOKEN": "hunter2"},
        max_lifetime_s=100.0,
    )
    wheel = build_wheel(folder / "wheels")
    return task_yaml(request, machine, load_template("aws"), wheel=wheel)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ask everything at once."""
    python = sky_python()
    if python is None:
        pytest.skip(f"SkyPilot is not installed: pip install 'spotguard[sky]', or set {SKY_PYTHON}")
    folder = tmp_path_factory.mktemp("skypilot")
    home = make_home(folder / "home")
    (folder / "work").mkdir()
    tasks: dict[str, Any] = {}
    for key, case in TASKS.items():
        tasks[key] = {**(task_of(case) or {}), "workdir": str(folder / "work")}
    tasks["whole"] = _whole_task(folder / "work")
    for offer in (VM_OFFER, SLURM_OFFER):
        controlled = job(folder / "work", infra_of(offer))
        tasks[f"controller on {offer.infra}"] = node_task(controlled, offer, folder / "work")
    more = {key: {"market": "spot", **question} for key, question in MORE_SURVEYS.items()}
    surveys = {**survey_questions(), **more}
    looked_up = {place: [place] for place in PLACES_LOOKED_UP}
    return ask_skypilot(python, home, surveys=surveys, tasks=tasks, places=looked_up)


def test_prices_are_those_of_the_catalogue(answers: dict[str, Any]) -> None:
    """Per zone and market, the cheapest first, with why a place is skipped: as last looked at."""
    golden = json.loads((GOLDEN / "survey.json").read_text())
    assert {key: answers["surveys"][key] for key in golden} == golden


def test_gcp_prices_are_those_of_host_and_gpu_together(answers: dict[str, Any]) -> None:
    """The catalogue has them in two rows; a zone that misses one of the two is no spot offer."""
    offers = answers["surveys"]["gcp L4:1"]["offers"]
    spot = {o["zone"]: o["price_usd_per_h"] for o in offers if o["market"] == "spot"}
    assert spot == {"us-central1-a": 0.2827, "us-central1-b": 0.2827}  # 0.0587 + 0.2240
    skipped = answers["surveys"]["gcp L4:1"]["skipped"]
    assert [(s["place"], s["why"]) for s in skipped] == [
        ("gcp/europe-west4/europe-west4-a", "has no spot price")
    ]


def test_the_cheapest_machine_of_each_zone_is_offered(answers: dict[str, Any]) -> None:
    """Also where a larger machine is cheaper on spot; its own on-demand price stands beside it."""
    offers = answers["surveys"]["aws L4:1"]["offers"]
    (west,) = [o for o in offers if o["zone"] == "us-west-2a" and o["market"] == "spot"]
    assert (west["instance_type"], west["price_usd_per_h"]) == ("g6.2xlarge", 0.287)
    assert west["on_demand_usd_per_h"] == 0.9776


def test_a_partitions_price_is_the_configurations(answers: dict[str, Any]) -> None:
    """The market is the partition; SkyPilot's zero for 'nobody said it' is unknown here."""
    offers = answers["surveys"]["slurm cpu"]["offers"]
    told = [
        (o["zone"], o["market"], o["price_usd_per_h"], o["on_demand_usd_per_h"]) for o in offers
    ]
    assert told == [("spot", "spot", 1.0, 3.0), ("ondemand", "on_demand", 3.0, 3.0)]
    (other,) = answers["surveys"]["unpriced partition"]["offers"]
    assert other["price_usd_per_h"] is None
    assert all(o["price_usd_per_h"] is None for o in answers["surveys"]["kubernetes cpu"]["offers"])


def test_on_demand_nodes_come_from_where_they_are_said_to(answers: dict[str, Any]) -> None:
    """Then from nowhere else: neither from another partition nor from the spot nodes' cloud."""
    (only,) = answers["surveys"]["on demand only, elsewhere"]["offers"]
    assert (only["zone"], only["market"], only["price_usd_per_h"]) == ("ondemand", "on_demand", 3.0)
    found = answers["surveys"]["on demand at another cloud"]
    sold = {(o["infra"], o["market"]) for o in found["offers"]}
    assert sold == {("aws", "spot"), ("gcp", "on_demand")}
    assert found["skipped"] == []


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("unknown region", "Invalid region 'mars'"),
        ("unknown zone", "Invalid zone 'us-central1-x' for region 'us-central1'"),
        ("too many", "has no A100:4; it has A100:8"),
        ("unknown machine", "No instance type p4d.xl found."),
        ("azure L4:1", "has no L4:1"),
    ],
)
def test_a_skipped_place_says_why(answers: dict[str, Any], question: str, why: str) -> None:
    """A typo, a GPU that is not there, a wrong count: one line, in both markets."""
    found = answers["surveys"][question]
    assert found["offers"] == []
    assert [(s["market"], s["why"]) for s in found["skipped"]] == [
        ("spot", why),
        ("on_demand", why),
    ]


@pytest.mark.parametrize("place", PLACES_LOOKED_UP)
def test_a_place_that_is_not_there_is_known(answers: dict[str, Any], place: str) -> None:
    """SkyPilot's own words say which part is wrong, and what there is."""
    wrong, found = PLACES_LOOKED_UP[place], answers["places"][place]
    if wrong is None:
        assert found == []
        return
    part, name, above, there = wrong
    (missing,) = found
    assert missing == {
        **{"kind": "Missing", "place": place, "part": part, "name": name},
        **{"above": above, "there": there},
    }


def test_prices_that_cannot_be_had_are_said(tmp_path: Path) -> None:
    """No catalogue here and no way to fetch one: a sentence, not an empty plan."""
    python = sky_python()
    if python is None:
        pytest.skip("SkyPilot is not installed")
    question = {"places": ["aws"], "machine": {"gpus": "L4:1"}, "market": "spot"}
    answers = ask_skypilot(python, tmp_path, surveys={"offline": question})
    assert "neither read nor fetched" in answers["surveys"]["offline"]["problem"]


def test_a_machine_by_name_is_priced(answers: dict[str, Any]) -> None:
    """An instance type needs no GPUs or sizes to be found."""
    offers = answers["surveys"]["by name"]["offers"]
    assert [(o["market"], o["price_usd_per_h"]) for o in offers] == [
        ("spot", 0.0346),
        ("on_demand", 0.192),
    ]


@pytest.mark.parametrize("case", TASKS.values(), ids=TASKS)
def test_skypilot_takes_the_task(answers: dict[str, Any], case: Case) -> None:
    """Schema and `Task.validate` pass, candidates keep their order, the leak guard is on."""
    verdict = answers["verdicts"][case.key]
    assert verdict["problem"] is None
    assert verdict["nodes"] == case.nodes
    assert verdict["downs_itself"]
    assert len(verdict["resources"]) == len(offers_of(case))
    assert verdict["ordered"] is (len(offers_of(case)) > 1)
    spot = [bool(resources.get("use_spot")) for resources in verdict["resources"]]
    wanted = case.market.value == "spot" and case.key in BY_CLOUD
    assert set(spot) == {wanted}


@pytest.mark.e2e
@pytest.mark.parametrize("case", BY_CLOUD.values(), ids=BY_CLOUD)
def test_the_optimizer_tries_our_first_place_first(answers: dict[str, Any], case: Case) -> None:
    """`ordered` is obeyed: the place whose price the attempt is reckoned with."""
    best = answers["verdicts"][case.key]["best"]
    first = offers_of(case)[0]
    assert best["instance_type"] == first.instance_type
    assert best["infra"].split("/")[:2] == [first.infra, first.region]


def test_a_task_with_everything_is_taken(answers: dict[str, Any]) -> None:
    """Wheel, set-up, arguments and secrets; SkyPilot shows no secret."""
    verdict = answers["verdicts"]["whole"]
    assert verdict["problem"] is None
    assert list(verdict["secrets"]) == ["HF_TOKEN"]
    assert "hunter2" not in json.dumps(verdict)


@pytest.mark.parametrize("offer", [VM_OFFER, SLURM_OFFER], ids=lambda offer: str(offer.infra))
def test_skypilot_takes_the_node_of_a_controller(answers: dict[str, Any], offer: Offer) -> None:
    """Bought on demand, where it was found; it goes once what runs there has ended."""
    verdict = answers["verdicts"][f"controller on {offer.infra}"]
    assert verdict["problem"] is None
    assert verdict["nodes"] == 1
    assert verdict["downs_itself"]
    assert {each["infra"] for each in verdict["resources"]} == {infra_of(offer)}
    assert not any(each.get("use_spot") for each in verdict["resources"])
