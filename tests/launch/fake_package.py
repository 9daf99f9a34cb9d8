"""A package `sky` in a folder, for what asks SkyPilot in a process of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

_SKY = """
import json, os
from types import SimpleNamespace
from sky import exceptions

WORLD = json.loads(os.environ["FAKE_SKY"])
print("<sky-payload>as SkyPilot does</sky-payload>")


class Resources:
    def __init__(self, infra):
        self.infra = infra


class Task:
    def __init__(self, run):
        self.resources = None

    def set_resources(self, resources):
        self.resources = resources


class Dag:
    def __init__(self):
        self.tasks = []

    def add(self, task):
        self.tasks.append(task)


def _reach():
    if WORLD["away"]:
        raise exceptions.ApiServerConnectionError("Could not connect to SkyPilot")


def validate(dag):
    _reach()
    (task,) = dag.tasks
    place = task.resources.infra
    if place not in WORLD["there"]:
        _, cluster, partition = place.split("/")
        raise ValueError(
            f"Partition {partition!r} not found in cluster {cluster!r}. Available partitions: ['x']"
        )


def enabled_clouds():
    _reach()
    return list(WORLD["enabled"])


def check(infra_list, verbose):
    return infra_list[0]


def get(request):
    return request


def stream_and_get(request, output_stream):
    print("<sky-payload>as SkyPilot does</sky-payload>")
    output_stream.write(WORLD["checks"].get(request, ""))
    able = ["compute", "storage"] if request not in WORLD["checks"] else []
    return {"default": {request.upper(): able} if able else {}}


client = SimpleNamespace(
    sdk=SimpleNamespace(validate=validate, enabled_clouds=enabled_clouds, check=check)
)
"""
_EXCEPTIONS = """
class ApiServerConnectionError(RuntimeError): ...
class ServerTemporarilyUnavailableError(RuntimeError): ...
class ClusterStatusFetchingError(RuntimeError): ...
class RequestInterruptedError(RuntimeError): ...
class ResourcesUnavailableError(RuntimeError): ...
"""
_WORLD = {"away": False, "there": [], "enabled": [], "checks": {}}


def plant_sky(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, source: str = _SKY, **world: Any
) -> None:
    """Let processes that are started from here on find this SkyPilot."""
    package = folder / "fake" / "sky"
    for name, text in {
        "__init__.py": source,
        "exceptions.py": _EXCEPTIONS,
        "catalog/__init__.py": "",
        "catalog/common.py": "",
    }.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("FAKE_SKY", json.dumps({**_WORLD, **world}))
