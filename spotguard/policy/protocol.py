"""The JSON lines of `python -m spotguard.policy`: what may stand in them, and what comes out.

`docs/policy.md` has the whole of it, `HELP` the same in short.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError
from spotguard.policy.action import ON_DEMAND, SPOT, Buy, HoldOff, Leave, Move, Stay
from spotguard.policy.decide import PACING, ROLLOUT, RULES
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

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_WORK = ("work_left", "work", "remaining_work", "work_remaining", "remaining")
_DEADLINE = ("deadline", "time_limit")
_START = ("start", "startup", "start_up", "cold_start", "restart_overhead", "restart", "overhead")
_TICK = ("tick", "gap", "tick_length", "step", "interval")
_SPOT = ("spot_usd_per_h", "price_usd_per_h", "price", "spot_price", "spot")
_OVER = ("on_demand_usd_per_h", "on_demand_price", "on_demand", "od_price", "ondemand_price")
_UP = ("answers", "available", "up", "capacity", "nodes")
_NAME = ("name", "place", "zone", "id")
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

    def tick(self, line: str) -> str:
        """Return the action for one line.

        Raises:
            UsageError: the line makes no sense; says which field.
        """
        body = _object(line, "a tick")
        tick_s = self.session.tick_s
        told = _places(body.get("places", body.get("zones", {})), "places")
        answers = {name: self._told(name, entry) for name, entry in told.items()}
        running = self._running(body)
        if running is not None:
            self.at = running.place
        elapsed_s = _duration(body, ("t", "elapsed", "now", "time"), self.unit_s, tick_s)
        if elapsed_s is None:
            count = _number(body.get("tick"), "tick")
            elapsed_s = (self.ticks if count is None else count) * tick_s
        work_left_s = _duration(body, _WORK, self.unit_s, tick_s)
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
        spent = _first(body, ("spent_usd", "spent", "cost", "cost_usd"))
        action = self.session.decide(
            Tick(
                elapsed_s=elapsed_s,
                work_left_s=work_left_s,
                places=offered,
                running=running,
                spent_usd=_number(spent, "spent_usd"),
            )
        )
        self.ticks += 1
        return printed(action)

    def _told(self, name: str, entry: dict[str, Any]) -> PlaceAnswer:
        known = self.places.setdefault(name, _Known(on_demand=self.default_on_demand))
        _note_prices(known, name, entry, self._nodes_priced())
        said = _first(entry, _UP)
        if said is None:
            return PlaceAnswer(up=None)
        if isinstance(said, bool):
            return PlaceAnswer(up=said)
        nodes = _number(said, f"places: {name}: answers")
        assert nodes is not None
        gang = self.session.job.nodes_min or self.session.job.nodes
        return PlaceAnswer(up=nodes >= gang, nodes=int(nodes))

    def _nodes_priced(self) -> int:
        return self.session.job.nodes if self.per_gang else 1

    def _running(self, body: dict[str, Any]) -> Running | None:
        said = body.get("running", body.get("current"))
        if isinstance(said, (dict, str)) and said:
            entry: dict[str, Any] = said if isinstance(said, dict) else {"place": said}
        elif said in _NOTHING:
            return None
        else:
            raise UsageError(f"running must be null, a place or an object, not {said!r}")
        name = _first(entry, _NAME)
        if name in _NOTHING:
            return None
        last = self.session.last.action if self.session.last else None
        nodes = _number(entry.get("nodes"), "running: nodes")
        if nodes is not None and nodes <= 0:
            return None
        market = _first(entry, ("market", "kind", "type"))
        if market is None:
            market = self._market_of(str(name), last)
        market = str(market).replace("-", "_")
        market = ON_DEMAND if market in (ON_DEMAND, "od", "ondemand") else market
        if name in (ON_DEMAND, "on-demand", "od", "ondemand") and name not in self.places:
            market, name = ON_DEMAND, self._on_demand_place()
        if market not in (SPOT, ON_DEMAND):
            raise UsageError(f"running: market must be spot or on_demand, not {market!r}")
        if name not in self.places:
            raise UsageError(f"running: there is no place {name!r}")
        starting = _duration(entry, ("starting",), self.unit_s, self.session.tick_s)
        if nodes is None:
            held = self.session.view.running if self.session.view else None
            count = held.nodes if held else self.session.job.nodes
            nodes = float(last.nodes if isinstance(last, (Buy, Move)) else count)
        return Running(
            place=str(name),
            market=market,
            nodes=int(nodes),
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
                        usd = _number(row[target], "egress_usd_per_gb") or 0.0
                        return usd * self.checkpoint_gb
            return 0.0
        same = here == there and here is not None
        return 0.0 if same else float(self.egress) * self.checkpoint_gb


def driver_of(line: str) -> Driver:
    """Return a driver for a header line.

    Raises:
        UsageError: the header makes no sense; says which field.
    """
    body = _object(line, "the header")
    told = body.get("job", body)
    if not isinstance(told, dict):
        raise UsageError(f"job must be an object, not {told!r}")
    job = {**{name: value for name, value in body.items() if name != "job"}, **told}
    unit = job.get("unit", "s")
    tick_s = 600.0
    for name in _TICK:
        found = _number(job.get(f"{name}_seconds"), f"{name}_seconds")
        found = _duration(job, (name,), 1.0, 0.0) if found is None else found
        if found is not None:
            tick_s = found
            break
    if tick_s <= 0:
        raise UsageError("tick_s must be above 0")
    if unit not in (*_UNITS, "ticks"):
        raise UsageError(f"unit must be s, min, h or ticks, not {unit!r}")
    unit_s = tick_s if unit == "ticks" else _UNITS[unit]
    nodes = _count(job, ("nodes", "gang", "nodes_max", "num_nodes"), 1)
    nodes_max = _count(job, ("nodes_max",), nodes)
    nodes_min = _count(job, ("nodes_min",), 0) or None
    if nodes_min is not None and nodes_min > nodes_max:
        raise UsageError(
            f"nodes_min must be at most the {nodes_max} of nodes_max or nodes, not {nodes_min}"
        )
    budget = _number(_first(job, ("budget_usd", "budget")), "budget_usd")
    work_s = _duration(job, _WORK, unit_s, tick_s)
    deadline_s = _duration(job, _DEADLINE, unit_s, tick_s)
    start_s = _duration(job, _START, unit_s, tick_s)
    paced = nodes_min is not None and budget is not None
    rule = job.get("rule", job.get("policy", PACING if paced else ROLLOUT))
    if rule not in RULES:
        raise UsageError(f"rule must be one of {', '.join(RULES)}, not {rule!r}")
    if rule != PACING and work_s is None:
        raise UsageError("job: work_s is missing, the seconds of work that are to be done")
    elastic = rule == PACING and nodes_min is not None
    alpha = _number(_first(job, ("alpha",)), "alpha")
    seed = body.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed must be a whole number from 0, not {seed!r}")
    session = Session(
        job=JobState(
            work_left_s=work_s or math.inf,
            left_s=deadline_s,
            start_s=300.0 if start_s is None else start_s,
            nodes=nodes_max if elastic else nodes,
            nodes_min=nodes_min if elastic else None,
            alpha=0.9 if alpha is None else alpha,
            accelerator=_accelerator(job, body),
            max_usd_per_h=_number(job.get("max_usd_per_h"), "max_usd_per_h"),
        ),
        tick_s=tick_s,
        seed=seed,
        rule=str(rule),
        budget_usd=budget,
    )
    egress = _first(job, ("egress_usd_per_gb", "egress"))
    if egress is not None and not isinstance(egress, dict):
        egress = _number(egress, "egress_usd_per_gb")
    driver = Driver(
        session=session,
        unit_s=unit_s,
        per_gang=job.get("price_per", "node") == "gang",
        checkpoint_gb=_number(job.get("checkpoint_gb"), "checkpoint_gb") or 0.0,
        egress=egress,
    )
    usd = _number(_first(job, _OVER), "on_demand_usd_per_h")
    driver.default_on_demand = None if usd is None else usd / driver._nodes_priced()
    for name, entry in _places(body.get("places", body.get("zones", [])), "places").items():
        known = driver.places.setdefault(name, _Known(on_demand=driver.default_on_demand))
        region = entry.get("region")
        known.region = None if region is None else str(region)
        _note_prices(known, name, entry, driver._nodes_priced())
    return driver


def answered(lines: Iterable[str]) -> Iterator[str]:
    """Return one action a line for a header and its ticks; blank lines are passed over.

    Raises:
        UsageError: a line makes no sense; what came before it has been answered.
    """
    driver: Driver | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            if driver is None:
                driver = driver_of(line)
            else:
                yield driver.tick(line)
        except UsageError as problem:
            raise UsageError(f"line {number}: {problem.message}") from problem


def printed(action: Action) -> str:
    """Return an action as a JSON object on one line."""
    word = "wait" if isinstance(action, HoldOff) else type(action).__name__.lower()
    body = {name: value for name, value in asdict(action).items() if value != ()}
    if isinstance(action, (Stay, Leave)) and "place" in body:
        body.pop("place")
    return json.dumps({"action": word, **body}, ensure_ascii=False)


def _object(line: str, what: str) -> dict[str, Any]:
    try:
        body = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{what} must be a JSON object ({problem})") from problem
    if not isinstance(body, dict):
        raise UsageError(f"{what} must be a JSON object, not {type(body).__name__}")
    return body


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _places(said: Any, field_name: str) -> dict[str, dict[str, Any]]:
    if isinstance(said, dict):
        pairs = list(said.items())
    elif isinstance(said, list):
        pairs = []
        for entry in said:
            if isinstance(entry, str):
                entry = {"name": entry}
            name = _first(entry, _NAME) if isinstance(entry, dict) else None
            if not isinstance(name, str) or not name:
                raise UsageError(f"{field_name}: each place needs a name, not {entry!r}")
            pairs.append((name, entry))
    else:
        raise UsageError(f"{field_name} must be a list or an object, not {said!r}")
    found: dict[str, dict[str, Any]] = {}
    for name, entry in pairs:
        if isinstance(entry, bool) or entry is None:
            entry = {"answers": entry}
        elif isinstance(entry, (int, float)):
            entry = {"price": entry}
        if not isinstance(entry, dict):
            raise UsageError(f"{field_name}: {name} must be an object, not {entry!r}")
        if name in found:
            raise UsageError(f"{field_name}: {name} stands there twice")
        found[name] = entry
    return found


def _note_prices(known: _Known, name: str, entry: dict[str, Any], nodes: int) -> None:
    spot = _number(_first(entry, _SPOT), f"places: {name}: price")
    over = _first(entry, _OVER)
    over = None if isinstance(over, bool) else _number(over, f"places: {name}: on_demand_usd_per_h")
    known.spot = known.spot if spot is None else spot / nodes
    known.on_demand = known.on_demand if over is None else over / nodes
    if any(entry.get(each) is False for each in _OVER):
        known.on_demand = None


def _first(entry: dict[str, Any], names: Iterable[str]) -> Any:
    return next((entry[name] for name in names if entry.get(name) is not None), None)


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} must be a number from 0, not {value!r}")
    return float(value)


def _count(job: dict[str, Any], names: Iterable[str], default: int) -> int:
    value = _first(job, names)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise UsageError(f"nodes must be a whole number, not {value!r}")
    if not 1 <= value <= 100_000:
        raise UsageError(f"nodes must be from 1, not {value!r}")
    return int(value)


def _duration(
    entry: dict[str, Any], stems: Iterable[str], unit_s: float, tick_s: float
) -> float | None:
    for stem in stems:
        for suffix, scale in (
            *_UNITS.items(),
            ("ticks", tick_s),
            ("seconds", 1.0),
            ("hours", 3600.0),
        ):
            name = f"{stem}_{suffix}"
            if entry.get(name) is not None:
                return (_number(entry[name], name) or 0.0) * scale
        if entry.get(stem) is not None:
            return (_number(entry[stem], stem) or 0.0) * unit_s
    return None


def _accelerator(job: dict[str, Any], body: dict[str, Any]) -> str:
    said = _first(job, ("accelerator", "gpu", "accelerators"))
    if said is None:
        for entry in _places(body.get("places", []), "places").values():
            said = said or _first(entry, ("accelerator", "gpu"))
    word = "" if said is None else str(said)
    return word.split(":")[0].strip().upper().removeprefix("NVIDIA-").removeprefix("NVIDIA ")
