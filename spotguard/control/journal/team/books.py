"""The books of a team's budget: what each run of a store has spent, and what is promised. Pure.

A run stands in them with absolute sums, so that to write the same twice changes nothing:

    spent in this period + promised, over all runs <= the cap

What is promised to a run is what is left of its own budget: before it launches nodes. As it spends,
one sum moves to the other, and what it uses of the cap stays the same.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from spotguard.shared.units import format_usd
from spotguard.spec.model.team import SWEEP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spotguard.spec.model import TeamCap

ROUNDING_USD = 1e-6
_CLOCKS_S = 86400.0
"""Clocks of machines differ by less."""
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Stake:
    """One run's part. Sums are in USD."""

    spent_before_usd: float = 0.0
    """All that the run had spent, ever, when it came into this period's books."""
    spent_usd: float = 0.0
    """All that it has spent, ever."""
    promised_usd: float = 0.0
    """The most that it may still spend; 0 is a run that may launch nothing."""
    launched: bool = False
    """Nodes may live by what is promised: nobody else may take it back."""
    until_at: float | None = None
    """By then they are gone, whoever died: the launcher's own guard ends them. None: unknown."""
    wants_usd: float | None = None
    """It waits in the queue for so much; None: it does not wait."""
    ticket: int = 0
    """Its place in the queue among those of its priority."""
    priority: int = 0
    beat: str = ""
    """Another one at each write of the run's controller, by which its life is seen."""

    @property
    def spent_here_usd(self) -> float:
        """What it has spent in this period."""
        return max(0.0, self.spent_usd - self.spent_before_usd)

    @property
    def used_usd(self) -> float:
        """What of the cap is not there for others."""
        return self.spent_here_usd + self.promised_usd

    @property
    def holds(self) -> bool:
        """Whether nodes of it live, or may be launched."""
        return self.promised_usd > 0 or self.launched

    def at(self, spent_usd: float) -> Stake:
        """Return it brought up to what the run has spent by now; what it uses stays the same.

        Only who spent more than was promised uses more.
        """
        now = replace(self, spent_usd=spent_usd)
        if self.promised_usd <= 0:
            return now
        return replace(now, promised_usd=max(0.0, self.used_usd - now.spent_here_usd))


@dataclass(frozen=True, kw_only=True)
class TeamBooks:
    """What is written of one period."""

    cap: TeamCap | None = None
    """What the team allows all its runs; None: whatever they like."""
    period: str = ""
    """A month, week or day as `period_of` names it; empty in books that nobody used."""
    stakes: Mapping[str, Stake] = field(default_factory=dict)
    """Of the runs that are not at rest, by run id."""
    at_rest_usd: float = 0.0
    """What runs that are at rest had spent in this period."""
    tickets: int = 0
    """So many were given out."""

    @property
    def spent_usd(self) -> float:
        """What all have spent in this period."""
        return self.at_rest_usd + sum(stake.spent_here_usd for stake in self.stakes.values())

    @property
    def promised_usd(self) -> float:
        """What all may still spend."""
        return sum(stake.promised_usd for stake in self.stakes.values())

    @property
    def used_usd(self) -> float:
        """What is spent or promised."""
        return self.spent_usd + self.promised_usd

    @property
    def left_usd(self) -> float | None:
        """What is neither; None without a cap."""
        return None if self.cap is None else max(0.0, self.cap.usd - self.used_usd)

    @property
    def queue(self) -> list[str]:
        """Who waits for money, in the order in which they are served."""
        waiting = [
            (-stake.priority, stake.ticket, run_id)
            for run_id, stake in self.stakes.items()
            if stake.wants_usd is not None
        ]
        return [run_id for *_, run_id in sorted(waiting)]

    def stake(self, run_id: str, spent_usd: float) -> Stake:
        """Return a run's part, brought up to what it has spent by now."""
        known = self.stakes.get(run_id)
        if known is None:
            return Stake(spent_before_usd=spent_usd, spent_usd=spent_usd)
        return known.at(spent_usd)

    def with_stake(self, run_id: str, stake: Stake) -> TeamBooks:
        """Return the books with this part of a run, written now."""
        told = replace(stake, beat=secrets.token_hex(8))
        return replace(self, stakes={**self.stakes, run_id: told})

    def under(self, cap: TeamCap | None) -> TeamBooks:
        """Return the books under another cap; another kind of period begins with nothing spent."""
        same = (self.cap.per if self.cap else "month") == (cap.per if cap else "month")
        return replace(self if same else self._emptied(""), cap=cap)

    def turned(self, now: float) -> TeamBooks:
        """Return the books of the period in which `now` lies, if it is later than theirs.

        What is still promised is paid from the new period, unless its nodes are long gone. Periods
        never go back.
        """
        period = period_of(now, self.cap.per if self.cap else "month")
        if period <= self.period:
            return self
        kept = {
            run_id: stake
            for run_id, stake in self.stakes.items()
            if stake.wants_usd is not None
            or ((stake.promised_usd > 0 or stake.launched) and not _over(stake, now))
        }
        return replace(self, stakes=kept)._emptied(period)

    def _emptied(self, period: str) -> TeamBooks:
        stakes = {
            run_id: replace(stake, spent_before_usd=stake.spent_usd)
            for run_id, stake in self.stakes.items()
        }
        return replace(self, period=period, stakes=stakes, at_rest_usd=0.0)

    def without_dead(self, is_dead: Callable[[str, Stake], bool]) -> TeamBooks:
        """Return the books without what the dead wait for or were promised and did not launch by.

        What they have spent stays.
        """
        stakes = {
            run_id: replace(
                stake,
                promised_usd=stake.promised_usd if stake.launched else 0.0,
                wants_usd=None,
            )
            if is_dead(run_id, stake)
            else stake
            for run_id, stake in self.stakes.items()
        }
        return replace(self, stakes=stakes)

    # ------------------------------------------------------------ what a run does

    def asked(
        self,
        run_id: str,
        *,
        spent_usd: float,
        most_usd: float | None,
        priority: int,
        living: bool = False,
    ) -> tuple[TeamBooks, str]:
        """Return the books in which a run is promised `most_usd` beyond what it has spent.

        Where that is not to be had, it stands in the queue instead, and the second value says why.
        What it was promised before is then given back, unless nodes of it live (`living`).
        """
        mine = self.stake(run_id, spent_usd)
        if most_usd is None:
            return (self, "") if self.cap is None else (self, self._without_budget(run_id))
        wished = replace(mine, promised_usd=most_usd, wants_usd=None, priority=priority)
        others_usd = self.used_usd - self._used_by(run_id)
        fits = self.cap is None or others_usd + wished.used_usd <= self.cap.usd + ROUNDING_USD
        fits = fits and (mine.holds or self._has_place())
        holds = mine.promised_usd > 0 and wished.used_usd <= mine.used_usd + ROUNDING_USD
        first = None if holds or self.cap is None else self._before(run_id, mine, priority)
        if fits and first is None:
            return self.with_stake(run_id, wished), ""
        waits, tickets = replace(mine, wants_usd=most_usd, priority=priority), self.tickets
        if not living:
            waits = replace(waits, promised_usd=0.0, launched=False, until_at=None)
        if mine.wants_usd is None:
            tickets += 1
            waits = replace(waits, ticket=tickets)
        waiting = replace(self.with_stake(run_id, waits), tickets=tickets)
        return waiting, waiting._why(run_id, most_usd, first if fits else None)

    def launching(
        self, run_id: str, *, spent_usd: float, most_usd: float | None, until_at: float | None
    ) -> tuple[TeamBooks, str]:
        """Return the books in which nodes may live by what was promised; or why none may."""
        if self.cap is None:
            return self, ""
        if most_usd is None:
            return self, self._without_budget(run_id)
        mine = self.stake(run_id, spent_usd)
        if mine.promised_usd + ROUNDING_USD < most_usd:
            return self, "what was promised of the team's budget was given back before the launch"
        return self.with_stake(run_id, replace(mine, launched=True, until_at=until_at)), ""

    def told(
        self,
        run_id: str,
        *,
        spent_usd: float,
        most_usd: float | None,
        living: bool,
        launched: bool,
        until_at: float | None = None,
    ) -> TeamBooks:
        """Return the books with what a run has spent.

        `living`: nodes of it may live, also of a launch that is only written down. `launched`: not
        only that. Then it stands there with all that they may cost, whatever the books say: they
        may be newer than the nodes, or somebody held the nodes for gone. Without a budget of its
        own that is unknown, and it stands there with what it spends from now on.
        """
        if run_id not in self.stakes and (not launched or self.cap is None):
            return self
        mine = self.stake(run_id, spent_usd)
        mine = replace(mine, launched=mine.launched and living, until_at=until_at)
        if launched:
            most_usd = max(mine.promised_usd, most_usd or 0.0)
            mine = replace(mine, launched=True, promised_usd=most_usd)
        if not living:  # it waits for nodes now, and bars nobody else's way meanwhile
            mine = replace(mine, wants_usd=None)
        return self.with_stake(run_id, mine)

    def released(self, run_id: str, spent_usd: float) -> TeamBooks:
        """Return the books in which a run is at rest: what it spent stays, and nothing else."""
        if run_id not in self.stakes:
            return self
        mine = self.stake(run_id, spent_usd)
        others = {other: stake for other, stake in self.stakes.items() if other != run_id}
        return replace(self, stakes=others, at_rest_usd=self.at_rest_usd + mine.spent_here_usd)

    def given_back(self, run_id: str) -> TeamBooks:
        """Return the books without what a run was promised; a person says that it has no nodes."""
        stake = self.stakes[run_id]
        back = replace(stake, promised_usd=0.0, launched=False, wants_usd=None, until_at=None)
        return self.with_stake(run_id, back)

    def stands_alike(self, run_id: str, other: TeamBooks) -> bool:
        """Tell whether a run stands in both books alike, whenever it wrote that."""
        mine, theirs = self.stakes.get(run_id), other.stakes.get(run_id)
        return mine is not None and theirs is not None and replace(mine, beat=theirs.beat) == theirs

    # ------------------------------------------------------------ words

    def _used_by(self, run_id: str) -> float:
        stake = self.stakes.get(run_id)
        return 0.0 if stake is None else stake.used_usd

    def _has_place(self) -> bool:
        """Tell whether one more run may go on beside those that do."""
        if self.cap is None or self.cap.at_once is None:
            return True
        return sum(stake.holds for stake in self.stakes.values()) < self.cap.at_once

    def is_over(self, wants_usd: float | None) -> bool:
        """Tell whether a sum is never to be had again: there is no next period of a sweep."""
        never = self.cap is not None and self.cap.per == SWEEP and wants_usd is not None
        return never and self._never_fits(wants_usd or 0.0)

    def _never_fits(self, wants_usd: float) -> bool:
        """Tell whether a sum is not to be had in this period whatever is given back."""
        return self.cap is not None and self.spent_usd + wants_usd > self.cap.usd + ROUNDING_USD

    def _before(self, run_id: str, mine: Stake, priority: int) -> str | None:
        """Return the run whose turn comes before this one's; who cannot have one bars nobody."""
        ticket = mine.ticket if mine.wants_usd is not None else self.tickets + 1
        for other in self.queue:
            stake = self.stakes[other]
            if other == run_id or self._never_fits(stake.wants_usd or 0.0):
                continue
            if (-stake.priority, stake.ticket) < (-priority, ticket):
                return other
        return None

    def _without_budget(self, run_id: str) -> str:
        assert self.cap is not None
        return (
            f"the runs of its store share {self.cap.words}, and it has no budget of its own; stop "
            f"it, then: spotguard resume {run_id} --budget USD"
        )

    def _why(self, run_id: str, most_usd: float, first: str | None) -> str:
        """Return why a run has to wait; the same words as long as nothing of that changes."""
        assert self.cap is not None
        queue = self.queue
        place = f"place {queue.index(run_id) + 1} of {len(queue)} in the queue"
        of_all = f"the team's {format_usd(self.cap.usd)} for {in_words(self.period)}"
        if self.cap.per == SWEEP:
            of_all = f"the sweep's {format_usd(self.cap.usd)}"
        if most_usd > self.cap.usd + ROUNDING_USD:
            return (
                f"it may cost {format_usd(most_usd)} more, and {of_all} are less than that; stop "
                "it, then resume it with a smaller --budget"
            )
        left = f"{format_usd(self.left_usd)} are left, and it needs {format_usd(most_usd)}"
        if first is not None:
            return f"of {of_all} {left}, but {first} comes first ({place})"
        if self.is_over(most_usd):
            return f"of {of_all} only {left}"
        if self._never_fits(most_usd):
            per = self.cap.per
            return f"{of_all} are spent or promised: {left}; so it waits for the next {per}"
        holders = [
            (-stake.promised_usd, other)
            for other, stake in self.stakes.items()
            if stake.promised_usd > 0 and other != run_id
        ]
        if most_usd <= (self.left_usd or 0.0) + ROUNDING_USD:
            return f"{self.cap.at_once} of the sweep's runs go on, as many as may at once ({place})"
        named = [other for _, other in sorted(holders)[:_NAMED]]
        more = f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else ""
        held = f", promised to {', '.join(named)}{more}" if named else ""
        return f"{of_all} are spent or promised: {left} ({place}{held})"


def _over(stake: Stake, now: float) -> bool:
    return stake.until_at is not None and now > stake.until_at + _CLOCKS_S


def period_of(now: float, per: str) -> str:
    """Return the name of the month, week or day (UTC) of an instant: 2026-11, 2026-W48, ..."""
    if per == SWEEP:
        return SWEEP
    at = datetime.fromtimestamp(now, tz=timezone.utc)
    if per == "week":
        year, week, _ = at.isocalendar()
        return f"{year:04d}-W{week:02d}"
    return at.strftime("%Y-%m-%d" if per == "day" else "%Y-%m")


def in_words(period: str) -> str:
    """Return such a name for people: November 2026, week 48 of 2026, 2026-11-25."""
    if period == SWEEP:
        return "the sweep"
    if "W" in period:
        year, week = period.split("-W")
        return f"week {int(week)} of {year}"
    if period.count("-") == 1:
        return datetime.strptime(period, "%Y-%m").replace(tzinfo=timezone.utc).strftime("%B %Y")
    return period
