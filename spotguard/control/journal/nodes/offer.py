"""Offers as the journal and a job's claim hold them."""

from __future__ import annotations

from typing import Any

from spotguard.events.states import Market
from spotguard.launch.base import Offer


def place_key(offer: Offer) -> str:
    """Return a name for a place that tells it from the others, for a round of launching."""
    machine = offer.instance_type or offer.gpus
    words = (offer.infra, offer.region, offer.zone, machine, offer.market.value)
    return "/".join(word or "-" for word in words)


def offer_to_json(offer: Offer) -> dict[str, Any]:
    """Return the offer as the journal and the job's claim hold it."""
    return {**offer.__dict__, "market": offer.market.value}


def offer_from_json(body: dict[str, Any]) -> Offer:
    """Return the offer that `offer_to_json` gave."""
    known: dict[str, Any] = {name: body.get(name) for name in Offer.__dataclass_fields__}
    known["market"] = Market(body["market"])
    return Offer(**known)
