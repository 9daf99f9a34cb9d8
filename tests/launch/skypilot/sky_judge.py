"""Runs under SkyPilot's Python: asks it for prices, and whether it would take tasks.

    python sky_judge.py QUESTIONS.json ANSWERS.json

SkyPilot prints to stdout what it likes, so files it is. HOME must hold the seeded catalogues.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import sky
from sky import check, clouds
from sky.provision.slurm import utils as slurm

from spotguard.errors import EnvironmentFailure
from spotguard.events.states import Market
from spotguard.launch.skypilot import existence
from spotguard.launch.skypilot.prices import Place, survey
from spotguard.launch.taskyaml import Machine

CLOUDS = [clouds.AWS(), clouds.GCP(), clouds.Azure()]
# Nobody is logged in anywhere, and there is no cluster to ask: the world as the tests seed it.
check.get_cached_enabled_clouds_or_refresh = lambda *_, **__: CLOUDS
slurm.get_partitions = lambda _: ["spot", "ondemand"]  # type: ignore[assignment]


def answer_survey(question: dict[str, Any]) -> dict[str, Any]:
    """Return where such a machine can be had, as plain data."""
    try:
        return _found(question)
    except EnvironmentFailure as problem:
        return {"problem": str(problem)}


def _found(question: dict[str, Any]) -> dict[str, Any]:
    found = survey(
        [Place.parse(text) for text in question["places"]],
        Machine(**question["machine"]),
        market=Market(question["market"]),
        on_demand_places=[Place.parse(text) for text in question.get("on_demand_places", ())],
    )
    sources = [{**dataclasses.asdict(s), "read_at": s.read_at is not None} for s in found.sources]
    return {
        "offers": [dataclasses.asdict(offer) for offer in found.offers],
        "skipped": [dataclasses.asdict(place) for place in found.skipped],
        "sources": sources,
    }


def answer_places(places: list[str]) -> list[dict[str, Any]]:
    """Return which places are not there, and of which nobody could say it, as plain data."""
    found = existence.look_up([Place.parse(text) for text in places])
    return [{"kind": type(each).__name__, **dataclasses.asdict(each)} for each in found]


def _as_the_server(question: str, *places: str) -> dict[str, dict[str, str]]:
    """Answer as SkyPilot's API server does before a launch: it validates the task."""
    assert question == "refusals"
    return {place: {"refusal": _refusal(place)} for place in places}


def _refusal(place: str) -> str:
    try:
        sky.Task(run="true").set_resources(sky.Resources(infra=place)).validate()
    except ValueError as problem:
        return " ".join(str(problem).split())
    return ""


vars(existence)["ask"] = _as_the_server


def judge(config: dict[str, Any]) -> dict[str, Any]:
    """Return whether SkyPilot takes the task, what it made of it, and what it would try first."""
    try:
        task = sky.Task.from_yaml_config(config)
        task.validate()
        wanted = [resources.to_yaml_config() for resources in task.resources]
        best = _best(task) if all(r.cloud in CLOUDS for r in task.resources) else None
    except Exception as problem:  # noqa: BLE001 - whatever it says is the verdict
        return {"problem": f"{type(problem).__name__}: {problem}"}
    autostop = [resources.autostop_config for resources in task.resources]
    return {
        "problem": None,
        "ordered": isinstance(task.resources, list),
        "resources": wanted,
        "best": best,
        "downs_itself": all(a is not None and a.enabled and a.down for a in autostop),
        "secrets": task.to_yaml_config(use_user_specified_yaml=True).get("secrets"),
        "nodes": task.num_nodes,
    }


def _best(task: Any) -> dict[str, Any]:
    with sky.Dag() as dag:
        dag.add(task)
    sky.Optimizer.optimize(dag, quiet=True)
    best: dict[str, Any] = task.best_resources.to_yaml_config()
    return best


def main() -> None:
    """Answer all questions of a file."""
    questions = json.loads(Path(sys.argv[1]).read_text())
    answers = {
        "surveys": {key: answer_survey(q) for key, q in questions["surveys"].items()},
        "places": {key: answer_places(asked) for key, asked in questions["places"].items()},
        "verdicts": {key: judge(task) for key, task in questions["tasks"].items()},
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
