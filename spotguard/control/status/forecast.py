"""Forecasts of a job that is planned, and of a run that goes on."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.journal.fold import read_record
from spotguard.control.run_folder import RunFolder, known_runs, runs_folder
from spotguard.control.supervisor.attempt_limits import end_margin_s
from spotguard.control.supervisor.placement.seen_places import (
    accelerator_of,
    checkpoint_bytes,
    move_usd,
    place_name,
    seen_of,
)
from spotguard.control.supervisor.placement.time_left import expected_start_s, work_left_s
from spotguard.control.supervisor.policy import policy_for
from spotguard.errors import JournalDamaged
from spotguard.events.states import Market
from spotguard.policy.market.sightings import (
    ENOUGH,
    answers_of,
    newest_price,
    seen_by,
    telling,
)
from spotguard.policy.plan.forecast import CostForecast
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View
from spotguard.spec.infra import DEADLINE, FALLBACK, LOCAL, gpu_alternatives
from spotguard.spec.model import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.launch.base import Offer
    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.market.sightings import Sighting

_EARLIER_RUNS = 20
"""So many of the newest runs are looked at for the pace of a script."""


@dataclass(frozen=True, kw_only=True)
class _Work:
    left_s: float
    source: str


@dataclass(frozen=True, kw_only=True)
class _Basis:
    """On which market a forecast rests."""

    words: str
    at: float | None


def plan_forecast(
    spec: JobSpec,
    offers: Sequence[Offer],
    sightings: Sequence[Sighting],
    *,
    now: float,
    state_bytes: float = 0.0,
) -> CostForecast | None:
    """Return what a job is expected to cost if it began now; None for nodes of this machine.

    `state_bytes` is the size of its checkpoints; 0 is unknown.
    """
    if spec.infra == LOCAL:
        return None
    work = _expected_work(spec)
    accelerator, gpus = _gpus(spec)
    basis = _basis(spec, accelerator, offers, sightings)
    none = _no_forecast(spec, work, basis, offers)
    if none is not None or work is None or basis is None:
        return CostForecast(none=none)
    nodes = spec.nodes.max
    hazard = _hazard(accelerator, nodes * gpus)
    seen = {
        place_name(offer): seen_by(
            answers_of(sightings, place=place_name(offer), nodes=nodes), now, hazard
        )
        for offer in offers
    }
    view = View(
        job=JobState(
            work_left_s=work.left_s,
            left_s=spec.deadline_s,
            start_s=policy_for(spec).start_s,
            nodes=nodes,
            accelerator=accelerator,
            on_demand=spec.on_demand == DEADLINE,
            max_usd_per_h=spec.max_price_usd_per_h,
        ),
        places=_places(offers, seen, sightings, store=spec.store, size=state_bytes),
        tick_s=policy_for(spec).ask_s,
    )
    return _told(view, hazard, spec, work, basis, now=now, spent_usd=0.0, seed=spec.name)


def run_forecast(
    record: RunRecord, sightings: Sequence[Sighting], *, now: float
) -> CostForecast | None:
    """Return what is to be expected of a run; None for a settled or a local one."""
    if record.settled is not None or record.spec.get("infra") == LOCAL:
        return None
    spec = JobSpec.from_json(record.spec)
    spent_usd = cost.spent_usd(record, now)
    nodes = record.limits.nodes_max
    paced_s = work_left_s(record, nodes)
    work = _expected_work(spec) if paced_s is None else _Work(left_s=paced_s, source="its own pace")
    newest = record.attempts[-1].offer if record.attempts else None
    accelerator, gpus = accelerator_of(record, newest)
    by_place = {(place_name(a.offer), a.offer.market): a.offer for a in record.attempts}
    offers = list(by_place.values())
    basis = _basis(spec, accelerator, offers, sightings)
    none = _no_forecast(spec, work, basis, offers)
    if none is None and spent_usd is None:
        none = "a price is unknown"
    if none is not None or work is None or basis is None or spent_usd is None:
        return CostForecast(none=none)
    hazard = _hazard(accelerator, nodes * gpus)
    policy = policy_for(spec)
    start_s = expected_start_s(record, now, policy)
    deadline_at = record.limits.deadline_at
    view = View(
        job=JobState(
            work_left_s=max(1.0, work.left_s),
            left_s=None
            if deadline_at is None
            else max(1.0, deadline_at - now - end_margin_s(record, policy)),
            start_s=start_s,
            nodes=nodes,
            accelerator=accelerator,
            on_demand=spec.on_demand == DEADLINE,
            max_usd_per_h=spec.max_price_usd_per_h,
        ),
        places=_places(
            offers,
            {
                place_name(offer): seen_of(record, offer, nodes, now, hazard, sightings)
                for offer in offers
                if offer.market is Market.SPOT
            },
            sightings,
            store=record.store_root,
            size=checkpoint_bytes(record),
        ),
        running=_running(record.current, start_s, now),
        tick_s=policy.ask_s,
    )
    return _told(view, hazard, spec, work, basis, now=now, spent_usd=spent_usd, seed=record.run_id)


def _running(attempt: AttemptRecord | None, start_s: float, now: float) -> Running | None:
    if attempt is None or attempt.down is not None:
        return None
    passed_s = now - attempt.intended_at
    return Running(
        place=place_name(attempt.offer),
        market=attempt.offer.market.value,
        nodes=attempt.nodes,
        starting_s=max(0.0, start_s - passed_s) if attempt.started_at is None else 0.0,
    )


def _told(
    view: View,
    hazard: Hazard,
    spec: JobSpec,
    work: _Work,
    basis: _Basis,
    *,
    now: float,
    spent_usd: float,
    seed: str,
) -> CostForecast:
    from spotguard.policy.decide import Model
    from spotguard.policy.simulation.forecast import forecast, on_demand_forecast

    if spec.market is Market.ON_DEMAND:
        made = on_demand_forecast(view)
    else:
        try:
            made = forecast(view, Model(hazard=hazard), zlib.crc32(seed.encode()))
        except ValueError as nothing_to_buy:
            return CostForecast(none=str(nothing_to_buy))
    over = made.on_demand_usd
    return CostForecast(
        work_s=work.left_s,
        work_from=work.source,
        cost_usd=spent_usd + made.cost_usd,
        cost_low_usd=spent_usd + made.cost_low_usd,
        cost_high_usd=spent_usd + made.cost_high_usd,
        finish_at=now + made.finish_s,
        finish_low_at=now + made.finish_low_s,
        finish_high_at=now + made.finish_high_s,
        late_pct=None if made.late_share is None else 100 * made.late_share,
        on_demand_usd=None if over is None else spent_usd + over,
        market=basis.words,
        market_at=basis.at,
    )


def _places(
    offers: Iterable[Offer],
    seen: dict[str, Seen],
    sightings: Sequence[Sighting],
    *,
    store: str,
    size: float,
) -> tuple[MarketPlace, ...]:
    """Return the places of the offers, each once with both of its prices.

    Starts there read checkpoints of so many bytes from the store.
    """
    found: dict[str, MarketPlace] = {}
    for offer in offers:
        name = place_name(offer)
        new = MarketPlace(
            name=name, seen=seen.get(name, Seen()), move_usd=move_usd(store, offer, size)
        )
        place = found.get(name, new)
        over = place.on_demand_usd_per_h
        over = offer.on_demand_usd_per_h if over is None else over
        if offer.market is Market.SPOT:
            noted = _price_noted(offer, sightings)
            price = offer.price_usd_per_h if noted is None else noted[1]
            place = replace(place, spot_usd_per_h=price, on_demand_usd_per_h=over)
        else:
            place = replace(place, on_demand_usd_per_h=offer.price_usd_per_h or over)
        found[name] = place
    return tuple(found.values())


def _price_noted(offer: Offer, sightings: Sequence[Sighting]) -> tuple[float, float] | None:
    """Return when a spot price was last noted, and what it was, for an offer without one."""
    if offer.market is not Market.SPOT or offer.price_usd_per_h is not None:
        return None
    return newest_price(sightings, place_name(offer))


def _no_forecast(
    spec: JobSpec, work: _Work | None, basis: _Basis | None, offers: Sequence[Offer]
) -> str | None:
    """Return why there is no forecast; None if one can be made."""
    if basis is None:
        what = "nodes without a GPU" if spec.gpus is None else "this GPU"
        return f"nothing recorded for {what}"
    if spec.market is Market.SPOT and spec.on_demand.startswith(FALLBACK):
        return f"none is made for --on-demand {FALLBACK}"
    if work is None:
        return "how long the training takes is not known yet; say it: --work 20h"
    of_market = [offer for offer in offers if offer.market is spec.market]
    if not any(offer.price_usd_per_h is not None for offer in of_market):
        return "no price is known"
    return None


def _expected_work(spec: JobSpec) -> _Work | None:
    """Return the work that the user named, else what an earlier run of the same script showed."""
    if spec.work_s is not None:
        return _Work(left_s=spec.work_s, source="--work")
    for run_id in known_runs()[:_EARLIER_RUNS]:
        try:
            with RunFolder(runs_folder() / run_id).journal() as journal:
                record = read_record(journal)
        except (JournalDamaged, OSError):
            continue
        same = all(record.spec.get(name) == getattr(spec, name) for name in ("script", "gpus"))
        if not same or record.spec.get("infra") == LOCAL or record.total_steps is None:
            continue
        whole_s = _whole_work_s(record, spec.nodes.max)
        if whole_s is not None:
            return _Work(left_s=whole_s, source=f"the pace of {run_id}")
    return None


def _whole_work_s(record: RunRecord, nodes: int) -> float | None:
    paces = [
        attempt.progress.step_s * attempt.nodes
        for attempt in record.attempts
        if attempt.progress is not None and attempt.progress.step_s
    ]
    return record.total_steps * min(paces) / nodes if record.total_steps and paces else None


def _basis(
    spec: JobSpec, accelerator: str, offers: Iterable[Offer], sightings: Sequence[Sighting]
) -> _Basis | None:
    """Return on what a forecast for an accelerator rests; None if on nothing.

    How often nodes are taken is what was recorded; own sightings tell of places, not of that. It is
    as old as the oldest of what it rests on.
    """
    from spotguard.policy.market.hazard import speaking_zones

    if spec.market is Market.ON_DEMAND:
        return _Basis(words="the price on demand", at=None)
    own = telling(sightings, accelerator) if accelerator else []
    zones, whose = speaking_zones(accelerator)
    if not accelerator or (whose != accelerator and len(own) < ENOUGH):
        return None
    days = [day for zone in zones if (day := _day(zone.start)) is not None]
    ages = [min(days)] if days else []
    clouds = ", ".join(sorted({zone.cloud for zone in zones}))
    parts = [f"{whose} as recorded in {len(zones)} zones of {clouds}"]
    if own:
        parts.append(f"{len(own)} sighting{'s' * (len(own) != 1)} of your own runs")
    noted_at = [noted[0] for each in offers if (noted := _price_noted(each, sightings))]
    if noted_at:
        parts.append("spot prices noted earlier")
    return _Basis(words=" and ".join(parts), at=min([*ages, *noted_at], default=None))


def _day(start: str) -> float | None:
    try:
        return datetime.fromisoformat(start[:10]).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def _hazard(accelerator: str, gang: int) -> Hazard:
    from spotguard.policy.market.hazard import pooled

    return pooled(accelerator, gang)


def _gpus(spec: JobSpec) -> tuple[str, int]:
    name, _, count = next(iter(gpu_alternatives(spec.gpus)), "").partition(":")
    return name.upper(), int(count) if count.isdigit() else 1
