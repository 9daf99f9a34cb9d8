"""How well the forecast of a job's cost foretells what recorded markets then made of it.

Rates come from the first half of a record, windows from the second. A job is forecast before its
begin, when nothing is seen; at its begin, when which places answer is; and six hours later, from
what it has seen until then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.policy.windows import CASES, STARTS_S, windows_of
from spotguard.policy.action import ON_DEMAND, SPOT
from spotguard.policy.decide import Model
from spotguard.policy.market.hazard import fitted
from spotguard.policy.market.recorded import recorded
from spotguard.policy.simulation.forecast import forecast
from spotguard.policy.simulation.policy_players import Rollout, State, play
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from benchmarks.policy.windows import Case
    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.simulation.forecast import Forecast
    from spotguard.policy.simulation.windows import Windows


class Foretold(NamedTuple):
    """Of some windows: cost per node predicted, the interval's ends, and realised."""

    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    real: NDArray[np.float64]


AFTER_H = 6.0


def forecasts_table(
    *, windows: int, work_h: float, ratios: Sequence[float], cases: Sequence[str]
) -> None:
    """Print predicted over realised cost, and the share of outcomes within the 80 % interval."""
    print(f"held windows, {work_h:g} h of work: mean predicted / mean realised cost, within 80 %")
    print(f"{'case':26}" + "".join(f"{when:>19}" for when in _WHEN) + f"{'jobs':>7}")
    made: dict[bool, list[list[Foretold]]] = {True: [], False: []}
    for name in cases:
        told = _of_case(CASES[name], windows=windows, work_h=work_h, ratios=ratios)
        if told:
            made[bool(CASES[name].zones)].append(told)
            _print_row(name, told)
    for one, name in ((False, "all multi-zone"), (True, "all of one zone")):
        if made[one]:
            _print_row(name, [_joined(each) for each in zip(*made[one], strict=True)])


_WHEN = ("before", "at the begin", f"after {AFTER_H:g} h")


def _joined(parts: Sequence[Foretold]) -> Foretold:
    return Foretold(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _print_row(name: str, told: Sequence[Foretold]) -> None:
    cells = []
    for each in told:
        inside = (each.low <= each.real + 1e-9) & (each.real <= each.high + 1e-9)
        ratio = each.mean.sum() / max(each.real.sum(), 1e-9)
        cells.append(f"{ratio:.2f}  {100 * inside.mean():.0f} %")
    print(
        f"{name:26}" + "".join(f"{cell:>19}" for cell in cells) + f"{len(told[0].real):>7}",
        flush=True,
    )


def _of_case(case: Case, *, windows: int, work_h: float, ratios: Sequence[float]) -> list[Foretold]:
    zones = recorded(case.dataset)
    half = min(len(zone.capacity) for zone in zones) // 2
    hazard = fitted([(zone.capacity[:half] >= case.gang, zone.gap_s) for zone in zones], "half")
    parts: list[list[Foretold]] = []
    for ratio in ratios:
        for start_s in STARTS_S:
            made = windows_of(
                case, half="held", work_h=work_h, count=windows, ratio=ratio, start_s=start_s
            )
            if made is not None:
                parts.append(_of_windows(made[0], hazard))
    return [_joined(each) for each in zip(*parts, strict=True)]


class _Noting(Rollout):
    """Notes what was known, and how the jobs stood, at one tick."""

    def __init__(self, *, hazard: Hazard, tick: int) -> None:
        super().__init__(hazard=hazard)
        self.tick, self.noted = tick, State(0, *(np.zeros(0) for _ in range(5)))  # type: ignore[arg-type]

    def want(self, state: State) -> NDArray[np.int64]:
        """Return where the rule wants to be."""
        wish = super().want(state)
        if state.tick == self.tick:
            self.noted = State(
                tick=state.tick,
                running=state.running.copy(),
                starting=state.starting.copy(),
                work=state.work.copy(),
                usd=state.usd.copy(),
                finish=state.finish.copy(),
            )
            self.then_age = self.age.copy()
            self.then = self.evidence.changes.copy(), self.evidence.expected.copy()
            self.setting_then = self.caps.copy(), self.thetas.copy()
        return wish


def _of_windows(windows: Windows, hazard: Hazard) -> list[Foretold]:
    later = round(AFTER_H * 3600 / windows.tick_s)
    player = _Noting(hazard=hazard, tick=later)
    real = play(windows, player).usd
    told = []
    for moment in range(3):
        made = [_told(windows, index, player, moment) for index in range(windows.count)]
        told.append(
            Foretold(
                mean=np.array([each.cost_usd for each in made]),
                low=np.array([each.cost_low_usd for each in made]),
                high=np.array([each.cost_high_usd for each in made]),
                real=real - player.noted.usd if moment == 2 else real,
            )
        )
    return told


def _told(windows: Windows, index: int, player: _Noting, moment: int) -> Forecast:
    """Return the forecast of a window before its begin (0), at it (1), or later (2), per node."""
    tick, noted = (player.tick, player.noted) if moment == 2 else (0, None)
    model = Model(hazard=player.rates)
    work, running = windows.work, None
    if noted is not None:
        caps, thetas = player.setting_then
        model = replace(model, cap_usd_per_h=float(caps[index]), theta=float(thetas[index]))
        work = float(noted.work[index])
        where, zones = int(noted.running[index]), len(windows.names)
        if where <= zones:
            running = Running(
                place=windows.names[min(where, zones - 1)],
                market=SPOT if where < zones else ON_DEMAND,
                nodes=1,
                starting_s=float(noted.starting[index]) * windows.tick_s,
            )
    view = View(
        job=JobState(
            work_left_s=work * windows.tick_s,
            left_s=(windows.deadline - tick) * windows.tick_s,
            start_s=windows.start * windows.tick_s,
            accelerator=windows.accelerator,
        ),
        places=tuple(
            MarketPlace(
                name=name,
                spot_usd_per_h=float(windows.price[index, tick, zone]),
                on_demand_usd_per_h=windows.on_demand,
                seen=_seen(windows, index, zone, player, moment),
            )
            for zone, name in enumerate(windows.names)
        ),
        running=running,
        tick_s=windows.tick_s,
    )
    return forecast(view, model, index)


def _seen(windows: Windows, index: int, zone: int, player: _Noting, moment: int) -> Seen:
    if moment == 0:
        return Seen()
    if moment == 1:
        return Seen(up=bool(windows.up[index, 0, zone]), unseen_s=0.0)
    changes, expected = (each[index, zone] for each in player.then)
    return Seen(
        up=bool(windows.up[index, player.tick, zone]),
        age_s=float(player.then_age[index, zone]) * windows.tick_s,
        unseen_s=0.0,
        came=float(changes[0]),
        came_expected=float(expected[0]),
        taken=float(changes[1]),
        taken_expected=float(expected[1]),
    )
