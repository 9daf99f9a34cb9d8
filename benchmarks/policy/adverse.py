"""Markets that do not keep to the records: egress, places that lie, dear spot, skipped ticks.

Each kind of trouble is laid over recorded windows, and the policy is driven through the JSON lines.
Cost, egress included, is divided by what somebody who knew the window would have paid, who is asked
at each tick and buys nothing from a place that lies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.policy.windows import CASES, interval, windows_of
from spotguard.policy.protocol import driver_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from spotguard.policy.simulation.windows import Windows

KINDS = ("plain", "egress", "lying", "dear", "dear one place", "gaps")
MARKETS = ("V100x4", "H100x8")
START_S = 600.0
CHECKPOINT_GB = 200.0
NEAR_USD, FAR_USD = 0.02, 0.08
"""Of a GB, to another region of the continent, and to another continent."""
_FAR_USD = 1e15
_FINE = 3
"""Units of work in a tick."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One window with what is laid over it; money is of one node."""

    windows: Windows
    """Of one window."""
    lies: frozenset[str] = frozenset()
    """Places that always answer, and take their nodes before the next tick."""
    skipped: frozenset[int] = frozenset()
    """Ticks at which nobody asks the policy."""
    checkpoint_gb: float = 0.0

    def egress(self) -> dict[str, dict[str, float]]:
        """Return USD per GB from each place to each."""
        names = self.windows.names
        return {one: {two: _usd_per_gb(one, two) for two in names} for one in names}


def adverse_table(
    *, half: str, windows: int, work_h: float, ratios: Sequence[float], seed: int = 0
) -> None:
    """Print cost over the omniscient's by kind of trouble, with late and over-budget windows."""
    print(
        f"{half} windows, {work_h:g} h of work: cost / omniscient [95 %], worst, late, "
        "over the budget, purchases"
    )
    for kind in KINDS:
        rows: list[tuple[float, bool, bool, int]] = []
        clusters: list[str] = []
        for case in MARKETS if "one place" not in kind else (*MARKETS[:1], "H100x8 us-east4-b"):
            for ratio in ratios:
                made = windows_of(
                    CASES[case],
                    half=half,
                    work_h=work_h,
                    count=windows,
                    ratio=ratio,
                    start_s=START_S,
                )
                if made is None:
                    continue
                for index in range(made[0].count):
                    chance = np.random.default_rng([seed, index, int(ratio * 100)])
                    trouble = laid_over(kind, _one(made[0], index), chance)
                    least = least_with_egress(trouble)
                    budget_usd = 2 * trouble.windows.on_demand * (work_h + START_S / 3600)
                    usd, early, bought = driven(trouble, budget_usd=budget_usd)
                    rows.append((usd / least, early < -1e-6, usd > budget_usd + 1e-6, bought))
                    clusters.append(f"{case} {made[1][index]}")
        found = np.array([row[0] for row in rows])
        low, high = interval(found, np.unique(clusters, return_inverse=True)[1])
        late, over = (sum(row[at] for row in rows) for at in (1, 2))
        bought = sum(row[3] for row in rows)
        print(
            f"{kind:16}{found.mean():8.3f} [{low:.3f} {high:.3f}] {found.max():8.2f} late {late} "
            f"over {over} purchases {bought / len(rows):.1f} of {len(rows)} windows",
            flush=True,
        )


def _one(windows: Windows, index: int) -> Windows:
    which = slice(index, index + 1)
    return replace(windows, up=windows.up[which], price=windows.price[which])


def laid_over(kind: str, windows: Windows, chance: np.random.Generator) -> Trouble:
    """Return a window with one kind of trouble."""
    _, ticks, zones = windows.price.shape
    hour = max(1, round(3600 / windows.tick_s))
    if kind == "egress":  # prices go up and down, so that there is something to move for
        parts = -(-ticks // (6 * hour))
        factor = np.exp(chance.normal(0.0, 0.5, (parts, zones))).repeat(6 * hour, axis=0)[:ticks]
        price = np.minimum(windows.price * factor, 0.95 * windows.on_demand)
        return Trouble(windows=replace(windows, price=price), checkpoint_gb=CHECKPOINT_GB)
    if kind == "lying":
        lies = np.ones((1, ticks, 1), dtype=bool)
        cheaper = windows.price.min(2, keepdims=True) * chance.uniform(0.5, 0.95)
        return Trouble(
            windows=replace(
                windows,
                up=np.concatenate((windows.up, lies), axis=2),
                price=np.concatenate((windows.price, cheaper), axis=2),
                names=(*windows.names, "zz-lies-1a"),
            ),
            lies=frozenset({"zz-lies-1a"}),
        )
    if kind.startswith("dear"):
        price = windows.price.copy()
        for zone in range(zones):
            begin = int(chance.integers(0, max(1, ticks // 2)))
            length = int(chance.integers(2 * hour, 10 * hour))
            price[:, begin : begin + length, zone] = windows.on_demand * chance.uniform(1.1, 3.0)
        return Trouble(windows=replace(windows, price=price))
    if kind == "gaps":
        # The longest comes first: a gap longer than any before is what nobody can keep time for.
        longest = max(2, round(2400 / windows.tick_s))
        skipped = set(range(2, 2 + longest))
        tick = 2 + longest
        while tick < ticks:
            tick += int(chance.integers(2, 4 * hour))
            length = int(chance.integers(1, longest + 1))
            skipped |= set(range(tick, tick + length))
            tick += length
        return Trouble(windows=windows, skipped=frozenset(skipped))
    return Trouble(windows=windows)


def _region(place: str) -> str:
    return place.rsplit("-", 1)[0] if place[-2] == "-" else place[:-1]


def _usd_per_gb(one: str, two: str) -> float:
    if _region(one) == _region(two):
        return 0.0
    return NEAR_USD if one.split("-")[0] == two.split("-")[0] else FAR_USD


def driven(
    trouble: Trouble, *, rule: str = "rollout", budget_usd: float | None = None
) -> tuple[float, float, int]:
    """Return the cost per node, the ticks from the work's end to the deadline, and purchases."""
    windows = trouble.windows
    names, nodes = windows.names, windows.gang
    job = {
        "work_ticks": windows.work,
        "deadline_ticks": windows.deadline,
        "start_ticks": windows.start,
        "tick_s": windows.tick_s,
        "nodes": nodes,
        "accelerator": windows.accelerator,
        "rule": rule,
        "checkpoint_gb": trouble.checkpoint_gb or None,
        "egress_usd_per_gb": trouble.egress(),
        "budget_usd": None if budget_usd is None else budget_usd * nodes,
    }
    places = [
        {"name": name, "region": _region(name), "on_demand_usd_per_h": windows.on_demand}
        for name in names
    ]
    driver = driver_of(json.dumps({"job": job, "places": places, "seed": 0}))
    work, starting, usd, bought = windows.work, 0.0, 0.0, 0
    running: tuple[str, str] | None = None
    at: str | None = None
    for tick in range(windows.up.shape[1] + 400):
        seen = min(tick, windows.up.shape[1] - 1)
        up = dict(zip(names, windows.up[0, seen], strict=True))
        price = dict(zip(names, windows.price[0, seen], strict=True))
        if running is not None and running[1] == "spot":
            running = None if running[0] in trouble.lies or not up[running[0]] else running
        at = at if running is None else running[0]
        if tick not in trouble.skipped:
            said = None if running is None else {"place": running[0], "market": running[1]}
            told = {n: {"price": float(price[n]), "answers": bool(up[n])} for n in names}
            line = {
                "tick": tick,
                "places": told,
                "work_left_ticks": work,
                "running": said,
                "spent_usd": usd * nodes,
            }
            action = json.loads(driver.tick(json.dumps(line)))
            before = running
            if action["action"] in ("buy", "move"):
                spot = action["market"] == "spot"
                asked = [action["place"], *action.get("then", ())]
                got = next((n for n in asked if up[n]), None) if spot else action["place"]
                running = None if got is None else (got, action["market"])
            elif action["action"] in ("leave", "wait"):
                running = None
            if running is not None and running != before:
                bought += 1
                starting = windows.start
                if at is not None:
                    usd += trouble.checkpoint_gb * _usd_per_gb(at, running[0]) / nodes
        if running is not None:
            hourly = price[running[0]] if running[1] == "spot" else windows.on_demand
            paid = min(1.0, starting + work)
            usd += hourly * paid * windows.tick_s / 3600
            if running[0] in trouble.lies and running[1] == "spot":
                continue  # what it did is lost with its nodes
            if starting + work <= 1.0:
                return usd, windows.deadline - (tick + starting + work), bought
            work -= max(0.0, 1.0 - starting)
            starting = max(0.0, starting - 1.0)
    return usd, -np.inf, bought


def least_with_egress(trouble: Trouble) -> float:
    """Return the least cost per node, by dynamic programming over where the checkpoint lies.

    On demand can be bought in each place, so it costs egress only to leave for spot elsewhere.
    """
    windows = trouble.windows
    zones, ticks, tick_h = len(windows.names), windows.up.shape[1], windows.tick_s / 3600
    honest = np.array([name not in trouble.lies for name in windows.names])
    spot = np.where(windows.up[0] & honest, windows.price[0], _FAR_USD)
    rate = np.concatenate((spot, np.full((ticks, zones), windows.on_demand)), axis=1) * tick_h
    move = np.array([[_usd_per_gb(a, b) for b in windows.names * 2] for a in windows.names])
    move = np.vstack((move, np.zeros(2 * zones)))  # the last row: there is no checkpoint yet
    move = move * trouble.checkpoint_gb / windows.gang
    units = int(np.floor(windows.work * _FINE + 1e-6))
    full, rest = divmod(int(np.floor(windows.start * _FINE + 1e-6)), _FINE)
    amount = np.arange(units + 1)
    value = np.full((2 * zones, units + 1), _FAR_USD)
    idle = np.full((zones + 1, units + 1), _FAR_USD)
    value[:, 0] = idle[:, 0] = 0.0
    later = [value] * (full + 1)
    broken = windows.deadline - np.floor(windows.deadline)
    for tick in range(ticks - 1, -1, -1):
        length = _FINE if tick < ticks - 1 or broken < 1e-9 else int(np.ceil(broken * _FINE))
        paid = np.minimum(amount, length) / _FINE
        going = rate[tick][:, None] * paid + _less(later[0], length)
        if tick + full < ticks:
            first = rate[tick + full][:, None] * np.minimum(amount + rest, _FINE) / _FINE
            fresh = rate[tick : tick + full].sum(0)[:, None] + first
            fresh = fresh + _less(later[full], _FINE - rest)
            idle = np.minimum(idle, (move[:, :, None] + fresh[None]).min(1))
        value = np.minimum(going, np.concatenate((idle[:-1], idle[:-1])))
        value[:, 0] = idle[:, 0] = 0.0
        later = [value, *later[:full]]
    return float(idle[-1, units])


def _less(value: NDArray[np.float64], done: int) -> NDArray[np.float64]:
    """Return the values after so many units of work were done."""
    return value[:, np.maximum(np.arange(value.shape[1]) - done, 0)]
