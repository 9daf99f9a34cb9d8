"""`status`, `history`, `logs` and `runs`: what happened and what it cost."""

from __future__ import annotations

import contextlib
import re
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import (
    AnyRunArgument,
    JsonOption,
    PatienceOption,
    looked_at_run,
    show_status,
)
from spotguard.cli.follow import (
    DEFAULT_PATIENCE_S,
    LineScreen,
    LiveScreen,
    RunSource,
    Screen,
    follow,
)
from spotguard.cli.terminal.output import (
    clean_log_line,
    console,
    note,
    print_json,
    print_json_line,
    print_json_list,
    say,
)
from spotguard.errors import UsageError
from spotguard.shared.json_documents import document
from spotguard.shared.units import from_iso, parse_duration_s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.api.documents import HistoryLine

_NEWEST = 100
"""Happenings that `history` tells unless it is asked for all."""


def status(
    run: AnyRunArgument = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it.")] = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
    as_json: JsonOption = False,
) -> None:
    """Tell how a run stands: attempts, steps lost, money spent and saved."""
    if watch and as_json:
        raise UsageError("--watch and --json exclude each other", hint="call --json repeatedly")
    known = looked_at_run(run)
    if as_json:
        print_json(known.status(forecast=True).to_json())
        return
    if watch:
        terminal = console()
        screen: Screen = LiveScreen(terminal) if terminal.is_terminal else LineScreen()
        try:
            follow(RunSource(known), screen, patience_s=contact_patience)
        except KeyboardInterrupt:
            raise typer.Exit from None
    show_status(known, known.status(forecast=True))


def history(
    run: AnyRunArgument = None,
    *,
    every: Annotated[
        bool, typer.Option("--all", help="Tell more than the 100 newest happenings.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell what happened to a run, and what it had cost by then."""
    from spotguard.api.documents import HistoryDocument

    known = looked_at_run(run)
    story = known.history(newest=None if every else _NEWEST)
    if as_json:
        head = document(HistoryDocument(run_id=known.run_id, earlier=story.earlier))
        print_json_list(head, "history", map(document, story.lines))
        return
    _show_history(story.lines)
    if story.earlier:
        say(f"{story.earlier} earlier happenings are not shown; --all tells them, too")


def _show_history(lines: Iterable[HistoryLine]) -> None:
    from spotguard.cli.views.history_table import HEADER, by_day, happening, happenings_table

    terminal = console()
    for day, of_day in by_day(lines):
        terminal.print(day, style="bold")
        if terminal.is_terminal:
            terminal.print(happenings_table(of_day))
        else:  # a pipe has no width: one line each, so that grep finds whole sentences
            say(HEADER)
            for line in of_day:
                say(happening(line))


def logs(
    run: AnyRunArgument = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the run settles.")
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only this attempt's, be it long gone."),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Only this node's."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Only this rank's."),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(min=1, metavar="LINES", help="Only the last so many lines."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only what is newer: 10m, 2h, 2026-05-01T12:00Z."),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Only lines in which this is found."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also what launchers say where it explains nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON Lines to stdout.")] = False,
) -> None:
    """Print what the job printed, across all attempts, nodes and ranks, gone ones too."""
    from spotguard.api.documents import LogDocument, LogQuery

    pattern = _pattern(grep)
    known = looked_at_run(run)
    query = LogQuery(
        attempt=attempt,
        node=node,
        rank=rank,
        tail=tail,
        since=None if since is None else _instant(since, known.now()),
        pattern=pattern,
        everything=every,
    )
    told = False
    try:
        for line in known.logs(follow=follow, query=query):
            told = True
            text = clean_log_line(line.text)
            if as_json and line.node is not None:
                logged = LogDocument(
                    attempt=line.attempt,
                    node=line.node,
                    rank=line.rank,
                    at=line.at,
                    stream=line.stream,
                    text=text,
                )
                print_json_line(document(logged))
                continue
            where = "" if line.node is None else f" node {line.node}"
            where += "" if line.rank is None else f" rank {line.rank}"
            tell = note if as_json else say
            tell(f"#{line.attempt}{where} | {text}")
    except KeyboardInterrupt:
        raise typer.Exit from None
    if not told:
        note(f"{known.name}: no line that was printed so far fits")


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as problem:
        raise UsageError(
            f"--grep: {text!r} is no regular expression: {problem}",
            hint=f"letter by letter it is: --grep {shlex.quote(re.escape(text or ''))}",
        ) from None


def _instant(text: str, now: float) -> float:
    """Return an instant, or one that is so long ago."""
    with contextlib.suppress(ValueError):
        return now - parse_duration_s(text)
    try:
        return from_iso(text)
    except ValueError:
        raise UsageError(
            f"--since: given {text!r}; allowed: a duration (10m, 2h) or an instant "
            "(2026-05-01T12:00:00Z)"
        ) from None


def runs(
    stores: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STORE",
            help="Stores whose runs are listed instead, whichever machine controls them.",
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List the runs of this machine, or those of stores with who controls each; newest first."""
    from spotguard import api
    from spotguard.api.documents import RunsDocument
    from spotguard.cli.views.lists import runs_table, stored_runs_table

    known, unreadable = api.runs_of(stores, note) if stores else (api.runs(), [])
    if as_json:
        print_json(document(RunsDocument(runs=tuple(known), unreadable=tuple(unreadable))))
        return
    if known:
        table = stored_runs_table(known) if stores else runs_table(known)
        console().print(table)
    elif stores:
        say(f"no runs in {' '.join(stores)}")
    else:
        say("no runs yet; start one with: spotguard up train.py")
    for each in known:
        if each.problem is not None:
            note(f"{each.run_id}: {each.problem}")
    for lost in unreadable:
        note(f"{lost.store} cannot be read: {lost.problem}")
