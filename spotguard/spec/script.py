"""What can be told of a training script without running it."""

from __future__ import annotations

import ast
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from spotguard.errors import SpecError
from spotguard.shared.typo_guess import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

_RUNTIME = "spotguard.runtime"
_WAYS_IN = (f"{_RUNTIME}.", "spotguard.integrations.")
_FIX = """if an installed package does so, give --trust-script; Trainer, Lightning and Accelerate \
take one line (docs/coming-from.md); else add around the training loop:
    import spotguard.runtime as spotguard
    run = spotguard.init()
    for step in run.steps(loader, total=1000): ..."""
_MOST_FILES = 2000
"""Followed from one script; a project has fewer."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script that can be launched."""

    path: Path
    source: str
    batches: tuple[int, int] | None
    """Global batch and micro-batch, where the script states both as plain numbers."""


def read_script(path: Path) -> Script:
    """Return the script at `path`, an absolute path.

    Raises:
        SpecError: it is missing, is no Python file, or has a syntax error.
    """
    try:
        _check_path(path)
    except OSError as problem:  # such as a name that is too long
        raise SpecError("script", f"{path} cannot be read: {problem.strerror}") from problem
    source = _source(path)
    return Script(path=path, source=source, batches=_batches(_tree(source, path)))


def check_runtime(script: Script) -> None:
    """Return if the script imports spotguard's runtime, itself or through files beside it.

    Raises:
        SpecError: no such import is seen.
    """
    if not _imports_runtime(script):
        raise SpecError(
            "script",
            f"{script.path.name} does not import {_RUNTIME}, so it cannot survive",
            hint=_FIX,
        )


def _check_path(path: Path) -> None:
    if path.is_dir():
        raise SpecError("script", f"{path} is a folder; allowed: a Python file")
    if path.suffix != ".py":
        raise SpecError(
            "script",
            f"given {path.name!r}; allowed: a Python file, ending in .py",
            hint="give the Python script that trains: what a shell script exports goes to "
            "--env NAME=VALUE, its torchrun or accelerate launch to --nproc-per-node",
        )
    if not path.is_file():
        names = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        match = nearest(path.name, names)
        hint = f"did you mean {match!r}?" if match else ""
        raise SpecError("script", f"there is no file {path}", hint=hint)


def _source(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # honours a coding line, as Python itself does
            return file.read()
    except OSError as problem:
        raise SpecError("script", f"{path} cannot be read: {problem.strerror}") from problem
    except (SyntaxError, UnicodeDecodeError) as problem:
        raise SpecError("script", f"{path.name} is not text in its encoding") from problem


def _tree(source: str, path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own warnings appear when it runs
            return ast.parse(source, filename=str(path))
    except SyntaxError as problem:
        raise SpecError(
            "script", f"{path.name} has a syntax error in line {problem.lineno}: {problem.msg}"
        ) from problem
    except (ValueError, RecursionError, MemoryError) as problem:
        raise SpecError("script", f"{path.name} is not Python: {problem}") from problem


def local_files(script: Script) -> set[Path]:
    """Return the script and the files that it imports from beside it and below, as far as seen."""
    return {path for path, _ in _followed(script)}


def _imports_runtime(script: Script) -> bool:
    return any(f"{name}.".startswith(_WAYS_IN) for _, names in _followed(script) for name in names)


def _followed(script: Script) -> Iterator[tuple[Path, set[str]]]:
    """Follow the imports from file to file, beside the script and below; each is read once.

    Yields each file with the absolute names that it imports.
    """
    folder = script.path.parent
    to_read, found = [script.path], {script.path}
    while to_read:
        path = to_read.pop()
        imported = set(_imported(path))
        yield path, {name for level, name in imported if not level}
        for level, name in imported:
            base = path.parents[level - 1] if 0 < level <= len(path.parents) else folder
            new = set(_files(base, name)) - found
            found |= new
            to_read += new
        if len(found) > _MOST_FILES:
            return


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what a file imports, wherever in it: how many dots lead to it, and its dotted name."""
    try:
        tree = _tree(_source(path), path)
    except SpecError:  # a broken neighbour is for Python to report, when the script runs
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from ((node.level, f"{module}.{each.name}".lstrip(".")) for each in node.names)
        elif isinstance(node, ast.Call) and node.args:
            first = node.args[0]  # importlib.import_module("spotguard.runtime")
            if isinstance(first, ast.Constant) and _is_dotted_name(first.value):
                yield 0, first.value


def _is_dotted_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))


def _files(base: Path, name: str) -> Iterator[Path]:
    """Yield the files that `import name` runs, if they lie below `base`; packages first."""
    for part in name.split("."):
        base /= part
        yield from filter(Path.is_file, (base.with_suffix(".py"), base / "__init__.py"))


def _batches(tree: ast.Module) -> tuple[int, int] | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            sizes = [_count(node, name) for name in ("global_batch_size", "micro_batch_size")]
            if sizes[0] and sizes[1]:
                return sizes[0], sizes[1]
    return None


def _count(call: ast.Call, name: str) -> int | None:
    """Return a call's keyword argument if it is written as a whole number above 0."""
    for keyword in call.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg == name and isinstance(value, int) and value > 0:
            return value
    return None
