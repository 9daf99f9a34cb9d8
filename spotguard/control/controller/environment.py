"""Which controller process may look after a run: one of the same code and the same environment.

A run's job, its store's credentials and SkyPilot go by the environment in which `up` was typed. So
a process looks after runs of its own environment alone, and no value of it is ever handed over.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import spotguard
from spotguard.shared.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME_CHARS = 16
_OF_THE_TERMINAL = (
    "_ PWD OLDPWD SHLVL TERM COLORTERM COLUMNS LINES WINDOWID WINDOW TMUX TMUX_PANE STY SSH_TTY "
    "SSH_CONNECTION SSH_CLIENT XDG_SESSION_ID TERM_SESSION_ID TERM_PROGRAM TERM_PROGRAM_VERSION "
    "GNOME_TERMINAL_SCREEN GNOME_TERMINAL_SERVICE KONSOLE_DBUS_SESSION VTE_VERSION WT_SESSION "
    "ITERM_SESSION_ID KITTY_WINDOW_ID KITTY_PID PROMPT_COMMAND PS1 HISTFILE HISTSIZE "
    "PYTEST_CURRENT_TEST"
)
"""Each window has its own, and no job and no cloud goes by them."""


def process_name(home: Path, environ: Mapping[str, str] | None = None) -> str:
    """Return the name of the controller process for what is begun in this environment.

    It tells environments and versions of spotguard's code apart, and nothing else of them: it is
    keyed by a secret that only this user can read.

    Raises:
        OSError: the home cannot be written.
    """
    env = os.environ if environ is None else environ
    left_out = frozenset(_OF_THE_TERMINAL.split())
    told = sorted((name, value) for name, value in env.items() if name not in left_out)
    body = json.dumps([_code(), sys.executable, told]).encode("utf-8", "surrogateescape")
    return hmac.new(_key(home), body, hashlib.sha256).hexdigest()[:_NAME_CHARS]


def _key(home: Path) -> bytes:
    folder = home / "controllers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "key"
    if not path.exists():
        fresh = folder / f".key.{os.getpid()}.{secrets.token_hex(4)}"
        fresh.touch(0o600)
        fresh.write_text(secrets.token_hex(32))
        try:
            os.link(fresh, path)  # unlike a rename, it fails if another one was faster
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path.read_bytes()


def _code() -> list[object]:
    """Return what changes with each installed version, and each edited file, of spotguard."""
    root = Path(spotguard.__file__).parent
    files = sorted(root.rglob("*.py"))
    return [__version__, str(root), [(str(each), each.stat().st_mtime_ns) for each in files]]
