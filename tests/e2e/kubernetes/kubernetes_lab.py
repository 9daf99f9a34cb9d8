"""The Kubernetes lab as tests use it: its verbs, its pods, and a user's machine beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.e2e.lab import lab_jobs
from tests.e2e.lab.scripted_lab import INFRA, BucketMachine, ScriptedLab
from tests.e2e.lab.sky_api import start_api

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = INFRA / "k8s-lab" / "k8s_lab.sh"
BUCKET = "runs"
CONTEXT = "k8slab"
IMAGE = "docker:k8slab/node:1"

wait_until = partial(lab_jobs.wait_until, every_s=2.0)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """What Kubernetes says of one pod."""

    name: str
    node: str
    run: str
    """What it is labelled with."""


class KubernetesLab(ScriptedLab):
    """A running lab."""

    script = SCRIPT
    prefix = "K8SLAB"

    def up(self) -> None:
        """Start the cluster, SkyPilot's API server, and the bucket that runs are kept in."""
        self.verb("up", timeout_s=3000.0)
        self.join()
        self.aws("s3", "mb", f"s3://{BUCKET}")
        start_api(self)  # else it would be a child of the first controller
        self.sky("check", "kubernetes", "aws")

    def delete(self, pod: Pod) -> None:
        """Delete a pod as a drained node does: with its grace period. Does not block."""
        self.verb("kubectl", "delete", "pod", pod.name, "--wait=false")

    def pods(self) -> list[Pod]:
        """Return all pods that there are, also those that are about to go."""
        found = json.loads(self.verb("kubectl", "get", "pods", "--output", "json"))["items"]
        return [
            Pod(
                name=each["metadata"]["name"],
                node=each["spec"].get("nodeName", ""),
                run=each["metadata"]["labels"].get("spotguard-run", ""),
            )
            for each in found
        ]


class Beside(BucketMachine):
    """A user's machine that can reach the cluster; its runs are kept in S3."""

    def __init__(self, folder: Path, kubernetes: KubernetesLab) -> None:
        super().__init__(folder, kubernetes, BUCKET)
        (self.work / "spotguard.toml").write_text(
            f'[node]\nimage = "{IMAGE}"\ncpus = "1"\nmemory = "1"\n'
        )

    def begin(self, job: Path, *flags: str, args: tuple[str, ...]) -> str:
        """Start a run and return its id."""
        return self.start_at(f"kubernetes/{CONTEXT}", job, *flags, args=args)
