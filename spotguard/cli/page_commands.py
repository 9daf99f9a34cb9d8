"""`report`, `dashboard` and `metrics`: a run on a page, and in numbers for Prometheus."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
from pathlib import Path
from typing import Annotated

import typer

from spotguard.cli.common import JsonOption, RunArgument, named_run
from spotguard.cli.terminal.output import note, print_json, say
from spotguard.errors import UsageError
from spotguard.shared.documents import document


def report(
    run: RunArgument = None,
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
    from spotguard.control import api

    run_id = named_run(run)
    told = api.report(run_id)
    if as_json:
        print_json(document(told))
        if html is None:
            return
    from spotguard.pages.html import report_html
    from spotguard.pages.run_page import run_page

    path = Path(f"{run_id}.html") if html is None else html
    _write(path, report_html(run_page(told)))
    tell = note if as_json else say
    tell(f"{path} has the report of {run_id}; open it in a browser")


def _write(path: Path, page: str, *, option: str = "--html") -> None:
    """Write a file in one piece: nobody finds half of it."""
    draft = path.with_name(f".{path.name}.new")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    except OSError as problem:
        draft.unlink(missing_ok=True) if path.parent.is_dir() else None
        raise UsageError(
            f"{option}: {path} cannot be written: {problem.strerror or problem}",
            hint="name a file in a folder that exists",
        ) from problem


def dashboard(
    stores: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STORE]...",
            help="Stores whose runs are shown, too, whichever machine controls them.",
        ),
    ] = None,
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on loopback; 0 takes a free one.")
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
    from spotguard.control import api
    from spotguard.pages.dashboard.serve import serve, token_in

    fleet = api.fleet(stores or (), note)
    token = token_in(token_file)
    fleet.refresh()

    def ready(address: str) -> None:
        count = len(fleet.summaries())
        say(f"{count} run{'' if count == 1 else 's'}; open {address}")
        note("Ctrl-C ends the dashboard; the runs go on")

    serve(fleet, port=port, token=token, read_only=read_only, ready=ready)


def metrics(
    stores: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STORE]...",
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
    from spotguard.control import api
    from spotguard.pages.metrics import exposition

    told = exposition(api.measures(stores or ())).decode()
    if textfile is None:
        typer.echo(told, nl=False)
    else:
        _write(textfile, told, option="--textfile")
