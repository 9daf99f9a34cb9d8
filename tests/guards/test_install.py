"""How the development environment is set up: on which Python, and from where uv takes packages."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = Path(__file__).parents[2] / "infra" / "install.py"
_install: dict[str, Any] = runpy.run_path(str(_PROGRAM))
_SCRIPT = _PROGRAM.with_name("python.sh")
_THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"
_settings_for_uv, _constraints = _install["settings_for_uv"], _install["constraints"]


def test_packages_come_from_where_pip_takes_them() -> None:
    """Of a setting in several places the one counts that counts for pip."""
    told = _settings_for_uv(
        ":env:.find-links='/wheels /more'\n"
        ":env:.default-timeout='180'\n"
        "global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'\n"
        "global.index-url='https://general.example/simple'\n"
        "install.index-url='https://own.example/simple'\n"
        "global.find-links='/elsewhere'\n"
        "freeze.timeout='10'\n"
        "nonsense\n"
    )
    assert told == {
        "UV_DEFAULT_INDEX": "https://own.example/simple",
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_constraints_of_pip_are_added_to_those_of_a_command() -> None:
    """Of a setting in several places the one counts that counts for pip."""
    told = "global.constraint='/all.txt'\n:env:.constraint='/one.txt /two.txt'\n"
    assert _constraints(told) == ["--constraint", "/one.txt", "--constraint", "/two.txt"]
    assert _constraints("global.index-url='https://x.example'") == []


def test_without_settings_they_come_from_where_all_come_from() -> None:
    """No index is added to uv's own."""
    assert _settings_for_uv("") == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def chosen(*versions: str, path: str = os.environ["PATH"]) -> tuple[int, str]:
    """Return the exit code, and what the script prints."""
    done = subprocess.run(
        [_SCRIPT, *versions],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def test_what_is_chosen_can_do() -> None:
    """It runs, and is of a version that spotguard supports."""
    code, python = chosen()
    assert code == 0
    told = subprocess.run(
        [python, "-c", "import sys, venv; print(sys.version_info >= (3, 10))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "True\n"


def test_a_version_may_be_asked_for(tmp_path: Path) -> None:
    """One that nobody has is said by the exit code; a broken one on PATH is passed over."""
    assert chosen("9.9") == (1, "python3")
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    code, python = chosen(_THIS, path=f"{tmp_path}:{os.environ['PATH']}")
    if code:
        pytest.skip(f"the Python {_THIS} of these tests lies where nobody looks")
    assert python != str(broken)
