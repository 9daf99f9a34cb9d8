"""A whole run through the real SkyPilot on Kubernetes, as `infra/k8s-lab` has it on this machine.

Pods, their grace period and their end are real.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.kubernetes.kubernetes_lab import wait_until
from tests.e2e.lab.lab_jobs import JOBS, Lab, final_weights, reasons

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.kubernetes.kubernetes_lab import Beside, KubernetesLab

pytestmark = [pytest.mark.e2e, pytest.mark.kubernetes, pytest.mark.timeout(3000)]

EXACT = JOBS / "exact.py"
EPOCHS = 30


def test_pods_are_deleted_and_die_and_the_weights_are_the_undisturbed_ones(
    beside: Beside, kubernetes: KubernetesLab, tmp_path: Path
) -> None:
    """A deleted pod saves within its grace, a dead node is missed, and nothing is left."""
    run = beside.begin(
        EXACT,
        *("--nodes", "2"),
        args=("--epochs", str(EPOCHS), "--pause", "0.7", "--until-attempt", "3"),
    )
    beside.trains(run, attempt=1)
    pods = kubernetes.pods()
    assert len({pod.node for pod in pods}) == 2
    assert {pod.run for pod in pods} == {run}
    kubernetes.delete(next(pod for pod in pods if "worker" in pod.name))
    told_at = time.monotonic()
    first = beside.ended(run, attempt=1)["attempts"][0]
    assert time.monotonic() - told_at < 60.0, "it did not wait for the end of its grace"
    assert first["end_reason"] == "terminated", "told to end, by SIGTERM"
    assert first["steps_lost"] == 0

    beside.trains(run, attempt=2)
    struck = next(pod for pod in kubernetes.pods() if "worker" in pod.name)
    kubernetes.verb("kubectl", "delete", "pod", struck.name, "--grace-period=0", "--force")
    second = beside.ended(run, attempt=2)["attempts"][1]
    assert second["end_reason"] in ("vanished", "node_lost")
    assert second["steps_lost"] <= 10, "two intervals between saves"

    status = beside.settled(run)
    assert reasons(status)[2:] == ["finished"]
    wait_until(lambda: not kubernetes.pods(), "no pod is left", timeout_s=300.0)
    alone = Lab(tmp_path / "alone").up(EXACT, args=("--epochs", str(EPOCHS)), timeout_s=900.0)
    assert beside.final_weights(status) == final_weights(alone)
