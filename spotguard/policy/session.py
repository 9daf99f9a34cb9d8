"""A job from its first decision to its last: memory, when to think anew, and what the guard keeps.

It owns no clock: whoever drives it says how much time has passed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from spotguard.errors import UsageError
from spotguard.policy.action import ON_DEMAND, SPOT, Buy, Leave, Move, Stay
from spotguard.policy.budget import Spending
from spotguard.policy.decide import ROLLOUT, Decided, Model, decide
from spotguard.policy.market.memory import PlaceAnswer, lived, remembered
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View

if TYPE_CHECKING:
    from spotguard.policy.action import Action

EVERY_TICKS = 6
AFTER_CHANGE_TICKS = 2
SLOWEST = 0.25
"""Less than this share of a tick's progress is an interruption, not a slow tick."""


@dataclass(frozen=True, kw_only=True)
class Offered:
    """What is known of a place at one tick."""

    name: str
    spot_usd_per_h: float | None
    on_demand_usd_per_h: float | None
    answer: PlaceAnswer
    move_usd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Tick:
    """What is known at one tick; times in seconds."""

    elapsed_s: float
    """Since the job began."""
    work_left_s: float
    places: tuple[Offered, ...]
    running: Running | None = None
    """With `starting_s` below 0 where nobody says how long it still starts: it is reckoned."""
    spent_usd: float | None = None
    """Of all nodes; None where nobody says it: with a budget it is reckoned."""


@dataclass(kw_only=True)
class Session:
    """Decides tick after tick."""

    job: JobState
    """As it began; `left_s` is the time until the deadline then."""
    tick_s: float
    seed: int = 0
    rule: str = ROLLOUT
    budget_usd: float | None = None
    model: Model | None = None
    seen: dict[str, Seen] = field(default_factory=dict)
    last: Decided | None = None
    view: View | None = None
    _due_s: float = 0.0
    _before: Tick | None = None
    _start_left_s: float = 0.0
    _ran: tuple[str, str] | None = None
    _sure: bool = False
    """Whether the guard counted on what was decided: it ran already, or its place answered."""
    _lost_s: float = 0.0
    """The most that an interruption has undone."""
    _undone_s: float = 0.0
    _interruptions: int = 0
    _gap_s: float = 0.0
    """The longest time between two ticks."""
    _pace: float = 1.0
    _spending: Spending = field(default_factory=Spending)
    _count: int = 0

    def decide(self, tick: Tick) -> Action:
        """Return what to do until the next tick.

        Raises:
            UsageError: the clock went back; or there is a budget, and what was spent is neither
                told nor can be reckoned.
        """
        gang = self.job.nodes_min or self.job.nodes
        model = self.model or Model.of(self.job.accelerator, gang * self.job.gpus)
        before = self._before
        step_s = 0.0 if before is None else tick.elapsed_s - before.elapsed_s
        if before is not None and step_s < 0:
            raise UsageError(
                f"t_s must not go back: it was {before.elapsed_s:g} s at the tick before, and is "
                f"{tick.elapsed_s:g} s now; tell the time since the job began"
            )
        self._gap_s = max(self._gap_s, step_s)
        running = self._running(tick, step_s)
        self._learn(tick, running, step_s)
        for place in self._inferred(tick, running):
            old = self.seen.get(place.name, Seen())
            known = remembered(old, place.answer, step_s, model.hazard)
            self.seen[place.name] = self._with_own_life(place.name, known, running, step_s)
        self.view = self._view(tick, running, step_s)
        decision = decide(
            self.view,
            model,
            self.seed + self._count,
            rule=self.rule,
            rethink=self._rethink(tick, running),
        )
        if decision.rethought:
            self._due_s = tick.elapsed_s + EVERY_TICKS * self.tick_s
            self._count += 1
        self.model = decision.model
        self.last = decision
        self._ran = None if running is None else (running.place, running.market)
        self._start_left_s = 0.0 if running is None else running.starting_s
        if isinstance(decision.action, (Buy, Move)):
            self._ran = (decision.action.place, decision.action.market)
        if isinstance(decision.action, Leave):
            self._ran = None
        self._sure = self._counted_on(decision.action)
        self._spending.decided(self.view, decision.action)
        if isinstance(decision.action, (Buy, Move)):
            self._start_left_s = self._whole_start_s()
        self._before = tick
        return decision.action

    def _running(self, tick: Tick, step_s: float) -> Running | None:
        """Return what runs, with the start that is left reckoned where nobody says it."""
        running = tick.running
        if running is None or running.starting_s >= 0:
            return running
        same = self._ran is not None and self._ran[1] == running.market
        if same and self._ran is not None and self._ran[0] == running.place:
            return replace(running, starting_s=max(0.0, self._start_left_s - step_s))
        if isinstance(
            self.last and self.last.action, Buy
        ):  # a fallback took the place of the first
            return replace(running, starting_s=max(0.0, self._whole_start_s() - step_s))
        return replace(running, starting_s=0.0)

    def _whole_start_s(self) -> float:
        """Return how long a start takes where it takes whole ticks."""
        return math.ceil(self.job.start_s / self.tick_s - 1e-9) * self.tick_s

    def _inferred(self, tick: Tick, running: Running | None) -> tuple[Offered, ...]:
        """Return the places, with what follows for those that nobody asked.

        What runs has its nodes. What ran or was bought, and does not run, has none, unless it was
        given up for another.
        """
        gone = None
        if running is None and self._ran is not None and self._ran[1] == SPOT:
            gone = self._ran[0]
        places = []
        for place in tick.places:
            up = place.answer.up
            if up is None and running is not None and running.market == SPOT:
                up = True if place.name == running.place else None
            if up is None and place.name == gone:
                up = False
            nodes = place.answer.nodes
            nodes = None if nodes is None else min(nodes, self.job.nodes)  # more are of no use
            places.append(replace(place, answer=PlaceAnswer(up=up, nodes=nodes)))
        return tuple(places)

    def _learn(self, tick: Tick, running: Running | None, step_s: float) -> None:
        """Note how much work a tick does, and how much an interruption undoes."""
        before = self._before
        if before is None or step_s <= 0 or not math.isfinite(tick.work_left_s):
            return
        done_s = before.work_left_s - tick.work_left_s
        self._note_loss(before, running, min(step_s, self.tick_s), done_s)
        if running is None or before.running is None or tick.work_left_s <= 0:
            return
        same = (running.place, running.market) == (before.running.place, before.running.market)
        expected_s = step_s - self._start_left_s
        if same and self._start_left_s <= 0 and done_s > SLOWEST * expected_s:
            self._pace = min(self._pace, max(SLOWEST, done_s / expected_s))

    def _with_own_life(
        self, place: str, seen: Seen, running: Running | None, step_s: float
    ) -> Seen:
        """Return what is known of a place, with how its own spot nodes fared since the last tick.

        Nodes that are gone lived for half a tick on average. A place that never said that it had
        nodes, and gave none, took none.
        """
        if self._ran != (place, SPOT) or step_s <= 0:
            return seen
        if running is not None and (running.place, running.market) == (place, SPOT):
            return lived(seen, step_s / 3600, taken=False)
        if running is None and self._sure:
            return lived(seen, min(step_s, self.tick_s) / 7200, taken=True)
        return seen

    def _counted_on(self, action: Action) -> bool:
        """Tell whether progress is to be expected until the next tick."""
        if isinstance(action, (Buy, Move)):
            return action.market == ON_DEMAND or self.seen[action.place].answers is True
        return isinstance(action, Stay)

    def _note_loss(
        self, before: Tick, running: Running | None, step_s: float, done_s: float
    ) -> None:
        """Note by how much an interruption left less done than the guard had counted on.

        Work that grew is a loss, too, whoever says that the nodes live. Work that stands still is
        none while they do: some tell it at each checkpoint only.
        """
        expected_s = max(0.0, step_s - self._start_left_s) if self._sure else 0.0
        expected_s = min(expected_s, before.work_left_s / self._pace)
        done_s /= self._pace
        gone = self._ran is not None and running is None
        if gone or done_s < 0:
            self._lost_s = max(self._lost_s, expected_s - done_s)
            self._undone_s += max(0.0, expected_s - done_s)
            self._interruptions += 1

    def _rethink(self, tick: Tick, running: Running | None) -> bool:
        lost = self._ran is not None and running is None and self._before is not None
        if lost:
            self._due_s = min(self._due_s, tick.elapsed_s + AFTER_CHANGE_TICKS * self.tick_s)
        return tick.elapsed_s >= self._due_s - 1e-6

    def _view(self, tick: Tick, running: Running | None, step_s: float) -> View:
        job = self.job
        left_s = reserve_s = None
        if job.left_s is not None:
            left_s = job.left_s - tick.elapsed_s
            reserve_s = self._reserve_s(tick, left_s)
        places = tuple(
            MarketPlace(
                name=place.name,
                spot_usd_per_h=place.spot_usd_per_h,
                on_demand_usd_per_h=place.on_demand_usd_per_h,
                move_usd=place.move_usd,
                seen=self.seen[place.name],
            )
            for place in tick.places
        )
        return View(
            job=replace(
                job,
                work_left_s=tick.work_left_s / (self._pace if self._pace < 0.999 else 1.0),
                left_s=left_s,
                guard_start_s=self._whole_start_s(),
                reserve_s=reserve_s or 0.0,
                undone_s=self._undone_s / max(1, self._interruptions),
                budget_left_usd=self._budget_left_usd(tick, places, running, step_s),
            ),
            places=places,
            running=running,
            tick_s=self.tick_s,
            gap_s=self._gap_s,
        )

    def _budget_left_usd(
        self,
        tick: Tick,
        places: tuple[MarketPlace, ...],
        running: Running | None,
        step_s: float,
    ) -> float | None:
        """Return what is left of the budget; None without one."""
        if self.budget_usd is None:
            return None
        if tick.spent_usd is not None:
            self._spending.told(tick.spent_usd)
        else:
            named = {place.name: place for place in places}
            self._spending.reckon(named, running, elapsed_s=tick.elapsed_s, step_s=step_s)
        return self.budget_usd - self._spending.usd

    def _reserve_s(self, tick: Tick, left_s: float) -> float:
        """Return what the guard keeps beyond a start.

        An interruption may undo as much as one did before, and the end may count whole ticks,
        those of the work that was undone among them. The next tick may come as late as one did:
        what runs is counted on until its own tick only.
        """
        assert self.job.left_s is not None
        broken = left_s % self.tick_s
        broken = 0.0 if min(broken, self.tick_s - broken) < 1e-6 * self.tick_s else broken
        again_ticks = (tick.work_left_s + self._lost_s) / self.tick_s
        end = 0.0
        if math.isfinite(again_ticks):
            end = (math.ceil(again_ticks - 1e-9) - again_ticks) * self.tick_s
        late_s = max(0.0, self._gap_s - self.tick_s)
        return end + broken + self._lost_s + late_s
