"""Many runs of a job on a recorded market: what each policy would have cost, and when it was done.

The same question with the same seed gives the same answer, byte for byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from spotguard.errors import UsageError
from spotguard.policy.decide import CONSTANTS, GREEDY, NEVER, ROLLOUT
from spotguard.policy.market.hazard import fitted
from spotguard.policy.simulation.omniscient import least_usd
from spotguard.policy.simulation.policy_players import Greedy, Rollout, RuleOf, play
from spotguard.policy.simulation.windows import Windows
from spotguard.shared.json_documents import document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from spotguard.policy.market.recorded import RecordedZone
    from spotguard.policy.simulation.policy_players import Outcome

SCHEMA: Final = 1
SIMULATED: Final = (ROLLOUT, CONSTANTS, GREEDY, NEVER)
"""The policies that can be simulated."""
TICK_S = 600.0
STRIP = 60
"""Characters of a strip of places over time."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FUTURES, _SCREENED, _EVERY = 12, 4, 12
"""Fewer futures, and decisions less often, than where money is spent: within half a percent."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of all runs."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class SimulatedPolicy:
    """How one policy fared."""

    policy: str
    cost_usd: Spread
    finish_s: Spread
    """Seconds from the start until the work was done; a run that was not done counts its end."""
    late_share: float
    late_low: float
    """The 95 % interval of the share (Wilson)."""
    late_high: float
    saved_pct: float
    """Mean cost against on demand from start to end; negative if it costs more."""
    omniscient_ratio: float
    """Mean cost over what somebody who knew the market would have paid."""
    strip: str
    """The run of median cost over time: a letter for spot in a place, `$` on demand, `.` none."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What `spotguard simulate --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    market: str
    """On which record it rests."""
    recorded_from: str
    recorded_days: float
    gang: int
    """Recorded nodes (of one GPU) that had to be had together."""
    runs: int
    seed: int
    work_s: float
    deadline_s: float
    start_s: float
    on_demand_usd: float
    """From start to end on demand."""
    omniscient_usd: Spread
    places: tuple[str, ...]
    """The zones; the first is `a` in a strip."""
    policies: tuple[SimulatedPolicy, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object of `simulate --json`."""
        return document(self)


def simulate(
    zones: Sequence[RecordedZone],
    *,
    market: str,
    gang: int,
    work_s: float,
    deadline_s: float,
    start_s: float = 600.0,
    policies: Sequence[str] = (ROLLOUT, CONSTANTS),
    runs: int = 200,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Simulation:
    """Return how the policies fare on so many windows of the record, begun at drawn instants.

    Raises:
        UsageError: a policy has no such name, there is no zone, gang or run, the record is too
            short, the gang was never recorded, the deadline leaves no time for the work and a
            start, or all that is needed is free.
    """
    for name, count in (("zones", len(zones)), ("gang", gang), ("runs", runs)):
        if count < 1:
            raise UsageError(f"{name}: there must be one at least")
    _check(
        zones, gang=gang, work_s=work_s, deadline_s=deadline_s, start_s=start_s, policies=policies
    )
    coarse = [_coarse(zone, gang) for zone in zones]
    windows = _drawn(
        zones,
        coarse,
        gang=gang,
        work_s=work_s,
        deadline_s=deadline_s,
        start_s=start_s,
        runs=runs,
        seed=seed,
    )
    hazard = fitted([(up, TICK_S) for up, _ in coarse], market)
    tell = progress or (lambda _: None)
    tell("what somebody who knew the market would pay")
    least = least_usd(windows) * gang
    if not least.mean() > 0:
        raise UsageError(
            "somebody who knew the market would pay nothing, so there is nothing to compare with",
            hint="the work must take some time, and spot must cost something",
        )
    made = []
    for name in policies:
        tell(f"policy {name}")
        player = _player(name, seed, hazard)
        made.append(_fared(name, play(windows, player, with_guard=name != NEVER), windows, least))
    days = min(len(zone.capacity) * zone.gap_s for zone in zones) / 86_400
    return Simulation(
        market=market,
        recorded_from=_day(zones[0].start),
        recorded_days=round(days, 1),
        gang=gang,
        runs=runs,
        seed=seed,
        work_s=work_s,
        deadline_s=deadline_s,
        start_s=start_s,
        on_demand_usd=_on_demand_usd(windows),
        omniscient_usd=_spread(least),
        places=windows.names,
        policies=tuple(made),
    )


def _check(
    zones: Sequence[RecordedZone],
    *,
    gang: int,
    work_s: float,
    deadline_s: float,
    start_s: float,
    policies: Sequence[str],
) -> None:
    for name in policies:
        if name not in SIMULATED:
            raise UsageError(
                f"policy {name!r} is not known", hint=f"allowed: {', '.join(SIMULATED)}"
            )
    most = max(zone.nodes_max for zone in zones)
    if gang > most:
        raise UsageError(
            f"{gang} GPUs at once were never recorded there, {most} at most",
            hint="take fewer nodes, or a record of your own: --trace DIR",
        )
    if deadline_s < work_s + start_s:
        raise UsageError("the deadline leaves no time for the work and one start")
    length_s = min(len(zone.capacity) * zone.gap_s for zone in zones)
    if deadline_s > length_s - 3600:
        raise UsageError(
            f"the record is {length_s / 86_400:.1f} days long, which is too short for the deadline"
        )


def _coarse(zone: RecordedZone, gang: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return the zone in ticks of `TICK_S`: up where it was throughout, with the mean price."""
    ticks = int(len(zone.capacity) * zone.gap_s // TICK_S)
    if zone.gap_s > TICK_S:
        return _refined(zone, gang, ticks)
    edges = np.minimum(np.arange(ticks + 1) * TICK_S / zone.gap_s, len(zone.capacity)).astype(int)
    edges = np.unique(edges)[:-1]
    least = np.minimum.reduceat(zone.capacity, edges)
    sizes = np.diff(np.append(edges, len(zone.capacity)))
    mean = np.add.reduceat(zone.spot_usd_per_h, edges) / sizes
    return least >= gang, mean


def _refined(
    zone: RecordedZone, gang: int, ticks: int
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return the same where rows are longer than a tick: each tick lies in one or two of them."""
    begin = np.arange(ticks) * (TICK_S / zone.gap_s) + 1e-9
    first = begin.astype(int)
    last = np.minimum((begin + TICK_S / zone.gap_s - 2e-9).astype(int), len(zone.capacity) - 1)
    in_first = np.minimum((first + 1 - begin) * (zone.gap_s / TICK_S), 1.0)
    price = zone.spot_usd_per_h
    mean = np.where(
        first == last, price[first], in_first * price[first] + (1 - in_first) * price[last]
    )
    return np.minimum(zone.capacity[first], zone.capacity[last]) >= gang, mean


def _drawn(
    zones: Sequence[RecordedZone],
    coarse: Sequence[tuple[NDArray[np.bool_], NDArray[np.float64]]],
    *,
    gang: int,
    work_s: float,
    deadline_s: float,
    start_s: float,
    runs: int,
    seed: int,
) -> Windows:
    length = min(len(up) for up, _ in coarse)
    ticks = math.ceil(deadline_s / TICK_S)
    rng = np.random.default_rng(seed)
    begins = rng.integers(0, max(1, length - ticks + 1), runs)
    index = begins[:, None] + np.arange(ticks)
    return Windows(
        up=np.stack([up[index] for up, _ in coarse], axis=2),
        price=np.stack([price[index] for _, price in coarse], axis=2),
        on_demand=min(zone.on_demand_usd_per_h for zone in zones),
        work=work_s / TICK_S,
        deadline=deadline_s / TICK_S,
        start=start_s / TICK_S,
        tick_s=TICK_S,
        gang=gang,
        accelerator=zones[0].accelerator,
        names=tuple(zone.zone for zone in zones),
    )


def _day(start: str) -> str:
    return start[:10] if start[:1].isdigit() else start


def _player(name: str, seed: int, hazard: Any) -> RuleOf:
    if name == ROLLOUT:
        return Rollout(seed=seed, futures=_FUTURES, screened=_SCREENED, every=_EVERY, hazard=hazard)
    return RuleOf() if name == CONSTANTS else Greedy()


def _on_demand_usd(windows: Windows) -> float:
    ticks = windows.work + windows.start
    return windows.on_demand * windows.gang * ticks * windows.tick_s / 3600


def _fared(
    name: str, outcome: Outcome, windows: Windows, least: NDArray[np.float64]
) -> SimulatedPolicy:
    usd = outcome.usd * windows.gang
    finish = np.where(outcome.finish > 0, outcome.finish, windows.deadline) * windows.tick_s
    low, high = wilson(int(outcome.late.sum()), len(usd))
    middle = int(np.argsort(usd, kind="stable")[len(usd) // 2])
    return SimulatedPolicy(
        policy=name,
        cost_usd=_spread(usd),
        finish_s=_spread(finish),
        late_share=float(outcome.late.mean()),
        late_low=low,
        late_high=high,
        saved_pct=100 * (1 - float(usd.mean()) / _on_demand_usd(windows)),
        omniscient_ratio=float(usd.mean() / least.mean()),
        strip=_strip(outcome.places[middle], windows),
    )


def wilson(count: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share."""
    z = 1.96
    share, spread = count / of, z * z / of
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / of + spread / (4 * of)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _spread(values: NDArray[np.float64]) -> Spread:
    p10, median, p90 = (float(each) for each in np.quantile(values, (0.1, 0.5, 0.9)))
    return Spread(median=median, p10=p10, p90=p90)


def _strip(places: NDArray[np.int16], windows: Windows) -> str:
    zones = windows.up.shape[2]
    signs = [_LETTERS[zone % len(_LETTERS)] for zone in range(zones)] + ["$", "."]
    edges = np.linspace(0, len(places), min(STRIP, len(places)) + 1).astype(int)
    parts = [places[begin:end] for begin, end in pairwise(edges)]
    return "".join(signs[int(np.bincount(part, minlength=zones + 2).argmax())] for part in parts)
