"""Budget and elastic nodes: how much work the money buys, over a bound that knows all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy.action import SPOT, Buy, Leave, Move
from spotguard.policy.decide import PACING
from spotguard.policy.market.memory import PlaceAnswer
from spotguard.policy.market.recorded import recorded
from spotguard.policy.session import Offered, Session, Tick
from spotguard.policy.view import JobState, Running

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.policy.market.recorded import RecordedZone

ALPHA, START_S = 0.9, 300.0


def bound(zones: Sequence[RecordedZone], begin: int, ticks: int, most: int, usd: float) -> float:
    """Return node-hours of one node's speed that nobody can beat: no restarts, all known.

    It is the least of the Lagrangian over the price of a dollar.
    """
    tick_h = zones[0].gap_s / 3600
    cap = np.stack([zone.capacity[begin : begin + ticks] for zone in zones], axis=1)
    spot = np.stack([zone.spot_usd_per_h[begin : begin + ticks] for zone in zones], axis=1)
    over = min(zone.on_demand_usd_per_h for zone in zones)
    sizes = np.arange(0, most + 1)
    can = sizes[None, None] <= np.minimum(cap, most)[:, :, None]
    least = np.where(can, sizes * spot[:, :, None], np.inf).min(1)  # (ticks, sizes)
    least = np.minimum(least, sizes * over)
    speed = sizes**ALPHA

    def at(price: float) -> float:
        return float((speed - price * least).max(1).sum() * tick_h + price * usd)

    grid = np.geomspace(1e-4, 10.0, 200)
    return min(at(float(price)) for price in grid)


def _answer(nodes: int) -> PlaceAnswer:
    return PlaceAnswer(up=nodes > 0, nodes=nodes)


def played(
    zones: Sequence[RecordedZone], begin: int, ticks: int, most: int, usd: float
) -> tuple[float, float]:
    """Return the work that priced pacing did, and what it spent."""
    gap_s = zones[0].gap_s
    session = Session(
        job=JobState(
            work_left_s=math.inf,
            left_s=ticks * gap_s,
            start_s=START_S,
            nodes=most,
            nodes_min=1,
            alpha=ALPHA,
            accelerator=zones[0].accelerator,
        ),
        tick_s=gap_s,
        rule=PACING,
        budget_usd=usd,
    )
    running: Running | None = None
    work = spent = 0.0
    by_name = {zone.zone: zone for zone in zones}
    for tick in range(ticks):
        at = begin + tick
        if running is not None and running.market == SPOT:
            left = min(running.nodes, int(by_name[running.place].capacity[at]))
            running = replace(running, nodes=left) if left else None
        action = session.decide(
            Tick(
                elapsed_s=tick * gap_s,
                work_left_s=math.inf,
                places=tuple(
                    Offered(
                        name=zone.zone,
                        spot_usd_per_h=float(zone.spot_usd_per_h[at]),
                        on_demand_usd_per_h=zone.on_demand_usd_per_h,
                        answer=PlaceAnswer(
                            up=bool(zone.capacity[at] > 0), nodes=int(zone.capacity[at])
                        ),
                    )
                    for zone in zones
                ),
                running=running,
                spent_usd=spent,
            )
        )
        if isinstance(action, (Buy, Move)):
            running = Running(
                place=action.place, market=action.market, nodes=action.nodes, starting_s=START_S
            )
        elif isinstance(action, Leave):
            running = None
        if running is not None:
            zone = by_name[running.place]
            spot = running.market == SPOT
            price = float(zone.spot_usd_per_h[at]) if spot else zone.on_demand_usd_per_h
            spent += price * running.nodes * gap_s / 3600
            useful_s = max(0.0, gap_s - running.starting_s)
            work += running.nodes**ALPHA * useful_s / 3600
            running = replace(running, starting_s=max(0.0, running.starting_s - gap_s))
    return work, spent


def elastic_table(*, half: str, windows: int) -> None:
    """Print work over the bound, by market and by how much of the nodes the budget pays."""
    print(f"{half} windows, budget and 1 to 4 or 16 nodes: work / bound, windows over budget")
    for dataset, most in (("aws_v100x4_2023-08", 4), ("gcp_h100x16_2025-10", 16)):
        zones = recorded(dataset)
        length = min(len(zone.capacity) for zone in zones)
        ticks = int(36 * 3600 / zones[0].gap_s)
        low, high = (0, length // 2) if half == "tune" else (length // 2, length)
        for share in (0.15, 0.4, 0.8):
            usd = share * most * 36 * min(float(z.spot_usd_per_h.min()) for z in zones)
            shares, over = [], 0
            for begin in np.linspace(low, high - ticks, windows).astype(int):
                work, spent = played(zones, int(begin), ticks, most, usd)
                shares.append(work / bound(zones, int(begin), ticks, most, usd))
                over += spent > usd + 1e-6
            print(
                f"{dataset:22} pays {share:4.0%} of the nodes: {np.mean(shares):.3f} "
                f"[{min(shares):.3f} {max(shares):.3f}] over {over}",
                flush=True,
            )
