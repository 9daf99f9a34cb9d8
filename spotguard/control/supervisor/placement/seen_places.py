"""What is known of a place: by this run's attempts and refusals, and by other runs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spotguard.control.journal.nodes.offer import place_key
from spotguard.events.states import EndReason, Market
from spotguard.policy.market.egress import egress_usd, store_place
from spotguard.policy.market.sightings import answers_of, says_free, seen_by
from spotguard.policy.view import Seen
from spotguard.shared.hazard import HazardByAge
from spotguard.spec.infra import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.launch.base import Offer
    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.market.sightings import Sighting

_TAKEN: Final = frozenset(
    {EndReason.PREEMPTED, EndReason.TERMINATED, EndReason.NODE_LOST, EndReason.VANISHED}
)
"""The ends that a spot market brings."""
_FAILING = HazardByAge(((0.0, 0.01),))
"""Machines that nobody takes: one in four days fails, a guess from above."""
_LOOK_EVERY_S = 3600.0
"""What is looked at so often does not count as out of sight (`policy.market.memory.STALE_S`)."""
_REMEMBERED_S = 3 * 86400.0
"""What was seen counts half as much after a day."""


def was_taken(attempt: AttemptRecord) -> bool:
    """Tell whether the market took nodes of an attempt that has ended.

    A launch that came to nothing by itself says nothing of it, though nodes of it are lost.
    """
    if attempt.end is None or any(node.in_vain for node in attempt.node_ends):
        return False
    return attempt.end.reason in _TAKEN


def place_name(offer: Offer) -> str:
    """Return a place in words, without its market: `aws/us-east-1/us-east-1a/p3.2xlarge`."""
    words = (offer.infra, offer.region, offer.zone, offer.instance_type or offer.gpus)
    return "/".join(word for word in words if word)


def accelerator_of(record: RunRecord, offer: Offer | None = None) -> tuple[str, int]:
    """Return the kind of GPU, in capitals, and how many a node has; `` and 1 without any.

    Of several alternatives it is the offer's; without one, the first.
    """
    gpus = record.spec.get("gpus")
    asked = gpus.partition(",")[0] if isinstance(gpus, str) else ""
    name, _, count = (offer.gpus if offer is not None and offer.gpus else asked).partition(":")
    return name.upper(), int(count) if count.isdigit() else 1


def seen_of(
    record: RunRecord,
    offer: Offer | None,
    nodes: int,
    now: float,
    hazard: Hazard,
    market: Sequence[Sighting] = (),
) -> Seen:
    """Return what is known of a spot place: by the run's attempts, its refusals, other runs."""
    if offer is None:
        return Seen()
    key = place_key(offer)
    told = answers_of(market, place=place_name(offer), nodes=nodes, without_run=record.run_id)
    for attempt in record.attempts:
        if place_key(attempt.offer) != key:
            continue
        told += [(at, True) for at in _lived(attempt, now)]
        if attempt.end is not None and was_taken(attempt):
            told.append((attempt.end.gone_at, False))
    if (nodes, key) in record.tried:
        told.append((now, False))
    elif says_free(market, place=place_name(offer), nodes=nodes):
        told.append((now, True))
    return seen_by(sorted(told), now, hazard)


def checkpoint_bytes(record: RunRecord) -> float:
    """Return the size of the newest checkpoint, which each start reads; 0 where there is none."""
    sizes = (attempt.saving.last_bytes for attempt in reversed(record.attempts))
    return next((each for each in sizes if each is not None), 0.0)


def move_usd(store_url: str, offer: Offer, size: float) -> float:
    """Return what it costs that nodes of an offer read a checkpoint of so many bytes."""
    return egress_usd(store_place(store_url), offer.infra, offer.region, size)


def _lived(attempt: AttemptRecord, now: float) -> Iterator[float]:
    """Yield instants at which nodes were there, close enough to know that they never went."""
    at = attempt.started_at if attempt.started_at is not None else attempt.up_at
    if at is None:
        return
    until = now if attempt.end is None else min(now, attempt.end.gone_at)
    if at < until:
        yield at
    at = max(at + _LOOK_EVERY_S, now - _REMEMBERED_S)  # what was before has faded
    while at < until:
        yield at
        at += _LOOK_EVERY_S
    if not was_taken(attempt):
        yield until


def hazard_of(
    record: RunRecord, attempt: AttemptRecord, now: float, market: Sequence[Sighting] = ()
) -> HazardByAge | None:
    """Return how often an attempt's nodes are taken, by their age; None where nobody takes any.

    On demand they only fail. Of spot nodes it is the record of their kind and number, corrected by
    what the run and others have seen of the place.
    """
    if attempt.offer.infra == LOCAL:
        return None
    if attempt.offer.market is not Market.SPOT:
        return _FAILING
    from spotguard.policy.market.hazard import pooled, recorded_level, taken_by_age

    accelerator, gpus = accelerator_of(record, attempt.offer)
    kind = accelerator, attempt.nodes * gpus
    seen = seen_of(record, attempt.offer, attempt.nodes, now, pooled(*kind), market)
    level = recorded_level(*kind)
    return taken_by_age(level, taken=seen.taken, expected=seen.taken_expected)
