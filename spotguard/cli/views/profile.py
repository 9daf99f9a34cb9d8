"""What cost most in some recorded steps, in few words."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from rich.text import Text

from spotguard.cli.terminal.output import clean
from spotguard.cli.views import formats
from spotguard.cli.views.formats import short_time

if TYPE_CHECKING:
    from spotguard.api.documents import ProfiledCost, ProfileDocument

_MOST_WIDTH = 100
_INDENT = " " * 9


def profile_screen(told: ProfileDocument, width: int) -> Text:
    """Return the five things that cost most, each with its lever, in lines of `width` columns."""
    width = min(width, _MOST_WIDTH)
    last = told.first_step + told.steps
    which = f"step {last}" if told.steps == 1 else f"steps {told.first_step + 1} to {last}"
    screen = Text()
    screen.append(f"{told.run_id}, attempt {told.attempt}, rank {told.rank}: {which}, ")
    screen.append(f"{short_time(told.step_s)} each\n", style="bold")
    screen.append(f"{fill(clean(told.signature), width)}\n")
    if told.balance:
        screen.append(f"{fill(told.balance, width)}\n")
    for number, cost in enumerate(told.costs, start=1):
        screen.append("\n")
        screen.append_text(_cost(number, cost, width))
    for rank in told.ranks:
        if rank.problem:
            screen.append(f"\nrank {rank.rank}: {clean(rank.problem)}")
    return screen


def _cost(number: int, cost: ProfiledCost, width: int) -> Text:
    share = f"{number}. {formats.percent(cost.share_pct / 100):>5} "
    title = f"{cost.title}: {short_time(cost.step_s)} a step"
    words = Text(
        fill(title, width, initial_indent=share, subsequent_indent=_INDENT) + "\n", style="bold"
    )
    if cost.operations:
        names = ", ".join(clean(name) for name in cost.operations)
        words.append(f"{_wrapped(f'mostly {names}', width)}\n", style="dim")
    words.append(f"{_wrapped(cost.lever, width)}\n")
    return words


def _wrapped(text: str, width: int) -> str:
    return fill(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
