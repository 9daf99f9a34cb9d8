"""Modules that are named where no type checker looks: in strings, in pages, in YAML."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.same_everywhere

ROOT = Path(__file__).parents[2]
KINDS = ("*.py", "*.md", "*.toml", "*.yaml", "*.sh", "Makefile")
NAMED = re.compile(r"(?<![\w./-])((?:spotguard|tests|benchmarks)(?:\.[a-z_]\w*){2,})(?![\w(/-])")
"""Of two parts it may be a file (spotguard.toml), or what a script calls (spotguard.init)."""
IMPORTED = re.compile(
    r"from ((?:spotguard|tests|benchmarks)(?:\.\w+)*) import \(?([\w ,\n]+?)\)?(?:[;\"'#\\]|\n)"
)


def _files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *KINDS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no checkout")
    left_out = {Path(__file__), ROOT / "CHANGELOG.md"}  # these may speak of what is gone
    return [path for name in listed.stdout.split() if (path := ROOT / name) not in left_out]


def _is_there(name: str) -> bool:
    """Return whether it is a module, or what a module's text defines."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module, _, last = name.rpartition(".")
    home = ROOT.joinpath(*module.split("."))
    text = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
    if not text.is_file():
        return bool(module) and module.count(".") > 1 and _is_there(module)
    return re.search(rf"\b{last}\b", text.read_text()) is not None


def test_a_module_that_is_not_there_would_be_seen() -> None:
    """A renamed module is found by name, by import in a string, and as a name of a module."""
    assert _is_there("spotguard.runtime.job.Job")
    assert _is_there("spotguard.storage")
    assert not _is_there("spotguard.runtime.saving")
    assert not _is_there("spotguard.saving.Saver")
    assert IMPORTED.findall("x = 'from spotguard.runtime import saving; y'\n") == [
        ("spotguard.runtime", "saving")
    ]


def test_all_pages_that_messages_name_are_there() -> None:
    """A hint that names a page leads to it."""
    named = {
        (page, path.name)
        for path in sorted((ROOT / "spotguard").rglob("*.py"))
        for page in re.findall(r"docs/[a-z/-]+\.md", path.read_text())
    }
    assert ("docs/coming-from.md", "accelerate.py") in named
    assert [each for each in sorted(named) if not (ROOT / each[0]).is_file()] == []


def test_all_modules_that_are_named_are_there() -> None:
    """Scripts inside strings import what exists, and pages name modules that a reader finds."""
    wrong = []
    for path in _files():
        text = path.read_text(errors="replace")
        names = set(NAMED.findall(text))
        for module, imported in IMPORTED.findall(text):
            names |= {f"{module}.{name.split()[0]}" for name in imported.split(",") if name.strip()}
        wrong += [
            f"{path.relative_to(ROOT)}: {name}" for name in sorted(names) if not _is_there(name)
        ]
    assert not wrong
