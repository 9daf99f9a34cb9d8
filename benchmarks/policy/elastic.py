"""Budget and elastic nodes: how much work the money buys, over bounds that know all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.policy.published_pacing import PublishedPacing, published_work
from benchmarks.policy.windows import interval
from spotguard.policy.action import SPOT, Buy, Leave, Move
from spotguard.policy.decide import PACING
from spotguard.policy.market.memory import PlaceAnswer
from spotguard.policy.market.recorded import recorded
from spotguard.policy.session import Offered, Session, Tick
from spotguard.policy.view import JobState, Running

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from spotguard.policy.market.recorded import RecordedZone

ALPHA, START_S = 0.9, 300.0


def bound(zones: Sequence[RecordedZone], begin: int, ticks: int, most: int, usd: float) -> float:
    """Return node-hours of one node's speed that nobody can beat: no restarts, all known.

    It is the least of the Lagrangian over the price of a dollar.
    """
    capacity, price = _offers(zones, begin, ticks, most)
    tick_h = zones[0].gap_s / 3600
    sizes = np.arange(0, most + 1)
    can = sizes[None, None] <= capacity[:, :, None]
    least = np.where(can, sizes * price[:, :, None], np.inf).min(1)  # (ticks, sizes)
    speed = sizes**ALPHA

    def at(dollar: float) -> float:
        return float((speed - dollar * least).max(1).sum() * tick_h + dollar * usd)

    return min(at(float(dollar)) for dollar in np.geomspace(1e-4, 10.0, 200))


def bound_with_starts(
    zones: Sequence[RecordedZone], begin: int, ticks: int, most: int, usd: float
) -> float:
    """Return the same for somebody who knows all, and whose starts take as long as ours.

    Nodes that are lost shrink what runs without a start, as in `played`; any other change is one.
    """
    capacity, price = _offers(zones, begin, ticks, most)
    tick_h = zones[0].gap_s / 3600
    useful = 1 - min(1.0, START_S / zones[0].gap_s)
    sizes = np.arange(0, most + 1)

    def at(dollar: float) -> float:
        value = np.zeros((capacity.shape[1], most + 1))  # by place and nodes, before the tick
        for tick in range(ticks - 1, -1, -1):
            speed = np.broadcast_to(sizes**ALPHA * tick_h, value.shape)
            paid = dollar * sizes * price[tick][:, None] * tick_h
            can = sizes <= capacity[tick][:, None]
            going = np.where(can, speed - paid + value, -np.inf)
            begun = np.where(can, useful * speed - paid + value, -np.inf).max()
            kept = np.minimum(sizes, capacity[tick][:, None])
            value = np.maximum(np.take_along_axis(going, kept, 1), begun)
        return float(value[0, 0]) + dollar * usd

    return _least(at, 1e-3, 5.0)


def _offers(
    zones: Sequence[RecordedZone], begin: int, ticks: int, most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return nodes and price of each place, on demand the last; of shape (ticks, places)."""
    window = slice(begin, begin + ticks)
    over = min(zone.on_demand_usd_per_h for zone in zones)
    capacity = [np.minimum(zone.capacity[window], most) for zone in zones]
    price = [zone.spot_usd_per_h[window] for zone in zones]
    return (
        np.stack([*capacity, np.full(ticks, most)], axis=1),
        np.stack([*price, np.full(ticks, over)], axis=1),
    )


def _least(at: Callable[[float], float], low: float, high: float) -> float:
    """Return the least of a convex function of the price of a dollar, to three digits."""
    for count in (24, 12):
        grid = np.geomspace(low, high, count)
        values = [at(float(dollar)) for dollar in grid]
        best = int(np.argmin(values))
        low, high = float(grid[max(0, best - 1)]), float(grid[min(count - 1, best + 1)])
    return values[best]


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
    """Print work over the bounds, by market and by how much of the nodes the budget pays."""
    print(
        f"{half} windows, budget and 1 to 4 or 16 nodes: work / bound [95 %], / bound with starts, "
        "of pacing as published / bound, ours / that [95 %], windows over budget"
    )
    for dataset, most in (("aws_v100x4_2023-08", 4), ("gcp_h100x16_2025-10", 16)):
        zones = recorded(dataset)
        length = min(len(zone.capacity) for zone in zones)
        gap_s = zones[0].gap_s
        ticks = int(36 * 3600 / gap_s)
        low, high = (0, length // 2) if half == "tune" else (length // 2, length)
        begins = np.linspace(low, high - ticks, windows).astype(int)
        for share in (0.15, 0.4, 0.8):
            usd = share * most * 36 * min(float(z.spot_usd_per_h.min()) for z in zones)
            shares, with_starts, published, over = [], [], [], 0
            for begin in (int(each) for each in begins):
                work, spent = played(zones, begin, ticks, most, usd)
                rival = PublishedPacing(zones, most, ALPHA, START_S / 3600)
                most_work = bound(zones, begin, ticks, most, usd)
                shares.append(work / most_work)
                published.append(published_work(zones, begin, ticks, rival, usd) / most_work)
                with_starts.append(work / bound_with_starts(zones, begin, ticks, most, usd))
                over += spent > usd + 1e-6
            days = begins * int(gap_s) // 86_400
            least, greatest = interval(np.array(shares), days)
            low_ratio, high_ratio = interval(np.array(shares) / np.array(published), days)
            print(
                f"{dataset:22} pays {share:4.0%} of the nodes: {np.mean(shares):.3f} "
                f"[{least:.3f} {greatest:.3f}], {np.mean(with_starts):.3f}, "
                f"{np.mean(published):.3f}, {np.mean(np.divide(shares, published)):.3f} "
                f"[{low_ratio:.3f} {high_ratio:.3f}], over {over}",
                flush=True,
            )
