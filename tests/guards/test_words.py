from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from spotguard.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = ROOT / "README.md"
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _commands(group: Any, path: str = "spotguard") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


TOP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = dict(_commands(TOP))


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_and_option_has_help(name: str) -> None:
    """`--help` explains the command in a sentence, and every option in a few words."""
    command = COMMANDS[name]
    assert command.help
    assert command.help.strip().endswith((".", ")", "`")) or "\n" in command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None) or parameter.name == "args", parameter.name


def test_readme_is_short_and_shows_code_first() -> None:
    """150 lines at most, and the first code above line 20."""
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("```") for line in lines[:20])


def _console_lines(page: Path) -> Iterator[str]:
    for language, body in _FENCE.findall(page.read_text()):
        if language == "console":
            joined = body.replace("\\\n", " ")
            for line in joined.splitlines():
                if line.startswith("$ "):
                    yield line[2:].strip()


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:
        words = words[1:]
    return [word.removeprefix(".venv/bin/") for word in words]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_shown_commands_exist(page: Path) -> None:
    """Every `spotguard` and `make` command in a console block is one that works."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in _console_lines(page):
        words = _words(line)
        if words[:1] == ["make"]:
            assert set(words[1:]) <= targets, line
        if words[:1] != ["spotguard"]:
            continue
        name = next((n for n in (" ".join(words[:3]), " ".join(words[:2])) if n in COMMANDS), None)
        of_its_own = all(word.startswith("-") for word in words[1:])
        assert name is not None or of_its_own, f"no such command: {line}"
        ours = words[: words.index("--")] if "--" in words else words
        command = COMMANDS[name] if name else TOP
        known = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
        for word in ours:
            if word.startswith("-"):
                assert word.split("=")[0] in known | {"--help", "-h"}, f"{word} in: {line}"


def _anchors(page: Path) -> set[str]:
    anchors = set()
    for line in _FENCE.sub("", page.read_text()).splitlines():
        if line.startswith("#"):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            anchors.add(title.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    """Every relative link in a page names a file, and a heading, that is there."""
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in _anchors(target), f"{page.name}: {link}"
