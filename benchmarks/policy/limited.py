"""A policy that sees only the places that it asks or probes, beside one that sees all.

Both are driven through the JSON lines, in ticks: a place answers when it is bought at, and at the
tick after it was named in `probe`. Nothing else tells whether a place has nodes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.policy.windows import CASES, STARTS_S, interval, windows_of
from spotguard.policy.protocol import driver_of
from spotguard.policy.simulation.omniscient import least_usd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from spotguard.policy.simulation.windows import Windows


def limited_table(
    *, half: str, windows: int, work_h: float, ratios: Sequence[float], cases: Sequence[str]
) -> None:
    """Print cost over the omniscient's with all seen and with views limited, by deadline."""
    print(
        f"{half} windows, {work_h:g} h of work: cost / omniscient; limited / all seen [95 %], late"
    )
    print(f"{'case':22}{'deadline':>9}{'all seen':>10}{'limited':>9}{'ratio':>22}{'late':>6}")
    everything: list[_Played] = []
    for name in cases:
        of_case: list[_Played] = []
        for ratio in ratios:
            found: list[_Played] = []
            for start_s in STARTS_S:
                made = windows_of(
                    CASES[name],
                    half=half,
                    work_h=work_h,
                    count=windows,
                    ratio=ratio,
                    start_s=start_s,
                )
                if made is not None:
                    found += _played(*made, name)
            if found:
                of_case += found
                _print_row(name, f"{ratio:g}", found)
        if of_case:
            everything += of_case
            _print_row(name, "all", of_case)
    if everything:
        _print_row("all", "all", everything)


class _Played(NamedTuple):
    """One window: what it cost, in the omniscient's cost, and which windows are one cluster."""

    free: float
    limited: float
    late: int
    cluster: str


def _played(windows: Windows, days: NDArray[np.int64], case: str) -> list[_Played]:
    least = least_usd(windows)
    rows = []
    for index in range(windows.count):
        free, early = driven(windows, index, limited=False)
        limited, also_early = driven(windows, index, limited=True)
        rows.append(
            _Played(
                free / least[index],
                limited / least[index],
                int(early < -1e-6) + int(also_early < -1e-6),
                f"{case} {days[index]}",
            )
        )
    return rows


def _print_row(name: str, deadline: str, rows: Sequence[_Played]) -> None:
    free = np.array([row.free for row in rows])
    limited = np.array([row.limited for row in rows])
    clusters = np.unique([row.cluster for row in rows], return_inverse=True)[1]
    low, high = interval(limited, clusters, free)
    ratio = f"{limited.sum() / free.sum():.3f} [{low:.3f} {high:.3f}]"
    print(
        f"{name:22}{deadline:>9}{free.mean():>10.3f}{limited.mean():>9.3f}{ratio:>22}"
        f"{sum(row.late for row in rows):>6}",
        flush=True,
    )


def driven(
    windows: Windows, index: int, *, limited: bool, rule: str = "rollout"
) -> tuple[float, float]:
    """Return the cost per node, and by how many ticks the work was done before the deadline."""
    names = windows.names
    job = {
        "work_ticks": windows.work,
        "deadline_ticks": windows.deadline,
        "start_ticks": windows.start,
        "tick_s": windows.tick_s,
        "accelerator": windows.accelerator,
        "rule": rule,
    }
    places = [{"name": name, "on_demand_usd_per_h": windows.on_demand} for name in names]
    driver = driver_of(json.dumps({"job": job, "places": places, "seed": index}))
    work, starting, usd = windows.work, 0.0, 0.0
    running: tuple[str, str] | None = None
    asked: set[str] = set()
    for tick in range(windows.up.shape[1] + 40):
        seen = min(tick, windows.up.shape[1] - 1)
        up = dict(zip(names, windows.up[index, seen], strict=True))
        price = dict(zip(names, windows.price[index, seen], strict=True))
        if running is not None and running[1] == "spot" and not up[running[0]]:
            running = None
        told = {
            name: {
                "price": float(price[name]),
                "answers": bool(up[name]) if not limited or name in asked else None,
            }
            for name in names
        }
        said = None if running is None else {"place": running[0], "market": running[1]}
        line = {"tick": tick, "places": told, "work_left_ticks": work, "running": said}
        action = json.loads(driver.tick(json.dumps(line)))
        asked = set(action.get("probe", ()))
        before = running
        if action["action"] in ("buy", "move"):
            wanted = [action["place"], *action.get("then", ())]
            spot = action["market"] == "spot"
            got = next((each for each in wanted if up[each]), None) if spot else action["place"]
            running = None if got is None else (got, action["market"])
            if spot:  # all that refused, and the one that did not
                asked |= set(wanted if got is None else wanted[: wanted.index(got)])
        elif action["action"] in ("leave", "wait"):
            running = None
        if running is not None:
            starting = windows.start if running != before else starting
            hourly = price[running[0]] if running[1] == "spot" else windows.on_demand
            paid = min(1.0, starting + work)
            usd += hourly * paid * windows.tick_s / 3600
            if starting + work <= 1.0:
                return usd, windows.deadline - (tick + starting + work)
            work -= max(0.0, 1.0 - starting)
            starting = max(0.0, starting - 1.0)
    return usd, -np.inf
