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
from spotguard.launch.local.smoke_driver import end_with_parent
from spotguard.spec.script import local_files, read_script

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.M)
_ACCEPTS = re.compile(r'File "[^"\n]+", line \d+ in accept$', re.M)
_KEEPERS = re.compile(r"^track$|LR$|LROnPlateau$|^CosineAnnealing|sched", re.I)
"""Calls that are given an optimizer and do not step it."""
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
        frames = _LINE.findall(_main_thread(stacks))
        return self.innermost(reversed(frames)), str(frames[0][0]) if frames else ""

    def is_any_thread_in(self, stacks: str, libraries: frozenset[str]) -> bool:
        """Tell whether a thread was in a file or package of these names, that is not the user's.

        One that waits for somebody to connect does not count, as a server or a rendezvous does; nor
        does one that spotguard itself has for the cloud's notices.
        """
        threads = (t for t in _threads(stacks) if not _ACCEPTS.match(t.lstrip()))
        return any(self._is_in(thread, libraries) for thread in threads)

    def is_main_thread_in(self, stacks: str, libraries: frozenset[str]) -> bool:
        """Tell whether the main thread was in a file or package of these names."""
        return self._is_in(_main_thread(stacks), libraries)

    def _is_in(self, thread: str, libraries: frozenset[str]) -> bool:
        files = [Path(file) for file, _ in _LINE.findall(thread)]
        inside = [not libraries.isdisjoint(self._in_library(file)) for file in files]
        callers = zip([*files, Path()][1:], [*inside, False][1:], strict=True)
        return any(
            is_in and not caller_is_in and not caller.is_relative_to(_OURS)
            for is_in, (caller, caller_is_in) in zip(inside, callers, strict=True)
        )

    def _in_library(self, path: Path) -> tuple[str, ...]:
        """Return the way to a file from where packages, or Python's own, lie; else nothing."""
        installed = [n for n, part in enumerate(path.parts, start=1) if part in _INSTALLED]
        if installed:
            return path.parts[installed[-1] :]
        folder = next((each for each in self._python if path.is_relative_to(each)), None)
        return path.relative_to(folder).parts if folder else ()

    def call_of(self, *names: str) -> CodeLine | None:
        """Return the first call in the script of a method or function with one of these names."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and _called(node) in names:
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
        return not any(tree is None or name in _used(tree) for tree in self._trees)

    def keeps_tracked(self) -> bool:
        """Tell whether what the script tracks is surely in no hands but its own, models aside.

        Then all of it is made by a call and has a name, of which the files read use attributes
        only, beside `track` and schedulers.
        """
        given = _tracked(self._tree)
        if given is None:
            return False
        names = {name for name in given if not _is_model(self._tree, name)}
        if not names or not names <= _made(self._tree):
            return False
        return not any(tree is None or names & _handed_on(tree) for tree in self._trees)

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

    def told_at(self, file: str, line: int) -> str:
        """Return a line of a file in words."""
        return self.told(CodeLine(file, line))

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
    def _trees(self) -> list[ast.Module | None]:
        return [_parsed(path) for path in local_files(read_script(self._script))]

    @cached_property
    def _tree(self) -> ast.Module:
        return _parsed(self._script) or ast.Module(body=[], type_ignores=[])


def _threads(stacks: str) -> list[str]:
    return [part for part in _THREAD.split(stacks) if _LINE.search(part)]


def _main_thread(stacks: str) -> str:
    threads = _threads(stacks)
    waits = f" in {end_with_parent.__name__}"  # a thread of the driver's own
    mine = [thread for thread in threads if "smoke_driver.py" in thread and waits not in thread]
    return mine[-1] if mine else threads[-1] if threads else ""  # of a crash, the last word


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


def _called(call: ast.Call) -> str:
    """Return the name of what is called, without what it is an attribute of."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _tracked(tree: ast.AST) -> set[str] | None:
    """Return names of what is tracked; None if not all of it has one."""
    found: set[str] = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _called(call) == "track":
            if any(keyword.arg is None for keyword in call.keywords):
                return None
            for value in _arguments(call):
                if not isinstance(value, ast.Name):
                    return None
                found.add(value.id)
    return found


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_model(tree: ast.AST, name: str) -> bool:
    """Tell whether something is called, or asked for its parameters."""
    used = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    of = [n.value for n in attributes if n.attr == "parameters"]
    return any(isinstance(node, ast.Name) and node.id == name for node in (*used, *of))


def _made(tree: ast.AST) -> set[str]:
    """Return names, each of them alone, to which the result of a call is given."""
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and len(n.targets) == 1]
    called = [n.targets[0] for n in assigned if isinstance(n.value, ast.Call)]
    return {target.id for target in called if isinstance(target, ast.Name)}


def _handed_on(tree: ast.AST) -> set[str]:
    """Return names that are read for more than an attribute, `track` or a scheduler."""
    kept = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _KEEPERS.search(_called(call)):
            kept |= set(map(id, _arguments(call)))
    read = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return {node.id for node in read if id(node) not in kept}


def _text_of(path: Path, line: int) -> str:
    try:
        with tokenize.open(path) as file:
            text = next((t for n, t in enumerate(file, start=1) if n == line), "").strip()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
    shown = "".join(c for c in text if c.isprintable())
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."
