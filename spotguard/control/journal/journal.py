"""The run's journal: an append-only list of events in one SQLite file.

The file is the only memory that the controller has. Triggers refuse to change or remove what
was written, every append is durable on return, and several processes may append at once (the
controller its acts, a command the user's wishes). What the events mean is `record`'s business.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spotguard.errors import AlreadyExists, DiskFailure, EnvironmentFailure, JournalDamaged
from spotguard.events.masking import masked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

SCHEMA = 1
_APPLICATION_ID = 0x53474A31  # "SGJ1": tells our files from any other SQLite database
_MAGIC = b"SQLite format 3\0"
_LOCK_PATIENCE_S = 20.0
_CHECKED_BYTES = 16 << 20
"""A larger file is not looked through when it is opened: that takes seconds for a million events.
SQLite still checks each page that it reads."""

_KEPT_WHOLE = frozenset({"spec", "job", "code", "sweep", "store_root", "store", "cluster", "key"})
"""What a run is launched by: the journal is the one place that has the values of its variables."""
_AFTER_ALL = 1 << 62
_LATEST_AT = 1e11
"""Some three thousand years; what is later is no time."""
NO_SENSE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(AssertionError, RuntimeError),
)
"""What folding raises over events that nobody can have written in earnest."""
_INDEX = """
CREATE INDEX IF NOT EXISTS events_by_key ON events (json_extract(data, '$.key'))
WHERE json_extract(data, '$.key') IS NOT NULL
"""
_TABLES = f"""
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA};
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    attempt INTEGER,
    data TEXT NOT NULL
);
{_INDEX};
CREATE TRIGGER events_keep_what_was_written BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
CREATE TRIGGER events_keep_everything BEFORE DELETE ON events
BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
"""

_connecting = threading.Lock()
_connected: Counter[tuple[int, int] | None] = Counter()
"""How many connections of this process each file has. Who reads such a file's bytes without SQLite
takes SQLite's locks on it away by closing it, for all of the process: the next other process that
looks would take the journal for nobody's, and remove what was written last."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One event of the journal."""

    seq: int
    """Position in the journal, from 1; later events have higher numbers."""
    at: float
    """Epoch seconds at which it happened."""
    kind: str
    attempt: int | None
    data: dict[str, Any] = field(default_factory=dict)


class Journal:
    """An open journal. Use it as a context manager, or `close` it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._file = _identity(path)
        self._is_closed = False
        _connected[self._file] += 1

    @property
    def file(self) -> tuple[int, int] | None:
        """What tells its file from any other one."""
        return self._file

    @classmethod
    def create(cls, path: Path) -> Journal:
        """Create an empty journal that only this user can read.

        Raises:
            AlreadyExists: there is a file at `path`.
            EnvironmentFailure: the file cannot be written.
        """
        try:
            # SQLite gives its helper files the mode of the main one, so make that first.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError as problem:
            raise AlreadyExists(f"There is already a journal at {path}.") from problem
        except OSError as problem:
            raise EnvironmentFailure(
                f"The journal {path} cannot be created: {problem.strerror}.",
                hint="Set SPOTGUARD_HOME to a folder that you can write.",
            ) from problem
        with _translated(path):
            connection = _connect(path)
            with _closed_on_error(connection):
                # The marks must be in the file itself before the write-ahead log takes over:
                # `open` checks them there without letting SQLite near a foreign file.
                connection.executescript(_TABLES)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
            return cls(path, connection)

    @classmethod
    def open(cls, path: Path, *, again: bool = False) -> Journal:
        """Open an existing journal.

        Args:
            path: its file.
            again: it was looked through a moment ago, so that is not done once more.

        Raises:
            JournalDamaged: the file is missing, damaged, of something else or of a newer
                spotguard. Nothing was changed.
        """
        with _connecting:
            if not _connected[_identity(path)]:
                _check_header(path)
            with _translated(path):
                journal = cls(path, _connect(path))
        with _translated(path), _closed_on_error(journal):
            journal._connection.execute("PRAGMA synchronous = FULL")
            if not again and not _fits_together(path, journal._connection):
                raise damaged(path, "its pages do not fit together")
        return journal

    def append(
        self,
        kind: str,
        *,
        at: float,
        attempt: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> int:
        """Write one event down, without secrets; on return it is on disk. Return its number."""
        self._check_in_place()
        told = masked(_finite(dict(data or {})), kept=_KEPT_WHOLE)
        body = json.dumps(told, sort_keys=True, allow_nan=False)
        with _translated(self.path):
            cursor = self._connection.execute(
                "INSERT INTO events (at, kind, attempt, data) VALUES (?, ?, ?, ?)",
                (at, kind, attempt, body),
            )
        return int(cursor.lastrowid or 0)

    def events(self, after_seq: int = 0) -> list[Entry]:
        """Return the events after number `after_seq`, in order."""
        return list(self.read(after_seq))

    def read(self, after_seq: int = 0, *, without: Sequence[str] = ()) -> Iterator[Entry]:
        """Yield the same one by one, in little memory however many; leave out some kinds."""
        self._check_in_place()
        with _translated(self.path):
            yield from map(
                _entry,
                self._connection.execute(
                    f"{_SELECT} WHERE seq > ? AND {_not_in(without)} ORDER BY seq",
                    (after_seq, *without),
                ),
            )

    def of_kinds(self, kinds: Sequence[str], *, after_seq: int = 0) -> Iterator[Entry]:
        """Yield the events of these kinds alone: a look at each, 0.2 s for a million."""
        with _translated(self.path):
            yield from map(
                _entry,
                self._connection.execute(
                    f"{_SELECT} WHERE seq > ? AND kind IN ({', '.join('?' * len(kinds))}) "
                    "ORDER BY seq",
                    (after_seq, *kinds),
                ),
            )

    def newest(self, kind: str, *, before: int = _AFTER_ALL) -> Entry | None:
        """Return the last event of a kind before a number, or None. Looks from the end."""
        with _translated(self.path):
            row = self._connection.execute(
                f"{_SELECT} WHERE kind = ? AND seq < ? ORDER BY seq DESC LIMIT 1", (kind, before)
            ).fetchone()
            return None if row is None else _entry(row)

    def start_of_newest(self, count: int, *, without: Sequence[str] = ()) -> int:
        """Return the number of the first of the newest `count` events; 0 if there are fewer."""
        with _translated(self.path):
            row = self._connection.execute(
                f"SELECT seq FROM events WHERE {_not_in(without)} "
                "ORDER BY seq DESC LIMIT 1 OFFSET ?",
                (*without, count - 1),
            ).fetchone()
        return 0 if row is None else int(row[0])

    def count(self, *, before: int, without: Sequence[str] = ()) -> int:
        """Return how many events there are before a number: 0.2 s for a million."""
        with _translated(self.path):
            row = self._connection.execute(
                f"SELECT count(*) FROM events WHERE seq < ? AND {_not_in(without)}",
                (before, *without),
            ).fetchone()
        return int(row[0])

    def knows(self, key: str) -> bool:
        """Tell whether an event has this `key` in its data. Fast after `index_keys`."""
        with _translated(self.path):
            row = self._connection.execute(
                "SELECT 1 FROM events WHERE json_extract(data, '$.key') = ? LIMIT 1", (key,)
            ).fetchone()
        return row is not None

    def index_keys(self) -> None:
        """Make the index of `knows`, if an older spotguard made this file without one."""
        with _translated(self.path):
            self._connection.execute(_INDEX)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Write all events of the block at once, at its end: much faster than one by one."""
        with _translated(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        with _translated(self.path):
            self._connection.execute("COMMIT")

    def _check_in_place(self) -> None:
        """Raise `JournalDamaged` if the file is not the one that was opened.

        Who goes on with a file that nobody finds any more acts beside whoever has the new one.
        """
        found = _identity(self.path)
        if found is None:
            raise damaged(self.path, "the file is missing")
        if found != self._file:
            raise damaged(self.path, "another file took its place")

    def close(self) -> None:
        """Let go of the file."""
        with _connecting:
            self._connection.close()
            if not self._is_closed:
                _connected.subtract([self._file])
            self._is_closed = True

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _finite(value: Any) -> Any:
    """Return data without NaN and infinities, which are no JSON: SQLite's index refuses them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


_SELECT = "SELECT seq, at, kind, attempt, data FROM events"


def _not_in(kinds: Sequence[str]) -> str:
    return f"kind NOT IN ({', '.join('?' * len(kinds))})"


def _entry(row: tuple[Any, ...]) -> Entry:
    seq, at, kind, attempt, data = row
    if not abs(at) < _LATEST_AT:
        raise ValueError(f"event {seq} has no instant")
    return Entry(seq=seq, at=float(at), kind=kind, attempt=attempt, data=dict(json.loads(data)))


def _fits_together(path: Path, connection: sqlite3.Connection) -> bool:
    if path.stat().st_size > _CHECKED_BYTES:
        return True
    return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")


def damaged(path: Path, problem: str) -> JournalDamaged:
    """Return the error for a journal that cannot be read, with the way out."""
    run_id = path.parent.name
    return JournalDamaged(
        f"The journal of run {run_id} at {path} cannot be read: {problem}. "
        "Nothing was changed, and the run's store still has its state.",
        hint=f"Rebuild it from the store: spotguard adopt STORE/{run_id}",
    )


@contextmanager
def making_sense(path: Path) -> Iterator[None]:
    """Turn what events raise that make no sense into `JournalDamaged`."""
    try:
        yield
    except NO_SENSE as problem:
        raise damaged(path, f"its events make no sense ({problem})") from problem


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=_LOCK_PATIENCE_S, isolation_level=None)


@contextmanager
def _closed_on_error(opened: sqlite3.Connection | Journal) -> Iterator[None]:
    try:
        yield
    except BaseException:
        opened.close()
        raise


def _check_header(path: Path) -> None:
    """Look at the file's first bytes before SQLite does, which might repair what it opens."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        raise damaged(path, "the file is missing") from None
    except OSError as problem:
        raise damaged(path, problem.strerror or "the file cannot be opened") from problem
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise damaged(path, "it is not a SQLite file")
    if int.from_bytes(header[68:72], "big") != _APPLICATION_ID:
        raise damaged(path, "it is a database of another program")
    version = int.from_bytes(header[60:64], "big")
    if version != SCHEMA:
        raise damaged(
            path, f"it has schema {version}, and this version of spotguard reads {SCHEMA}"
        )


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours, once."""
    try:
        yield
    except sqlite3.OperationalError as problem:
        if "no such" in str(problem):  # our marks, but not our table
            raise damaged(path, str(problem)) from problem
        raise DiskFailure(
            f"The journal {path} could not be used: {problem}. What it holds is intact.",
            hint="Free some space or end what locks the file, then repeat the command.",
        ) from problem
    except (sqlite3.DatabaseError, *NO_SENSE) as problem:
        raise damaged(path, str(problem)) from problem
