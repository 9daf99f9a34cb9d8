"""The recorded markets that come with spotguard: availability and prices of spot nodes, by tick."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from spotguard.errors import SpecError
from spotguard.policy.fields import LONGEST_S
from spotguard.shared.spot_traces import FIELD, read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from spotguard.shared.spot_traces import Trace

MOST_NODES = 1_000_000
"""More in a trace of one's own count as so many."""
DATASETS = ("aws_v100_2023-02", "aws_v100x4_2023-08", "gcp_h100x16_2025-10")


@dataclass(frozen=True, kw_only=True)
class RecordedZone:
    """What was seen of one zone's spot market. Arrays have one value per tick."""

    cloud: str
    accelerator: str
    """`V100`, `H100`; of one GPU per node."""
    zone: str
    start: str
    """When the record begins, as its source says it."""
    gap_s: float
    """Seconds between two ticks."""
    nodes_max: int
    """How many nodes were asked for at most; more than that are unknown."""
    on_demand_usd_per_h: float
    capacity: NDArray[np.int64]
    """Nodes that could be had."""
    spot_usd_per_h: NDArray[np.float64]
    """Of one node."""
    spot_recorded: bool
    """False where a constant stands for prices that were not recorded."""


@cache
def recorded(dataset: str) -> tuple[RecordedZone, ...]:
    """Return the zones of a bundled data set; read once, from this package's own files."""
    packed = (files("spotguard.policy.market") / f"{dataset}.json.gz").read_bytes()
    return tuple(_zone(entry) for entry in json.loads(gzip.decompress(packed))["zones"])


def zones_of(accelerator: str) -> tuple[RecordedZone, ...]:
    """Return all recorded zones of an accelerator; none if it was never recorded."""
    return tuple(
        zone for name in DATASETS for zone in recorded(name) if zone.accelerator == accelerator
    )


def accelerators() -> tuple[str, ...]:
    """Return the accelerators of which a market was recorded."""
    return tuple(sorted({zone.accelerator for dataset in DATASETS for zone in recorded(dataset)}))


def zones_of_folder(folder: Path) -> tuple[RecordedZone, ...]:
    """Return the traces of a folder, in the order of their names; this reads files.

    Raises:
        SpecError: there is none, one cannot be read, has no price or is of more than 100 years.
    """
    paths = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    if not paths:
        raise SpecError(FIELD, f"{folder} holds no trace: no file ends in .json or .json.gz")
    return tuple(_from_trace(path, read_trace(path)) for path in paths)


def _from_trace(path: Path, trace: Trace) -> RecordedZone:
    prices = [trace.price_at(tick * trace.gap_s) for tick in range(len(trace.capacity))]
    known = [each for each in prices if each is not None]
    if trace.on_demand_usd_per_h is None or len(known) < len(prices):
        raise SpecError(FIELD, f"{path} does not tell all prices: on demand, and spot at each tick")
    if trace.on_demand_usd_per_h <= 0:
        raise SpecError(
            FIELD, f"{path} has an 'on_demand_price' of 0: there is nothing to compare with"
        )
    if trace.duration_s > LONGEST_S:
        raise SpecError(FIELD, f"{path} tells of more than 100 years: look at its 'gap_seconds'")
    capacity = np.array([min(each, MOST_NODES) for each in trace.capacity], dtype=np.int64)
    return RecordedZone(
        cloud=trace.cloud,
        accelerator=trace.instance_type,
        zone=trace.zone,
        start="an unknown day",
        gap_s=trace.gap_s,
        nodes_max=int(capacity.max()),
        on_demand_usd_per_h=trace.on_demand_usd_per_h,
        capacity=capacity,
        spot_usd_per_h=np.array(known),
        spot_recorded=True,
    )


def _zone(entry: dict[str, Any]) -> RecordedZone:
    return RecordedZone(
        cloud=entry["cloud"],
        accelerator=entry["accelerator"],
        zone=entry["zone"],
        start=str(entry["start"]),
        gap_s=float(entry["gap_s"]),
        nodes_max=int(entry["nodes_max"]),
        on_demand_usd_per_h=float(entry["on_demand_usd_per_h"]),
        capacity=_unrolled(entry["capacity"]).astype(np.int64),
        spot_usd_per_h=_unrolled(entry["spot_usd_per_h"]).astype(np.float64),
        spot_recorded=bool(entry["spot_recorded"]),
    )


def _unrolled(runs: list[list[float]]) -> NDArray[Any]:
    values, lengths = zip(*runs, strict=True)
    return np.repeat(np.array(values), np.array(lengths))
