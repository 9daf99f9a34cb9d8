"""Policies and rivals on recorded markets, in one run: `python -m benchmarks.policy`.

Windows are cut from the bundled records, the first half of each to tune on and the second half
held back. Cost is divided by what somebody who knew the window would have paid. Intervals are of
95 %, from a bootstrap over clusters: windows that begin on the same day of a record are one.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.policy.adverse import adverse_table
from benchmarks.policy.elastic import elastic_table
from benchmarks.policy.forecasts import forecasts_table
from benchmarks.policy.limited import limited_table
from benchmarks.policy.rivals import SkyNomad, Today, UniformProgress
from benchmarks.policy.saves import saves_table
from benchmarks.policy.windows import CASES, RATIOS, STARTS_S, Case, interval, windows_of
from spotguard.policy.simulation.omniscient import least_usd
from spotguard.policy.simulation.policy_players import Greedy, Rollout, RuleOf, play

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    parser.add_argument("--only", choices=("adverse", "elastic", "forecasts", "limited", "saves"))
    asked = parser.parse_args()
    if asked.only is not None:
        _other_table(asked)
        return
    rules = list(players(1, 0))
    print(
        f"{asked.half} windows, cost / omniscient [95 %], late windows; {asked.work_h:g} h of work"
    )
    print(f"{'case':22}" + "".join(f"{name:>26}" for name in rules) + f"{'windows':>9}{'s':>6}")
    for name in asked.cases:
        _row(name, CASES[name], asked, rules)


def _other_table(asked: argparse.Namespace) -> None:
    if asked.only == "adverse":
        adverse_table(
            half=asked.half,
            windows=asked.windows,
            work_h=asked.work_h,
            ratios=asked.ratios,
            seed=asked.seed,
        )
    elif asked.only == "elastic":
        elastic_table(half=asked.half, windows=asked.windows)
    elif asked.only == "forecasts":
        forecasts_table(
            windows=asked.windows, work_h=asked.work_h, ratios=asked.ratios, cases=asked.cases
        )
    elif asked.only == "limited":
        limited_table(
            half=asked.half,
            windows=asked.windows,
            work_h=asked.work_h,
            ratios=asked.ratios,
            cases=asked.cases,
        )
    else:
        saves_table(asked.half)


def _row(name: str, case: Case, asked: argparse.Namespace, rules: list[str]) -> None:
    began = time.perf_counter()
    costs: dict[str, list[NDArray[np.float64]]] = {rule: [] for rule in rules}
    late = dict.fromkeys(rules, 0)
    best: list[NDArray[np.float64]] = []
    clusters: list[NDArray[np.int64]] = []
    for ratio in asked.ratios:
        for start_s in STARTS_S:
            made = windows_of(
                case,
                half=asked.half,
                work_h=asked.work_h,
                count=asked.windows,
                ratio=ratio,
                start_s=start_s,
            )
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


if __name__ == "__main__":
    main()
