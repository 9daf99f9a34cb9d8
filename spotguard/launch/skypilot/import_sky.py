"""The one way to SkyPilot: importing it takes seconds and 150 MB, so only when it is used."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from spotguard.errors import MissingExtra, SpecError
from spotguard.shared.paths import expanded

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import ModuleType

_PAYLOAD = re.compile(r"<sky-payload[^>]*>(.*?)</sky-payload>\n?")
_LONGEST = 300
"""Characters of a complaint of SkyPilot's that are repeated."""
_MARKUP = re.compile(r"</?(?:rich_\w+|heartbeat|retry)>|\[/?[a-z# ]*\]")


def load_sky() -> ModuleType:
    """Return SkyPilot's package.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        with off_stdout():  # its loggers keep the stream that they see now
            import sky
            import sky.catalog
            import sky.catalog.common
    except ImportError as problem:
        raise MissingExtra(
            "SkyPilot is not installed, and every place but local needs it",
            hint="pip install 'spotguard[sky]'",
        ) from problem
    module: ModuleType = sky
    return module


def check_task(task: dict[str, Any]) -> None:
    """Let pass what SkyPilot takes for a task; asks nobody, and starts nothing.

    Raises:
        SpecError: it does not, for something that the user's own template says.
    """
    sky = load_sky()
    try:
        with off_stdout():
            sky.Task.from_yaml_config(copy.deepcopy(task))  # which takes it apart
    except (ValueError, TypeError, AssertionError) as problem:
        said = " ".join(str(problem).split())[:_LONGEST]
        raise SpecError("template", f"SkyPilot refuses what it makes: {said}") from problem


def off_stdout() -> AbstractContextManager[object]:
    """Send to stderr what SkyPilot prints on stdout: JSON stays JSON."""
    return contextlib.redirect_stdout(cast("TextIO", _Plainly(sys.stderr)))


class _Plainly:
    """A stream whose `<sky-payload>` lines become the words in them, each once.

    They tell a spinner what to show, and in a process that is no API server nobody reads them.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""

    def write(self, text: str) -> int:
        """Write what is left of `text`; return the length of all of it."""
        self._stream.write(_PAYLOAD.sub(self._words_of, text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _words_of(self, payload: re.Match[str]) -> str:
        try:
            words = json.loads(payload[1])
        except (ValueError, RecursionError):
            return payload[0]
        words = _MARKUP.sub("", words).strip() if isinstance(words, str) else ""
        if words in ("", self._shown):
            return ""
        self._shown = words
        return f"{words}\n"


def in_use() -> bool:
    """Return whether SkyPilot is installed and was ever used or set up here. Imports nothing.

    Asking a SkyPilot that never was would start its API server, and tell nothing.
    """
    if find_spec("sky") is None:
        return False
    folder = expanded(os.environ.get("SKY_RUNTIME_DIR", "~")) / ".sky"
    traces = (folder / "state.db", folder / "config.yaml")
    return "SKYPILOT_API_SERVER_ENDPOINT" in os.environ or any(map(Path.exists, traces))
