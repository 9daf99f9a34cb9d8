"""A requirements file as pip reads it, so far as it says what will be installed.

Continued lines, comments, `-r` and `-c` of other files, options for indexes, `-e`, paths, URLs and
hashes are what pip's own reader knows; environment markers are part of a requirement.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from spotguard.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMENT = re.compile(r"(^|\s+)#.*$")
_OPTION_OF_LINE = re.compile(r"\s+--?[A-Za-z].*$")
"""What follows a requirement on its line: `--hash=…`, `--config-settings …`."""
_FILES: Final = ("-r", "--requirement", "-c", "--constraint")
_EDITABLE: Final = ("-e", "--editable")
_EGG = re.compile(r"[#&]egg=([A-Za-z0-9._-]+)")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.I)
_DEEPEST = 10


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a requirements file asks for."""

    lines: tuple[str, ...] = ()
    """Requirements that have a name, as `packaging` takes them; addresses are left out of them."""
    folders: tuple[str, ...] = ()
    """Projects of the user's own, as the file names them: seen from where pip runs."""
    files: tuple[Path, ...] = ()
    """The file itself, and those that it reads by `-r` and `-c`."""
    has_hashes: bool = False
    """pip then takes nothing without one."""


def plain_requirements(path: Path) -> Requirements:
    """Return what a requirements file asks for; nothing of one that cannot be read.

    Who installs it says what is wrong with it.
    """
    found = list(_read(path, _DEEPEST, set()))
    return Requirements(
        lines=tuple(text for kind, text in found if kind == "line"),
        folders=tuple(text for kind, text in found if kind == "folder"),
        files=tuple(dict.fromkeys(Path(text) for kind, text in found if kind == "file")),
        has_hashes=any(kind == "hash" for kind, _ in found),
    )


def logical_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a file as pip joins them, without comments, each with its first number.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    joined: list[tuple[int, str]] = []
    begun, rest = 0, ""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        begun = begun or number
        is_comment = line.lstrip().startswith("#")
        if line.endswith("\\") and not is_comment:
            rest += line.rstrip("\\")
            continue
        joined.append((begun, rest + (" " if is_comment and rest else "") + line))
        begun, rest = 0, ""
    if rest:
        joined.append((begun, rest))
    plain = ((number, _COMMENT.sub("", line).strip()) for number, line in joined)
    return [(number, line) for number, line in plain if line]


def _read(path: Path, depth: int, seen: set[Path]) -> Iterator[tuple[str, str]]:
    if path in seen or depth == 0:
        return
    seen.add(path)
    yield "file", str(path)
    try:
        lines = logical_lines(path)
    except (OSError, UnicodeDecodeError):
        return
    for _, line in lines:
        if "--hash" in line:
            yield "hash", ""
        option, value = _option(line)
        if option in _FILES:
            inner = list(_read(path.parent / value, depth - 1, seen))
            # What a file of constraints names is installed only if something else asks for it.
            yield from (each for each in inner if option in _FILES[:2] or each[0] == "file")
        elif option in _EDITABLE:
            yield from _asked(value)
        elif not option:
            yield from _asked(_OPTION_OF_LINE.sub("", line))


def _option(line: str) -> tuple[str, str]:
    """Return the option that a line begins with and its value; no option if it has none."""
    if not line.startswith("-"):
        return "", ""
    name, _, value = line.partition("=") if line.startswith("--") else (line, "", "")
    if not value or " " in name:
        name, _, value = line.partition(" ")
    if not line.startswith("--") and len(name) > 2:  # `-rfile`
        name, value = name[:2], f"{name[2:]} {value}".strip()
    try:
        words = shlex.split(value)
    except ValueError:
        words = [value]
    return name.strip(), words[0] if words else ""


def _asked(text: str) -> Iterator[tuple[str, str]]:
    plain = text.partition(";")[0].strip()
    named = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*(?:\[[^\]]*\])?)\s*@\s*\S", plain)
    if named:
        marker = text.partition(" ;")[2] or text.partition("; ")[2]
        yield "line", f"{named[1]} ; {marker.strip()}" if marker.strip() else named[1]
    elif egg := _EGG.search(plain):
        yield "line", egg[1]
    elif "://" in plain or plain.endswith((".whl", ".zip", ".tar.gz")):
        return  # what it is called, its own file says
    elif plain.startswith((".", "/")) or "/" in plain.partition("[")[0]:
        yield "folder", plain.partition("[")[0]
    else:
        yield "line", text


def check_no_login(setting: str, path: Path) -> None:
    """Let pass a requirements file, with those that it reads, in which no address holds a login.

    Raises:
        SpecError: one does; names the file and the line, and not the login.
    """
    for file in plain_requirements(path).files:
        try:
            lines = logical_lines(file)
        except (OSError, UnicodeDecodeError):
            continue
        for number, line in lines:
            if holds_login(line):
                raise SpecError(
                    setting,
                    f"{file.name} line {number} has an address that holds a login",
                    hint="take it out: let pip read it from a variable, as in "
                    "https://${TOKEN}@HOST, and give that by --env TOKEN=...",
                )


def holds_login(text: str) -> bool:
    """Tell whether an address in a text holds a password or a token, other than a `${VARIABLE}`."""
    for address in _URL.findall(text):
        try:
            user, _, host = urlsplit(address).netloc.rpartition("@")
        except ValueError:
            continue
        secret = re.sub(r"\$\{[A-Z0-9_]+\}", "", user)
        plain = secret.strip(":") in ("", "git", "oauth2", "x-access-token", "__token__")
        if host and not plain:
            return True
    return False
