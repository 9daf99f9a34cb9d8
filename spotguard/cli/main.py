"""The entry point, and the one place where errors become sentences and exit codes."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spotguard.cli import (
    check,
    checkpoints,
    page_commands,
    run_commands,
    setup,
    status_commands,
    up,
)
from spotguard.cli.policy import controller, market, simulate, sweep, team
from spotguard.cli.terminal.output import note, say
from spotguard.cli.terminal.plain_help import PlainCommand, PlainGroup
from spotguard.errors import SpotguardError, UsageError
from spotguard.shared.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_CODES: Final = (
    "Exit codes: 0 finished · 1 unexpected · 2 usage · 3 environment · 10 the job's own failure · "
    "11 no capacity · 20 budget reached · 21 deadline reached · 30 contact lost · "
    "75 still running, detached, or stopped. "
    "What is saved is told by the sentence, not by the code."
)
CLOSED_PIPE_EXIT_CODE: Final = 141
"""What a shell reports for any tool that ended of SIGPIPE."""
INTERRUPTED_EXIT_CODE: Final = 130
"""What a shell reports for any tool that ended of Ctrl-C."""

_PARSE_ERROR: Final[Any] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
"""Base of what typer raises for a wrong command line (it exports only some of its children)."""

app = typer.Typer(
    cls=PlainGroup,
    name="spotguard",
    help="Train on spot machines as if they never died.",
    epilog=EXIT_CODES,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config = typer.Typer(cls=PlainGroup, help="Where each setting comes from.", no_args_is_help=False)
saves = typer.Typer(
    cls=PlainGroup, help="What is saved, and getting it out.", no_args_is_help=False
)
controllers = typer.Typer(
    cls=PlainGroup, help="Where a run's controller lives.", no_args_is_help=False
)
spot_market = typer.Typer(
    cls=PlainGroup, help="What is known of spot markets.", no_args_is_help=False
)

_NO_OPTIONS: Final = {
    "--any-of": "of several, any will do: --infra aws,gcp --gpus A100:8,H100:8",
    "--env-file": "read it into this shell (set -a; . ./FILE; set +a), then name each variable: "
    "--env NAME takes the shell's value",
    "-m": "give the module's file, `spotguard up pkg/train.py`, or a script of two lines that "
    "imports it and calls its main()",
}
"""What users of other tools type, and what does the same here."""
_RUNNING, _LOOKING, _CARE = "Run", "Look", "Prepare and check"
for _panel, _commands in (
    (
        _RUNNING,
        (up.up, run_commands.stop, run_commands.down, run_commands.resume, run_commands.adopt),
    ),
    (
        _LOOKING,
        (
            status_commands.status,
            status_commands.history,
            status_commands.logs,
            status_commands.runs,
            sweep.sweep,
            team.team,
            page_commands.profile,
            page_commands.report,
            page_commands.dashboard,
            page_commands.metrics,
            run_commands.ssh,
        ),
    ),
    (
        _CARE,
        (up.plan, simulate.simulate, check.drill, check.doctor, page_commands.notify, setup.init),
    ),
):
    for _command in _commands:
        app.command(cls=PlainCommand, rich_help_panel=_panel)(_command)
app.command(name="exec", cls=PlainCommand, rich_help_panel=_LOOKING)(run_commands.exec_)
config.command(name="show", cls=PlainCommand)(setup.config_show)
for _command in (
    checkpoints.ls,
    checkpoints.show,
    checkpoints.verify,
    checkpoints.prune,
    checkpoints.archive,
    checkpoints.pin,
    checkpoints.unpin,
    checkpoints.export,
):
    saves.command(cls=PlainCommand)(_command)
for _command in (controller.status, controller.move, controller.down, controller.serve):
    controllers.command(cls=PlainCommand)(_command)
for _command in (market.show, market.refresh):
    spot_market.command(cls=PlainCommand)(_command)
app.add_typer(controllers, name="controller", rich_help_panel=_RUNNING)
app.add_typer(saves, name="checkpoints", rich_help_panel=_LOOKING)
app.add_typer(spot_market, name="market", rich_help_panel=_CARE)
app.add_typer(config, name="config", rich_help_panel=_CARE)


def _print_version(asked: bool) -> None:
    if asked:
        say(f"spotguard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train on spot machines as if they never died."""
    _help_without_command(context)


@controllers.callback(invoke_without_command=True)
def _controllers(context: typer.Context) -> None:
    """Where a run's controller lives."""
    _help_without_command(context)


@saves.callback(invoke_without_command=True)
def _saves(context: typer.Context) -> None:
    """What is saved, and getting it out."""
    _help_without_command(context)


@config.callback(invoke_without_command=True)
def _config(context: typer.Context) -> None:
    """Where each setting comes from."""
    _help_without_command(context)


@spot_market.callback(invoke_without_command=True)
def _spot_market(context: typer.Context) -> None:
    """What is known of spot markets."""
    _help_without_command(context)


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        said = context.get_help()
        if said:  # rich help has printed itself by now
            say(said)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. Nothing is raised."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets '?', not a crash
    try:
        code = app(
            args=None if arguments is None else list(arguments),
            prog_name="spotguard",
            standalone_mode=False,
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit as left:  # typer leaves so once it has completed a word, or installed that
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        return _say_error(str(left.code), "", SpotguardError.exit_code)
    except SpotguardError as problem:
        return _say_error(problem.message, problem.hint, problem.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # What is still buffered must not raise again while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE_EXIT_CODE
    except _PARSE_ERROR as problem:
        return _say_usage(problem)
    except Exception as problem:  # noqa: BLE001 - the top of the CLI: a user gets a sentence
        return _say_unexpected(problem)


def _say_error(message: str, hint: str, code: int) -> int:
    note(f"error: {message}")
    if hint:
        note(f"hint: {hint}")
    return code


def _say_usage(problem: Any) -> int:
    context = getattr(problem, "ctx", None)
    command = context.command_path if context is not None else "spotguard"
    message = problem.format_message().strip().rstrip(".")
    hint = f"{command} --help"
    if found := next((o for o in _NO_OPTIONS if f"No such option: {o}" in message), ""):
        hint = _NO_OPTIONS[found]
    elif "No such option" in message and any(p.name == "args" for p in _parameters(context)):
        hint += "; the script's own arguments come after `--`"
    elif "No such command" in message and message.split("'")[1].endswith(".py"):
        hint = "to run a script: spotguard up SCRIPT"
    elif "No such command" in message and "Did you mean" not in message and context is not None:
        from spotguard.shared.typo_guess import did_you_mean

        hint = f"{did_you_mean(message.split(chr(39))[1], context.command.commands)}; {hint}"
    return _say_error(message, hint, UsageError.exit_code)


def _parameters(context: Any) -> Sequence[Any]:
    return context.command.params if context is not None else ()


def _say_unexpected(problem: Exception) -> int:
    told = "".join(traceback.format_exception(problem))
    if os.environ.get("SPOTGUARD_DEBUG"):
        sys.stderr.write(told)
    what = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return _say_error(
        f"this is a bug of spotguard: {what}; the traceback is in {_keep(told)}",
        "runs in the background are not affected: spotguard status",
        SpotguardError.exit_code,
    )


def _keep(told: str) -> str:
    """Write a traceback where only the user can read it; return the path."""
    name = time.strftime("crash-%Y%m%d-%H%M%S-")
    for folder in (*_home(), Path(tempfile.gettempdir())):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(prefix=name, suffix=".txt", dir=folder)
        except OSError:
            continue
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(told)
        return path
    return "no file (neither spotguard's home nor the temporary folder can be written)"


def _home() -> tuple[Path, ...]:
    try:
        from spotguard.api.settings import spotguard_home

        return (spotguard_home(),)
    except (ImportError, SpotguardError):  # what is broken may be what this needs, too
        return ()


if __name__ == "__main__":
    sys.exit(main())
