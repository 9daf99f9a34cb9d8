"""What a job would have cost on a recorded spot market, under each policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.errors import UsageError
from spotguard.policy.market.recorded import (
    RecordedZone,
    accelerators,
    zones_of,
    zones_of_folder,
)
from spotguard.policy.simulation.plot import svg
from spotguard.policy.simulation.report import SimulatedPolicy, Simulation, simulate
from spotguard.spec.infra import gpu_alternatives

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.spec.model import JobSpec

__all__ = [
    "recorded_market",
    "RecordedZone",
    "simulate",
    "SimulatedPolicy",
    "Simulation",
    "svg",
]


def recorded_market(
    spec: JobSpec, market: str | None = None, trace: Path | None = None
) -> tuple[tuple[RecordedZone, ...], str, int]:
    """Return the recorded zones, the market's name, and recorded nodes per node of the job.

    Args:
        spec: the job; its GPUs are looked for if nothing else is named.
        market: a recorded accelerator.
        trace: a folder with traces of one's own, instead.

    Raises:
        UsageError: both are given, or nothing is recorded for what is named.
    """
    gpu, _, count = next(iter(gpu_alternatives(spec.gpus)), "").partition(":")
    gpus = int(count) if count.isdigit() else 1
    if trace is not None:
        if market is not None:
            raise UsageError("--market and --trace cannot both be given")
        return zones_of_folder(trace), str(trace), 1
    name = (market or gpu).upper()
    known = ", ".join(accelerators())
    if not name:
        raise UsageError("no GPU is named", hint=f"give --gpus, or --market with one of: {known}")
    zones = zones_of(name)
    if not zones:
        raise UsageError(
            f"no forecast: nothing is recorded for {name}",
            hint=f"recorded are: {known}; your own traces: --trace DIR",
        )
    gang = spec.nodes.max * gpus
    gaps = {zone.gap_s: [each for each in zones if each.gap_s == zone.gap_s] for zone in zones}
    able = [group for group in gaps.values() if max(each.nodes_max for each in group) >= gang]
    return tuple(able[0] if able else zones), name, gpus
