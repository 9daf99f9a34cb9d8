"""Fixtures: a controller that does nothing, a home of its own, a script, a way to call the CLI."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import spotguard.control
from spotguard.cli import follow
from spotguard.cli.main import main
from spotguard.control.doctor import checks as doctor
from spotguard.control.doctor import store as doctor_store
from tests.cli.documents import stand_alone
from tests.cli.fake_control import FakeControl

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Said:
    """What a command printed and returned."""

    code: int
    out: str
    err: str


Cli = Callable[..., Said]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect spotguard's home, drop its variables, stand in an empty folder."""
    return stand_alone(monkeypatch, tmp_path)


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> FakeControl:
    """Put a fake in the controller's place, and make following it quick."""
    fake = FakeControl()
    monkeypatch.setitem(sys.modules, "spotguard.control.api", fake)
    monkeypatch.setattr(spotguard.control, "api", fake, raising=False)
    monkeypatch.setattr(follow, "POLL_S", 0.0)
    return fake


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the doctor import no torch, which takes seconds, and write little: others test these."""
    monkeypatch.setattr(doctor_store, "SPEED_BYTES", 1_000_000)
    monkeypatch.setattr(doctor, "check_torch", doctor.check_python)


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Write a script that uses spotguard; return its path."""
    path = tmp_path / "work" / "job.py"
    path.write_text("import spotguard.runtime as spotguard\n\nrun = spotguard.init()\n")
    return str(path)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs one command line."""

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        return Said(code=code, out=said.out, err=said.err)

    return run
