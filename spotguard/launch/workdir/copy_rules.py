"""Which files of a folder SkyPilot copies to nodes, and by which line the others stay behind.

SkyPilot runs `rsync -a` with the ignore files as lists of excludes (`command_runner.py` in 0.14):
`.skyignore` of each folder if the top folder has one, else `.gitignore` of each folder and
`.git/info/exclude`. rsync reads these lines otherwise than git does:

- a line that begins with `!` brings nothing back: it is a pattern for names that begin with `!`
- a file that git tracks is left behind like any other
- nothing is stripped of a line, and a pattern with a slash matches in any folder

Links are copied as links, wherever they lead; `.git` is copied.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SKYIGNORE: Final = ".skyignore"
GITIGNORE: Final = ".gitignore"
GIT_EXCLUDE: Final = ".git/info/exclude"
_MOST_BYTES = 1 << 20
"""Of a file of rules; a longer one is read so far."""
_CLASS = re.compile(r"\[(?P<not>[!^]?)(?P<body>\]?(?:\[:\w+:\]|\\.|[^\]\\])*)\]", re.S)
_POSIX: Final = {
    **{"alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": r" \t", "digit": "0-9", "lower": "a-z"},
    **{"punct": r"!-/:-@\[-`{-~", "space": r"\s", "upper": "A-Z", "xdigit": "0-9a-fA-F"},
}


@dataclass(frozen=True, order=True)
class NotCopied:
    """A file or folder that stays behind, and the line that says so."""

    path: str
    """Seen from the folder that is copied."""
    rules: str
    """The file of rules, seen from there."""
    line: int

    def words(self) -> str:
        """Return it as a person reads it."""
        return f"{self.path}, by line {self.line} of {self.rules}"


@dataclass(frozen=True)
class _Rule:
    rules: str
    line: int
    only_folders: bool
    name_only: bool
    """It is matched against the last part of a path alone."""
    with_folder: bool
    """It ends in `/***`: a folder itself, and all that is in it."""
    base: str
    """The folder, with a slash, from which an anchored pattern is seen; empty: the top."""
    pattern: re.Pattern[str]
    keeps: bool = False
    """What it matches is copied, whatever a later line says."""

    def matches(self, path: str, *, is_folder: bool) -> bool:
        if self.only_folders and not is_folder:
            return False
        if self.name_only:
            return self.pattern.fullmatch(path.rpartition("/")[2]) is not None
        if not path.startswith(self.base):
            return False
        end = "/" if is_folder and self.with_folder else ""
        return self.pattern.fullmatch(f"/{path[len(self.base) :]}{end}") is not None


class CopyRules:
    """The rules of one folder. Reads each file of rules once, as it comes to that folder."""

    def __init__(self, top: Path) -> None:
        """`top` is the folder that is copied."""
        self._top = top
        self._name = SKYIGNORE if (top / SKYIGNORE).exists() else GITIGNORE
        everywhere: list[_Rule] = []
        if self._name == GITIGNORE:
            everywhere = list(_read(top / GIT_EXCLUDE, GIT_EXCLUDE, "", has_prefixes=True))
        self._no_folders = _CLEARED in everywhere
        self._everywhere = everywhere
        self._of: dict[str, list[_Rule]] = {}

    def left_behind(self, path: str, *, is_folder: bool) -> NotCopied | None:
        """Return why a path stays behind, if it does; its folder is copied.

        A link is no folder, wherever it leads.
        """
        for rule in self._rules_in(path.rpartition("/")[0]):
            if rule.matches(path, is_folder=is_folder):
                return None if rule.keeps else NotCopied(path, rule.rules, rule.line)
        return None

    def why(self, path: str) -> NotCopied | None:
        """Return why a path that exists stays behind: itself, or a folder that it is in."""
        parts = path.split("/")
        for length in range(1, len(parts) + 1):
            part = "/".join(parts[:length])
            is_folder = length < len(parts) or _is_folder(self._top / part)
            if (found := self.left_behind(part, is_folder=is_folder)) is not None:
                return found
        return None

    def _rules_in(self, folder: str) -> list[_Rule]:
        """Return what counts in a folder: its own lines, those above, those of git's own file."""
        known = self._everywhere if self._no_folders else self._of.get(folder)
        if known is None:
            above = self._rules_in(folder.rpartition("/")[0]) if folder else self._everywhere
            name = f"{folder}/{self._name}" if folder else self._name
            base = f"{folder}/" if folder else ""
            known = [*_read(self._top / name, name, base, has_prefixes=False), *above]
            self._of[folder] = known
        return known


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _read(path: Path, shown: str, base: str, *, has_prefixes: bool) -> Iterator[_Rule]:
    """Yield the rules of a file, as rsync understands it; of one that is not there, none."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", "surrogateescape")
    except OSError:
        return
    found: list[_Rule] = []
    kept = False
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        if not line or line[0] in "#;":
            continue
        if has_prefixes:  # `--exclude-from` knows these, a merged list of excludes does not
            if line == "!":
                found = [_CLEARED]
                continue
            kept = line.startswith("+ ")
            line = line[2:] if line.startswith(("+ ", "- ")) else line
        if (rule := _rule(line, shown, number, base)) is not None:
            found.append(replace(rule, keeps=kept))
    yield from found


_CLEARED: Final = _Rule("", 0, False, False, False, "", re.compile("(?!)"))
"""Stands where a line of git's own file makes rsync forget all rules before it."""


def _rule(text: str, rules: str, line: int, base: str) -> _Rule | None:
    only_folders = text.endswith("/") and len(text) > 1
    pattern = text[:-1] if only_folders else text
    anchored = pattern.startswith("/")
    body = pattern[1:] if anchored else pattern
    if not body:
        return None
    name_only = not anchored and "/" not in body and "**" not in body
    try:
        compiled = re.compile(_regex(body, anchored=anchored, name_only=name_only), re.S)
    except re.error:  # a class such as [z-a], which matches nothing
        return None
    return _Rule(
        rules=rules,
        line=line,
        only_folders=only_folders,
        name_only=name_only,
        with_folder=body.endswith("/***"),
        base=base if anchored else "",
        pattern=compiled,
    )


def _regex(body: str, *, anchored: bool, name_only: bool) -> str:
    """Return what matches a whole path that begins with a slash, or a name."""
    matched = _wild(body) if re.search(r"[*?\[]", body) else re.escape(body)
    if name_only:
        return matched
    if anchored:
        return f"/{matched}"
    if body.startswith("**"):
        return matched
    return f"(?:/.*)?/{matched}"


def _wild(body: str) -> str:
    """Return rsync's wildcards as a regular expression."""
    out, at = [], 0
    while at < len(body):
        char = body[at]
        if char == "*":
            end = at
            while end < len(body) and body[end] == "*":
                end += 1
            out.append(".*" if end - at > 1 else "[^/]*")
            at = end
        elif char == "?":
            out.append("[^/]")
            at += 1
        elif char == "[" and (found := _CLASS.match(body, at)):
            out.append(_class(found["body"], negated=bool(found["not"])))
            at = found.end()
        elif char == "\\" and at + 1 < len(body):
            out.append(re.escape(body[at + 1]))
            at += 2
        else:
            out.append(re.escape(char))
            at += 1
    return "".join(out)


def _class(body: str, *, negated: bool) -> str:
    parts: list[str] = []
    for piece in re.findall(r"\[:\w+:\]|\\.|.", body, re.S):
        if len(piece) > 2:
            parts.append(_POSIX.get(piece[2:-2], ""))
        elif len(piece) == 2:
            parts.append(re.escape(piece[1]))
        else:
            parts.append(piece if piece == "-" else re.escape(piece))
    return f"(?!/)[{'^' if negated else ''}{''.join(parts)}]"


def first_of(found: Sequence[NotCopied], most: int = 3) -> str:
    """Return some of what stays behind in words, and how many more there are."""
    shown = "; ".join(each.words() for each in found[:most])
    more = len(found) - most
    return f"{shown}; and {more} more" if more > 0 else shown


def way_out(found: Sequence[NotCopied]) -> str:
    """Return what a person does to have files copied that stay behind."""
    if found and found[0].rules.rpartition("/")[2] == SKYIGNORE:
        return f"take that line out of {found[0].rules}"
    return f"{SKYIGNORE} overrides it (an empty one has all copied)"
