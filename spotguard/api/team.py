"""A team: what all runs of a store may cost together, what they spent, who waits for money."""

from __future__ import annotations

from spotguard.control.journal.team.books import in_words
from spotguard.control.journal.team.membership import TeamDocument, give_back, look, set_cap
from spotguard.spec.model import TeamCap
from spotguard.spec.model.team import TEAM_BUDGET

__all__ = ["give_back", "in_words", "look", "set_cap", "TEAM_BUDGET", "TeamCap", "TeamDocument"]
