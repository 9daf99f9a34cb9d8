"""`report`, `dashboard`, `metrics`, `notify`, `profile`: runs on pages, in numbers, in messages."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
from pathlib import Path
from typing import Annotated

import typer

from spotguard.api.states import MOST_STEPS
from spotguard.cli.common import AnyRunArgument, JsonOption, StepPatienceOption, looked_at_run
from spotguard.cli.terminal.output import check_is_file, console, note, print_json, say, write_file
from spotguard.errors import EnvironmentFailure, UsageError
from spotguard.shared.json_documents import document

_STEP_PATIENCE_S = 120.0
_TRIAL = {
    "text": "spotguard: this is a test; messages of your runs will arrive here",
    "run_id": "test",
    "name": "test",
    "event": "test",
    "spent_usd": None,
    "budget_usd": None,
    "demo_prices": False,
    "id": "test/0",
}


def report(
    run: AnyRunArgument = None,
    *,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Where to write the page; default: RUN.html in this folder.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write all that is known of a run into one page, which opens without a network."""
    if html is not None:
        check_is_file(html, option="--html")
    told = looked_at_run(run).report()
    run_id = told.run.run_id
    if as_json:
        print_json(document(told))
        if html is None:
            return
    from spotguard.api.pages import report_page

    path = Path(f"{run_id}.html") if html is None else html
    write_file(path, report_page(told).encode(), option="--html")
    tell = note if as_json else say
    tell(f"{path} has the report of {run_id}; open it in a browser")


def dashboard(
    stores: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STORE",
            help="Stores whose runs are shown, too, whichever machine controls them.",
        ),
    ] = None,
    *,
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="Port on loopback; 0 takes a free one."
        ),
    ] = 8650,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Show only: nothing can be stopped or resumed.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Keep the token in this file, as for Prometheus; default: a new one each time.",
        ),
    ] = None,
) -> None:
    """Show all runs live in a browser, until Ctrl-C.

    It listens on this machine alone, and answers only who has the token that it prints. From
    elsewhere: ssh -L 8650:127.0.0.1:8650 HOST
    """
    from spotguard.api import pages

    def ready(address: str, count: int) -> None:
        say(f"{count} run{'' if count == 1 else 's'}; open {address}")
        note("Ctrl-C ends the dashboard; the runs go on")

    pages.serve_dashboard(
        stores or (),
        port=port,
        token_file=token_file,
        read_only=read_only,
        tell=note,
        ready=ready,
    )


def metrics(
    stores: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STORE",
            help="Stores whose runs are told, too, whichever machine controls them.",
        ),
    ] = None,
    *,
    textfile: Annotated[
        Path | None,
        typer.Option(
            "--textfile",
            metavar="FILE",
            help="Write there, in one piece, as node_exporter's textfile collector wants it.",
        ),
    ] = None,
) -> None:
    """Tell all runs in numbers, as Prometheus reads them."""
    from spotguard.api.pages import prometheus_text

    if textfile is not None:
        check_is_file(textfile, option="--textfile")
    told = prometheus_text(stores or ())
    if textfile is None:
        typer.echo(told, nl=False)
    else:
        write_file(textfile, told.encode(), option="--textfile")


def profile(
    run: AnyRunArgument = None,
    *,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_STEPS,
            metavar="N",
            help="Record the next so many steps.",
            show_default="5",
        ),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Ask nobody: tell the newest profile that is kept of this one."
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Tell of this rank; default: the slowest, if ranks differ."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write its trace there, for Perfetto or chrome://tracing."
        ),
    ] = None,
    patience: StepPatienceOption = _STEP_PATIENCE_S,
    as_json: JsonOption = False,
) -> None:
    """Record some steps of the living job, and tell the five things that cost most of them.

    In words, each with its lever. Training goes on meanwhile with the same numbers; a save or a
    notice goes first. Traces stay in the run store: --attempt tells of them when nodes are gone.
    """
    from spotguard.cli.views.profile import profile_screen

    if steps is not None and attempt is not None:
        raise UsageError(
            "--steps and --attempt exclude each other",
            hint="--attempt tells what is kept; without it the living job is asked",
        )
    if out is not None:
        check_is_file(out, option="--out")
    told, trace = looked_at_run(run).profile(
        steps, attempt=attempt, rank=rank, patience_s=patience, tell=note, raw=out is not None
    )
    if out is not None and trace is not None:
        write_file(out, trace, option="--out")
    if as_json:
        print_json(document(told))
        return
    screen = console()
    screen.print(profile_screen(told, screen.width))
    if out is None:
        say(
            f"the trace itself: spotguard profile {told.run_id} --attempt {told.attempt}"
            " --out trace.json"
        )
    else:
        say(f"{out} has the trace; open it at https://ui.perfetto.dev")


def notify(
    *,
    test: Annotated[
        bool,
        typer.Option("--test", help="Send each of them a message, to see it arrive."),
    ] = False,
) -> None:
    """Say who is told of what, by the settings of this folder; `--test` tells them something."""
    from spotguard.api import alerts

    urls, topics = alerts.alerts_named()
    if not urls:
        raise UsageError(
            "nobody is told: `notify` is not set here",
            hint='in spotguard.toml: notify = ["https://hooks.example.com/..."]',
        )
    alerts.check_urls(urls)
    say(f"told of: {', '.join(topics)}")
    failed = 0
    for url in urls:
        problem = alerts.post_to(url, _TRIAL) if test else None
        failed += problem is not None
        told = "" if not test else f": {problem}" if problem else ": told"
        say(f"{alerts.public_name(url)}{told}")
    if failed:
        raise EnvironmentFailure(
            f"{failed} of {len(urls)} could not be told.",
            hint="the URL may be old or wrong; it is not printed, for it is a secret",
        )
