"""Reading the sample log that `SPOTGUARD_TRACE_SAMPLES` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
    begins: dict[int, int] = {}
    for line in lines:
        begins[line["attempt"]] = min(begins.get(line["attempt"], line["step"]), line["step"])
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        # What an attempt did beyond the place where a later one begins was lost.
        if all(line["step"] < step for n, step in begins.items() if n > line["attempt"]):
            by_step.setdefault(line["step"], []).append(line)
    steps: list[TracedStep] = []
    for step in sorted(by_step):
        ranks = sorted(by_step[step], key=lambda x: x["rank"])
        first = ranks[0]
        if [x["rank"] for x in ranks] != list(range(first["world_size"])):
            raise ValueError(f"step {step} of attempt {first['attempt']} misses ranks")
        steps.append(
            TracedStep(
                step=step,
                epoch=first["epoch"],
                attempt=first["attempt"],
                world_size=first["world_size"],
                samples=[sample for x in ranks for sample in x["samples"]],
                loss=sum(x["loss"] for x in ranks),
            )
        )
    return steps
