from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import SpecError
from spotguard.spec.model import JobSpec, build_spec
from spotguard.spec.nodes import NodeRange
from spotguard.spec.setting_catalogue import catalogue
from spotguard.spec.sources import place_of, resolve

if TYPE_CHECKING:
    from pathlib import Path

CHEAP_FIRST = [{"until_step": 500, "infra": "local"}, {"gpus": "A100:8"}]


def a_job(**fields: Any) -> JobSpec:
    """Return a job with these fields."""
    return build_spec({"script": "/j.py", "workdir": "/", "name": "j", "store": "/s", **fields})


def test_a_phase_is_the_job_with_its_own_place() -> None:
    """What a phase says counts, the rest is the job's; processes follow the GPUs."""
    job = a_job(infra="aws", nodes="1:4", phases=[*CHEAP_FIRST[:1], {"gpus": "A100:8", "nodes": 2}])
    first, second = job.in_phase(0), job.in_phase(1)
    assert (first.infra, first.nodes, first.nproc_per_node) == ("local", NodeRange(1, 4), 1)
    assert (second.infra, second.gpus, second.nodes) == ("aws", "A100:8", NodeRange(2, 2))
    assert second.nproc_per_node == 8
    assert second.phases == ()


def test_a_job_without_phases_is_itself() -> None:
    """`in_phase` and `moved` need no other case for it."""
    job = a_job(infra="aws")
    assert job.in_phase(0) is job
    assert job.moved(0, {"infra": "gcp"}).infra == "gcp"


def test_prices_and_machines_stay_behind() -> None:
    """They are of one machine: elsewhere, or with other GPUs, nobody has given any."""
    node = {"instance_type": "p4d.24xlarge", "image": "ami-0123"}
    job = a_job(infra="aws", gpus="A100:8", price_usd_per_h=9.0, node=node, template="aws")
    moved = job.at_place({"infra": "gcp"})
    assert (moved.price_usd_per_h, moved.template) == (None, "base")
    assert (moved.node.instance_type, moved.node.image) == (None, None)
    assert job.at_place({"gpus": "H100:8"}).price_usd_per_h is None
    assert job.at_place({"nodes": NodeRange(3, 3)}).price_usd_per_h == 9.0
    assert job.at_place({"infra": "gcp", "price_usd_per_h": 7.0}).price_usd_per_h == 7.0


def test_a_move_is_of_the_phase_at_hand() -> None:
    """Phases to come stay as they are."""
    job = a_job(infra="aws", phases=CHEAP_FIRST)
    moved = job.moved(0, {"infra": "gcp", "nodes": NodeRange(2, 2)})
    assert (moved.in_phase(0).infra, moved.in_phase(0).nodes.max) == ("gcp", 2)
    assert (moved.in_phase(1).infra, moved.in_phase(1).gpus) == ("aws", "A100:8")


def test_phases_survive_the_journal() -> None:
    """Written as JSON and read back, it is the same job."""
    job = a_job(infra="aws", phases=[{"until_step": 5, "max_price": "$1.50", "nodes": "1:2"}, {}])
    assert JobSpec.from_json(json.loads(json.dumps(job.to_json()))) == job


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (3, "given 3; allowed: a list of tables"),
        ([1], "phase 1 is 1; allowed: a table"),
        ([{"until_step": 5}, {"until_step": 3}, {}], "phase 2 has until_step = 3"),
        ([{"until_step": 5}, {"until_step": 5}, {}], "each has to end after the one before"),
        ([{}, {}], "phase 1 has no until_step"),
        ([{"until_step": 5}, {"until_step": 9}], "the last one goes on to the run's end"),
        ([{"until_step": 0}, {}], "phase 1 has until_step = 0; allowed: a whole number from 1"),
        ([{"until_step": True}, {}], "phase 1 has until_step = True"),
        ([{"until_step": 5, "infra": "moon"}, {}], "phase 1 has infra = 'moon'; allowed: local"),
        ([{"until_step": 5, "budget": 3}, {}], "phase 1 has 'budget', which no phase can change"),
        (
            [{"until_step": 5, "infra": "slurm/a/b", "on_demand_infra": "aws"}, {}],
            "phase 1 cannot be: on_demand_infra",
        ),
    ],
)
def test_a_list_that_cannot_be_followed_is_refused(phases: object, words: str) -> None:
    """In one sentence that names the field, the phase and its key."""
    with pytest.raises(SpecError) as caught:
        a_job(phases=phases)
    assert caught.value.message.startswith("phases: ")
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_typo_is_guessed() -> None:
    """The nearest key is named."""
    with pytest.raises(SpecError) as caught:
        a_job(phases=[{"until_stp": 5}, {}])
    assert "until_step" in caught.value.hint


def test_a_file_and_a_variable_say_the_same(tmp_path: Path) -> None:
    """Both forms of TOML's lists of tables, and its text in a variable."""
    script = tmp_path / "job.py"
    script.write_text("import spotguard.runtime\n")
    (tmp_path / "mine.yaml").write_text("resources: {disk_tier: best}\n")
    (tmp_path / "spotguard.toml").write_text(
        '[[phases]]\nuntil_step = 500\ninfra = "local"\n[[phases]]\ngpus = "A100:8"\n'
        'template = "mine.yaml"\n'
    )
    found = resolve(script, flags={}, environ={}, cwd=tmp_path)
    assert [phase.until_step for phase in found.spec.phases] == [500, None]
    assert found.spec.phases[1].template == str(tmp_path / "mine.yaml")
    (row,) = [value for value in found.values if value.field == "phases"]
    assert row.value[0] == '{ until_step = 500, infra = "local" }'
    text = '[{until_step = 7, nodes = "1:2"}, {nodes = 3}]'
    said = resolve(script, flags={}, environ={"SPOTGUARD_PHASES": text}, cwd=tmp_path).spec
    assert [phase.nodes for phase in said.phases] == [NodeRange(1, 2), NodeRange(3, 3)]


def test_what_says_nothing_of_a_place_is_no_move() -> None:
    """A seed goes nowhere."""
    assert place_of({"infra": "aws", "nodes": "1:2", "gpus": None, "max_price": "$2"}) == {
        "infra": "aws",
        "nodes": NodeRange(1, 2),
        "max_price_usd_per_h": 2.0,
    }
    with pytest.raises(SpecError, match="seed: is not of a place"):
        place_of({"seed": 3})


def test_several_gpus_are_alternatives() -> None:
    """One spelling, none twice."""
    assert a_job(infra="aws", gpus="A100:8, H100").gpus == "A100:8,H100:1"
    assert a_job(infra="aws", gpus=["A100:8", "H100:8"]).gpus == "A100:8,H100:8"
    with pytest.raises(SpecError, match="gpus"):
        a_job(gpus="A100:8,A100:8")
    assert catalogue()["gpus"].setting.parse(None) is None
