"""Which files of the cached folders are kept: plain ones, none that looks like a secret.

A cache folder has more in it than what a later node needs: locks, downloads that are under way,
and, as in `~/.cache/huggingface/token`, a login. What is left out costs a download, no more.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TEMPORARY: Final = ".spotguard-cache-"
"""How the name of a file begins that is being restored."""
MOST_FILES: Final = 50_000
_DEEPEST: Final = 64
_SECRET_NAMES: Final = frozenset(
    {"token", "stored_tokens", "credentials", "credentials.json", ".netrc", "_netrc", ".env"}
    | {"kaggle.json", ".git-credentials", "application_default_credentials.json", ".pypirc"}
    | {"id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".npmrc", "hosts.yml", "secrets.toml"}
)
_SECRET_ENDS: Final = (".pem", ".key", ".p12", ".pfx", ".token", ".secret", ".keytab", ".kdbx")
_UNFINISHED: Final = (".incomplete", ".part", ".partial", ".tmp", ".crdownload")
_SMALL_BYTES: Final = 64 << 10
"""A file that is no larger is read through for secrets, whatever it is called."""
_LOOKS_SECRET: Final = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"
    rb"|\bhf_[A-Za-z0-9]{30,}\b"
    rb"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    rb"|\bgh[pousr]_[A-Za-z0-9]{30,}\b"
    rb"|\bgithub_pat_[A-Za-z0-9_]{30,}\b"
    rb"|\bsk-[A-Za-z0-9_-]{32,}\b"
)


class Stamp(NamedTuple):
    """What changes with a file's content."""

    size_bytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        """Return the stamp of a file."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


@dataclass(frozen=True)
class FoundFile:
    """A plain file below a cached folder."""

    folder: str
    """As in the setting."""
    path: str
    """Below it, with `/`."""
    real: str
    """On this node."""
    stamp: Stamp
    mode: int


@dataclass(frozen=True)
class FoundLink:
    """A symbolic link below a cached folder that leads to somewhere else below it."""

    folder: str
    path: str
    target: str
    """As it stands in the link, relative."""


@dataclass(frozen=True)
class CacheContents:
    """All that counts in the cached folders."""

    files: tuple[FoundFile, ...]
    links: tuple[FoundLink, ...]
    left_out: int = 0
    """Files that are beyond the limit."""
    left_out_bytes: int = 0


def look(folders: Iterable[tuple[str, Path]], *, most_bytes: int) -> CacheContents:
    """Return what is in the folders (as in the setting, and where), up to a limit in all.

    By folder in their order, and by path: so the same files are left out each time.
    """
    files: list[FoundFile] = []
    links: list[FoundLink] = []
    left_out = left_out_bytes = size_bytes = 0
    for folder, root in folders:
        for found in _below(folder, root):
            if isinstance(found, FoundLink):
                links.append(found)
            elif size_bytes + found.stamp.size_bytes > most_bytes or len(files) >= MOST_FILES:
                left_out += 1
                left_out_bytes += found.stamp.size_bytes
            else:
                size_bytes += found.stamp.size_bytes
                files.append(found)
    return CacheContents(tuple(files), tuple(links[:MOST_FILES]), left_out, left_out_bytes)


def looks_secret(data: bytes, secrets: Iterable[bytes]) -> bool:
    """Tell whether a small file holds a key, a token, or one of the job's own secrets."""
    return bool(_LOOKS_SECRET.search(data)) or any(secret in data for secret in secrets)


def is_small(file: FoundFile) -> bool:
    """Tell whether a file is to be looked through for secrets."""
    return file.stamp.size_bytes <= _SMALL_BYTES


def is_secret_name(name: str) -> bool:
    """Tell whether a file is called as logins and keys are."""
    return name.lower() in _SECRET_NAMES or name.lower().endswith(_SECRET_ENDS)


def link_stays_inside(path: str, target: str) -> bool:
    """Tell whether a link at `path` below a folder leads to somewhere below that folder.

    It goes up only at its beginning: behind the name of another link, `..` is elsewhere.
    """
    if not target or target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = parts.count("..")
    inside = len(path.split("/")) - 1
    return ".." not in parts[up:] and up <= inside and (up < inside or len(parts) > up)


def _below(folder: str, root: Path) -> Iterator[FoundFile | FoundLink]:
    """Yield files and links in order; all else is passed over."""
    yield from _walk(folder, os.path.realpath(root), "", 0)


def _walk(folder: str, root: str, inner: str, depth: int) -> Iterator[FoundFile | FoundLink]:
    try:
        with os.scandir(os.path.join(root, inner)) as entries:  # noqa: PTH118 - many files
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:  # not there (yet), no folder, or not for us
        return
    for entry in found:
        path = f"{inner}/{entry.name}" if inner else entry.name
        if not _is_wanted(entry.name):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                if depth < _DEEPEST:
                    yield from _walk(folder, root, path, depth + 1)
            elif stat.S_ISLNK(status.st_mode):
                target = os.readlink(entry.path)  # noqa: PTH115
                if link_stays_inside(path, target) and target.isprintable():
                    yield FoundLink(folder, path, target)
            elif stat.S_ISREG(status.st_mode) and not _is_lock(entry.name, status):
                mode = stat.S_IMODE(status.st_mode) & 0o777
                yield FoundFile(folder, path, entry.path, Stamp.of(status), mode)
        except OSError:  # gone meanwhile
            continue


def _is_wanted(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # no text, so it cannot be written down
        return False
    return not (
        name.startswith(TEMPORARY)
        or is_secret_name(name)
        or name.lower().endswith(_UNFINISHED)
        or any(ord(letter) < 32 for letter in name)
    )


def _is_lock(name: str, status: os.stat_result) -> bool:
    return name.endswith(".lock") and not status.st_size
