"""The Kubernetes lab as tests use it: its verbs, its pods, and a user's machine beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.lab import lab_jobs
from tests.e2e.lab.far_machine import FarMachine
from tests.e2e.lab.lab_jobs import NO_SMOKE, Status, Weights, weights_at
from tests.e2e.lab.sky_api import start_api

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPT = Path(__file__).parents[3] / "infra" / "k8s-lab" / "k8s_lab.sh"
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


class KubernetesLab:
    """A running lab."""

    def __init__(self, folder: Path, owner: int) -> None:
        """It comes down by itself once the process `owner` is gone."""
        self.folder = folder
        self.owner = owner
        self.environ: dict[str, str] = {}

    def up(self) -> None:
        """Start the cluster, SkyPilot's API server, and the bucket that runs are kept in."""
        self.verb("up", timeout_s=3000.0)
        printed = self._output(["bash", "-c", f'eval "$({SCRIPT} env)"; env -0'], self._knobs())
        self.environ = dict(line.split("=", 1) for line in printed.split("\0") if line)
        self.aws("s3", "mb", f"s3://{BUCKET}")
        start_api(self)  # else it would be a child of the first controller
        self.sky("check", "kubernetes", "aws")

    def down(self) -> None:
        """Take away whatever is there, in whatever state."""
        self.verb("down")

    def verb(self, *words: str, timeout_s: float = 120.0) -> str:
        """Run one of the lab's verbs."""
        return self._output([str(SCRIPT), *words], self._knobs(), timeout_s)

    def sky(self, *words: str) -> str:
        """Run SkyPilot's command line."""
        program = str(Path(sys.executable).with_name("sky"))
        return self._output([program, *words], self.environ, 400.0)

    def aws(self, *words: str) -> str:
        """Run AWS' command line."""
        return self._output(["aws", *words], self.environ, 200.0)

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

    def _knobs(self) -> dict[str, str]:
        return {
            **os.environ,
            "K8SLAB_DATA": str(self.folder / "data"),
            "K8SLAB_HOME": str(self.folder / "home"),
            "K8SLAB_VENV": str(Path(sys.executable).parents[1]),
            "K8SLAB_FOR_PID": str(self.owner),
        }

    @staticmethod
    def _output(command: list[str], environ: Mapping[str, str], limit_s: float = 120.0) -> str:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        said = f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, said
        return done.stdout


class Beside(FarMachine):
    """A user's machine that can reach the cluster; its runs are kept in S3."""

    def __init__(self, folder: Path, kubernetes: KubernetesLab) -> None:
        super().__init__(folder)
        self.kubernetes = kubernetes
        self.folder = folder
        self.prefix = f"{folder.name}-{time.time():.0f}"
        (self.work / "spotguard.toml").write_text(
            f'[node]\nimage = "{IMAGE}"\ncpus = "1"\nmemory = "1"\n'
        )

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a shell that uses the lab."""
        store = {"SPOTGUARD_STORE": f"s3://{BUCKET}/{self.prefix}", **NO_SMOKE}
        home = {"SPOTGUARD_HOME": str(self.home)}
        return {**self.kubernetes.environ, **store, **home, **(more or {})}

    def begin(self, job: Path, *flags: str, args: tuple[str, ...]) -> str:
        """Start a run and return its id."""
        copy = self.work / job.name
        copy.write_text(job.read_text())
        place = ("--infra", f"kubernetes/{CONTEXT}", "--save-every", "5 steps")
        return self.start(copy, *place, *flags, args=args)

    def final_weights(self, status: Status) -> Weights:
        """Return every tensor of a finished run's last checkpoint, to the last bit."""
        assert status["state"] == "finished", status
        assert status["saved_step"] == status["total_steps"]
        folder = self.folder / "fetched"
        self.kubernetes.aws("s3", "sync", "--quiet", status["store"], str(folder))
        return weights_at(folder, status["total_steps"])
