"""What the run store says of launches that came to nothing: no attempt, but perhaps money.

`launch.json` of such a launch stays, and has `over`. Without it, whoever rebuilds a lost journal
would take what its nodes have written for an attempt, and not know what they cost.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.lineage import attempt_numbers
from spotguard.control.journal.record import Allotment
from spotguard.errors import NotFound
from spotguard.events import keys
from spotguard.events.states import EndReason
from spotguard.events.untrusted import Refused, amount, parse_object, seconds, text
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.storage.base import ObjectStore


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
