"""The name of a spotguard home, by which the leases of its runs are known; a copy gets another.

`machine-id` in the home holds the name, and where the home was when that was written: its path,
this machine, and the file's own inode, which moves with a home and is another one in a copy. Two
homes of one name would both hold the runs of one; a home that may be a copy holds none of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard.events.untrusted import Refused, integer, needed, parse_object, text

if TYPE_CHECKING:
    from collections.abc import Iterator

_FILE = "machine-id"
_HOST_ID = Path("/etc/machine-id")
_MOST_BYTES = 10_000


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a home is."""

    path: str
    inode: int
    host: str


def machine_id(home: Path) -> str:
    """Return the name of this home; made at the first call, and anew in a copy."""
    return _settled(home)[0]


def home_news(home: Path) -> str:
    """Return one sentence if it is found only now that the home is a copy; else nothing.

    A home that cannot be written, for which no controller can start, is left for later.
    """
    with contextlib.suppress(OSError):
        if (home / _FILE).exists():
            return _settled(home)[1]
    return ""


def _settled(home: Path) -> tuple[str, str]:
    """Return the home's name, and what is new about it."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    name, then = _read(home / _FILE)
    if name and then == _place(home):
        return name, ""
    with _locked(home):
        name, then = _read(home / _FILE)
        now = _place(home)
        if name and then == now:  # another process was first
            return name, ""
        news = ""
        if name and then is not None and _is_copy(home, name, then, now):
            news = (
                f"{home} is a copy of {then.path}, whose runs stay with that one: nothing of them "
                "is launched from here. `spotguard adopt STORE/RUN` brings one here."
            )
        if news or not name:
            name = secrets.token_hex(16)
        _write(home, name, now)
        return name, news


def _is_copy(home: Path, name: str, then: _Place, now: _Place) -> bool:
    """Tell whether there is, or may be, another home of this name."""
    same_file = then.inode == now.inode
    if then.path == now.path:  # what was put back here from a backup is no copy
        return not (same_file or then.host == now.host)
    original = Path(then.path) / _FILE
    try:
        if _read(original)[0] == name:
            return not original.samefile(home / _FILE)
    except OSError:
        return True  # who cannot look must not be sure
    return not (same_file or then.host == now.host)


def _place(home: Path) -> _Place:
    try:
        inode = (home / _FILE).stat().st_ino
    except FileNotFoundError:
        inode = 0
    return _Place(path=str(home.resolve()), inode=inode, host=_host())


def _host() -> str:
    """Return what tells this machine from others, also under another host name."""
    try:
        return _HOST_ID.read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


def _read(path: Path) -> tuple[str, _Place | None]:
    """Return the name, empty if there is none, and where its home was, if that is known."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return "", None
    name, _, rest = raw.decode("ascii", "replace").partition("\n")
    try:
        body = parse_object(rest, "its place")
        place = _Place(
            path=needed(text(body, "path"), "path"),
            inode=needed(integer(body, "inode"), "inode"),
            host=needed(text(body, "host"), "host"),
        )
    except Refused:  # of an older version, which wrote the name alone
        return name.strip(), None
    return name.strip(), place


def _write(home: Path, name: str, place: _Place) -> None:
    """Put a whole file in the place of the old one, with its own inode in it."""
    fresh = home / f".{_FILE}.{secrets.token_hex(4)}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            body = {"path": place.path, "inode": os.fstat(file.fileno()).st_ino, "host": place.host}
            file.write(f"{name}\n{json.dumps(body)}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(home / _FILE)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Let one process at a time look whether the home is a copy."""
    descriptor = os.open(home / f".{_FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
