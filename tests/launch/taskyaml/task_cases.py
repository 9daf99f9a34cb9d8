"""Clouds x markets x nodes x GPUs: what is asked, and the tasks that come of it.

python -m tests.launch.taskyaml.task_cases     writes golden/ anew: look at the difference
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from spotguard.events import env
from spotguard.events.states import Market
from spotguard.launch.base import LaunchRequest, Offer
from spotguard.launch.taskyaml import Machine, task_yaml
from spotguard.spec.templates import load_template

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
GOLDEN = HERE / "golden"
SKY_PYTHON = "TEST_SKY_PYTHON"
"""Names a Python that has SkyPilot, where the tests' own has not: their pins may not agree."""

PLACES: dict[str, list[str]] = {
    "aws": ["aws"],
    "azure": ["azure"],
    "clouds": ["gcp", "aws/us-east-1", "azure"],
    "gcp": ["gcp"],
    "kubernetes": ["kubernetes/ctx"],
    "slurm": ["slurm/spotlab/spot"],
}
ON_DEMAND_PLACES = {"slurm": ["slurm/spotlab/ondemand"]}
GPUS = (None, "L4:1", "A100:8")
NODES = (1, 3)

_SKY_CONFIG = """\
slurm:
  cluster_configs:
    spotlab:
      partition_configs:
        spot: {pricing: {cpu: 1.0, memory: 0.0}}
        ondemand: {pricing: {cpu: 3.0, memory: 0.0}}
"""
_KUBE_CONFIG = """\
apiVersion: v1
kind: Config
current-context: ctx
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
contexts: [{name: ctx, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: none}}]
"""


class Case(NamedTuple):
    """One combination."""

    where: str
    gpus: str | None
    market: Market
    nodes: int

    @property
    def key(self) -> str:
        """Its name in the golden files: `aws-spot 3x A100:8`."""
        return f"{self.where}-{self.market.value} {self.nodes}x {self.gpus or 'cpu'}"


CASES = [
    Case(where, gpus, market, nodes)
    for where in PLACES
    for market in Market
    for nodes in NODES
    for gpus in GPUS
]


# ---------------------------------------------------------------- SkyPilot


def sky_python() -> str | None:
    """Return a Python that can import SkyPilot."""
    if given := os.environ.get(SKY_PYTHON):
        return given
    if find_spec("sky"):
        return sys.executable
    beside = ROOT / ".venv-sky" / "bin" / "python"
    return str(beside) if beside.exists() else None


def make_home(home: Path) -> Path:
    """Make a home for SkyPilot: the seeded catalogues, prices, and the addresses of clusters."""
    copytree(HERE.parent / "skypilot" / "catalogue", home / ".sky" / "catalogs" / "v8")
    for name, text in {
        ".sky/config.yaml": _SKY_CONFIG,
        ".kube/config": _KUBE_CONFIG,
        ".slurm/config": "Host spotlab\n  HostName 127.0.0.1\n  User nobody\n",
    }.items():
        path = home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return home


def ask_skypilot(
    python: str,
    home: Path,
    *,
    surveys: dict[str, Any] | None = None,
    tasks: dict[str, Any] | None = None,
    places: dict[str, list[str]] | None = None,
) -> dict[str, Any]:
    """Return SkyPilot's answers; one process for all questions, since importing it takes long."""
    questions, answers = home / "questions.json", home / "answers.json"
    asked = {"surveys": surveys or {}, "tasks": tasks or {}, "places": places or {}}
    questions.write_text(json.dumps(asked))
    given = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    given["HTTPS_PROXY"] = "http://127.0.0.1:9"  # nothing leaves this machine
    done = subprocess.run(
        [python, HERE.parent / "skypilot" / "sky_judge.py", questions, answers],
        env={**given, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answered: dict[str, Any] = json.loads(answers.read_text())
    return answered


def survey_questions() -> dict[str, Any]:
    """Return a question for each place and machine."""
    return {
        f"{where} {gpus or 'cpu'}": {
            "places": places,
            "machine": dataclasses.asdict(machine_of(where, gpus)),
            "market": "spot",
            "on_demand_places": ON_DEMAND_PLACES.get(where, []),
        }
        for where, places in PLACES.items()
        for gpus in GPUS
    }


# ---------------------------------------------------------------- tasks


def machine_of(where: str, gpus: str | None) -> Machine:
    """Return what a node of these cases is."""
    template = load_template(PLACES[where][0].partition("/")[0])
    return Machine(gpus=gpus, cpus=None if gpus else template["resources"]["cpus"])


def offers_of(case: Case) -> list[Offer]:
    """Return the case's offers, out of the golden survey."""
    body = _golden_survey()[f"{case.where} {case.gpus or 'cpu'}"]
    offers = [Offer(**{**offer, "market": Market(offer["market"])}) for offer in body["offers"]]
    return [offer for offer in offers if offer.market is case.market]


@lru_cache(maxsize=1)
def _golden_survey() -> dict[str, Any]:
    survey: dict[str, Any] = json.loads((GOLDEN / "survey.json").read_text())
    return survey


def request_for(offer: Offer, *, nodes: int = 1, **changes: Any) -> LaunchRequest:
    """Return a request with a bucket as its store."""
    fields: dict[str, Any] = {
        "cluster": "gpt-260101-000000-ab12-1",
        "run_id": "gpt-260101-000000-ab12",
        "attempt": 1,
        "nodes": nodes,
        "nproc_per_node": 1,
        "script": "/code/job.py",
        "args": (),
        "workdir": "/code",
        "env": {env.RUN_ID: "gpt-260101-000000-ab12", env.ATTEMPT: "1", env.STORE: "s3://b/runs"},
        "offer": offer,
        "max_lifetime_s": None,
    }
    return LaunchRequest(**{**fields, **changes})


def task_of(case: Case) -> dict[str, Any] | None:
    """Return the case's task; None if no place has such nodes."""
    offers = offers_of(case)
    if not offers:
        return None
    request = request_for(offers[0], nodes=case.nodes)
    template = load_template(offers[0].infra)
    return task_yaml(request, machine_of(case.where, case.gpus), template, offers=offers)


@lru_cache(maxsize=1)
def golden_tasks() -> dict[str, dict[str, Any]]:
    """Return what golden/*.yaml holds: of each task what differs from case to case."""
    files: dict[str, dict[str, Any]] = {}
    for case in CASES:
        task = task_of(case)
        kept = task and {k: task[k] for k in ("num_nodes", "resources", "config") if k in task}
        files.setdefault(f"{case.where}-{case.market.value}.yaml", {})[case.key] = kept
    return files


def main() -> None:
    """Write the golden files."""
    python = sky_python()
    assert python, f"no SkyPilot: pip install 'spotguard[sky]', or set {SKY_PYTHON}"
    with TemporaryDirectory() as folder:
        home = make_home(Path(folder) / "home")
        answers = ask_skypilot(python, home, surveys=survey_questions())
    text = json.dumps(answers["surveys"], indent=1, sort_keys=True)
    (GOLDEN / "survey.json").write_text(f"{text}\n")
    for name, tasks in golden_tasks().items():
        (GOLDEN / name).write_text(yaml.safe_dump(tasks, sort_keys=True))


if __name__ == "__main__":
    main()
