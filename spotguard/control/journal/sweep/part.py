"""A run's part in a sweep, as its journal and the run store keep it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from spotguard.events import keys
from spotguard.events.untrusted import Refused, an_object, integer, needed, text
from spotguard.spec.model import TeamCap
from spotguard.storage import PrefixedStore

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore

MINIMIZE, MAXIMIZE = "min", "max"
REDUCTION = 2
"""At each look one of so many goes on, and the next look is at so many times as many steps."""


@dataclass(frozen=True, kw_only=True)
class SweepPart:
    """Which point of which sweep a run is, who pays, and by what it is measured."""

    sweep_id: str
    number: int
    """Of the point, from 1 on."""
    cap: TeamCap
    """What all points may cost together, and how many go on at once."""
    metric: str | None = None
    """By which points are compared, as `run.log` calls it."""
    goal: str = MINIMIZE
    """`min` or `max`."""
    first_step: int | None = None
    """Steps done at which points are compared first, and the worse ones stopped; None: never."""

    def to_json(self) -> dict[str, Any]:
        """Return what `of` takes."""
        return asdict(self)

    @classmethod
    def of(cls, body: dict[str, Any]) -> SweepPart | None:
        """Return what `to_json` wrote; None for a run of no sweep.

        Raises:
            Refused: it makes no sense.
        """
        if not body:
            return None
        sweep_id = needed(text(body, "sweep_id"), "sweep")
        goal = needed(text(body, "goal"), "goal")
        if not keys.RUN_ID_PATTERN.fullmatch(sweep_id) or goal not in (MINIMIZE, MAXIMIZE):
            raise Refused("what it says of its sweep makes no sense")
        try:
            cap = TeamCap.parse(an_object(body.get("cap"), "budget of its sweep"))
        except ValueError:
            raise Refused("the budget of its sweep makes no sense") from None
        return cls(
            sweep_id=sweep_id,
            number=needed(integer(body, "number", low=1), "number in its sweep"),
            cap=cap,
            metric=text(body, "metric"),
            goal=goal,
            first_step=integer(body, "first_step", low=1),
        )

    @property
    def run_id(self) -> str:
        """The point's run."""
        return f"{self.sweep_id}-{self.number:02d}"

    def look_at(self, looks: int) -> int | None:
        """Return the steps done at which points are compared, after so many looks; None: never."""
        return None if self.first_step is None else self.first_step * REDUCTION**looks

    def looks_by(self, step: int) -> int:
        """Return how many looks are due once so many steps are done."""
        looks = 0
        while (at := self.look_at(looks)) is not None and at <= step:
            looks += 1
        return looks


def sweep_store(root: ObjectStore, sweep_id: str) -> PrefixedStore:
    """Return the sweep's own part of a store, by the root of its runs."""
    return PrefixedStore(root, keys.sweep(sweep_id))
