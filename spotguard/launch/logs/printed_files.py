"""Reads the files into which ranks print, line by line, while they are written.

Each rank has a file for each of its streams. A file takes what is printed whatever
happens to who reads it: a rank never waits for a reader, and what a killed rank printed is there.

The files must not fill the node's disk, for then the training would fail. So what was read is given
back to the disk, and where more is printed than can be read, the middle is passed over, and told.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.events.log_line import LAUNCHER, STDERR, STDOUT
from spotguard.shared.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spotguard.events.masking import MaskedStream, Masker

LAUNCHER_FILES = {"launcher.out": STDOUT, "launcher.err": STDERR}
"""Into which what starts the ranks prints, and where that is shown."""
LONGEST = 64 << 10
"""Of a line without an end, so many bytes make a line of their own."""
MOST_BEHIND = 16 << 20
"""Of a file, what may wait to be read: of more, only the end is read."""
KEPT_END = 2 << 20
"""So long is that end; and a file's beginning, which is read whatever follows."""
_AT_ONCE = 256 << 10
_GIVEN_BACK_BYTES = 1 << 20
"""The disk gets its room back in pieces of this size."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Linux's flags of `fallocate`."""
_LOOK_S = 0.5
"""Between looks for files that are not there yet: ranks start once all nodes are there."""


@dataclass(frozen=True)
class PrintedLine:
    """A line as it was printed, without its end."""

    rank: int | None
    stream: str
    raw: bytes
    more: bool
    """It had no end yet."""
    shown_on: str = STDERR


@dataclass
class _File:
    descriptor: int
    rank: int | None
    stream: str
    shown_on: str
    masked: MaskedStream
    at: int = 0
    """How much of it was read, or passed over."""
    given_back: int = 0
    gone: int = 0
    """How much of it is no longer there, since the other reader is far ahead."""
    rest: bytearray = field(default_factory=bytearray)
    """What has no line end yet."""
    rest_since: float = 0.0


class PrintedFiles:
    """The files of one node's ranks in one attempt. Used by one thread."""

    def __init__(
        self, folder: Path, *, first_rank: int, nproc: int, masker: Masker, patience_s: float
    ) -> None:
        """A line without an end is read as it is once it is `patience_s` old."""
        self._folder = folder
        self._first_rank = first_rank
        self._nproc = nproc
        self._masker = masker
        self._patience_s = patience_s
        self._files: dict[Path, _File] = {}
        self._look_at = 0.0
        self.read_all = False
        """Whether the last call of `read` read all that there was."""

    def read(self, now: float, *, most_bytes: int, final: bool = False) -> Iterator[PrintedLine]:
        """Yield what was printed since the last call, up to about `most_bytes`.

        With `final` nothing is printed any more: also what has no end.
        """
        if final or now >= self._look_at:
            self._look_for_files()
            self._look_at = now + _LOOK_S
        left = most_bytes
        self.read_all = True
        for file in self._files.values():
            while left > 0:
                yield from self._pass_over(file, 2 * KEPT_END if final else MOST_BEHIND)
                data = os.read(file.descriptor, min(_AT_ONCE, left))
                if not data:
                    break
                left -= len(data)
                file.at += len(data)
                yield from _lines(file, file.masked.feed(data), now)
            else:
                self.read_all = False
            if final and self.read_all:
                yield from _lines(file, file.masked.rest(), now)
            old = now - file.rest_since >= self._patience_s
            if file.rest and (old or (final and self.read_all)):
                yield _line(file, bytes(file.rest), more=True)
                file.rest.clear()

    def give_back(self, also: PrintedFiles) -> None:
        """Give the disk its room back of what these files' two readers have read.

        One that hangs passes the rest over, once it goes on: it is not waited for.
        """
        for path, file in list(self._files.items()):
            other = also._files.get(path)
            if other is None:  # not looked for yet
                continue
            read = min(file.at, max(other.at, _size(file) - MOST_BEHIND))
            if read - file.given_back < _GIVEN_BACK_BYTES:
                continue
            other.gone = read  # before it is
            if _punch_hole(file.descriptor, read):
                file.given_back = read

    def _pass_over(self, file: _File, most: int) -> Iterator[PrintedLine]:
        """Go to the end of a file of which more than `most` is unread, and say how much is not."""
        size = _size(file)
        is_there = file.at >= file.gone
        if is_there and (file.at < KEPT_END or size - file.at <= most):
            return
        if file.rest:
            yield _line(file, bytes(file.rest), more=False)
            file.rest.clear()
        begin = max(file.at, file.gone, size - KEPT_END)
        begin += os.pread(file.descriptor, LONGEST, begin).find(b"\n") + 1  # a whole line
        os.lseek(file.descriptor, begin, os.SEEK_SET)
        left_out, file.at = begin - file.at, begin
        file.masked = self._masker.stream()
        words = (
            f"spotguard: {format_bytes(left_out)} that were printed here are left out: more than "
            "this node can store in time"
        )
        yield _line(file, words.encode(), more=False)

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def _look_for_files(self) -> None:
        if len(self._files) == 2 * self._nproc + len(LAUNCHER_FILES):
            return  # all are there
        # Of lines that are found at once, stdout's come first: a traceback is said last.
        found = sorted(self._folder.glob("*/attempt_*/*/std*.log"), reverse=True)
        for path in sorted(found, key=lambda path: path.parent):
            local_rank, stream = path.parent.name, path.stem
            if path not in self._files and local_rank.isdigit() and stream in (STDOUT, STDERR):
                self._open(path, self._first_rank + int(local_rank), stream, stream)
        for name, shown_on in LAUNCHER_FILES.items():  # last: what it says of ranks follows them
            path = self._folder / name
            if path in self._files:
                self._files[path] = self._files.pop(path)
            else:
                self._open(path, None, LAUNCHER, shown_on)

    def _open(self, path: Path, rank: int | None, stream: str, shown_on: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._files[path] = _File(descriptor, rank, stream, shown_on, self._masker.stream())


def _size(file: _File) -> int:
    return os.fstat(file.descriptor).st_size


def _punch_hole(descriptor: int, until: int) -> bool:
    """Free the blocks of a file up to there, for all who have it open; False if that cannot be.

    Cutting the file instead would lose what is printed in the same moment.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):  # a Mac
        return False
    flags = _KEEP_SIZE | _PUNCH_HOLE
    return not libc.fallocate(descriptor, flags, ctypes.c_int64(0), ctypes.c_int64(until))


def _lines(file: _File, data: bytes, now: float) -> Iterator[PrintedLine]:
    if not data:
        return
    *whole, last = data.split(b"\n")
    for part in whole:
        line = bytes(file.rest) + part if file.rest else part
        file.rest.clear()
        while len(line) > LONGEST:
            yield _line(file, line[:LONGEST], more=True)
            line = line[LONGEST:]
        yield _line(file, line, more=False)
    if last and not file.rest:
        file.rest_since = now
    file.rest += last
    while len(file.rest) > LONGEST:
        yield _line(file, bytes(file.rest[:LONGEST]), more=True)
        del file.rest[:LONGEST]


def _line(file: _File, raw: bytes, *, more: bool) -> PrintedLine:
    return PrintedLine(file.rank, file.stream, raw, more, file.shown_on)
