"""What the budget can pay until the next decision."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from spotguard.policy.action import SPOT, Action, Buy, HoldOff, Leave, Move, Stay
from spotguard.shared.units import format_usd

if TYPE_CHECKING:
    from spotguard.policy.view import MarketPlace, View

PRICE_MAY_RISE = 1.02
"""Spot prices may rise within a tick by this, for the budget."""


def tick_usd(view: View, place: MarketPlace, market: str, nodes: int) -> float | None:
    """Return the most that nodes cost until the next decision; None if the price is unknown."""
    price = place.spot_usd_per_h if market == SPOT else place.on_demand_usd_per_h
    if price is None:
        return None
    rise = PRICE_MAY_RISE if market == SPOT else 1.0
    return price * rise * nodes * view.tick_s / 3600


def affordable(view: View, action: Action) -> Action:
    """Return the action, or none that the budget cannot pay until the next decision."""
    left = view.job.budget_left_usd
    if left is None or isinstance(action, (HoldOff, Leave)):
        return action
    named = {place.name: place for place in view.places}
    if isinstance(action, Stay):
        running = view.running
        assert running is not None
        usd = tick_usd(view, named[running.place], running.market, running.nodes)
        place = None
    else:
        place = named[action.place]
        usd = tick_usd(view, place, action.market, action.nodes)
        usd = None if usd is None else usd + place.move_usd
    if usd is not None and usd <= left + 1e-9:
        if isinstance(action, Buy) and action.then:  # dearer fallbacks may not be payable
            payable = tuple(
                name
                for name in action.then
                if (cost := tick_usd(view, named[name], SPOT, action.nodes)) is not None
                and cost + named[name].move_usd <= left + 1e-9
            )
            return replace(action, then=payable)
        return action
    why = f"{format_usd(max(left, 0.0))} of the budget is left, which does not pay another step"
    if usd is None:
        why = "nobody knows the price of what runs, nor whether the budget pays another step"
    if view.running is None:
        return HoldOff(why=why)
    if not isinstance(action, Stay):
        return affordable(view, Stay(why=f"stays: {why} elsewhere"))
    return Leave(why=why)


def fitting(view: View, action: Buy | Move) -> Action:
    """Return the purchase with as many nodes as the budget can pay until the next decision."""
    least = view.job.nodes_min or view.job.nodes
    for nodes in range(action.nodes, least - 1, -1):
        tried = affordable(view, replace(action, nodes=nodes))
        if isinstance(tried, type(action)):
            return tried
    return affordable(view, action)
