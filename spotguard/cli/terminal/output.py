"""Where words go: consoles, JSON documents, questions, and cleaning of text that others wrote."""

from __future__ import annotations

import json
import math
import sys
from textwrap import indent
from typing import TYPE_CHECKING, Any

from spotguard.errors import SpotguardError, UsageError
from spotguard.shared.plain_text import clean as clean
from spotguard.shared.plain_text import one_line as one_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    """Return a console that never interprets what it is given as markup.

    Colour only on a terminal, and never under `NO_COLOR`; 80 columns when there is no terminal.
    """
    from rich.console import Console as RichConsole

    class QuietConsole(RichConsole):
        """Leaves a closed pipe to `main`, which ends quietly."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return QuietConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(text: str) -> None:
    """Print one line to stdout; long lines are left whole."""
    sys.stdout.write(clean(text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print one line to stderr, where it cannot spoil a JSON document."""
    sys.stderr.write(clean(text) + "\n")
    sys.stderr.flush()


def check_is_file(path: Path, *, option: str) -> None:
    """Let pass what a file can be called; `option` is by which it was asked for.

    Raises:
        UsageError: it is a folder, or has no name.
    """
    if not path.name or path.is_dir():
        raise UsageError(
            f"{option}: {path} is a folder, not a file",
            hint=f"name a file in it: {option} {path / 'FILE'}",
        )


def write_file(path: Path, content: bytes, *, option: str) -> None:
    """Write a file in one piece: nobody finds half of it. `option` is by which it was asked for."""
    check_is_file(path, option=option)
    draft = path.with_name(f".{path.name}.new")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as problem:
        draft.unlink(missing_ok=True) if path.parent.is_dir() else None
        raise UsageError(
            f"{option}: {path} cannot be written: {problem.strerror or problem}",
            hint="name a file in a folder that exists",
        ) from problem


def print_json(body: dict[str, Any]) -> None:
    """Print one JSON document to stdout, indented. What is not finite becomes null."""
    sys.stdout.write(json.dumps(_finite(body), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_json_list(body: dict[str, Any], name: str, items: Iterable[dict[str, Any]]) -> None:
    """Print the same with a list as its last member, item by item: it may be a very long one."""
    first = {key: value for key, value in body.items() if key != name}
    head = json.dumps(_finite(first), indent=2, allow_nan=False).removesuffix("\n}")
    sys.stdout.write(f'{head},\n  "{name}": [')
    comma = ""
    for item in items:
        text = json.dumps(_finite(item), indent=2, allow_nan=False)
        sys.stdout.write(f"{comma}\n{indent(text, '    ')}")
        comma = ","
    sys.stdout.write("\n  ]\n}\n" if comma else "]\n}\n")
    sys.stdout.flush()


def print_json_line(body: dict[str, Any]) -> None:
    """Print one JSON document on one line to stdout."""
    sys.stdout.write(json.dumps(_finite(body), allow_nan=False) + "\n")
    sys.stdout.flush()


def clean_log_line(text: str) -> str:
    """Return a line of a log as a terminal would show it after its carriage returns."""
    return clean(text.rstrip("\r\n").rsplit("\r", 1)[-1])


def confirm(question: str, *, refused: str) -> None:
    """Return if the user says yes.

    Raises:
        UsageError: nobody can be asked, since stdin is no terminal.
        SpotguardError: the answer is not yes; `refused` says what did not happen.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "this needs a confirmation, and there is no terminal to ask on", hint="pass --yes"
        )
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise SpotguardError(f"not confirmed: {refused}")


def _finite(value: Any) -> Any:
    """JSON has no NaN: a loss that is none is unknown."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
