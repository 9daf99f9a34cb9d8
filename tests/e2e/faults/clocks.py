"""Machines whose clocks are wrong: every Python on them reads another wall clock than is right.

A `sitecustomize` on PYTHONPATH adds what stands in a file named after the machine: `node-1` for a
node, `home` for the user's own, where the commands and the controller run. It is read again at each
look at the clock, so a test can let it jump at any moment.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HOUR_S = 3600.0
_PATCH = """\
import os, time
_node = os.environ.get("SPOTGUARD_NODE")
_path = os.path.join(os.path.dirname(__file__), "home" if _node is None else "node-" + _node)
_true = time.time
def _wrong():
    try:
        with open(_path) as file:
            return _true() + float(file.read())
    except (OSError, ValueError):
        return _true()
time.time = _wrong
time.time_ns = lambda: int(_wrong() * 1e9)
"""


class WrongClocks:
    """The clocks of one test's machines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_PATCH)

    def environ(self) -> dict[str, str]:
        """Return the environment in which they count."""
        path = os.pathsep.join(filter(None, (str(self._folder), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path}

    def set(self, machine: str, ahead_s: float) -> None:
        """Let a machine's clock be so far ahead from now on; negative is behind."""
        fresh = self._folder / f".{machine}"
        fresh.write_text(str(ahead_s))
        fresh.replace(self._folder / machine)
