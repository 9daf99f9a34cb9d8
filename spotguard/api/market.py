"""What is known of spot markets: what own runs saw, and prices from the user's own account."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spotguard.control.journal.market_log import market_path, note_market, read_market
from spotguard.control.status.market import MarketDocument, SeenPlace, market_document, refreshed
from spotguard.errors import UsageError
from spotguard.launch.aws_prices import LONGEST_DAYS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MarketDocument", "refresh", "SeenPlace", "show"]


def show() -> MarketDocument:
    """Return what own runs saw of spot nodes, place by place, and what they cost."""
    path = market_path()
    return market_document(str(path), read_market(path))


def refresh(
    regions: Sequence[str] = (),
    instance_types: Sequence[str] = (),
    *,
    days: float = 7.0,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[int, MarketDocument]:
    """Fetch spot prices from AWS; return how many are new, and what is known then.

    Args:
        regions: of AWS, beside those that runs have asked.
        instance_types: to ask for there.
        days: how far to look back, at most 90.
        tell: hears which region is asked.

    Raises:
        UsageError: only one of `regions` and `instance_types` is given, or there is nothing to ask,
            or `days` is out of bounds.
        MissingExtra, EnvironmentFailure: boto3 is not installed; AWS does not answer.
    """
    if not 0 < days <= LONGEST_DAYS:  # nor what is no number
        raise UsageError(
            f"days: given {days:g}; allowed: a number above 0 and up to {LONGEST_DAYS}, for AWS "
            "remembers no more"
        )
    if bool(regions) != bool(instance_types):
        raise UsageError("--region and --instance-type belong together")
    path = market_path()
    known = read_market(path)
    if not regions and not any(each.place.startswith("aws/") for each in known):
        raise UsageError(
            "no run of this machine has asked AWS for spot nodes yet",
            hint="name places: --region us-east-1 --instance-type p4d.24xlarge",
        )
    new = refreshed(
        known,
        regions=regions,
        instance_types=instance_types,
        days=days,
        now=time.time(),
        tell=tell,
    )
    note_market(path, new)
    return len(new), show()
