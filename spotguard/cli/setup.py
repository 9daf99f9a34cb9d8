"""`init` and `config show`: first files, and where each setting comes from."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
from pathlib import Path
from typing import Annotated

import typer

from spotguard.cli.common import JsonOption
from spotguard.cli.flags import resolve_job, takes_job_flags
from spotguard.cli.terminal.output import console, print_json, say
from spotguard.cli.up import JobArguments, ScriptArgument
from spotguard.errors import EnvironmentFailure, UsageError


def init(
    *,
    template: Annotated[
        str, typer.Option(metavar="NAME", help="Task template that the settings start from.")
    ] = "base",
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
) -> None:
    """Write a first spotguard.toml and a small train.py into this folder."""
    from spotguard.api.settings import starter_files

    files = starter_files(template)
    taken = [name for name in files if Path(name).exists() or Path(name).is_symlink()]
    if taken and not force:
        raise UsageError(
            f"{' and '.join(taken)} already {'exist' if len(taken) > 1 else 'exists'} in this "
            f"folder; nothing was written",
            hint="pass --force to overwrite, or change to an empty folder",
        )
    for name, text in files.items():
        try:
            Path(name).write_text(text, encoding="utf-8")
        except OSError as problem:
            raise EnvironmentFailure(f"{name} cannot be written: {problem.strerror}") from problem
        say(f"wrote {name}")
    say("next: spotguard up train.py")


@takes_job_flags()
def config_show(
    script: ScriptArgument,
    args: JobArguments = None,
    *,
    flags: dict[str, object],
    as_json: JsonOption = False,
) -> None:
    """Show each setting of SCRIPT with where it comes from; variables' values stay hidden."""
    from spotguard.cli.views.lists import config_table

    resolved = resolve_job(script, args or [], flags)
    if as_json:
        print_json(resolved.to_json())
    else:
        console().print(config_table(resolved.values))
