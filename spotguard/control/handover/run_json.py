"""What a run was asked for, as its store has it: `run.json`, its moves, its controller's nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.stored.code import read_code
from spotguard.control.journal.stored.controller_nodes import read_nodes
from spotguard.control.journal.stored.places import read_limits, read_places
from spotguard.control.journal.sweep.part import SweepPart
from spotguard.errors import NotFound, UsageError
from spotguard.events import keys
from spotguard.events.untrusted import (
    Refused,
    an_object,
    instant,
    integer,
    needed,
    parse_object,
    text,
)
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from spotguard.control.journal.stored.controller_nodes import StoredNode
    from spotguard.storage.base import ObjectStore


def _sweep(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return a run's part in a sweep; None if it has none."""
    told = body.get("sweep")
    part = None if told is None else SweepPart.of(an_object(told, "its sweep"))
    return None if part is None else part.to_json()


def read_run_json(store: ObjectStore, url: str) -> dict[str, Any]:
    """Return what a run was asked for; `UsageError` if there is none at `url`, or it is damaged."""
    try:
        body = parse_object(get_small(store, keys.RUN), keys.RUN)
        if integer(body, "schema") != 1:
            raise UsageError(f"The run at {url} was written by another version of spotguard.")
        asked = {
            "name": needed(text(body, "name"), "name"),
            "limits": read_limits(an_object(body.get("limits"), "its limits")),
            "spec": an_object(body.get("spec"), "its spec"),
            "created_at": needed(instant(body, "created_at"), "instant"),
            "places": read_places(store),
            "sweep": _sweep(body),
            "controller_nodes": read_nodes(store),
            "code": read_code(store),
        }
        return _as_handed_over(asked)
    except NotFound as problem:
        raise UsageError(
            f"There is no run at {url}: it has no {keys.RUN}.",
            hint=f"give it as STORE/RUN_ID; the runs of a store: spotguard runs {url}",
        ) from problem
    except Refused as problem:
        raise UsageError(
            f"The run at {url} has a {keys.RUN} that makes no sense: {problem}."
        ) from problem


def _as_handed_over(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what a run was asked for, with the limits that it had when it was last handed over."""
    handed = [each for each in asked["controller_nodes"] if each.limits is not None]
    if not handed:
        return asked
    newest: StoredNode = handed[-1]
    money = {name: (newest.limits or {}).get(name) for name in ("budget_usd", "deadline_at")}
    places = asked["places"]
    before = [index for index, place in enumerate(places) if place.at <= newest.limits_at]
    limits = {**asked["limits"], **money} if before else newest.limits
    for index in before:
        last = index == before[-1]
        kept = newest.limits if last else {**places[index].limits, **money}
        places[index] = replace(places[index], limits=kept)
    return {**asked, "limits": limits, "places": places}
