"""Install packages for the Python that runs this, as `pip install` with the same words would.

    .venv/bin/python infra/install.py --constraint constraints.txt --editable '.[dev]'

uv does it, in a small part of pip's time. It does not read pip's settings, and packages must come
from where somebody told pip to take them: so it is told those settings. If it fails, pip does it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

_PIP = (sys.executable, "-m", "pip")
_SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", ""),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "proxy": ("ALL_PROXY", ""),
    "cert": ("SSL_CERT_FILE", ""),
}
"""uv's variable for each of pip's settings, and what is between several values there."""


def settings_for_uv(pip_settings: str) -> dict[str, str]:
    """Return uv's variables for what `pip config list` has printed.

    As with pip, a variable counts before a file's part for `install`, and that before its general
    part.
    """
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: all indexes are equal
    for setting, told in _told(pip_settings).items():
        if setting in _SETTINGS:
            name, between = _SETTINGS[setting]
            found[name] = between.join(told.split()) if between else told
    return found


def constraints(pip_settings: str) -> list[str]:
    """Return the words that add the constraints of pip's settings to those of a command.

    A variable would not do: in uv a command's own constraints replace it.
    """
    files = _told(pip_settings).get("constraint", "").split()
    return [word for file in files for word in ("--constraint", file)]


def _told(pip_settings: str) -> dict[str, str]:
    """Return pip's settings; of several places the one that counts for `pip install`."""
    lines = [line.partition("=") for line in pip_settings.splitlines()]
    return {
        key.removeprefix(part): str(ast.literal_eval(value))
        for part in ("global.", "install.", ":env:.")
        for key, _, value in lines
        if key.startswith(part)
    }


def main(words: list[str]) -> int:
    """Install what pip's `words` ask for; return the exit code."""
    asked = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, check=False)
    # What the user told uv itself counts before what pip was told.
    environ = {**settings_for_uv(asked.stdout), **os.environ}
    has_uv = subprocess.run([*_PIP, "install", "--quiet", "uv"], check=False).returncode == 0
    uv = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable)
    more = constraints(asked.stdout)
    if has_uv and subprocess.run([*uv, *more, *words], env=environ, check=False).returncode == 0:
        return 0
    sys.stderr.write("uv could not install it: pip tries, which takes some minutes\n")
    return subprocess.run([*_PIP, "install", "--quiet", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
