from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spotguard.launch.skypilot.free_nodes import free_pods
from spotguard.launch.taskyaml import Machine


def node(**changes: Any) -> Any:
    """Return a node of SkyPilot's `KubernetesNodeInfo`, with 8 CPUs, 32 GB and 4 GPUs left."""
    plain = {
        "accelerator_type": "L4",
        "free": {"accelerators_available": 4},
        "cpu_free": 8.0,
        "memory_free_gb": 32.0,
        "is_ready": True,
        "is_cordoned": False,
        "taints": [],
    }
    return SimpleNamespace(**{**plain, **changes})


UNKNOWN = {"cpu_free": None, "memory_free_gb": None}
TAINTED = [{"key": "k", "effect": "NoSchedule", "tolerated": False}]
TOLERATED = [{"key": "k", "effect": "NoSchedule", "tolerated": True}]


@pytest.mark.parametrize(
    ("machine", "nodes", "free"),
    [
        (Machine(), [node()], 4),  # SkyPilot's default: 2 CPUs and 2 GB
        (Machine(cpus="4+"), [node(), node(cpu_free=3.9)], 2),
        (Machine(cpus="1", memory="16"), [node()], 2),
        (Machine(cpus="16+"), [node()], 0),
        (Machine(), [], 0),
        (Machine(gpus="L4:1"), [node()], 2),  # 4 CPUs and 16 GB for each GPU
        (Machine(gpus="l4:2", cpus="1+", memory="1"), [node()], 2),
        (Machine(gpus="L4:8", cpus="1+"), [node()], 0),
        (Machine(gpus="A100:1"), [node()], 0),
        (Machine(gpus="L4:1"), [node(free={"accelerators_available": 0})], 0),
        (Machine(gpus="L4:1"), [node(accelerator_type=None)], 0),
        (Machine(), [node(is_ready=False), node(is_cordoned=True), node(taints=TAINTED)], 0),
        (Machine(), [node(taints=TOLERATED)], 4),
    ],
)
def test_pods_are_counted_where_they_fit(machine: Machine, nodes: list[Any], free: int) -> None:
    """By GPUs, CPUs and memory, on nodes that take pods."""
    assert free_pods(nodes, machine) == free


@pytest.mark.parametrize(
    ("machine", "nodes", "free"),
    [
        (Machine(), [node(**UNKNOWN)], None),
        (Machine(), [node(**UNKNOWN), node()], 4),
        (Machine(), [node(**UNKNOWN), node(cpu_free=0.5)], None),
        (Machine(), [node(**UNKNOWN, is_ready=False)], 0),
        (Machine(gpus="L4:1"), [node(free={"accelerators_available": -1})], None),
        (Machine(gpus="L4:1"), [node(free={"accelerators_available": -1}, cpu_free=0.5)], 0),
        (Machine(gpus="L4:1"), [node(**UNKNOWN, free={"accelerators_available": 0})], 0),
    ],
)
def test_what_may_not_be_seen_is_unknown_and_not_none(
    machine: Machine, nodes: list[Any], free: int | None
) -> None:
    """Who may not list pods is told -1 GPUs and no CPUs; what is too small is so all the same."""
    assert free_pods(nodes, machine) == free
