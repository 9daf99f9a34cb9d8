"""Fixtures of the command line, for `simulate`."""

from __future__ import annotations

from tests.cli.conftest import cli, home, script

__all__ = ["cli", "home", "script"]
