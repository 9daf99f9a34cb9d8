"""What the run store says of how launches ended: as attempts, or as nothing that cost money.

`end.json` has the verdict on an attempt. `launch.json` of a launch that came to nothing stays, and
has `over`. Without it, whoever rebuilds a lost journal would take what its nodes have written for
an attempt, and not know what they cost.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.lineage import attempt_numbers
from spotguard.control.journal.record import Allotment
from spotguard.errors import NotFound, StoreError
from spotguard.events import keys
from spotguard.events.masking import masked
from spotguard.events.states import EndReason
from spotguard.events.untrusted import Refused, amount, parse_object, seconds, text
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

_LOOKED_AT = 2
"""Of how many ended attempts it is asked whether their verdicts are published: a request each."""


class Over(str, Enum):
    """How a launch came to nothing."""

    GIVEN_UP = "given_up"
    """Its nodes were asked for ahead, and never had their turn."""
    REFUSED = "refused"
    """The cloud had no such nodes: the next launch has the same number."""


def read_launch(store: ObjectStore, number: int) -> dict[str, Any] | None:
    """Return what is published of a launch; None if nothing is, or it makes no sense."""
    return read_published(store, keys.launch(number))


def read_published(store: ObjectStore, key: str) -> dict[str, Any] | None:
    """Return what a controller has published; None if it has not, or it makes no sense."""
    try:
        return parse_object(get_small(store, key), key)
    except (NotFound, Refused):
        return None


def over(launch: dict[str, Any] | None) -> Over | None:
    """Return how a launch came to nothing, as its controller says; None if it does not."""
    said = None if launch is None else text(launch, "over")
    return Over(said) if said in [each.value for each in Over] else None


def allotment_of(launch: dict[str, Any]) -> Allotment:
    """Return until when a launch may live, as its controller says; of one that does not, no limit.

    Whoever takes a living attempt over ends it as the one before would have.
    """
    found = launch.get("allotment")
    said: dict[str, Any] = found if isinstance(found, dict) else {}
    reason = text(said, "down_reason")
    return Allotment(
        budget_stop_at=seconds(said, "budget_stop_at"),
        deadline_stop_at=seconds(said, "deadline_stop_at"),
        down_at=seconds(said, "down_at"),
        down_reason=next((each for each in EndReason if each.value == reason), EndReason.BUDGET),
        max_lifetime_s=amount(said, "max_lifetime_s"),
    )


def came_to_nothing(store: ObjectStore, number: int, launch: dict[str, Any]) -> bool:
    """Return whether a launch is no attempt, by what is published of it and of its job.

    A refused number is used again. Where the next launch's own word did not reach the store, a
    claim or an end says that nodes came.
    """
    said = over(launch)
    if said is not Over.REFUSED:
        return said is not None
    return all(store.head(key) is None for key in (keys.claim(number), keys.end(number)))


def is_unheard_of(store: ObjectStore, number: int) -> bool:
    """Return whether nobody has said that a launch was made, whatever its nodes have left."""
    said = (keys.launch(number), keys.claim(number), keys.end(number), keys.group(number))
    return all(store.head(key) is None for key in said)


def launched_numbers(store: ObjectStore) -> Iterator[int]:
    """Yield the numbers of the attempts whose launch has not come to nothing, newest first.

    Each one costs a request.
    """
    for number in reversed(attempt_numbers(store)):
        launch = read_launch(store, number)
        if launch is None or not came_to_nothing(store, number, launch):
            yield number


def newest_regions(store: ObjectStore) -> list[str]:
    """Return the regions of AWS of the newest attempt, and of the one before, which may both live.

    Each one costs a request.
    """
    newest = attempt_numbers(store)[-2:]
    launches = [launch for launch in (read_launch(store, each) for each in newest) if launch]
    found = [text(each, "region") for each in launches if text(each, "infra") == "aws"]
    return [region for region in found if region]


def verdict(attempt: AttemptRecord) -> dict[str, Any]:
    """Return what is published of an attempt whose nodes are gone."""
    end = attempt.end
    assert end is not None
    assert not end.leaving, "who rebuilds a lost journal would take its nodes for gone"
    body = {**asdict(end), "reason": end.reason.value, "saved": attempt.saved}
    del body["leaving"]
    return body


def publish(store: ObjectStore, key: str, body: dict[str, Any] | None) -> StoreError | None:
    """Put into the run store (or with None: remove) what only the journal would know.

    It is for who has to rebuild a lost journal; a store that fails here stops nothing, and its
    problem is returned.
    """
    try:
        if body is None:
            store.delete(key)
        else:
            store.put(key, json.dumps(masked(body), sort_keys=True).encode())
    except StoreError as problem:
        log.warning("could not publish %s: %s", key, problem)
        return problem
    return None


def publish_missing_ends(store: ObjectStore, record: RunRecord) -> None:
    """Publish the newest verdicts that did not reach the store when they were given.

    A store that still fails stops nothing.
    """
    gone = [each for each in record.attempts if each.end is not None and not each.end.leaving]
    for attempt in gone[-_LOOKED_AT:]:
        key = keys.end(attempt.number)
        try:
            if store.head(key) is None:
                publish(store, key, verdict(attempt))
        except StoreError as problem:
            log.warning("could not publish %s: %s", key, problem)
