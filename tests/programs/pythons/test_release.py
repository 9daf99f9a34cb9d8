"""What the command does and says, and when it fails. Nothing is built or installed here."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spotguard.shared.version import __version__
from tests.programs.pythons import interpreters, release
from tests.programs.pythons.environments import Environment, NotToBeHadError

if TYPE_CHECKING:
    from collections.abc import Sequence

OTHER = interpreters.SUPPORTED[0]
FINISHED = json.dumps({"state": "finished", "step": 3, "saved_step": 3, "total_steps": 3})
FAILED = json.dumps({"state": "failed", "step": 2, "saved_step": 0, "total_steps": 3})


class Machine:
    """Plays every command; each answer can be set by a word of the command."""

    def __init__(self, dist: Path) -> None:
        self.dist = dist
        self.ran: list[str] = []
        self.answers = {
            "--porcelain": "",
            "spotguard.__file__": "",
            "--version": f"spotguard {__version__}",
            "status --json": FINISHED,
        }
        self.fails = ""
        self.in_direct_wheel = "a"

    def said(self, command: Sequence[str], **_: object) -> str:
        """Note the command, and answer."""
        words = " ".join(command)
        self.ran.append(words)
        if self.fails and self.fails in words:
            raise release.FailedError(f"exit code 1 of {words}")
        if "-m build" in words:
            to = Path(command[command.index("--outdir") + 1])
            self._build(to, "a" if to == self.dist else self.in_direct_wheel)
        return next((said for word, said in self.answers.items() if word in words), "")

    def _build(self, to: Path, content: str) -> None:
        to.mkdir(exist_ok=True)
        with zipfile.ZipFile(to / "spotguard-0.1.0-py3-none-any.whl", "w") as files:
            files.writestr("spotguard/__init__.py", content)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Every Python is there, has all that it needs, and all goes well."""
    played = Machine(tmp_path / "dist")
    played.answers["spotguard.__file__"] = f"{Environment(OTHER, wheel=tmp_path).folder}/lib/x.py"
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "DIST", played.dist)
    monkeypatch.setattr(release, "said", played.said)
    monkeypatch.setattr(interpreters, "find", lambda version: Path(f"python{version}"))
    monkeypatch.setattr(Environment, "make", lambda environment, interpreter: None)
    return played


def test_what_is_built_is_checked_and_used(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Built, checked, installed, and used for a run of the starter; and nothing is uploaded."""
    (machine.dist).mkdir()
    (machine.dist / "of-an-earlier-build.whl").touch()
    assert release.main(["--only", OTHER]) == 0
    said = capsys.readouterr().out
    assert f"Python {OTHER}: passed" in said
    assert "of-an-earlier-build" not in said
    assert said.endswith("ready in dist; nothing was uploaded\n")
    told = " | ".join(machine.ran)
    for words in ("twine check --strict", "spotguard --help", "spotguard init", "--nodes 1"):
        assert words in told
    assert "upload" not in told


def test_every_python_is_tried(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails is named, and fails the release."""
    machine.answers["spotguard.__file__"] = "/somewhere/else/spotguard/__init__.py"
    assert release.main([]) == 1
    said = capsys.readouterr().out
    for version in interpreters.SUPPORTED:
        assert f"Python {version}: FAILED: what is imported is not the wheel" in said
    assert said.endswith("not to be released\n")


@pytest.mark.parametrize(
    "fails", ["build", "twine", "uv pip check", "--help", "init", "up train.py"]
)
def test_what_fails_fails_the_release(machine: Machine, fails: str) -> None:
    """Whichever step it is."""
    machine.fails = fails
    assert release.main(["--only", OTHER]) == 1


@pytest.mark.parametrize(
    ("word", "answer", "problem"),
    [
        ("--porcelain", " M README.md", "commit these first, or remove them:\n M README.md"),
        ("--version", "spotguard 0.0.9", "the wheel calls itself 'spotguard 0.0.9'"),
        ("status --json", FAILED, "the run is failed at step 2"),
    ],
)
def test_what_is_wrong_is_said(
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    word: str,
    answer: str,
    problem: str,
) -> None:
    """In words that say what to do, or what was found instead."""
    machine.answers[word] = answer
    assert release.main(["--only", OTHER]) == 1
    assert problem in capsys.readouterr().out


def test_the_sdist_builds_the_same_wheel(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """What pip builds from the sdist is what is released as a wheel."""
    machine.in_direct_wheel = "b"
    assert release.main(["--only", OTHER]) == 1
    assert "not the same from the sdist: spotguard/__init__.py" in capsys.readouterr().out


def test_what_cannot_be_tried_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine need not have every Python; but on some the wheel must have been tried."""
    has = {OTHER}
    monkeypatch.setattr(interpreters, "find", lambda version: Path("p") if version in has else None)
    assert release.main([]) == 0
    assert capsys.readouterr().out.count("skipped: there is no such Python") == 3

    def make(environment: Environment, interpreter: Path) -> None:
        raise NotToBeHadError("no route to the registry")

    monkeypatch.setattr(Environment, "make", make)
    assert release.main([]) == 1
    assert f"Python {OTHER}: skipped: no route to the registry" in capsys.readouterr().out


def test_a_command_that_fails_shows_what_it_printed() -> None:
    """Its last lines, of both streams."""
    with pytest.raises(release.FailedError) as caught:
        release.said(["sh", "-c", "echo one; echo two >&2; exit 7"])
    assert str(caught.value).startswith("exit code 7 of sh -c")
    assert str(caught.value).endswith("one\n\ntwo")
