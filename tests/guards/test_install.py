"""How the development environment is set up: uv takes packages from where pip was told to."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).parents[2] / "infra" / "install.py"
_install: dict[str, Any] = runpy.run_path(str(_PROGRAM))
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
