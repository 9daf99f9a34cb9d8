"""`team`: what all runs of a store may cost together."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import JsonOption
from spotguard.cli.terminal.output import console, print_json, say
from spotguard.errors import SpecError, UsageError
from spotguard.shared.json_documents import document

if TYPE_CHECKING:
    from spotguard.api.team import TeamCap, TeamDocument

_NONE = "none"


def team(
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="Where the team's runs are.", show_default=False)
    ],
    *,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="'USD / PERIOD'",
            help="What all its runs may cost together from now on: '2000 / month', week, day; "
            "none: as much as they like.",
            show_default=False,
        ),
    ] = None,
    give_back: Annotated[
        str | None,
        typer.Option(
            "--give-back",
            metavar="RUN",
            help="Take back what was promised to a run whose nodes are gone, and whose controller "
            "will never come back.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what the runs of a store may cost together, what they spent, and who waits for money."""
    from spotguard.api import team

    if budget is not None and give_back is not None:
        raise UsageError("--budget and --give-back exclude each other")
    if budget is not None:
        shown = team.set_cap(store, _cap(budget))
    elif give_back is not None:
        shown = team.give_back(store, give_back)
    else:
        shown = team.look(store)
    if as_json:
        print_json(document(shown))
    else:
        _show(shown)


def _cap(text: str) -> "TeamCap | None":
    from spotguard.api.team import TEAM_BUDGET, TeamCap

    if text.strip().lower() == _NONE:
        return None
    try:
        return TeamCap.parse(text)
    except ValueError:
        allowed = f"{TEAM_BUDGET.allowed}, or {_NONE}"
        raise SpecError("--budget", f"given {text!r}; allowed: {allowed}") from None


def _show(shown: "TeamDocument") -> None:
    from rich.text import Text

    from spotguard.api.team import in_words
    from spotguard.cli.views import formats
    from spotguard.cli.views.lists import plain_table
    from spotguard.shared.units import format_usd

    if shown.budget_usd is None:
        say(f"the runs of {shown.store} have no budget together")
        say(f"to give them one: spotguard team {shown.store} --budget '2000 / month'")
        if not shown.runs:
            return
    else:
        say(
            f"{in_words(shown.period)}: {format_usd(shown.budget_usd)} for all, "
            f"{format_usd(shown.spent_usd)} spent, {format_usd(shown.promised_usd)} promised, "
            f"{format_usd(shown.left_usd)} left"
        )
    if not shown.runs:
        say("no run holds or waits for any of it")
        return
    table = plain_table("run", "", "spent", "promised", "waits for", "priority")
    for column in table.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    for run in shown.runs:
        stands = "has nodes" if run.launched else "" if run.place is None else f"place {run.place}"
        table.add_row(
            run.run_id,
            Text(stands, style="yellow" if run.place else ""),
            formats.usd(run.spent_usd),
            formats.usd(run.promised_usd),
            "" if run.wants_usd is None else formats.usd(run.wants_usd),
            str(run.priority),
        )
    console().print(table)
