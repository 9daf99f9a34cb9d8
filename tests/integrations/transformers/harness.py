"""Starts the Trainer's job and reads what it leaves."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Job, Jobs

SCRIPT = Path(__file__).parent / "jobs" / "trainer_job.py"


@dataclass(frozen=True)
class Result:
    """How a training ended."""

    log: list[dict[str, Any]]
    step: int
    best: float | None
    tokens: int
    weights: dict[str, Any]

    def logged(self) -> list[dict[str, Any]]:
        """Return what was logged, without how fast it was, and how much there was to compute.

        That is summed over the ranks at each log only; between two logs a save has an estimate.
        """
        left_out = ("runtime", "per_second", "flos")
        return [
            {k: v for k, v in entry.items() if not any(word in k for word in left_out)}
            for entry in self.log
        ]

    def losses(self) -> list[float]:
        """Return the training losses that were logged."""
        return [entry["loss"] for entry in self.log if "loss" in entry]

    def differs_by(self, other: Result) -> float:
        """Return the largest difference of two weights."""
        pairs = [
            (torch.tensor(self.weights[k]), torch.tensor(other.weights[k])) for k in other.weights
        ]
        return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


@dataclass(frozen=True)
class TrainerRuns:
    """Runs of the Trainer's job, each by its name."""

    jobs: Jobs

    def start(
        self,
        name: str,
        told: dict[str, Any],
        *,
        ranks: int = 0,
        until: int | None = None,
        **env: Any,
    ) -> list[Job]:
        """Start the next attempt of a run; without ranks, as `python job.py` does.

        `until` is where it ends, saved, as if there were no more steps.
        """
        folder = self.jobs.folder
        variables = {
            "JOB": json.dumps(told),
            "RESULT": str(folder / f"{name}.json"),
            "OUT": str(folder / f"out-{name}"),
            "SPOTGUARD_RUN_ID": name,
            "SPOTGUARD_SAVE_EVERY": "100000 steps",
            "SPOTGUARD_TRACE_SAMPLES": str(folder / f"{name}.trace"),
            "HF_HUB_OFFLINE": "1",
            **({} if until is None else {"SPOTGUARD_MAX_STEPS": str(until)}),
            **env,
        }
        if ranks:
            return self.jobs.start_ranks(ranks, script=SCRIPT, **variables)
        return [self.jobs.start(SCRIPT, **variables)]

    def run(self, name: str, told: dict[str, Any], *, code: int = 0, **how: Any) -> str:
        """Run the next attempt to its end, check its exit code, and return what it printed."""
        started = self.start(name, told, **how)
        codes = [job.wait() for job in started]
        assert codes == [code] * len(started), "\n".join(job.said for job in started)
        return started[0].said

    def result(self, name: str) -> Result:
        """Return what a run ended with."""
        return Result(**json.loads((self.jobs.folder / f"{name}.json").read_text()))

    def samples(self, name: str) -> dict[int, Counter[int]]:
        """Return for each epoch how often each sample was trained on."""
        found: dict[int, Counter[int]] = {}
        for line in (self.jobs.folder / f"{name}.trace").read_text().splitlines():
            entry = json.loads(line)
            found.setdefault(entry["epoch"], Counter()).update(entry["samples"])
        return found
