"""What all runs of one store may cost together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from spotguard.shared.units import format_usd
from spotguard.spec.model.tables import Frozen
from spotguard.spec.setting import IfGiven, Setting, text, usd

PERIODS = ("month", "week", "day")
_WRITTEN = re.compile(r"(?P<usd>[^/]*?)\s*(?:(?:/|\bper\b)\s*(?P<per>[a-z]+))?")


@dataclass(frozen=True)
class TeamCap:
    """A sum for each month, week or day of the calendar (UTC; weeks begin on Monday)."""

    usd: float
    per: str = "month"

    def __post_init__(self) -> None:
        if self.per not in PERIODS:
            raise ValueError(f"no period: {self.per}")

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
            return cls(usd(raw.get("usd")), str(raw.get("per")))
        if not isinstance(raw, str):
            return cls(usd(raw))
        written = _WRITTEN.fullmatch(text(raw).lower())
        if written is None:
            raise ValueError("not a sum for a period")
        return cls(usd(written["usd"]), written["per"] or "month")


TEAM_BUDGET = Setting(
    parse=IfGiven(TeamCap.parse),
    allowed='an amount of USD above 0 for a month, week or day, such as "2000 / month"',
    example='"2000 / month"',
    flag="--team-budget",
    variable="SPOTGUARD_TEAM_BUDGET",
)


class TeamSpec(Frozen):
    """What all runs of one store may cost together."""

    budget: Annotated[TeamCap | None, TEAM_BUDGET] = None
    """The most that all runs of `store` may cost together, whoever started them and wherever their
    controllers are. Each run then needs a `budget` of its own: what is left of it is promised to
    the run before a launch. A run for which too little is left waits, by `priority`."""
