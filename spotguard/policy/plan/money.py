"""What a budget buys. Unknown in, unknown out: None is never taken for zero."""

from __future__ import annotations

import math

from spotguard.errors import BudgetExhausted, SpecError
from spotguard.shared.units import format_duration, format_usd

SECONDS_PER_H = 3600.0


def rate_usd_per_h(price_usd_per_h: float | None, nodes: int) -> float | None:
    """Return what `nodes` nodes cost in an hour."""
    return None if price_usd_per_h is None else price_usd_per_h * nodes


def cost_usd(rate_usd_per_h: float | None, duration_s: float | None) -> float | None:
    """Return what a time at a rate costs."""
    if rate_usd_per_h is None or duration_s is None:
        return None
    return rate_usd_per_h * duration_s / SECONDS_PER_H


def hours_bought(budget_usd: float | None, rate_usd_per_h: float | None) -> float | None:
    """Return for how many hours the budget lasts; None without a budget or at an unknown rate."""
    if budget_usd is None or not rate_usd_per_h:
        return None
    return max(0.0, budget_usd) / rate_usd_per_h


def reserve_usd(rate_usd_per_h: float | None, *, save_s: float, teardown_s: float) -> float | None:
    """Return the money to keep back for the last save and until the last node is gone."""
    return cost_usd(rate_usd_per_h, save_s + teardown_s)


def budget_stop_at(
    *,
    now: float,
    spent_usd: float | None,
    budget_usd: float | None,
    rate_usd_per_h: float | None,
    reserve_usd: float | None,
) -> float | None:
    """Return the instant (epoch seconds) at which to save and stop, so that the reserve remains.

    May be in the past. With `reserve_usd=0` it is when the money itself is gone. None without a
    budget, and when what is spent or the rate is unknown.
    """
    if budget_usd is None or spent_usd is None or reserve_usd is None or not rate_usd_per_h:
        return None
    return now + (budget_usd - spent_usd - reserve_usd) / rate_usd_per_h * SECONDS_PER_H


def saved_pct(spent_usd: float | None, on_demand_usd: float | None) -> float | None:
    """Return by how many percent it was cheaper than on demand; negative if it was dearer."""
    if spent_usd is None or not on_demand_usd:
        return None
    return 100.0 * (1.0 - spent_usd / on_demand_usd)


def check_budget(
    budget_usd: float | None,
    price_usd_per_h: float | None,
    *,
    nodes: int = 1,
    spent_usd: float | None = 0.0,
    least_s: float = 20.0,
    allow_unknown_price: bool = False,
) -> None:
    """Let pass only what the budget can hold.

    Args:
        budget_usd: of the whole run; None is no limit, and everything passes.
        price_usd_per_h: of one node.
        nodes: the smallest number of nodes that would do.
        spent_usd: by the run so far.
        least_s: time to start, save and release the nodes, for which there must be money.
        allow_unknown_price: start anyway where a price, or what was spent, is unknown.

    Raises:
        SpecError: a price is unknown, so the budget could not be kept.
        BudgetExhausted: what is left does not even buy `least_s`.
    """
    if budget_usd is None:
        return
    least_usd = cost_usd(rate_usd_per_h(price_usd_per_h, nodes), least_s)
    if least_usd is None or spent_usd is None:
        if allow_unknown_price:
            return
        what = "the price of a node" if least_usd is None else "what was spent so far"
        raise SpecError(
            "budget",
            f"{what} is unknown, so {format_usd(budget_usd)} could not be kept",
            hint="give the price with --price, or start anyway with --allow-unknown-price",
        )
    left_usd = budget_usd - spent_usd
    if left_usd < least_usd:
        raise BudgetExhausted(
            f"of the budget of {format_usd(budget_usd)}, {format_usd(max(0.0, left_usd))} is left, "
            f"but {nodes} node{'s' * (nodes > 1)} for {format_duration(least_s)}, to start and "
            f"save, cost {format_usd(least_usd)}",
            hint=f"raise it: --budget {_next_cent(spent_usd + 2 * least_usd):.2f} or more",
        )


def _next_cent(usd: float) -> float:
    return math.ceil(round(usd * 100, 6)) / 100
