"""What the command says of each Python, and when it fails. No environment is made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.pythons import __main__ as command
from tests.programs.pythons import interpreters
from tests.programs.pythons.environments import Environment, NotToBeHadError

OTHER = next(version for version in interpreters.SUPPORTED if version != command.OWN)


@pytest.fixture(autouse=True)
def all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python is there, has all that it needs, and passes."""
    monkeypatch.setattr(interpreters, "find", lambda version: Path(f"python{version}"))
    monkeypatch.setattr(Environment, "make", lambda environment, interpreter: None)
    monkeypatch.setattr(command, "_passes", lambda words, **env: True)


def test_every_python_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """The supported ones, and the lowest versions of all packages on the oldest."""
    assert command.main([]) == 0
    *_, table = capsys.readouterr().out.split("\n\n")
    names = [line.split()[1].rstrip(":") for line in table.splitlines()]
    assert names == [*interpreters.SUPPORTED, f"{interpreters.SUPPORTED[0]}-lowest"]
    assert table.count(": passed (") == len(names)


def test_a_python_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine need not have them all."""
    monkeypatch.setattr(interpreters, "find", lambda version: None)
    assert command.main(["--only", OTHER]) == 0
    assert f"Python {OTHER}: skipped: there is no such Python" in capsys.readouterr().out


def test_packages_that_cannot_be_had_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A registry that is away says nothing of us."""

    def make(environment: Environment, interpreter: Path) -> None:
        raise NotToBeHadError("no route to the registry")

    monkeypatch.setattr(Environment, "make", make)
    assert command.main(["--only", OTHER]) == 0
    assert f"Python {OTHER}: skipped: no route to the registry" in capsys.readouterr().out


@pytest.mark.parametrize(("broken", "word"), [("pytest", "the quick tests"), ("make", "the demo")])
def test_what_fails_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str, word: str
) -> None:
    """Either the tests or the demo, on one Python of several that are asked for."""
    lowest = f"{interpreters.SUPPORTED[0]}-lowest"

    def passes(words: list[str], **env: str) -> bool:
        return not (broken in words and any(f"{lowest}" in part for part in words))

    monkeypatch.setattr(command, "_passes", passes)
    assert command.main(["--only", OTHER, "--only", lowest]) == 1
    said = capsys.readouterr().out
    assert f"Python {lowest}: FAILED: {word} (" in said
    assert f"Python {OTHER}: passed" in said


def test_what_failed_among_others_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `make test`: what its neighbours' load broke is not what a Python breaks."""
    ran: list[list[str]] = []

    def passes(words: list[str], **env: str) -> bool:
        ran.append(words)
        return "--last-failed" in words or words[0] == "make"

    monkeypatch.setattr(command, "_passes", passes)
    assert command.main(["--only", OTHER]) == 0
    assert ["--last-failed" in words for words in ran] == [False, True, False]


def test_a_python_that_nobody_supports_is_refused() -> None:
    """A typo must not look like a success in which nothing ran."""
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "3.9"])
    assert ended.value.code == 2
