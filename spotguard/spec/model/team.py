"""What several runs may cost together: all of one store, or those of a sweep."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from spotguard.shared.units import format_usd
from spotguard.spec.model.tables import Frozen
from spotguard.spec.setting import IfGiven, Setting, text, usd

PERIODS = ("month", "week", "day")
SWEEP = "sweep"
"""The period of a sweep's budget, which never turns."""
_WRITTEN = re.compile(r"(?P<usd>[^/]*?)\s*(?:(?:/|\bper\b)\s*(?P<per>[a-z]+))?")


@dataclass(frozen=True)
class TeamCap:
    """A sum for each month, week or day of the calendar (UTC; weeks begin on Monday).

    Or for a whole sweep: then it also says how many of its runs go on side by side.
    """

    usd: float
    per: str = "month"
    at_once: int | None = None
    """So many runs may hold money at any time; None: as many as it pays."""

    def __post_init__(self) -> None:
        if self.per not in (*PERIODS, SWEEP):
            raise ValueError(f"no period: {self.per}")
        if self.at_once is not None and not _is_count(self.at_once):
            raise ValueError(f"no number of runs: {self.at_once!r}")

    def __str__(self) -> str:
        return f"{self.usd:.12g} / {self.per}"

    @property
    def words(self) -> str:
        """Return it for people: `$2,000.00 / month`."""
        return f"{format_usd(self.usd)} / {self.per}"

    @classmethod
    def parse(cls, raw: Any) -> TeamCap:
        """Return the sum of `2000`, `"$2,000 / month"`, `"500 per week"` or a table of both."""
        if isinstance(raw, cls):
            return raw
        if isinstance(raw, Mapping):
            return cls(usd(raw.get("usd")), str(raw.get("per")), raw.get("at_once"))
        if not isinstance(raw, str):
            return cls(usd(raw))
        written = _WRITTEN.fullmatch(text(raw).lower())
        if written is None or written["per"] == SWEEP:
            raise ValueError("not a sum for a period")
        return cls(usd(written["usd"]), written["per"] or "month")


def _is_count(raw: object) -> bool:
    return isinstance(raw, int) and not isinstance(raw, bool) and raw >= 1


TEAM_BUDGET = Setting(
    parse=IfGiven(TeamCap.parse),
    allowed="an amount of USD above 0 for a month, week or day, decimals after a point: "
    '"2000 / month"',
    example='"2000 / month"',
    flag="--team-budget",
    variable="SPOTGUARD_TEAM_BUDGET",
)


class TeamSpec(Frozen):
    """What several runs may cost together: all of one store, or those of a sweep."""

    budget: Annotated[TeamCap | None, TEAM_BUDGET] = None
    """The most that all runs of `store` may cost together, whoever started them and wherever their
    controllers are. Each run then needs a `budget` of its own: what is left of it is promised to
    the run before a launch. A run for which too little is left waits, by `priority`."""
