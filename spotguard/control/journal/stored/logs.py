"""What ranks printed, as the run store keeps it: filtered, by time, each line once."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.events import keys
from spotguard.events.log_line import LAUNCHER, StoredLine
from spotguard.events.untrusted import Refused
from spotguard.shared.units import format_bytes
from spotguard.storage.patterns.growing_lines import PieceRead, read_piece, stored_pieces

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator

    from spotguard.storage.base import ObjectStore
    from spotguard.storage.patterns.growing_lines import StoredPiece

_OUR_OWN = "spotguard: "
_LONGEST = 1 << 20
"""Of a line that is put together of its parts."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of what a run printed."""

    attempt: int
    node: int | None
    """None: no node printed it, it is told of the attempt."""
    text: str
    rank: int | None = None
    """None: nobody says, or no rank printed it but the launcher of a node's ranks."""
    at: float | None = None
    """When it was printed, in seconds since the epoch; None is unknown."""
    stream: str | None = None
    """`stdout`, `stderr`, or `launcher`; None is unknown."""


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """Which lines are wanted."""

    attempt: int | None = None
    node: int | None = None
    rank: int | None = None
    tail: int | None = None
    """The last so many."""
    since: float | None = None
    """Printed at this instant or later, in seconds since the epoch."""
    pattern: re.Pattern[str] | None = None
    """To be found in the line."""
    everything: bool = False
    """Also what the launcher of a node's ranks says, where it explains nothing."""

    def wants(self, line: LogLine, *, failed: bool) -> bool:
        """Tell whether a line of an attempt is wanted, which may have `failed` by its script."""
        return (
            (self.node is None or line.node == self.node)
            and (self.rank is None or line.rank == self.rank)
            and (self.since is None or (line.at is not None and line.at >= self.since))
            and (self.pattern is None or self.pattern.search(line.text) is not None)
            and (failed or not self.is_noise(line))
        )

    def is_noise(self, line: LogLine) -> bool:
        """Tell whether a line is the launcher's: after a clean leave it says FAILED, too."""
        if self.everything or line.stream != LAUNCHER:
            return False
        return not line.text.startswith(_OUR_OWN)


@dataclass
class _Writer:
    """How far one writer's lines were read."""

    node: int
    lines: int = 0
    """Of those that it has written."""
    bytes: int = 0
    parts: dict[tuple[int | None, str], list[str]] = field(default_factory=dict)
    """What has no end yet."""


class StoredLog:
    """Reads one attempt's lines again and again. Not thread-safe; raises `StoreError`."""

    def __init__(self, store: ObjectStore, attempt: int, query: LogQuery) -> None:
        """Read from the run's own store."""
        self._store = store
        self._attempt = attempt
        self._query = query
        self._writers: dict[str, _Writer] = {}
        self._read: dict[str, PieceRead | None] = {}
        self._tail = query.tail

    def has_any(self) -> bool:
        """Tell whether anything is stored of the attempt."""
        return bool(self._writers) or any(True for _ in self._store.list(keys.logs(self._attempt)))

    def lines(self, *, failed: bool, final: bool) -> Iterator[LogLine]:
        """Yield what is stored since the last call, by time; with `final` also half lines.

        The first time only the last so many of them, if the query says so.
        """
        found = stored_pieces(self._store, keys.logs(self._attempt))
        if self._query.node is not None:
            wanted = self._query.node
            found = {w: pieces for w, pieces in found.items() if pieces[0].name.owner == wanted}
        streams = []
        for name, pieces in found.items():
            known = name in self._writers
            writer = self._writers.setdefault(name, _Writer(node=pieces[0].name.owner))
            if not known:
                pieces = self._from_where_it_matters(writer, pieces, failed=failed)
            streams.append(self._of(writer, pieces, final=final))
        merged = heapq.merge(*streams, key=lambda line: line.at or 0.0)
        wanted_lines = (line for line in merged if self._is_wanted(line, failed=failed))
        tail, self._tail = self._tail, None
        yield from wanted_lines if tail is None else deque(wanted_lines, maxlen=tail)
        self._read.clear()

    def _is_wanted(self, line: LogLine, *, failed: bool) -> bool:
        return line.node is None or self._query.wants(line, failed=failed)

    def _from_where_it_matters(
        self, writer: _Writer, pieces: list[StoredPiece], *, failed: bool
    ) -> list[StoredPiece]:
        """Return only the newest pieces if the query wants no more; the rest counts as read."""
        query = self._query
        if query.tail is None and query.since is None:
            return pieces
        enough = math.inf if query.tail is None else query.tail
        count, first = 0, 0
        for index in range(len(pieces) - 1, -1, -1):
            read = self._piece(pieces[index])
            lines = [] if read is None else [self._line(writer, raw) for raw in read.lines]
            parsed = [line for line in lines if line is not None]
            count += sum(query.wants(line, failed=failed) for line in parsed)
            is_older = bool(
                parsed and query.since is not None and (parsed[0].at or 0.0) < query.since
            )
            if count > enough or is_older:
                first = index
                break
        begin = self._piece(pieces[first])
        if begin is not None and first:
            writer.lines, writer.bytes = begin.lines_before, begin.bytes_before
        return pieces[first:]

    def _line(self, writer: _Writer, raw: bytes) -> LogLine | None:
        try:
            line = StoredLine.from_json(raw)
        except Refused:
            return None
        return self._told(writer, line, line.text)

    def _piece(self, piece: StoredPiece) -> PieceRead | None:
        key = piece.keys[0]
        if key not in self._read:
            try:
                self._read[key] = read_piece(self._store, piece)
            except Refused:
                self._read[key] = None
        return self._read[key]

    def _of(self, writer: _Writer, pieces: list[StoredPiece], *, final: bool) -> Iterator[LogLine]:
        """Yield what one writer has written since the last call."""
        last_at = 0.0
        for piece in pieces:
            read = self._piece(piece)
            self._read.pop(piece.keys[0], None)
            if read is None or read.lines_before + len(read.lines) <= writer.lines:
                continue
            if read.lines_before > writer.lines:
                yield self._gap(writer, read, last_at)
                writer.lines = read.lines_before
                writer.parts.clear()
            fresh = read.lines[writer.lines - read.lines_before :]
            writer.lines += len(fresh)
            for raw in fresh:
                try:
                    line = StoredLine.from_json(raw)
                except Refused:
                    continue
                last_at = line.at
                yield from self._joined(writer, line)
            writer.bytes = read.bytes_before + sum(len(raw) + 1 for raw in read.lines)
        if final:
            for (rank, stream), parts in writer.parts.items():
                whole = StoredLine(last_at, rank, stream, "".join(parts))
                yield self._told(writer, whole, whole.text)
            writer.parts.clear()

    def _joined(self, writer: _Writer, line: StoredLine) -> Iterator[LogLine]:
        source = (line.rank, line.stream)
        before = writer.parts.get(source)
        if line.more and sum(map(len, before or ())) < _LONGEST:
            writer.parts.setdefault(source, []).append(line.text)
            return
        text = line.text if before is None else "".join([*before, line.text])
        writer.parts.pop(source, None)
        yield self._told(writer, line, text)

    def _told(self, writer: _Writer, line: StoredLine, text: str) -> LogLine:
        return LogLine(
            attempt=self._attempt,
            node=writer.node,
            text=text,
            rank=line.rank,
            at=line.at,
            stream=line.stream,
        )

    def _gap(self, writer: _Writer, read: PieceRead, at: float) -> LogLine:
        missing = read.lines_before - writer.lines
        size = format_bytes(max(0, read.bytes_before - writer.bytes))
        return LogLine(
            attempt=self._attempt,
            node=None,
            text=f"{missing} lines of node {writer.node} ({size}) are not kept: it printed more "
            "than the run store keeps of a node, and they were neither its first nor its last",
            at=at,
        )


def stored_tail(store: ObjectStore, attempt: int, node: int, lines: int) -> str | None:
    """Return the last lines that the ranks of a node printed; None if none are stored.

    Raises:
        StoreError: the store cannot be read.
    """
    log = StoredLog(store, attempt, LogQuery(node=node, tail=lines))
    return "\n".join(line.text for line in log.lines(failed=False, final=True)) or None
