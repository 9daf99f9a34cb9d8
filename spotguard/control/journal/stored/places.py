"""Where a run goes on: what the journal and the run store say of a move, or of a phase's beginning.

The journal's event holds the whole job, so that whoever reads it needs nothing else. The store has
the same without secrets, in an object of its own for each; it is written by the controller before
it launches anything there, so that who has to rebuild a lost journal asks the right launcher.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.record import Kind, Limits
from spotguard.events import keys
from spotguard.events.untrusted import (
    Refused,
    amount,
    an_object,
    instant,
    integer,
    needed,
    parse_object,
    seconds,
)
from spotguard.shared.units import to_iso
from spotguard.spec.model import JobSpec
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.journal.record import RunRecord
    from spotguard.spec.nodes import NodeRange
    from spotguard.storage.base import ObjectStore

SCHEMA = 1
_KINDS = (Kind.MOVED.value, Kind.PHASE_BEGUN.value)


def place_data(
    job: JobSpec, phase: int, limits: Limits, nodes: NodeRange | None = None
) -> dict[str, Any]:
    """Return what the journal holds of a job that goes on in a phase, or elsewhere.

    Args:
        job: with all its phases.
        phase: which of them, from 0; 0 where it has none.
        limits: of the run; the nodes are those of the place.
        nodes: unless the user gave them otherwise.
    """
    spec = job.in_phase(phase)
    nodes = nodes or spec.nodes
    limits = replace(limits, nodes_min=nodes.min, nodes_max=nodes.max)
    return {
        "spec": spec.to_json(),
        "job": job.to_json() if job.phases else None,
        "phase": phase,
        "phases": len(job.phases),
        "until_step": job.phases[phase].until_step if job.phases else None,
        "limits": limits_to_json(limits),
    }


def publish_place(store: ObjectStore, record: RunRecord) -> None:
    """Write down in the run store where the run is since its newest move; nothing if unmoved.

    Raises:
        StoreError: it cannot be written; so nothing may be launched there.
    """
    placing = record.placing
    if placing is None:
        return
    job = JobSpec.from_json({**(record.job or record.spec), "env": {}, "notify": []})
    names = (record.job or record.spec).get("env") or {}
    body = {
        "schema": SCHEMA,
        "kind": placing.kind,
        "at": to_iso(placing.at),
        "after": placing.after,
        "phase": record.phase,
        "limits": limits_to_json(record.limits),
        "spec": {**job.public_json(), "env_names": sorted(names)},
    }
    key = keys.place(placing.number)
    store.put(key, json.dumps(body, sort_keys=True, indent=1).encode())


@dataclass(frozen=True, kw_only=True)
class StoredPlace:
    """One move, or beginning of a phase, as a run store has it."""

    kind: Kind
    at: float
    after: int
    """Number of the last attempt before it."""
    phase: int
    limits: dict[str, Any]
    job: dict[str, Any]
    """As `JobSpec.public_json` gave it; nothing of it is checked."""


def read_places(store: ObjectStore) -> list[StoredPlace]:
    """Return all of them, oldest first; blocks for a listing, and for a read each.

    Raises:
        Refused: one of them makes no sense.
        StoreError: the store cannot be read.
    """
    found = [info.key for info in store.list(keys.PLACES)]
    return [_stored(get_small(store, key), key) for key in sorted(found) if keys.is_place(key)]


def _stored(raw: bytes, key: str) -> StoredPlace:
    body = parse_object(raw, key)
    if integer(body, "schema") != SCHEMA or body.get("kind") not in _KINDS:
        raise Refused(f"{key} was written by another version of spotguard")
    job = an_object(body.get("spec"), "its spec")
    phases = job.get("phases")
    most = max(0, len(phases) - 1) if isinstance(phases, list) else 0
    return StoredPlace(
        kind=Kind(str(body["kind"])),
        at=needed(instant(body, "at"), "instant"),
        after=needed(integer(body, "after", low=0), "after"),
        phase=needed(integer(body, "phase", low=0, high=most), "phase"),
        limits=read_limits(an_object(body.get("limits"), "its limits")),
        job=job,
    )


def read_limits(body: dict[str, Any]) -> dict[str, Any]:
    """Return a run's limits out of untrusted data, as the journal holds them.

    Raises:
        Refused: one of them makes no sense.
    """
    nodes_min = needed(integer(body, "nodes_min", low=1), "nodes_min")
    return {
        "budget_usd": _given(body, "budget_usd", amount),
        "deadline_at": _given(body, "deadline_at", seconds),
        "nodes_min": nodes_min,
        "nodes_max": needed(integer(body, "nodes_max", low=nodes_min), "nodes_max"),
        "allow_unknown_price": body.get("allow_unknown_price") is True,
    }


def _given(
    body: dict[str, Any], name: str, read: Callable[[dict[str, Any], str], float | None]
) -> float | None:
    """Return a limit, or None if there is none; one that cannot be read is refused, not lifted."""
    return None if body.get(name) is None else needed(read(body, name), name)


def raw_place_data(job: dict[str, Any], phase: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Return what `place_data` would, of a job that cannot be checked here: for looks alone.

    Raises:
        Refused: its phases make no sense.
    """
    phases = job.get("phases") or []
    if not isinstance(phases, list) or not all(isinstance(each, dict) for each in phases):
        raise Refused("its phases are no list of tables")
    own = phases[phase] if phases else {}
    said = {name: value for name, value in own.items() if value is not None}
    spec = {**job, **said}
    if any(spec.get(name) != job.get(name) for name in ("infra", "gpus")):
        spec["price_usd_per_h"] = said.get("price_usd_per_h")
    return {
        "spec": {**spec, "phases": []},
        "job": job if phases else None,
        "phase": phase,
        "phases": len(phases),
        "until_step": said.get("until_step"),
        "limits": limits,
    }
