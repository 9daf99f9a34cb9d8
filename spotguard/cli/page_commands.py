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


def _write(path: Path, page: str) -> None:
    """Write a file in one piece: nobody finds half of it."""
    draft = path.with_name(f".{path.name}.new")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    except OSError as problem:
        draft.unlink(missing_ok=True) if path.parent.is_dir() else None
        raise UsageError(
            f"--html: {path} cannot be written: {problem.strerror or problem}",
            hint="name a file in a folder that exists",
        ) from problem
