"""Reading the sample log that `SPOTGUARD_TRACE_SAMPLES` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class TracedStep:
    """One step of the run as it counts: all ranks of the last attempt that did it."""

    step: int
    """From 0."""
    epoch: int
    attempt: int
    world_size: int
    samples: list[int] = field(default_factory=list)
    """Ids (dataset indices) of all ranks, in rank order."""
    loss: float = 0.0
    """Mean loss over the global batch."""


def read_sample_trace(path: str | Path) -> list[TracedStep]:
    """Return the steps of a run in order, each as the last attempt that did it left it.

    Raises:
        ValueError: a step of an attempt misses the line of a rank.
    """
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    last: dict[int, int] = {}
    for line in lines:
        last[line["step"]] = max(last.get(line["step"], 0), line["attempt"])
    steps: list[TracedStep] = []
    for step in sorted(last):
        ranks = sorted(
            (x for x in lines if x["step"] == step and x["attempt"] == last[step]),
            key=lambda x: x["rank"],
        )
        first = ranks[0]
        if [x["rank"] for x in ranks] != list(range(first["world_size"])):
            raise ValueError(f"step {step} of attempt {last[step]} misses ranks")
        steps.append(
            TracedStep(
                step=step,
                epoch=first["epoch"],
                attempt=last[step],
                world_size=first["world_size"],
                samples=[sample for x in ranks for sample in x["samples"]],
                loss=sum(x["loss"] for x in ranks),
            )
        )
    return steps
