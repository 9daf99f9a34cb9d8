"""The books as they stand in the store, and how they are read back."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.team.books import Stake, TeamBooks
from spotguard.errors import NotFound
from spotguard.events import keys
from spotguard.events.checksummed import check_bytes, with_checksum
from spotguard.events.untrusted import (
    Refused,
    amount,
    an_object,
    integer,
    needed,
    parse_object,
    seconds,
    text,
)
from spotguard.spec.model import TeamCap
from spotguard.spec.model.team import SWEEP
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore

SCHEMA = 1
_WHAT = "the team's ledger"
_PERIOD = re.compile(rf"(\d{{4}}-(W\d\d|(0[1-9]|1[0-2])(-\d\d)?)|{SWEEP})?")


@dataclass(frozen=True, kw_only=True)
class Written:
    """TeamBooks that were found in a store."""

    books: TeamBooks
    etag: str
    """By which only these are replaced."""
    at: float | None
    """When they were written, by the store's clock; None if it does not say."""


def read_books(store: ObjectStore) -> Written | None:
    """Return the books of a store, by its root; None if there are none.

    Raises:
        Refused: they make no sense, or another version of spotguard wrote them.
        StoreError: the store cannot be read.
    """
    found = store.head(keys.TEAM)
    if found is None:
        return None
    try:  # who writes in between changes the etag, so these are replaced by nobody then
        books = from_bytes(get_small(store, keys.TEAM))
    except NotFound:
        return None
    return Written(books=books, etag=found.etag, at=found.modified_at)


def to_bytes(books: TeamBooks) -> bytes:
    """Return what is written into the store."""
    body = {
        "schema": SCHEMA,
        "budget": None if books.cap is None else asdict(books.cap),
        "period": books.period,
        "at_rest_usd": books.at_rest_usd,
        "tickets": books.tickets,
        "runs": {run_id: asdict(stake) for run_id, stake in books.stakes.items()},
    }
    return with_checksum(json.dumps(body, sort_keys=True).encode())


def from_bytes(raw: bytes) -> TeamBooks:
    """Return what `to_bytes` wrote.

    Raises:
        Refused: it makes no sense, or another version of spotguard wrote it.
    """
    check_bytes(raw, _WHAT)
    body = parse_object(raw, _WHAT)
    if integer(body, "schema") != SCHEMA:
        raise Refused(f"{_WHAT} was written by another version of spotguard")
    runs = an_object(body.get("runs"), "runs")
    if not all(keys.RUN_ID_PATTERN.fullmatch(run_id) for run_id in runs):
        raise Refused(f"{_WHAT} names what is no run")
    stakes = {run_id: _stake(an_object(value, "a run")) for run_id, value in runs.items()}
    return TeamBooks(
        cap=_cap(body),
        period=_period(body),
        stakes=stakes,
        at_rest_usd=needed(amount(body, "at_rest_usd"), "sum of runs at rest"),
        tickets=needed(integer(body, "tickets", low=0), "number of tickets"),
    )


def _cap(body: dict[str, Any]) -> TeamCap | None:
    if body.get("budget") is None:
        return None
    try:
        return TeamCap.parse(an_object(body["budget"], "budget"))
    except ValueError:
        raise Refused(f"{_WHAT} has no budget that makes sense") from None


def _period(body: dict[str, Any]) -> str:
    period = needed(text(body, "period"), "period")
    if not _PERIOD.fullmatch(period):
        raise Refused(f"{_WHAT} is of no period that makes sense")
    return period


def _stake(body: dict[str, Any]) -> Stake:
    launched = body.get("launched")
    if not isinstance(launched, bool):
        raise Refused(f"{_WHAT} does not say whether a run was launched")
    return Stake(
        spent_before_usd=needed(amount(body, "spent_before_usd"), "sum spent before"),
        spent_usd=needed(amount(body, "spent_usd"), "sum spent"),
        promised_usd=needed(amount(body, "promised_usd"), "sum promised"),
        launched=launched,
        until_at=seconds(body, "until_at"),
        wants_usd=None
        if body.get("wants_usd") is None
        else needed(amount(body, "wants_usd"), "sum wanted"),
        ticket=needed(integer(body, "ticket", low=0), "ticket"),
        priority=needed(integer(body, "priority", low=-(10**6)), "priority"),
        beat=needed(text(body, "beat"), "beat"),
    )
