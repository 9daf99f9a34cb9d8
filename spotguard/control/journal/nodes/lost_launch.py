"""A launch that came to nothing, and cost money all the same."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_LOST_LAUNCHES = 32


@dataclass(frozen=True, kw_only=True)
class LostLaunch:
    """A launch that came to nothing after nodes of it may have run: they are paid all the same."""

    at: float
    """When the nodes are taken to have begun to cost."""
    paid_s: float
    usd: float | None
    """None: the price is unknown."""
    unseen_s: float = 0.0
    """For how long they may have been paid after that, since nobody saw them go."""
    unseen_usd: float = 0.0
    """What that may have cost."""


def with_lost(lost: tuple[LostLaunch, ...], new: LostLaunch) -> tuple[LostLaunch, ...]:
    """Return them with one more; where there are many, the two oldest are added up."""
    every = (*lost, new)
    if len(every) <= KEPT_LOST_LAUNCHES:
        return every
    first, second = every[0], every[1]
    known = first.usd is not None and second.usd is not None
    added = LostLaunch(
        at=first.at,
        paid_s=first.paid_s + second.paid_s,
        usd=(first.usd or 0.0) + (second.usd or 0.0) if known else None,
        unseen_s=first.unseen_s + second.unseen_s,
        unseen_usd=first.unseen_usd + second.unseen_usd,
    )
    return (added, *every[2:])
