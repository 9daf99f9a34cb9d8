"""Which line of the user's own code is to blame: of a traceback, of written stacks, of a call."""

from __future__ import annotations

import ast
import re
import sysconfig
import tokenize
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import spotguard
from spotguard.spec.script import local_files, read_script

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.M)
_LONGEST: Final = 80
_INSTALLED = ("site-packages", "dist-packages")
_OURS = Path(spotguard.__file__).parent


@dataclass(frozen=True)
class CodeLine:
    """A line of a file."""

    file: str
    line: int


class Code:
    """The user's code: the script, and whatever is neither installed nor Python's nor ours."""

    def __init__(self, script: str, workdir: str) -> None:
        self._script = Path(script)
        self._workdir = workdir
        paths = sysconfig.get_paths()
        self._python = [Path(paths[name]) for name in ("stdlib", "platstdlib")]

    def innermost(self, frames: Iterable[Sequence[object]]) -> CodeLine | None:
        """Return the last of these frames (file, line) that is the user's."""
        mine = [CodeLine(str(file), int(str(line))) for file, line in frames if self.is_mine(file)]
        return mine[-1] if mine else None

    def has_below(self, path: str) -> bool:
        """Tell whether a path is below the workdir, which the nodes have as it is here."""
        return Path(path).is_relative_to(self._workdir)

    def in_text(self, text: str) -> CodeLine | None:
        """Return the innermost line of the user's in a traceback that is part of a text."""
        return self.innermost(_LINE.findall(text))

    def in_stacks(self, stacks: str) -> tuple[CodeLine | None, str]:
        """Return where the main thread was, and the file that it was in innermost of all.

        Args:
            stacks: as `faulthandler` writes them, the most recent call first.
        """
        threads = [part for part in _THREAD.split(stacks) if _LINE.search(part)]
        mine = [t for t in threads if "smoke_driver.py" in t]
        main = mine[-1] if mine else threads[-1] if threads else ""  # of a crash, the last word
        frames = _LINE.findall(main)
        return self.innermost(reversed(frames)), str(frames[0][0]) if frames else ""

    def call_of(self, *names: str) -> CodeLine | None:
        """Return the first call in the script of a method or function with one of these names."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else ""
                name = called.id if isinstance(called, ast.Name) else name
                if name in names:
                    return CodeLine(str(self._script), node.lineno)
        return None

    def attribute_alone(self, name: str) -> CodeLine | None:
        """Return the first statement in the script that is only this attribute: not called."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Expr) and getattr(node.value, "attr", None) == name:
                return CodeLine(str(self._script), node.lineno)
        return None

    def never_uses(self, name: str) -> bool:
        """Tell whether nothing in the script and the files that it imports from beside it uses it.

        An attribute that stands alone is no use. What is looked up by its name as a text is one.
        """
        trees = [_parsed(path) for path in local_files(read_script(self._script))]
        return bool(trees) and not any(tree is None or name in _used(tree) for tree in trees)

    @property
    def last(self) -> CodeLine:
        """The script's last statement."""
        line = max((node.lineno for node in self._tree.body), default=1)
        return CodeLine(str(self._script), line)

    def told(self, place: CodeLine | None) -> str:
        """Return a place in words: the file as seen from the workdir, the line and what is there.

        Without a place, the script.
        """
        if place is None:
            return self._script.name
        path = Path(place.file)
        shown = path.relative_to(self._workdir) if path.is_relative_to(self._workdir) else path
        text = _text_of(path, place.line)
        return f"{shown} line {place.line}{f' (`{text}`)' if text else ''}"

    def is_mine(self, file: object) -> bool:
        """Tell whether a file is the user's."""
        path = Path(str(file))
        if path == self._script:
            return True
        return (
            path.is_absolute()
            and not any(name in path.parts for name in _INSTALLED)
            and not any(path.is_relative_to(folder) for folder in (*self._python, _OURS))
        )

    @cached_property
    def _tree(self) -> ast.Module:
        return _parsed(self._script) or ast.Module(body=[], type_ignores=[])


def _parsed(path: Path) -> ast.Module | None:
    try:
        with tokenize.open(path) as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # it was read before; it may change
        return None


def _used(tree: ast.Module) -> set[str]:
    """Return names of attributes that are more than a statement of their own, and short texts."""
    alone = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    named = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and id(n) not in alone}
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    return named | {text for text in texts if isinstance(text, str)}


def _text_of(path: Path, line: int) -> str:
    try:
        with tokenize.open(path) as file:
            text = next((t for n, t in enumerate(file, start=1) if n == line), "").strip()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
    shown = "".join(c for c in text if c.isprintable())
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."
