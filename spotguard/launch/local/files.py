"""Small files that are whole or not there, and locks that die with their holder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def write_json(path: Path, body: object) -> None:
    """Replace the file at `path` by `body` as JSON; no reader ever sees half of it."""
    temporary = _write_aside(path, body)
    temporary.replace(path)


def create_json(path: Path, body: object) -> bool:
    """Write `body` to `path` unless a file is there; return whether it was written."""
    temporary = _write_aside(path, body)
    try:
        # Unlike a rename, a link fails if the name is taken.
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in the file at `path`, or None if there is no file."""
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    assert isinstance(body, dict), f"{path} does not hold an object"
    return body


def _write_aside(path: Path, body: object) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(body, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    return temporary


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on `path` inside the block; blocks until it is free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Take the lock on `path` for as long as the returned descriptor is open; None if held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether somebody holds the lock on `path` exclusively.

    It takes a shared lock for a moment, so `try_lock` elsewhere may fail once though nobody
    holds it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
