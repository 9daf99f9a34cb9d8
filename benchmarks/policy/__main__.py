"""Policies and rivals on recorded markets, in one run: `python -m benchmarks.policy`.

Windows are cut from the bundled records, the first half of each to tune on and the second half
held back. Cost is divided by what somebody who knew the window would have paid. Intervals are of
95 %, from a bootstrap over clusters: windows that begin on the same day of a record are one.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.policy.elastic import elastic_table
from benchmarks.policy.rivals import SkyNomad, Today, UniformProgress
from spotguard.policy.recorded import recorded
from spotguard.policy.simulation.omniscient import least_usd
from spotguard.policy.simulation.players import Greedy, Rollout, RuleOf, play
from spotguard.policy.simulation.windows import cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.simulation.windows import Windows

V100, V100X4, H100 = "aws_v100_2023-02", "aws_v100x4_2023-08", "gcp_h100x16_2025-10"


class Case(NamedTuple):
    """A market and a gang; `zones` empty is all of them."""

    dataset: str
    gang: int
    zones: tuple[int, ...] = ()


CASES = {
    "V100x1": Case(V100, 1),
    "V100x2": Case(V100X4, 2),
    "V100x4": Case(V100X4, 4),
    "H100x1": Case(H100, 1),
    "H100x8": Case(H100, 8),
    "H100x16": Case(H100, 16),
    "V100x1 us-east-2a": Case(V100, 1, (2,)),
    "V100x1 us-east-1d": Case(V100, 1, (1,)),
    "H100x8 us-central1-c": Case(H100, 8, (3,)),
    "H100x16 us-east4-b": Case(H100, 16, (4,)),
}
MULTI = ("V100x1", "V100x2", "V100x4", "H100x1", "H100x8", "H100x16")
RATIOS = (1.1, 1.25, 1.5, 2.0, 3.0)
STARTS_S = (200.0, 600.0)


def players(futures: int, seed: int) -> dict[str, tuple[RuleOf, bool]]:
    """Return the rules to compare, and whether the guard has the last word on each."""
    return {
        "rollout": (Rollout(seed=seed, futures=futures), True),
        "constants": (RuleOf(), True),
        "greedy": (Greedy(), True),
        "uniform progress": (UniformProgress(), True),
        "skynomad's rule": (SkyNomad(), True),
        "before": (Today(), False),
    }


def main() -> None:
    """Print a table per half."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=("tune", "held"), default="held")
    parser.add_argument("--windows", type=int, default=6, help="per case, deadline and start")
    parser.add_argument("--work-h", type=float, default=24.0)
    parser.add_argument("--futures", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ratios", type=float, nargs="*", default=list(RATIOS))
    parser.add_argument("--elastic", action="store_true", help="only budget and elastic nodes")
    asked = parser.parse_args()
    if asked.elastic:
        elastic_table(half=asked.half, windows=asked.windows)
        return
    rules = list(players(1, 0))
    print(
        f"{asked.half} windows, cost / omniscient [95 %], late windows; {asked.work_h:g} h of work"
    )
    print(f"{'case':22}" + "".join(f"{name:>26}" for name in rules) + f"{'windows':>9}{'s':>6}")
    for name in asked.cases:
        _row(name, CASES[name], asked, rules)


def _row(name: str, case: Case, asked: argparse.Namespace, rules: list[str]) -> None:
    began = time.perf_counter()
    costs: dict[str, list[NDArray[np.float64]]] = {rule: [] for rule in rules}
    late = dict.fromkeys(rules, 0)
    best: list[NDArray[np.float64]] = []
    clusters: list[NDArray[np.int64]] = []
    for ratio in asked.ratios:
        for start_s in STARTS_S:
            made = windows_of(case, asked, ratio=ratio, start_s=start_s)
            if made is None:
                continue
            windows, days = made
            best.append(least_usd(windows))
            clusters.append(days)
            for rule, (player, with_guard) in players(asked.futures, asked.seed).items():
                outcome = play(windows, player, with_guard=with_guard)
                costs[rule].append(outcome.usd)
                late[rule] += int(outcome.late.sum())
    if not best:
        print(f"{name:22} no window is long enough")
        return
    least, days = np.concatenate(best), np.concatenate(clusters)
    cells = []
    for rule in rules:
        ratio_of = np.concatenate(costs[rule]) / least
        low, high = interval(ratio_of, days)
        cells.append(f"{ratio_of.mean():.3f} [{low:.3f} {high:.3f}] {late[rule]:>3}")
    took_s = time.perf_counter() - began
    print(
        f"{name:22}" + "".join(f"{c:>26}" for c in cells) + f"{len(least):>9}{took_s:>6.0f}",
        flush=True,
    )


def windows_of(
    case: Case, asked: argparse.Namespace, *, ratio: float, start_s: float
) -> tuple[Windows, NDArray[np.int64]] | None:
    """Return windows of the half, and the day on which each begins; None if none fits."""
    zones = recorded(case.dataset)
    chosen = [zones[index] for index in case.zones] if case.zones else list(zones)
    length = min(len(zone.capacity) for zone in chosen)
    gap_s = chosen[0].gap_s
    ticks = int(np.ceil(asked.work_h * ratio * 3600 / gap_s))
    low, high = (0, length // 2) if asked.half == "tune" else (length // 2, length)
    if high - low < ticks:
        return None
    begins = np.unique(np.linspace(low, high - ticks, asked.windows).astype(int))
    made = cut(
        chosen,
        gang=case.gang,
        work_h=asked.work_h,
        deadline_h=asked.work_h * ratio,
        start_s=start_s,
        begins=[int(each) for each in begins],
    )
    return made, (begins * gap_s // 86_400).astype(np.int64)


def interval(values: NDArray[np.float64], clusters: NDArray[np.int64]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, from 2000 draws of whole clusters."""
    names = np.unique(clusters)
    sums = np.array([values[clusters == name].sum() for name in names])
    sizes = np.array([(clusters == name).sum() for name in names])
    drawn = np.random.default_rng(0).integers(0, len(names), (2000, len(names)))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


if __name__ == "__main__":
    main()
