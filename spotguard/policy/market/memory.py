"""What places have shown, folded from what they answered. Pure: each fold returns a new memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.policy.market.hazard import HALF_LIFE_S

if TYPE_CHECKING:
    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.view import Seen

STALE_S = 7200.0
"""After a gap this long it is unknown how long a state has lasted."""


@dataclass(frozen=True, kw_only=True)
class PlaceAnswer:
    """What one place said when it was asked; None if it was not asked."""

    up: bool | None
    nodes: int | None = None


def remembered(seen: Seen, answer: PlaceAnswer, elapsed_s: float, hazard: Hazard) -> Seen:
    """Return what is known of a place `elapsed_s` later, and after its answer."""
    keep = 0.5 ** (elapsed_s / HALF_LIFE_S)
    faded = replace(
        seen,
        unseen_s=seen.unseen_s + elapsed_s,
        came=seen.came * keep,
        came_expected=seen.came_expected * keep,
        taken=seen.taken * keep,
        taken_expected=seen.taken_expected * keep,
        lied=seen.lied * keep,
        lived_h=seen.lived_h * keep,
    )
    if answer.up is None:
        return faded
    if faded.unseen_s == float("inf"):
        ages_s = _ages_s((), answer.nodes, 0.0)
        return replace(
            faded, up=answer.up, nodes=answer.nodes, nodes_age_s=ages_s, age_s=0.0, unseen_s=0.0
        )
    gap_s = faded.unseen_s
    expected = hazard.cumulative(int(seen.up), seen.age_s + gap_s) - hazard.cumulative(
        int(seen.up), seen.age_s
    )
    changed = answer.up != seen.up
    # At most one change can be seen, however many happened meanwhile.
    expected = min(expected, 1.0) if gap_s > STALE_S else expected
    age_s = gap_s / 2 if changed and gap_s > STALE_S else 0.0 if changed else seen.age_s + gap_s
    if seen.up:
        faded = replace(
            faded, taken=faded.taken + changed, taken_expected=faded.taken_expected + expected
        )
    else:
        faded = replace(
            faded, came=faded.came + changed, came_expected=faded.came_expected + expected
        )
    ages_s = _ages_s(seen.nodes_age_s, answer.nodes, gap_s)
    return replace(
        faded, up=answer.up, nodes=answer.nodes, nodes_age_s=ages_s, age_s=age_s, unseen_s=0.0
    )


def lived(seen: Seen, hours: float, *, taken: bool) -> Seen:
    """Return what is known of a place after own spot nodes lived there, and maybe were taken.

    A place that has none after it took them has shown the loss to the market's record already.
    """
    return replace(seen, lived_h=seen.lived_h + hours, lied=seen.lied + (taken and seen.up))


def _ages_s(before: tuple[float, ...], nodes: int | None, gap_s: float) -> tuple[float, ...]:
    """Return for how long so many nodes have answered: those that had not have just come."""
    kept = tuple(age_s + gap_s for age_s in before[: nodes or 0])
    return kept + (0.0,) * ((nodes or 0) - len(kept))
