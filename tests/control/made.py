"""Hand-made records: a run's journal as a list of short lines."""

from __future__ import annotations

from typing import Any

from spotguard.control.journal.fold import allotment_to_json, fold, limits_to_json
from spotguard.control.journal.journal import Entry
from spotguard.control.journal.nodes.offer import offer_to_json
from spotguard.control.journal.record import Allotment, Limits, RunRecord
from spotguard.testing.launcher import FAKE_OFFER

Line = tuple[Any, ...]
"""(kind, at, attempt, data), the last two optional."""


def created(limits: Limits | None = None, **more: Any) -> dict[str, Any]:
    """Return what the journal says of a run that begins."""
    return {
        "run_id": "job-1",
        "name": "job",
        "store_root": "memory://",
        "limits": limits_to_json(limits or Limits()),
        "spec": {},
        **more,
    }


def made(*lines: Line, limits: Limits | None = None) -> RunRecord:
    """Return the record of a run created at 0 to which these things happened."""
    all_lines: list[Line] = [("run_created", 0.0, None, created(limits)), *lines]
    return fold([_entry(seq, *line) for seq, line in enumerate(all_lines, 1)])


def intended(
    at: float = 0.0,
    attempt: int = 1,
    *,
    nodes: int = 2,
    price: float | None = 1.0,
    infra: str = FAKE_OFFER.infra,
    **limit: Any,
) -> Line:
    """An attempt is to be launched; `limit` are fields of its `Allotment`."""
    data = {
        "cluster": f"job-1-{attempt}",
        "nodes": nodes,
        "offer": {**offer_to_json(FAKE_OFFER), "price_usd_per_h": price, "infra": infra},
        "allotment": allotment_to_json(Allotment(**limit)),
    }
    return ("launch_intended", at, attempt, data)


def launched(at: float = 0.0, attempt: int = 1, **more: Any) -> tuple[Line, Line]:
    """An attempt was launched."""
    return intended(at, attempt, **more), ("launched", at, attempt)


def training(at: float = 2.0, attempt: int = 1, step: int = 0, source: str | None = None) -> Line:
    """The job started to train after `step`."""
    return ("job_started", at, attempt, {"resumed_step": step, "resumed_from": source})


def saved(at: float, step: int, attempt: int = 1, **more: Any) -> Line:
    """The job saved."""
    data = {"step": step, "checkpoint": f"checkpoints/{step:012d}-{attempt:06d}/", **more}
    return ("job_saved", at, attempt, data)


def said(at: float, reason: str, attempt: int = 1, **more: Any) -> Line:
    """The job reported its end."""
    return ("job_ended", at, attempt, {"reason": reason, "message": "", **more})


def node_ended(
    at: float,
    node: int = 0,
    end: str = "exited",
    code: int | None = None,
    attempt: int = 1,
    **more: Any,
) -> Line:
    """A node's part of the job ended."""
    data = {"node": node, "end": end, "exit_code": code, "detail": "", **more}
    return ("node_ended", at, attempt, data)


def node_left(at: float, node: int = 0, code: int = -15, *, told: bool = False) -> Line:
    """A node's agent wrote that its part is over; `told`: by a signal from outside."""
    return ("job_node_exited", at, 1, {"node": node, "exit_code": code, "told": told})


def ended(at: float, reason: str, attempt: int = 1, last_step: int | None = None) -> Line:
    """An attempt's end was confirmed."""
    data = {
        "reason": reason,
        "detail": "",
        "gone_at": at,
        "training_ended_at": at,
        "last_step": last_step,
        "traceback": None,
    }
    return ("attempt_ended", at, attempt, data)


def down_asked(at: float, reason: str, attempt: int = 1) -> Line:
    """The nodes are to be taken down."""
    return ("down_asked", at, attempt, {"reason": reason, "detail": "so"})


def _entry(
    seq: int, kind: str, at: float, attempt: int | None = None, data: dict[str, Any] | None = None
) -> Entry:
    return Entry(seq=seq, at=at, kind=kind, attempt=attempt, data=data or {})
