"""One writer's lines in few objects that grow: what ranks print, what they measure.

An object store cannot append. So the newest piece is stored anew with each addition, under a key
that says how many lines are in it, and then the one before is deleted. A key names its content for
ever: what is stored twice, or late, by a request that was given up, does no harm, and of two
objects of one piece the one with more lines counts. Whenever the writer dies, each line that was
stored stands in exactly one piece.

A piece is JSON Lines in gzip. Its first line tells how many lines and bytes the writer had before
it, so that a reader sees what is missing: of a writer that has more than is kept, pieces between
the first and the newest ones are deleted, the oldest first.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.errors import NotFound
from spotguard.events import keys
from spotguard.events.untrusted import Refused, integer, needed, parse_object
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from spotguard.events.keys import Piece
    from spotguard.storage.base import ObjectStore

SCHEMA = 1
_FULL_BYTES = 256 << 10
"""Of a piece, compressed: so much is stored again at most with each addition."""
_FULL_LINES = 100_000
_FULL_PLAIN_BYTES = 4 << 20
_MOST_BYTES = 64 << 20
"""Of a piece that is read, unpacked; ours have some megabytes."""
_SLICE_BYTES = 4 << 10
_FIRST_SHARE = 4
"""A quarter of what is kept is the beginning."""
_LEVEL = 3
"""zlib's: a higher one takes twice the time for a few percent."""
_GZIP = 31
"""zlib's number for gzip's form."""


@dataclass
class _Full:
    key: str
    size_bytes: int


class GrowingObjects:
    """Writes one writer's lines. Not thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        *,
        owner: int,
        at: float,
        most_bytes: int | None = None,
    ) -> None:
        """Write below `folder`; nobody else of this `owner` may begin `at` the same instant.

        Of more than `most_bytes`, compressed, the oldest middle is deleted.
        """
        self._store = store
        self._folder = folder
        self._owner = owner
        self._at = at
        self._most_bytes = most_bytes
        self._number = 0
        self._content: list[bytes] = []
        self._lines = self._plain_bytes = self._stored_lines = 0
        self._lines_before = self._bytes_before = 0
        self._full: list[_Full] = []
        self._doomed: list[str] = []

    @property
    def is_stored(self) -> bool:
        """True if all that was added is stored."""
        return self._lines == self._stored_lines

    @property
    def is_full(self) -> bool:
        """True if nothing more may be added before the next `store`."""
        return (
            self._lines >= _FULL_LINES
            or self._plain_bytes >= _FULL_PLAIN_BYTES
            or sum(map(len, self._content)) >= _FULL_BYTES
        )

    def add(self, lines: Sequence[bytes]) -> None:
        """Take lines, without their line ends, into the newest piece; stores nothing yet."""
        if not lines:
            return
        plain = b"".join(line + b"\n" for line in lines)
        if not self._content:
            head = {"schema": SCHEMA, "lines": self._lines_before, "bytes": self._bytes_before}
            plain = json.dumps(head).encode() + b"\n" + plain
        # Members of gzip stand one behind the other: what is packed is never packed again.
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._content.append(packer.compress(plain) + packer.flush())
        self._lines += len(lines)
        self._plain_bytes += len(plain)

    def store(self) -> None:
        """Store what was added. Blocks.

        Raises:
            StoreError: it is not stored, and may be tried again.
        """
        if self.is_stored:
            self._tidy()
            return
        key = self._key(self._lines)
        if key not in self._doomed:  # an attempt that fails may have been heard all the same
            self._doomed.append(key)
        self._store.put(key, list(self._content))
        self._doomed.remove(key)
        self._stored_lines = self._lines
        if self.is_full:
            self._full.append(_Full(key, sum(map(len, self._content))))
            self._lines_before += self._lines
            self._bytes_before += self._plain_bytes
            self._number += 1
            self._content = []
            self._lines = self._plain_bytes = self._stored_lines = 0
            self._drop_the_middle()
            self._tidy()
        else:
            self._tidy()
            self._doomed.append(key)  # once there is one with more lines

    def _key(self, lines: int) -> str:
        return keys.piece(
            self._folder, owner=self._owner, at=self._at, number=self._number, count=lines
        )

    def _tidy(self) -> None:
        """Delete what is no longer needed, but never what alone holds a line."""
        newest = self._key(self._stored_lines)
        for key in [key for key in self._doomed if key != newest]:
            self._store.delete(key)
            self._doomed.remove(key)

    def _drop_the_middle(self) -> None:
        if self._most_bytes is None:
            return
        total = sum(full.size_bytes for full in self._full)
        first = 0
        at = 0
        while at < len(self._full) and total > self._most_bytes:
            if first < self._most_bytes // _FIRST_SHARE:
                first += self._full[at].size_bytes
                at += 1
                continue
            total -= self._full[at].size_bytes
            self._doomed.append(self._full.pop(at).key)


@dataclass(frozen=True, kw_only=True)
class PieceRead:
    """A piece's lines."""

    lines_before: int
    """How many the writer had written before."""
    bytes_before: int
    """How many bytes these have, unpacked."""
    lines: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """Where a piece lies: under several keys for a moment, or for ever if its writer died."""

    name: Piece
    """Of the fullest object."""
    keys: tuple[str, ...]
    """The fullest first."""


def stored_pieces(store: ObjectStore, folder: str) -> dict[str, list[StoredPiece]]:
    """Return each writer's pieces, oldest first.

    Raises:
        StoreError: the store cannot be read.
    """
    found: dict[str, dict[int, list[tuple[Piece, str]]]] = {}
    for info in store.list(folder):
        piece = keys.parse_piece(info.key)
        if piece is not None:
            of_piece = found.setdefault(piece.writer, {}).setdefault(piece.number, [])
            of_piece.insert(0, (piece, info.key))  # a listing is sorted: the fullest comes last
    return {
        writer: [
            StoredPiece(name=of[number][0][0], keys=tuple(key for _, key in of[number]))
            for number in sorted(of)
        ]
        for writer, of in found.items()
    }


def read_piece(store: ObjectStore, piece: StoredPiece) -> PieceRead | None:
    """Return a piece's lines; None if it is gone, or replaced by a fuller one, meanwhile.

    An upload that was torn off counts for as many lines as it has.

    Raises:
        Refused: it is none of ours, or too large.
        StoreError: the store cannot be read.
    """
    best: PieceRead | None = None
    problem: Refused | None = None
    for key in piece.keys:
        name = keys.parse_piece(key)
        try:
            read = _read(get_small(store, key), key)
        except NotFound:
            continue
        except Refused as found:
            problem = problem or found
            continue
        if best is None or len(read.lines) > len(best.lines):
            best = read
        if name is None or len(read.lines) >= name.lines:
            break
    if best is None and problem is not None:
        raise problem
    return best


def _read(raw: bytes, key: str) -> PieceRead:
    lines = _unpacked(raw).split(b"\n")
    lines.pop()  # behind the last line's end, or half a line
    if not lines:
        raise Refused(f"{key} is damaged")
    head = parse_object(lines[0], "the piece's first line")
    if integer(head, "schema") != SCHEMA:
        raise Refused(f"{key} is of another schema")
    return PieceRead(
        lines_before=needed(integer(head, "lines", low=0), "lines"),
        bytes_before=integer(head, "bytes", low=0) or 0,
        lines=tuple(lines[1:]),
    )


def _unpacked(raw: bytes) -> bytes:
    """Return as much as can be unpacked; `Refused` if it is too much."""
    plain = bytearray()
    packed = memoryview(raw)
    unpacker, members = zlib.decompressobj(_GZIP), 0
    at = 0
    while at < len(packed):
        # In slices: zlib copies all that follows a member, so that the time for many small ones
        # would grow with their number squared.
        given = packed[at : at + _SLICE_BYTES]
        try:
            plain += unpacker.decompress(given, _MOST_BYTES - len(plain) + 1)
        except zlib.error:
            break
        if len(plain) > _MOST_BYTES:
            raise Refused(f"a piece is too large (more than {_MOST_BYTES} bytes)")
        at += len(given) - len(unpacker.unused_data)
        if unpacker.eof:
            unpacker, members = zlib.decompressobj(_GZIP), members + 1
            if members > _FULL_LINES:  # each of ours has at least a line
                raise Refused(f"a piece has too many parts (more than {_FULL_LINES})")
    return bytes(plain)


def plain_lines(bodies: Iterable[object]) -> Iterator[bytes]:
    """Yield values as lines of JSON, as short as they can be."""
    for body in bodies:
        yield json.dumps(body, separators=(",", ":")).encode()
