"""What a node has kept of its cached folders: one object, sealed with a key that no store holds.

A cache may hold what is run as code, such as what `torch.compile` made, or is unpickled by others.
So a node believes nobody who can merely write into the store: its first line is an HMAC of the
rest, made with a key of the run that only the controller's machine and the run's nodes have. It is
checked before anything else is read, and it vouches for the hash of each piece.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spotguard.events.untrusted import Refused, integer, needed, objects, parse_object, text
from spotguard.launch.cache.scan import is_secret_name, link_stays_inside

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.storage.base import Buffer

SCHEMA: Final = 1
PIECE_BYTES: Final = 8 << 20
"""Of a file that is stored as one object: short, so that a save never waits long behind one."""
MOST_BYTES: Final = 64 << 20
"""Of a listing; fifty thousand files have about ten megabytes."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SEAL_CHARS: Final = 64


@dataclass(frozen=True)
class CachedFile:
    """A file as it is kept."""

    folder: str
    path: str
    size_bytes: int
    mode: int
    mtime_ns: int
    pieces: tuple[str, ...]
    """Hashes of each `PIECE_BYTES` of it; also the names under which they are stored."""


@dataclass(frozen=True)
class CachedLink:
    """A symbolic link as it is kept."""

    folder: str
    path: str
    target: str


@dataclass(frozen=True)
class CacheListing:
    """What one node has of the cached folders."""

    files: tuple[CachedFile, ...] = ()
    links: tuple[CachedLink, ...] = ()

    @property
    def pieces(self) -> set[str]:
        """Return the hashes of all that it refers to."""
        return {piece for file in self.files for piece in file.pieces}

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def sealed(self, key: str, about: str) -> bytes:
        """Return the listing as the store keeps it; `about` names the run."""
        body = {
            "schema": SCHEMA,
            "files": [
                {
                    "folder": file.folder,
                    "path": file.path,
                    "size_bytes": file.size_bytes,
                    "mode": file.mode,
                    "mtime_ns": file.mtime_ns,
                    "pieces": "".join(file.pieces),
                }
                for file in self.files
            ],
            "links": [
                {"folder": link.folder, "path": link.path, "target": link.target}
                for link in self.links
            ],
        }
        raw = json.dumps(body, sort_keys=True).encode()
        return f"{_seal(key, about, raw)}\n".encode() + raw

    @classmethod
    def opened(cls, sealed: bytes, key: str, about: str) -> CacheListing:
        """Return the listing that `sealed` made.

        Raises:
            Refused: it was made with another key, for another run, or makes no sense.
        """
        seal, newline = sealed[:_SEAL_CHARS], sealed[_SEAL_CHARS : _SEAL_CHARS + 1]
        raw = sealed[_SEAL_CHARS + 1 :]
        if newline != b"\n" or not hmac.compare_digest(seal, _seal(key, about, raw).encode()):
            raise Refused("it was not written by a node of this run, as far as can be proven")
        body = parse_object(raw, "the listing", most_bytes=MOST_BYTES)
        if integer(body, "schema") != SCHEMA:
            raise Refused(f"it is no listing of schema {SCHEMA}")
        return cls(
            tuple(_file(each) for each in objects(body, "files")),
            tuple(_link(each) for each in objects(body, "links")),
        )


def together(listings: Iterable[CacheListing]) -> CacheListing:
    """Return what is in any of them; the first that has a path counts."""
    files: dict[tuple[str, str], CachedFile] = {}
    links: dict[tuple[str, str], CachedLink] = {}
    for listing in listings:
        for file in listing.files:
            if (file.folder, file.path) not in links:
                files.setdefault((file.folder, file.path), file)
        for link in listing.links:
            if (link.folder, link.path) not in files:
                links.setdefault((link.folder, link.path), link)
    return CacheListing(tuple(files.values()), tuple(links.values()))


def digest(data: Buffer) -> str:
    """Return the hash that names a piece: one that nobody can find a second piece for."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _seal(key: str, about: str, raw: bytes) -> str:
    return hmac.new(f"{key} cache {about}".encode(), raw, hashlib.sha256).hexdigest()


def _file(body: dict[str, Any]) -> CachedFile:
    size_bytes = needed(integer(body, "size_bytes", low=0), "size")
    hashes = body.get("pieces")
    if not isinstance(hashes, str):
        raise Refused("a file has no pieces")
    pieces = tuple(hashes[at : at + 64] for at in range(0, len(hashes), 64))
    if len(pieces) != -(-size_bytes // PIECE_BYTES) or not all(map(_DIGEST.fullmatch, pieces)):
        raise Refused("a file's pieces do not add up to it")
    return CachedFile(
        folder=needed(text(body, "folder"), "folder"),
        path=_path(body),
        size_bytes=size_bytes,
        mode=needed(integer(body, "mode", low=0, high=0o777), "mode"),
        mtime_ns=needed(integer(body, "mtime_ns"), "time"),
        pieces=pieces,
    )


def _link(body: dict[str, Any]) -> CachedLink:
    path, target = _path(body), needed(text(body, "target"), "target")
    if not link_stays_inside(path, target):
        raise Refused("a link leads out of its folder")
    return CachedLink(needed(text(body, "folder"), "folder"), path, target)


def _path(body: dict[str, Any]) -> str:
    path = needed(text(body, "path"), "path")
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or is_secret_name(parts[-1]):
        raise Refused("a path is none below its folder")
    return path
