"""Kilowatt-hours and CO2e of a run. Pure: the record and the tables of `plan.carbon`.

Where GPUs have counted their energy, it is theirs. Else it is estimated from what the nodes are
made of and for how long they were billed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.control.journal import cost
from spotguard.control.journal.nodes.made_of import machine_of
from spotguard.policy.plan.carbon import factors
from spotguard.policy.plan.carbon.estimate import draw
from spotguard.shared.units import sum_known

if TYPE_CHECKING:
    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.policy.plan.carbon.estimate import NodeDevices
    from spotguard.policy.plan.carbon.factors import Factor


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Energy at the data centre's wall, and what it causes. None is unknown, never zero."""

    energy_kwh: float | None
    co2e_kg: float | None
    measured: bool
    """True if counters of the devices told the energy; else it is estimated."""


@dataclass(frozen=True, kw_only=True)
class RunFootprint:
    """The same of a whole run, with all numbers that it was made of."""

    energy_kwh: float | None
    co2e_kg: float | None
    measured: bool
    """True if all of its energy was measured."""
    factors: tuple[Factor, ...]
    """Each with its source and its year."""


def attempt_footprint(record: RunRecord, attempt: AttemptRecord, now: float) -> Footprint:
    """Return what an attempt has drawn and caused so far."""
    node = machine_of(record, attempt.offer, here=_is_here(record, attempt))
    cloud, region = attempt.offer.infra, attempt.offer.region
    causes = draw(cloud, region, node)
    counted_kwh = _counted_kwh(attempt, node)
    if counted_kwh is not None:
        energy_kwh = counted_kwh * factors.pue(cloud).value
        co2e_kg = energy_kwh * factors.grid(cloud, region).value / 1000
        return Footprint(energy_kwh=energy_kwh, co2e_kg=co2e_kg, measured=True)
    if causes is None:
        return Footprint(energy_kwh=None, co2e_kg=None, measured=False)
    billed_h = cost.billed_s(attempt, now) / 3600
    energy_kwh = causes.kwh_per_h * attempt.nodes * billed_h
    return Footprint(
        energy_kwh=energy_kwh, co2e_kg=energy_kwh * causes.g_per_kwh / 1000, measured=False
    )


def _counted_kwh(attempt: AttemptRecord, node: NodeDevices) -> float | None:
    """Return what the devices counted between two signs of life; None if not all of them did.

    What else a node draws is not in it.
    """
    if not attempt.energy or len(attempt.energy) < attempt.nodes * node.gpus:
        return None
    return sum(each.last_j - each.first_j for each in attempt.energy) / 3.6e6


def run_footprint(record: RunRecord, now: float) -> RunFootprint:
    """Return what a run has drawn and caused so far; unknown if it is of one attempt."""
    parts = [attempt_footprint(record, attempt, now) for attempt in record.attempts]
    used = dict[str, Any]()
    for attempt in record.attempts:
        node = machine_of(record, attempt.offer, here=_is_here(record, attempt))
        cloud, region = attempt.offer.infra, attempt.offer.region
        causes = None if _counted_kwh(attempt, node) is not None else draw(cloud, region, node)
        made_of = causes.factors if causes else (factors.pue(cloud), factors.grid(cloud, region))
        used |= {factor.name: factor for factor in made_of}
    return RunFootprint(
        energy_kwh=sum_known([part.energy_kwh for part in parts]),
        co2e_kg=sum_known([part.co2e_kg for part in parts]),
        measured=bool(parts) and all(part.measured for part in parts),
        factors=tuple(used.values()),
    )


def _is_here(record: RunRecord, attempt: AttemptRecord) -> bool:
    return record.placing is None or attempt.number > record.placing.after
