"""How many pods more would find room on a Kubernetes cluster, by what SkyPilot says of its nodes.

A node of a cluster is a pod there. What SkyPilot asks for a pod is what the user asks for; where
the user leaves it open, SkyPilot's own defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.launch.taskyaml import Machine

_CPUS, _CPUS_PER_GPU = 2.0, 4.0
_GB_PER_CPU, _GB_PER_CPU_WITH_GPU = 1.0, 4.0
"""What SkyPilot gives to a pod when nobody says it (`sky/clouds/kubernetes.py`)."""


class _Pod(NamedTuple):
    gpu: str
    gpus: int
    cpus: float
    memory_gb: float


def free_pods(nodes: Iterable[Any], machine: Machine) -> int | None:
    """Return how many such pods fit on the nodes; None if none is seen to, and some do not tell.

    Args:
        nodes: SkyPilot's `KubernetesNodeInfo`. What is not known of one is None, and -1 of GPUs.
        machine: what each pod must be.
    """
    pod = _pod(machine)
    fitting = [_fits(node, pod) for node in nodes if _takes_pods(node, pod)]
    free = sum(count for count in fitting if count is not None)
    return None if not free and None in fitting else free


def _pod(machine: Machine) -> _Pod:
    gpu, _, count = (machine.gpus or "").partition(":")
    gpus = int(count or 1) if gpu else 0
    cpus = _CPUS_PER_GPU * gpus if gpus else _CPUS
    if machine.cpus is not None:
        cpus = float(machine.cpus.rstrip("+"))
    memory_gb = cpus * (_GB_PER_CPU_WITH_GPU if gpus else _GB_PER_CPU)
    if machine.memory is not None:
        memory_gb = float(machine.memory.rstrip("+"))
    return _Pod(gpu=gpu.lower(), gpus=gpus, cpus=cpus, memory_gb=memory_gb)


def _takes_pods(node: Any, pod: _Pod) -> bool:
    barred = any(not taint.get("tolerated") for taint in node.taints or ())
    of_its_kind = not pod.gpus or (node.accelerator_type or "").lower() == pod.gpu
    return node.is_ready and not node.is_cordoned and not barred and of_its_kind


def _fits(node: Any, pod: _Pod) -> int | None:
    rooms = [(node.cpu_free, pod.cpus), (node.memory_free_gb, pod.memory_gb)]
    if pod.gpus:
        free = node.free["accelerators_available"]
        rooms.append((None if free < 0 else free, pod.gpus))
    told = [int(free // wanted) for free, wanted in rooms if free is not None]
    if 0 in told:
        return 0
    return min(told) if len(told) == len(rooms) else None
