"""What a job has spent, told or reckoned, and what the budget pays until the next decision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.errors import UsageError
from spotguard.policy.action import ON_DEMAND, SPOT, Action, Buy, HoldOff, Leave, Move, Stay
from spotguard.shared.units import format_usd

if TYPE_CHECKING:
    from spotguard.policy.view import MarketPlace, Running, View

PRICE_MAY_RISE = 1.02
"""Spot prices may rise within a tick by this, for the budget."""


def tick_usd(view: View, place: MarketPlace, market: str, nodes: int) -> float | None:
    """Return the most that nodes cost until the next decision; None if the price is unknown."""
    price = _price(place, market)
    if price is None:
        return None
    rise = PRICE_MAY_RISE if market == SPOT else 1.0
    return price * rise * nodes * view.until_next_s / 3600


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


@dataclass(frozen=True, kw_only=True)
class _Paid:
    """Nodes that are paid from a tick on."""

    place: str
    market: str
    nodes: int
    usd_per_h: float | None
    once_usd: float = 0.0
    """For bringing the checkpoint there."""
    bought: bool = False
    """At that tick: another place may have given the nodes."""
    sure: bool = True
    """Not so where the place did not say that it has nodes: it may refuse, which costs nothing."""


@dataclass(kw_only=True)
class Spending:
    """What was told last, and what was paid since then at the prices that were known."""

    told_usd: float = 0.0
    since_usd: float = 0.0
    _paid: _Paid | None = None
    """What was decided at the tick before."""
    _began: bool = False

    @property
    def usd(self) -> float:
        """So far, of all nodes."""
        return self.told_usd + self.since_usd

    def told(self, usd: float) -> None:
        """Take what the outside says; what was spent never becomes less."""
        self._began = True
        self.told_usd, self.since_usd = max(self.told_usd, usd), 0.0

    def reckon(
        self,
        places: dict[str, MarketPlace],
        running: Running | None,
        *,
        elapsed_s: float,
        step_s: float,
    ) -> None:
        """Add what the time since the last tick cost, where the outside does not say it.

        Raises:
            UsageError: it cannot be known: a price is not, or what was before the first tick.
        """
        if not self._began and elapsed_s > 0:
            raise _unknown("what was spent before the first tick")
        self._began = True
        paid = self._paid_for(places, running)
        if paid is None or step_s <= 0:
            return
        if paid.usd_per_h is None:
            market = paid.market.replace("_", "-")
            raise _unknown(f"the price of the {market} nodes that ran in {paid.place}")
        self.since_usd += paid.usd_per_h * paid.nodes * step_s / 3600 + paid.once_usd

    def decided(self, view: View, action: Action) -> None:
        """Note what is paid from now on."""
        self._paid = None
        places = {place.name: place for place in view.places}
        running = view.running
        if isinstance(action, Stay) and running is not None:
            self._paid = _paid(places[running.place], running.market, running.nodes)
        elif isinstance(action, (Buy, Move)):
            place = places[action.place]
            self._paid = _Paid(
                place=place.name,
                market=action.market,
                nodes=action.nodes,
                usd_per_h=_price(place, action.market),
                once_usd=place.move_usd,
                bought=True,
                sure=action.market == ON_DEMAND or place.seen.answers is True,
            )

    def _paid_for(self, places: dict[str, MarketPlace], running: Running | None) -> _Paid | None:
        paid = self._paid
        if running is None:
            return paid if paid is not None and paid.sure else None
        elsewhere = paid is not None and (paid.place, paid.market) != (
            running.place,
            running.market,
        )
        if paid is None or (paid.bought and elsewhere):
            return _paid(places[running.place], running.market, running.nodes)
        return paid


def _paid(place: MarketPlace, market: str, nodes: int) -> _Paid:
    return _Paid(place=place.name, market=market, nodes=nodes, usd_per_h=_price(place, market))


def _price(place: MarketPlace, market: str) -> float | None:
    return place.spot_usd_per_h if market == SPOT else place.on_demand_usd_per_h


def _unknown(what: str) -> UsageError:
    return UsageError(f"spent_usd is needed with a budget: {what} is not known")
