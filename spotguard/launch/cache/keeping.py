"""Stores what has changed in the cached folders, piece by piece, while the attempt trains.

Pieces are named by their hash and come before the listing that refers to them, so whatever dies
half-way leaves garbage and never half a file. Each round looks at all files, reads those whose
stamp is new, and stores the pieces that the store does not have; a long one lists now and then
what it has by then. Before each piece it waits for as long as a rank of this node saves, or this
node is about to be taken.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from spotguard.errors import AlreadyExists
from spotguard.events import keys
from spotguard.launch.cache.listing import (
    MOST_BYTES,
    PIECE_BYTES,
    CachedFile,
    CachedLink,
    CacheListing,
    digest,
    together,
)
from spotguard.launch.cache.scan import (
    CacheContents,
    FoundFile,
    Stamp,
    is_small,
    look,
    looks_secret,
)
from spotguard.shared.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

_OTHERS_FIRST_S: Final = 60.0
"""Of several nodes each piece is for one of them to store; the others wait so long for it."""
_HOT_S: Final = 10.0
"""A file that was written to so short ago is looked at in the next round."""
_LISTED_EVERY_S: Final = 30.0
"""A round that takes hours need not be over for the next node to have something of it."""
_FRESH_S: Final = 1800.0
"""Pieces that are older and that nobody refers to may be deleted at any time: stored again."""


class Interrupted(Exception):
    """There is no more time."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose cache it is, and among how many nodes."""

    about: str
    """The run's id."""
    key: str
    attempt: int
    node: int
    place: int
    """Of this node among those that train, from 0."""
    places: int


class _Read(NamedTuple):
    """What was read of a file."""

    stamp: Stamp
    file: CachedFile | None
    """None: it holds a secret."""


class Keeping:
    """One node's part of keeping its cached folders. For one thread."""

    def __init__(
        self,
        folders: Sequence[tuple[str, Path]],
        owner: Owner,
        *,
        most_bytes: int,
        secrets: Iterable[str],
        clock: Clock,
        wait: Callable[[], None],
        had: CacheListing,
        later: CacheListing | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`wait` is called before each piece; it blocks, or raises `Interrupted`.

        `had` is what the store had when this node began. What of it could not be brought back,
        `later`, goes on being listed: the next node may have the room. `wall` is the clock of this
        node's own files.
        """
        self.owner = owner
        self._folders = folders
        self._most_bytes = most_bytes
        self._secrets = [secret.encode("utf-8", "surrogateescape") for secret in secrets]
        self._clock = clock
        self._wait = wait
        self._wall = wall
        self._later = later or CacheListing()
        self._in_store = set(had.pieces)
        self._read = dict(_unchanged(folders, had))
        self._wanted_since: dict[str, float] = {}
        self._stored: tuple[CacheListing, tuple[int, int]] | None = None
        """The last listing, and by which attempt and node."""
        self.stored_bytes = 0
        """Of pieces, in all rounds."""
        self.left_out = ""
        """What to tell if the folders hold more than is kept; empty if they do not."""

    def round(self, store: ObjectStore, *, final: bool = False, closed: bool = True) -> bool:
        """Store what is new; return whether the store now has all that there is.

        In the `final` one nothing is left to other nodes, and nothing to a later round if all files
        were `closed` by who wrote them: half of one would be taken for all of it.

        Raises:
            Interrupted: as `wait` did; what is stored by then is of use to the next round.
            StoreError: the store failed; the next round goes on.
        """
        found = look(self._folders, most_bytes=self._most_bytes)
        self._say_what_is_left_out(found)
        links = tuple(CachedLink(link.folder, link.path, link.target) for link in found.links)
        there = {(each.folder, each.path) for each in found.files}
        self._read = {where: read for where, read in self._read.items() if where in there}
        files, missing, is_whole = self._sort_out(found, with_hot=final and closed)
        if missing:
            self._learn(store)
        listed_at = self._clock.monotonic()
        for each, known in missing:
            file = self._store(store, each, known, final=final)
            if file is not None:
                files.append(file)
                if self._clock.monotonic() - listed_at >= _LISTED_EVERY_S:
                    self._write(store, files, links)
                    listed_at = self._clock.monotonic()
            else:
                is_whole = is_whole and self._holds_secret(each)
        listing = self._write(store, files, links)
        # What nothing refers to any more may be deleted, and must be stored when it comes again.
        self._in_store &= listing.pieces
        return is_whole

    def _sort_out(
        self, found: CacheContents, *, with_hot: bool
    ) -> tuple[list[CachedFile], list[tuple[FoundFile, CachedFile | None]], bool]:
        """Return the files that the store has, the others (and what is known), and if that is all.

        A file that is written to is left to the next round, unless `with_hot`.
        """
        files: list[CachedFile] = []
        missing: list[tuple[FoundFile, CachedFile | None]] = []
        is_all = True
        for each in found.files:
            read = self._read.get((each.folder, each.path))
            if read is None or read.stamp != each.stamp:
                if not with_hot and self._is_hot(each):
                    is_all = False
                else:
                    missing.append((each, None))
            elif read.file is not None:  # else it holds a secret
                if self._in_store.issuperset(read.file.pieces):
                    files.append(read.file)
                else:
                    missing.append((each, read.file))
        return files, missing, is_all

    def _holds_secret(self, file: FoundFile) -> bool:
        read = self._read.get((file.folder, file.path))
        return read is not None and read.file is None

    def begin_attempt(self, owner: Owner) -> None:
        """Go on as another attempt's, on this same node; any thread may call it."""
        self.owner = owner

    def _is_hot(self, file: FoundFile) -> bool:
        return 0 <= self._wall() - file.stamp.mtime_ns / 1e9 < _HOT_S

    def _learn(self, store: ObjectStore) -> None:
        """Take note of the pieces that other nodes have stored lately."""
        now = self._clock.now()
        for info in store.list(keys.CACHE_PIECES):
            if info.modified_at is not None and now - info.modified_at < _FRESH_S:
                self._in_store.add(info.key.rpartition("/")[2])

    def _store(
        self, store: ObjectStore, found: FoundFile, known: CachedFile | None, *, final: bool
    ) -> CachedFile | None:
        """Store the pieces of a file that are missing; None if it is not whole there (yet).

        A file that changes while it is read is for the next round, which sees its new stamp.
        """
        where = (found.folder, found.path)
        self._read.pop(where, None)
        pieces: list[str] = []
        whole = True
        try:
            descriptor = os.open(found.real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone, or not for us
            return None
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if Stamp.of(os.fstat(descriptor)) != found.stamp:
                return None
            for at in range(0, found.stamp.size_bytes, PIECE_BYTES):
                piece = known.pieces[at // PIECE_BYTES] if known is not None else None
                if piece is None or (piece not in self._in_store and self._is_mine(piece, final)):
                    self._wait()
                    data = os.pread(descriptor, PIECE_BYTES, at)
                    if is_small(found) and looks_secret(data, self._secrets):
                        self._read[where] = _Read(found.stamp, None)
                        return None
                    piece = digest(data)
                    self._put(store, piece, data, final=final)
                whole = whole and piece in self._in_store
                pieces.append(piece)
            unchanged = Stamp.of(os.fstat(file.fileno())) == found.stamp
        kept = CachedFile(
            folder=found.folder,
            path=found.path,
            size_bytes=found.stamp.size_bytes,
            mode=found.mode,
            mtime_ns=found.stamp.mtime_ns,
            pieces=tuple(pieces),
        )
        if not unchanged:
            return None
        self._read[where] = _Read(found.stamp, kept)
        return kept if whole else None

    def _put(self, store: ObjectStore, piece: str, data: bytes, *, final: bool) -> None:
        if piece in self._in_store or not self._is_mine(piece, final):
            return
        try:
            store.put(keys.cache_piece(piece), data, if_absent=True)
        except AlreadyExists:  # perhaps long ago, and about to be deleted: that makes it new
            store.put(keys.cache_piece(piece), data)
        self.stored_bytes += len(data)
        self._in_store.add(piece)

    def _is_mine(self, piece: str, final: bool) -> bool:
        """Tell whether this node stores a piece, or waits for another one to do so."""
        owner = self.owner
        if final or owner.places == 1 or int(piece[:8], 16) % owner.places == owner.place:
            return True
        now = self._clock.monotonic()
        return now - self._wanted_since.setdefault(piece, now) >= _OTHERS_FIRST_S

    def _write(
        self, store: ObjectStore, files: Iterable[CachedFile], links: tuple[CachedLink, ...]
    ) -> CacheListing:
        """Write down what the store has by now, if that is new; return it."""
        in_order = sorted(files, key=lambda file: (file.folder, file.path))
        listing = together([CacheListing(tuple(in_order), links), self._later])
        owner = self.owner
        where = (owner.attempt, owner.node)
        if (listing, where) == self._stored:
            return listing
        sealed = listing.sealed(owner.key, owner.about)
        if len(sealed) > MOST_BYTES:  # names of thousands of letters
            self.left_out = "the cached folders' list of files is too long; nothing new is kept"
            return listing
        self._wait()
        store.put(keys.cache_listing(*where), sealed)
        self._stored = (listing, where)
        return listing

    def _say_what_is_left_out(self, found: CacheContents) -> None:
        self.left_out = ""
        if found.left_out:
            self.left_out = (
                f"the cached folders hold more than cache_limit_gb "
                f"({format_bytes(self._most_bytes)}): {found.left_out} files "
                f"({format_bytes(found.left_out_bytes)}) are not kept; raise it, or name fewer"
            )


def _unchanged(
    folders: Sequence[tuple[str, Path]], had: CacheListing
) -> Iterator[tuple[tuple[str, str], _Read]]:
    """Yield the files that are as they are listed, by size and time: they need not be read."""
    roots = dict(folders)
    for file in had.files:
        if file.folder in roots:
            try:
                stamp = Stamp.of((roots[file.folder] / file.path).lstat())
            except OSError:
                continue
            if (stamp.size_bytes, stamp.mtime_ns) == (file.size_bytes, file.mtime_ns):
                yield (file.folder, file.path), _Read(stamp, file)
