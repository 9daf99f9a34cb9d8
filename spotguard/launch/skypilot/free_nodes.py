"""How many nodes of a place are free: of Slurm, or as pods of a Kubernetes cluster.

A node of a cluster is a pod in Kubernetes, and SkyPilot tells what its nodes have left. What it
asks for a pod is what the user asks for; where the user leaves it open, SkyPilot's own defaults.
"""

from __future__ import annotations

import logging
import threading
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, NamedTuple

from spotguard.errors import SpotguardError
from spotguard.launch.base import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from spotguard.launch.taskyaml import Machine
    from spotguard.shared.units import Clock

log = logging.getLogger(__name__)

_FREE_FRESH_S = 30.0
"""How old the word on free nodes may be; twice that, should who knows be slow to answer."""
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


class FreeNodes:
    """How many nodes of a place are free, asked for in a thread of its own."""

    def __init__(self, question: Callable[[], int | None], place: str, clock: Clock) -> None:
        self._question = question
        self._place = place
        self._clock = clock
        self._asked_at = self._told_at = float("-inf")
        self._told: int | None = None
        self._thread: threading.Thread | None = None

    def count(self, *, in_background: bool) -> int | None:
        """Return the last answer, or 0 if there is none that is fresh.

        Who does not answer would not launch anything either: what a run has, it keeps. None is an
        answer, too: nobody can tell, so only a launch can.
        """
        now = self._clock.monotonic()
        busy = self._thread is not None and self._thread.is_alive()
        if now - self._asked_at >= _FREE_FRESH_S and not busy:
            self._asked_at = now
            if in_background:
                self._thread = threading.Thread(
                    target=copy_context().run, args=(self._ask,), name="spotguard-free", daemon=True
                )
                self._thread.start()
            else:
                self._ask()
        return self._told if now - self._told_at <= 2 * _FREE_FRESH_S else 0

    def _ask(self) -> None:
        try:
            self._told = self._question()
        except Unreachable as problem:
            log.info("free nodes of %s: %s", self._place, problem)
            self._told = 0
        except SpotguardError as problem:
            log.info("free nodes of %s: %s", self._place, problem)
            self._told = None
        self._told_at = self._clock.monotonic()
