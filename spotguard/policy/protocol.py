"""The JSON lines of `python -m spotguard.policy`: what may stand in them, and what comes out.

`docs/policy.md` has the whole of it, `HELP` the same in short.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError
from spotguard.policy.action import ON_DEMAND, SPOT, Buy, HoldOff, Leave, Move, Stay
from spotguard.policy.decide import PACING, ROLLOUT, RULES
from spotguard.policy.fields import (
    DEAREST_USD,
    NAME,
    OVER_PRICE,
    RICHEST_USD,
    SHORTEST_TICK_S,
    SPOT_PRICE,
    UNITS,
    count,
    duration,
    first,
    number,
    object_of,
    places_of,
    shown,
    text,
)
from spotguard.policy.market.memory import PlaceAnswer
from spotguard.policy.session import Offered, Session, Tick
from spotguard.policy.view import JobState, Running

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from spotguard.policy.action import Action

HELP = """\
usage: python -m spotguard.policy [--help]

Reads a header line and then one JSON object a line from stdin; writes one action a line to stdout.
It reads nothing else. Whoever asks owns time, billing and the verdict.

header  {"job": {"work_s": 86400, "deadline_s": 129600, "start_s": 600, "tick_s": 600, "nodes": 16,
                 "accelerator": "H100"},
         "places": [{"name": "us-east4-b", "spot_usd_per_h": 1.86, "on_demand_usd_per_h": 10.3}],
         "seed": 0}
tick    {"t_s": 0, "places": {"us-east4-b": {"price": 1.86, "answers": true}},
         "work_left_s": 86400, "running": null, "spent_usd": 0}
action  {"action": "buy", "place": "us-east4-b", "market": "spot", "nodes": 16, "why": "..."}

Durations end in _s, _min, _h or _ticks; bare names (work, deadline, start, work_left) are in the
header's "unit" (s, min, h or ticks; default s). Prices are USD per node and hour, unless the header
says "price_per": "gang".

job     work, deadline (none: no deadline), start, tick (default 600 s), nodes (default 1),
        accelerator, on_demand_usd_per_h (where places name none), budget_usd,
        nodes_min, nodes_max, alpha (elastic nodes), checkpoint_gb, egress_usd_per_gb (a number
        between regions, or {from: {to: USD}} by region or place), max_usd_per_h,
        rule (rollout, constants, greedy, never, pacing)
places  a list of objects or names, or an object {name: {...}}; name, region, spot_usd_per_h,
        on_demand_usd_per_h
tick    t or tick (a count), places (price, answers: true, false, a count of nodes, or null where
        nobody asked), work_left, running (null, a name, or {"place", "market", "nodes",
        "starting_s"}), spent_usd. A place that is left out was not asked; its price holds on.
action  buy (nothing runs), move (give up what runs for this), stay, leave (stop, buy nothing),
        wait (nothing runs, buy nothing). "then": places to ask next should this one refuse;
        "probe": places of which it would help to know whether they answer.

Exit codes: 0 at the end of input; 2 if a line makes no sense: the last line is {"error": "..."}.
"""

_WORK = ("work_left", "work", "remaining_work", "work_remaining", "remaining")
_DEADLINE = ("deadline", "time_limit")
_START = ("start", "startup", "start_up", "cold_start", "restart_overhead", "restart", "overhead")
TICK_S = 600.0
STEEPEST = 2.0
"""The most for `alpha`: two nodes are not more than four times as fast as one."""
_TICK = ("tick", "gap", "tick_length", "step", "interval")
_UP = ("answers", "available", "up", "capacity", "nodes")
_SMALL_COUNT = re.compile("[0-9]{1,5}")
_NOTHING = (None, False, "", "none", "None", "null", "nothing")


@dataclass
class _Known:
    """A place as it was last told."""

    region: str | None = None
    spot: float | None = None
    on_demand: float | None = None


@dataclass
class Driver:
    """Parses lines, drives a session, and prints actions as JSON."""

    session: Session
    unit_s: float
    per_gang: bool
    checkpoint_gb: float = 0.0
    egress: Any = None
    default_on_demand: float | None = None
    places: dict[str, _Known] = field(default_factory=dict)
    at: str | None = None
    """Where the checkpoint is."""
    ticks: int = 0

    def take_prices(self, job: dict[str, Any], places: dict[str, dict[str, Any]]) -> None:
        """Take the header's prices and places, per node as everywhere after it.

        Raises:
            UsageError: one makes no sense; says which field.
        """
        most = self._price(job.get("max_usd_per_h"), "max_usd_per_h", None)
        self.session.job = replace(self.session.job, max_usd_per_h=most)
        over = first(job, OVER_PRICE)
        self.default_on_demand = self._price(over, "on_demand_usd_per_h", None)
        for name, entry in places.items():
            self._note(name, entry)

    def tick(self, line: str) -> str:
        """Return the action for one line.

        Raises:
            UsageError: the line makes no sense; says which field.
        """
        body = object_of(line, "a tick")
        tick_s = self.session.tick_s
        told = places_of(body.get("places", body.get("zones", {})), "places")
        answers = {name: self._told(name, entry) for name, entry in told.items()}
        running = self._running(body)
        if running is not None:
            self.at = running.place
        elapsed_s = duration(body, ("t", "elapsed", "now", "time"), self.unit_s, tick_s)
        if elapsed_s is None:
            counted_s = duration({"tick": body.get("tick")}, ("tick",), tick_s, tick_s)
            elapsed_s = self.ticks * tick_s if counted_s is None else counted_s
        work_left_s = duration(body, _WORK, self.unit_s, tick_s)
        if work_left_s is None:
            raise UsageError("a tick needs work_left_s, the seconds of work that are left")
        offered = tuple(
            Offered(
                name=name,
                spot_usd_per_h=known.spot,
                on_demand_usd_per_h=known.on_demand,
                answer=answers.get(name, PlaceAnswer(up=None)),
                move_usd=self._move_usd(name),
            )
            for name, known in self.places.items()
        )
        if not offered:
            raise UsageError("places are named neither in the header nor in this tick")
        spent = first(body, ("spent_usd", "spent", "cost", "cost_usd"))
        action = self.session.decide(
            Tick(
                elapsed_s=elapsed_s,
                work_left_s=work_left_s,
                places=offered,
                running=running,
                spent_usd=number(spent, "spent_usd", RICHEST_USD),
            )
        )
        self.ticks += 1
        return printed(action)

    def _told(self, name: str, entry: dict[str, Any]) -> PlaceAnswer:
        self._note(name, entry)
        said = first(entry, _UP)
        if said is None:
            return PlaceAnswer(up=None)
        if isinstance(said, bool):
            return PlaceAnswer(up=said)
        nodes = number(said, f"places: {name}: answers")
        assert nodes is not None
        gang = self.session.job.nodes_min or self.session.job.nodes
        return PlaceAnswer(up=nodes >= gang, nodes=int(nodes))

    def _note(self, name: str, entry: dict[str, Any]) -> None:
        """Take what is said of a place beside whether it answers; what is not said holds on."""
        known = self.places.setdefault(name, _Known(on_demand=self.default_on_demand))
        region = text(entry.get("region"), f"places: {name}: region")
        known.region = known.region if region is None else region
        known.spot = self._price(first(entry, SPOT_PRICE), f"places: {name}: price", known.spot)
        over, field_name = first(entry, OVER_PRICE), f"places: {name}: on_demand_usd_per_h"
        over = None if isinstance(over, bool) else over
        known.on_demand = self._price(over, field_name, known.on_demand)
        if any(entry.get(each) is False for each in OVER_PRICE):
            known.on_demand = None

    def _price(self, said: Any, name: str, otherwise: float | None) -> float | None:
        """Return USD per node and hour."""
        usd = number(said, name, DEAREST_USD)
        nodes = self.session.job.nodes if self.per_gang else 1
        return otherwise if usd is None else usd / nodes

    def _running(self, body: dict[str, Any]) -> Running | None:
        said = body.get("running", body.get("current"))
        if isinstance(said, (dict, str)) and said:
            entry: dict[str, Any] = said if isinstance(said, dict) else {"place": said}
        elif said in _NOTHING:
            return None
        else:
            raise UsageError(f"running must be null, a place or an object, not {shown(said)}")
        place = first(entry, NAME)
        if place in _NOTHING:
            return None
        last = self.session.last.action if self.session.last else None
        name = text(place, "running: place") or ""
        nodes = count({"running: nodes": entry.get("nodes")}, ("running: nodes",), least=0)
        if nodes == 0:
            return None
        market = first(entry, ("market", "kind", "type"))
        if market is None:
            market = self._market_of(name, last)
        market = str(market).replace("-", "_")
        market = ON_DEMAND if market in (ON_DEMAND, "od", "ondemand") else market
        if name in (ON_DEMAND, "on-demand", "od", "ondemand") and name not in self.places:
            market, name = ON_DEMAND, self._on_demand_place() or name
        if market not in (SPOT, ON_DEMAND):
            raise UsageError(f"running: market must be spot or on_demand, not {shown(market)}")
        if name not in self.places:
            raise UsageError(f"running: there is no place {shown(name)}")
        starting = duration(entry, ("starting",), self.unit_s, self.session.tick_s)
        if nodes is None:
            held = self.session.view.running if self.session.view else None
            kept = held.nodes if held else self.session.job.nodes
            nodes = last.nodes if isinstance(last, (Buy, Move)) else kept
        return Running(
            place=name,
            market=market,
            nodes=nodes,
            starting_s=-1.0 if starting is None else starting,
        )

    def _market_of(self, name: str, last: Action | None) -> str:
        if isinstance(last, (Buy, Move)) and last.place == name:
            return last.market
        held = self.session.view.running if self.session.view else None
        return held.market if held is not None and held.place == name else SPOT

    def _on_demand_place(self) -> str | None:
        last = self.session.last.action if self.session.last else None
        if isinstance(last, (Buy, Move)) and last.market == ON_DEMAND:
            return last.place
        held = self.session.view.running if self.session.view else None
        if held is not None and held.market == ON_DEMAND:
            return held.place
        priced = {n: k.on_demand for n, k in self.places.items() if k.on_demand is not None}
        return min(priced, key=lambda each: priced[each] or 0.0, default=None)

    def _move_usd(self, name: str) -> float:
        if self.at is None or self.at == name or not self.checkpoint_gb or not self.egress:
            return 0.0
        here, there = self.places[self.at].region, self.places[name].region
        if isinstance(self.egress, dict):
            for source in (self.at, here):
                row = self.egress.get(source, {})
                for target in (name, there):
                    if target is not None and isinstance(row, dict) and target in row:
                        usd = number(row[target], "egress_usd_per_gb", DEAREST_USD) or 0.0
                        return usd * self.checkpoint_gb
            return 0.0
        same = here == there and here is not None
        return 0.0 if same else float(self.egress) * self.checkpoint_gb


def driver_of(line: str) -> Driver:
    """Return a driver for a header line.

    Raises:
        UsageError: the header makes no sense; says which field.
    """
    body = object_of(line, "the header")
    told = body.get("job", body)
    if not isinstance(told, dict):
        raise UsageError(f"job must be an object, not {shown(told)}")
    job = {**{name: value for name, value in body.items() if name != "job"}, **told}
    tick_s = _tick_s(job)
    unit = job.get("unit", "s")
    if unit not in (*UNITS, "ticks"):
        raise UsageError(f"unit must be s, min, h or ticks, not {shown(unit)}")
    price_per = job.get("price_per", "node")
    if price_per not in ("node", "gang"):
        raise UsageError(f"price_per must be node or gang, not {shown(price_per)}")
    unit_s = tick_s if unit == "ticks" else UNITS[unit]
    driver = Driver(
        session=_session(job, body, unit_s, tick_s),
        unit_s=unit_s,
        per_gang=price_per == "gang",
        checkpoint_gb=number(job.get("checkpoint_gb"), "checkpoint_gb", DEAREST_USD) or 0.0,
        egress=_egress(job),
    )
    driver.take_prices(job, places_of(body.get("places", body.get("zones", [])), "places"))
    return driver


def _session(job: dict[str, Any], body: dict[str, Any], unit_s: float, tick_s: float) -> Session:
    """Return the job as it begins."""
    nodes = count(job, ("nodes", "gang", "nodes_max", "num_nodes")) or 1
    nodes_max = count(job, ("nodes_max",)) or nodes
    nodes_min = count(job, ("nodes_min",))
    if nodes_min is not None and nodes_min > nodes_max:
        raise UsageError(
            f"nodes_min must be at most the {nodes_max} of nodes_max or nodes, not {nodes_min}"
        )
    budget = number(first(job, ("budget_usd", "budget")), "budget_usd", RICHEST_USD)
    rule = job.get("rule", job.get("policy"))
    if rule is None:
        rule = ROLLOUT if nodes_min is None or budget is None else PACING
    if rule not in RULES:
        raise UsageError(f"rule must be one of {', '.join(RULES)}, not {shown(rule)}")
    work_s = duration(job, _WORK, unit_s, tick_s)
    if rule != PACING and work_s is None:
        raise UsageError("job: work_s is missing, the seconds of work that are to be done")
    start_s = duration(job, _START, unit_s, tick_s)
    alpha = number(first(job, ("alpha",)), "alpha", STEEPEST)
    seed = body.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed must be a whole number from 0, not {shown(seed)}")
    elastic = rule == PACING and nodes_min is not None
    accelerator, gpus = _accelerator(job, body)
    return Session(
        job=JobState(
            work_left_s=work_s or math.inf,
            left_s=duration(job, _DEADLINE, unit_s, tick_s),
            start_s=300.0 if start_s is None else start_s,
            nodes=nodes_max if elastic else nodes,
            nodes_min=nodes_min if elastic else None,
            alpha=0.9 if alpha is None else alpha,
            accelerator=accelerator,
            gpus=gpus,
        ),
        tick_s=tick_s,
        seed=seed,
        rule=rule,
        budget_usd=budget,
    )


def _tick_s(job: dict[str, Any]) -> float:
    for name in _TICK:  # always in seconds, unless the name says more
        seconds = {f"{name}_s": job.get(f"{name}_seconds")}
        found = duration(seconds, (name,), 1.0, 0.0)
        found = duration(job, (name,), 1.0, 0.0) if found is None else found
        if found is not None and found < SHORTEST_TICK_S:
            raise UsageError(f"tick_s must be from {SHORTEST_TICK_S:g} s, not {found:g}")
        if found is not None:
            return found
    return TICK_S


def _egress(job: dict[str, Any]) -> Any:
    """Return USD per GB between regions, or a table of it."""
    said = first(job, ("egress_usd_per_gb", "egress"))
    return said if isinstance(said, dict) else number(said, "egress_usd_per_gb", DEAREST_USD)


def answered(lines: Iterable[str]) -> Iterator[str]:
    """Return one action a line for a header and its ticks; blank lines are passed over.

    Raises:
        UsageError: a line makes no sense; what came before it has been answered.
    """
    driver: Driver | None = None
    for nth, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            if driver is None:
                driver = driver_of(line)
            else:
                yield driver.tick(line)
        except UsageError as problem:
            raise UsageError(f"line {nth}: {problem.message}") from problem


def printed(action: Action) -> str:
    """Return an action as a JSON object on one line."""
    word = "wait" if isinstance(action, HoldOff) else type(action).__name__.lower()
    body = {name: value for name, value in asdict(action).items() if value != ()}
    if isinstance(action, (Stay, Leave)) and "place" in body:
        body.pop("place")
    return json.dumps({"action": word, **body})  # in ASCII: not each name can be written


def _accelerator(job: dict[str, Any], body: dict[str, Any]) -> tuple[str, int]:
    """Return its name and how many of them a node has: `H100:8`."""
    said = first(job, ("accelerator", "gpu", "accelerators"))
    if said is None:
        for entry in places_of(body.get("places", []), "places").values():
            said = said or first(entry, ("accelerator", "gpu"))
    name, _, gpus = (text(said, "accelerator") or "").partition(":")
    name = name.strip().upper().removeprefix("NVIDIA-").removeprefix("NVIDIA ")
    return name, max(1, int(gpus)) if _SMALL_COUNT.fullmatch(gpus) else 1
