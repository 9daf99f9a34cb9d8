from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import SpecError
from spotguard.spec.model import JobSpec

if TYPE_CHECKING:
    from tests.spec.conftest import Resolve

FLAGS = {
    "budget": 200,
    "deadline": "2h",
    "nodes": "1:4",
    "market": "on_demand",
    "env": ["HF_TOKEN=hunter2", "A=b"],
    "local.mtbf": "60s",
    "local.interrupt": ["node=1@step=40:notice"],
}


def test_a_spec_survives_json(resolve_job: Resolve) -> None:
    """The journal gives back exactly the spec that was written."""
    spec = resolve_job(FLAGS).spec
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_the_store_never_holds_a_secret(resolve_job: Resolve) -> None:
    """run.json names the job's variables; their values stay on the user's machine."""
    spec = resolve_job(FLAGS).spec
    public = json.dumps(spec.public_json())
    assert "hunter2" not in public
    assert json.loads(public)["env_names"] == ["A", "HF_TOKEN"]
    here = {"HF_TOKEN": "hunter2", "A": "b", "OTHER": "x"}
    assert JobSpec.from_json(json.loads(public), environ=here) == spec


def test_a_variable_that_is_not_set_here_is_named(resolve_job: Resolve) -> None:
    """A run taken over on another machine is not started without a variable that it had."""
    body = resolve_job(FLAGS).spec.public_json()
    with pytest.raises(SpecError, match="these are not set here: HF_TOKEN"):
        JobSpec.from_json(body, environ={"A": "b"})


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": None},
        {"surprise": 1},
        {"budget_usd": -1},
        {"budget_usd": "NaN"},
        {"nodes": {"min": 3, "max": 2}},
        {"nodes": {}},
        {"local": 3},
        {"local": {"mtbf_s": -1}},
        {"script": None},
        {"args": [1]},
        {"env_names": "PATH"},
        {"env_names": [1]},
    ],
    ids=str,
)
def test_a_damaged_or_newer_spec_is_refused(
    resolve_job: Resolve, change: dict[str, object]
) -> None:
    """What this version cannot read, or never wrote, is one sentence that names the field."""
    body = resolve_job().spec.to_json() | change
    with pytest.raises(SpecError) as caught:
        JobSpec.from_json(body)
    assert str(caught.value).split(":")[0].split(".")[0] in {*change, "budget"}


@pytest.mark.parametrize("body", [None, [], "x", {}])
def test_what_is_no_spec_at_all_is_refused(body: object) -> None:
    """Any other JSON is refused as such."""
    with pytest.raises(SpecError, match="schema: given None; allowed: 1"):
        JobSpec.from_json(body)  # type: ignore[arg-type]


def test_a_field_that_an_older_version_lacked_has_its_default(resolve_job: Resolve) -> None:
    """Adding a field with a default needs no new schema."""
    body = resolve_job().spec.to_json()
    del body["keep_last"]
    assert JobSpec.from_json(body).keep_last == 3


def test_replace_checks_like_a_user_was_asked(resolve_job: Resolve) -> None:
    """A raised budget is checked as at the start; nothing else changes."""
    spec = resolve_job(FLAGS).spec
    assert spec.replace(budget_usd="$300").budget_usd == 300
    assert spec.replace(budget_usd=200.0) == spec
    with pytest.raises(SpecError, match="budget: given -1"):
        spec.replace(budget_usd=-1)
