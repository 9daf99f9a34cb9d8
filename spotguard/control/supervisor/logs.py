"""What the job printed: one stream of lines across nodes and attempts."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from spotguard.control.journal.stored.logs import LogLine, LogQuery, StoredLog, stored_tail
from spotguard.errors import LauncherFailure, SpotguardError, StoreError
from spotguard.events.states import EndReason
from spotguard.launch.base import LogGone
from spotguard.launch.ranks.node_ranks import SAYS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.launch.base import Launcher, LogChunk
    from spotguard.storage.base import ObjectStore

_KEPT_BACK = 200
_TAIL_LINES = 40


class ReadsLog(Protocol):
    """What is asked of a launcher."""

    def read_log(self, cluster: str, node: int, offset: int) -> LogChunk:
        """Return what a node printed, from an offset on."""
        ...


class NodeLog:
    """Reads one node's output line by line, each line once."""

    def __init__(self, launcher: ReadsLog, cluster: str, *, attempt: int, node: int) -> None:
        self._launcher = launcher
        self._cluster = cluster
        self._attempt = attempt
        self._node = node
        self._offset = 0
        self._rest = b""

    def lines(self, *, final: bool = False) -> Iterator[LogLine]:
        """Yield the whole lines printed since the last call; with `final` also the rest."""
        while True:
            chunk = self._launcher.read_log(self._cluster, self._node, self._offset)
            if not chunk.data:
                break
            self._offset = chunk.offset + len(chunk.data)
            *whole, self._rest = (self._rest + chunk.data).split(b"\n")
            for line in whole:
                yield self._line(line)
        if final and self._rest:
            yield self._line(self._rest)
            self._rest = b""

    def _line(self, raw: bytes) -> LogLine:
        text = raw.decode(errors="replace").rstrip("\r")
        return LogLine(attempt=self._attempt, node=self._node, text=text)


class RunLog:
    """Reads what all attempts of a run printed, each line once.

    The run store has it; what is not there, of a launch that has just begun or of an attempt of an
    earlier version, the launcher is asked for. A log that is gone, or cannot be read, costs one
    line and never those of other attempts.
    """

    def __init__(
        self, launcher: ReadsLog, store: ObjectStore | None = None, query: LogQuery | None = None
    ) -> None:
        """Without a `store`, the run's own, the launcher alone is asked."""
        self._launcher = launcher
        self._store = store
        self._query = query or LogQuery()
        self._tail = self._query.tail
        self._readers: dict[tuple[int, int], NodeLog] = {}
        self._stored: dict[int, StoredLog] = {}
        self._tells_apart = (self._query.rank, self._query.since) != (None, None)
        """What the launcher cannot: whose a node's lines are, and when each was printed."""
        self._shown: dict[int, Counter[tuple[int | None, str]]] = {}
        """Nodes and texts that the launcher told, of attempts of which nothing was stored yet."""
        self._kept_back: dict[int, deque[LogLine]] = {}
        """The last lines that tell something only if their attempt failed."""
        self._done: set[int] = set()
        """Attempts that print nothing more, or are lost."""

    def lines(self, record: RunRecord, *, last: bool) -> Iterator[LogLine]:
        """Yield what was printed since the last call, attempt after attempt.

        The record must be older than the logs. With `last`, nobody asks again: also what is not
        a whole line, and why a log cannot be read.
        """
        wanted = [
            attempt
            for attempt in record.attempts
            if self._query.attempt in (None, attempt.number) and attempt.number not in self._done
        ]
        tail, self._tail = self._tail, None  # who follows wants all that comes after
        if tail is None:
            self._query = replace(self._query, tail=None)
            for attempt in wanted:
                yield from self._of_attempt(record, attempt, last=last)
            return
        found: deque[list[LogLine]] = deque()
        missing = tail
        for attempt in reversed(wanted):  # the last lines of a long run may be those of its last
            if not missing:
                self._done.add(attempt.number)
                continue
            lines = list(self._of_attempt(record, attempt, last=last))[-missing:]
            found.appendleft(lines)
            missing -= len(lines)
        for lines in found:
            yield from lines

    def _of_attempt(
        self, record: RunRecord, attempt: AttemptRecord, *, last: bool
    ) -> Iterator[LogLine]:
        over = _is_over(record, attempt)
        final = last or over
        failed = attempt.end is not None and attempt.end.reason is EndReason.FAILED
        try:
            stored = self._stored_log(attempt.number)
        except StoreError as problem:
            stored = None
            if last:
                yield _told(attempt, f"the run store cannot be read now: {problem.message}")
        try:
            if stored is not None:
                yield from self._from_store(stored, attempt.number, failed=failed, final=final)
            elif not final and self._tells_apart:
                return  # seconds later the store has it, and knows whose it is
            elif not attempt.in_place:  # else its nodes print on into the log of the one before
                yield from self._from_launcher(attempt, final=final)
        except StoreError as problem:
            if last:
                yield _told(attempt, f"its log cannot be read now: {problem.message}")
        except LogGone:
            if over:
                yield _told(attempt, "its cluster is gone, and what it printed with it")
                self._done.add(attempt.number)
            elif last:
                yield _told(attempt, "its nodes have printed nothing yet")
        except LauncherFailure as problem:
            if last:
                yield _told(attempt, f"its log cannot be read now: {problem.message}")
        else:
            self._done |= {attempt.number} if over else set()

    def _stored_log(self, number: int) -> StoredLog | None:
        """Return the attempt's log in the run store, once there is any."""
        if self._store is None:
            return None
        log = self._stored.get(number) or StoredLog(self._store, number, self._query)
        if number not in self._stored and log.has_any():
            self._stored[number] = log
        return self._stored.get(number)

    def _from_store(
        self, stored: StoredLog, number: int, *, failed: bool, final: bool
    ) -> Iterator[LogLine]:
        shown = self._shown.get(number, Counter())
        back = self._kept_back.setdefault(number, deque(maxlen=_KEPT_BACK))
        if failed:
            yield from back
            back.clear()
        # Of a living attempt all are read: whether the launcher's tell something is known later.
        for line in stored.lines(failed=failed or not final, final=final):
            if not failed and self._query.is_noise(line):
                back.append(line)
            elif shown[line.node, line.text] > 0:
                shown[line.node, line.text] -= 1
            else:
                yield line

    def _from_launcher(self, attempt: AttemptRecord, *, final: bool) -> Iterator[LogLine]:
        if attempt.number not in self._shown and self._tells_apart:
            words = "is not in the run store, so that nobody can tell its ranks and times apart"
            yield _told(attempt, f"what it printed {words}")
        shown = self._shown.setdefault(attempt.number, Counter())
        for node in range(attempt.nodes):
            if self._query.node not in (None, node):
                continue
            reader = self._readers.setdefault(
                (attempt.number, node),
                NodeLog(self._launcher, attempt.cluster, attempt=attempt.number, node=node),
            )
            for line in reader.lines(final=final):
                shown[node, line.text] += 1
                pattern = self._query.pattern
                if pattern is None or pattern.search(line.text):
                    yield line


def _told(attempt: AttemptRecord, text: str) -> LogLine:
    return LogLine(attempt=attempt.number, node=None, text=text)


def _is_over(record: RunRecord, attempt: AttemptRecord) -> bool:
    """Return True once nothing more is printed on an attempt's cluster, by any attempt."""
    return all(a.end is not None for a in record.attempts if a.cluster == attempt.cluster)


def log_tail(
    launcher: Launcher, store: ObjectStore, attempt: AttemptRecord, node: int
) -> str | None:
    """Return the last lines that the script printed on a node, or None if there are none.

    The launcher is asked first: it knows what the node printed before its ranks began. What
    spotguard adds is left out, unless there is nothing else.
    """
    try:
        return _tail_of(launcher, attempt.cluster, node) or stored_tail(
            store, attempt.number, node, _TAIL_LINES
        )
    except StoreError:
        return None


def _tail_of(launcher: Launcher, cluster: str, node: int) -> str | None:
    reader = NodeLog(launcher, cluster, attempt=0, node=node)
    printed: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        for line in reader.lines(final=True):
            if printed and line.text.startswith(SAYS):
                break
            printed.append(line.text)
    except SpotguardError:
        return None
    return "\n".join(printed) or None
