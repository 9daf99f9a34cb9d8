"""Why the policy does what it does, as sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.policy.market.chances import mean_h
from spotguard.shared.units import format_duration, format_usd

if TYPE_CHECKING:
    from spotguard.policy.decide import Case, Model
    from spotguard.policy.view import View


def no_spot_place(view: View) -> str:
    """Return why no place can be asked for spot nodes: the maximum price, or no price at all."""
    prices = [place.spot_usd_per_h for place in view.places if place.spot_usd_per_h is not None]
    if not prices:
        return "no place is known to sell spot nodes"
    return (
        f"no spot place is within the maximum of {format_usd(view.job.max_usd_per_h)} per node "
        f"and hour, the cheapest costs {format_usd(min(prices))}"
    )


def nothing_worth(view: View) -> str:
    """Return why priced pacing wants no node."""
    if view.job.left_s is not None and view.job.left_s <= 0:
        return "the deadline has passed"
    over = view.job.on_demand and any(each.on_demand_usd_per_h is not None for each in view.places)
    if not over and not view.spot_places:
        return no_spot_place(view)
    if not over and not any(place.seen.answers for place in view.spot_places):
        return "no spot place is known to answer now"
    return "no place is worth its price at the pace of the budget"


class Words:
    """Reasons, as sentences."""

    def __init__(self, case: Case, model: Model) -> None:
        self.case, self.model = case, model

    def _slack(self) -> str:
        job = self.case.view.job
        if job.left_s is None:
            return "there is no deadline"
        if job.left_s <= 0:
            return "the deadline has passed"
        if job.left_s < job.work_left_s:
            return "the deadline leaves less than the work takes"
        return f"the deadline leaves {format_duration(job.left_s - job.work_left_s)}"

    def nothing(self) -> str:
        """Return why no nodes are wanted."""
        return f"{self._no_spot()}, and {self._slack()}"

    def _no_spot(self) -> str:
        """Return why the spot place that comes nearest to it is not wanted now."""
        case = self.case
        if case.no_spot:
            return no_spot_place(case.view)
        cap = self.model.cap_usd_per_h or float(case.cost.min())
        index = min(
            (i for i in range(case.zones) if case.cost[i] <= cap * 1.01),
            key=lambda i: (-case.spot[i].seen.came, case.cost[i]),
            default=int(case.cost.argmin()),
        )
        place = case.spot[index]
        spot = f"spot in {place.name} at {format_usd(case.price[index])} per node and hour"
        over = None if case.on_demand is None else case.on_demand.on_demand_usd_per_h
        if over is not None and case.price[index] >= over:
            return f"{spot} is no cheaper than on demand at {format_usd(over)}"
        if over is not None and case.cost[index] >= case.on_demand_cost:
            return f"{spot} is dearer than on demand, with the egress and the starts that it costs"
        if case.answers[index]:
            return f"{spot} answers, but a start there is not worth it now"
        back_h = (
            mean_h(self.model.hazard, 0)
            * (1.5 + place.seen.came_expected)
            / (1.5 + place.seen.came)
        )
        return f"{spot} is likely back within {format_duration(60 * round(back_h * 60))}"

    def stays(self, target: int) -> str:
        """Return why what runs goes on."""
        case = self.case
        if target == case.zones:
            return f"stays on demand: no cheaper place is worth a start now, and {self._slack()}"
        price = format_usd(case.price[target])
        return f"stays: spot in {case.spot[target].name} costs {price} per node and hour"

    def buys(self, target: int) -> str:
        """Return why these nodes are bought."""
        case = self.case
        if target == case.zones:
            there = case.on_demand
            assert there is not None
            price = format_usd(there.on_demand_usd_per_h)
            buys = f"buys on demand in {there.name} at {price} per node and hour"
            left_s = case.view.job.left_s
            if left_s is not None and left_s < case.view.job.work_left_s:
                return f"{buys}: {self._slack()}, and nothing is done sooner"
            return f"{buys}: waiting for spot could miss the deadline, since {self._slack()}"
        place = case.spot[target]
        price = format_usd(case.price[target])
        said = "answers" if case.answers[target] else "is the likeliest to have nodes"
        buys = f"buys spot in {place.name}: it {said} at {price} per node and hour"
        moved = f", the checkpoint's egress costs {format_usd(place.move_usd)}"
        return f"{buys}{moved if place.move_usd > 0 else ''}"
