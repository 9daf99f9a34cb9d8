"""What a key may look like, the same for every store, so that a run can move between them."""

from __future__ import annotations

import re

from spotguard.errors import UsageError

RESERVED = ".spotguard"
"""Folder name that stores keep for themselves; never part of a key, never listed."""

MAX_KEY_BYTES = 1024
MAX_PART_BYTES = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_key(key: str) -> str:
    """Return `key` if it can name an object; UsageError says what is wrong with it."""
    parts = key.split("/")
    problem = next(filter(None, map(_problem_of_part, parts)), "")
    if not problem and len(key.encode()) > MAX_KEY_BYTES:
        problem = f"is longer than {MAX_KEY_BYTES} bytes"
    if problem:
        raise UsageError(
            f"key {_short(key)} {problem}", hint="keys look like attempts/000001/x.json"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if some key could start with it (the part after its last `/` is partial)."""
    folder, slash, _ = prefix.rpartition("/")
    if slash:
        check_key(folder)
    return prefix


def check_folder(prefix: str) -> str:
    """Return `prefix` if it is empty or names a folder, with its trailing `/`."""
    if prefix and not prefix.endswith("/"):
        raise UsageError(f"folder {_short(prefix)} must end in '/' or be empty")
    return check_prefix(prefix)


def is_part(name: str) -> bool:
    """Return whether `name` can stand between two slashes of a key."""
    return not _problem_of_part(name)


def _problem_of_part(part: str) -> str:
    if part in ("", ".", ".."):
        return "has an empty, '.' or '..' part"
    if part == RESERVED:
        return f"uses the reserved name {RESERVED!r}"
    if _CONTROL.search(part):
        return "holds a control character"
    try:
        size_bytes = len(part.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    return f"has a part longer than {MAX_PART_BYTES} bytes" if size_bytes > MAX_PART_BYTES else ""


def _short(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")
