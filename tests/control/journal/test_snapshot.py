"""Long journals: read from near their end, in little memory, and still told as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.handover.adopt import Rebuild
from spotguard.control.journal import snapshot
from spotguard.control.journal.fold import fold, newest_record, read_record
from spotguard.control.journal.journal import Entry, Journal
from spotguard.control.journal.ledger import Ledger
from spotguard.control.journal.record import KEPT_SAVES, Kind
from spotguard.control.status.history_words import history_lines
from spotguard.events import event_chunk, keys
from spotguard.events.event import Event
from spotguard.launch.local import LocalLauncher
from spotguard.launch.local.options import LocalOptions
from spotguard.shared.typed_json import TypedJson
from spotguard.testing import FakeClock, FaultyStore, MemoryStore
from tests.control.made import down_asked, ended, launched, made, node_ended, said, saved, training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.control.made import Line

EVERY = 40
"""Entries between snapshots in these tests."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_EVERY", EVERY)
    monkeypatch.setattr(snapshot, "_BYTES_PER_ENTRY", 1 << 20)


def created() -> dict[str, Any]:
    """Return the data of a journal's first event."""
    limits = dataclasses.asdict(made().limits)
    return {
        "run_id": "job-1",
        "name": "job",
        "store_root": "memory://",
        "limits": limits,
        "spec": {},
    }


def story(attempts: int = 3, saves: int = 60) -> Iterator[Line]:
    """Yield a run with every kind of part that a record has."""
    for attempt in range(1, attempts + 1):
        at = attempt * 1000.0
        yield from launched(at, attempt, down_at=9e9, budget_stop_at=8e9)
        source = keys.checkpoint((attempt - 1) * saves, attempt - 1) if attempt > 1 else None
        yield training(at + 1, attempt, step=(attempt - 1) * saves, source=source)
        for number in range(saves):
            yield saved(at + 2 + number, (attempt - 1) * saves + number, attempt, duration_s=1.0)
        yield ("job_warning", at + 90, attempt, {"message": f"warning {attempt}"})
        yield ("job_notice", at + 91, attempt, {"source": "aws", "deadline_at": None})
        yield ("progress", at + 92, attempt, {"step": 5, "total_steps": 99, "loss": 0.5})
        yield ("stop_asked", at + 93, attempt, {"reason": "preempted"})
        yield down_asked(at + 94, "preempted", attempt)
        yield node_ended(at + 95, attempt=attempt, end="lost")
        yield said(at + 96, "preempted", attempt, step=7)
        yield ended(at + 97, "preempted", attempt, last_step=7)
    yield ("no_capacity", 9e6, 9, {"nodes": 2, "place": "a/b", "problem": ""})
    yield ("user_stop", 9e6, None, {})
    yield ("run_settled", 9e6, None, {})
    yield ("settled", 9e6, None, {"state": "paused", "detail": "so", "exit_code": 11})


def kept(path: Path) -> Journal:
    """Return a journal that a controller wrote, entry by entry."""
    journal = Journal.create(path)
    journal.append(Kind.CREATED.value, at=0.0, data=created())
    ledger = Ledger(journal, FakeClock())
    for kind, at, *rest in story():
        attempt, data = (*rest, None, None)[:2]
        journal.append(kind, at=at, attempt=attempt, data=data)
        ledger.catch_up()
    return journal


def snapshots(journal: Journal) -> list[int]:
    """Return the numbers of the snapshots."""
    return [entry.seq for entry in journal.events() if entry.kind == Kind.SNAPSHOT.value]


def test_a_snapshot_and_what_follows_say_what_all_entries_say(tmp_path: Path) -> None:
    """Wherever a reader begins, it gets the very same record."""
    with kept(tmp_path / "journal.db") as journal:
        whole = fold(journal.events())
        assert len(snapshots(journal)) > 3
        assert snapshot.newest_snapshot(journal) is not None
        assert read_record(journal) == whole
        assert whole.settled is not None
        assert whole.attempts[0].notice is not None
        assert whole.tried


def test_a_journal_is_folded_in_time_by_its_length() -> None:
    """The attempts that an event does not change are not gone through: counted in comparisons."""
    lines: list[Line] = [(Kind.CREATED.value, 0.0, None, created()), *story(300, saves=2)]
    entries = [
        Entry(seq=seq, at=at, kind=kind, attempt=attempt, data=data or {})
        for seq, (kind, at, attempt, data) in enumerate(
            ((*line, None, None)[:4] for line in lines), 1
        )
    ]
    looked_at = 0

    class Counted(int):
        def __eq__(self, other: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return int(self) == other

        __hash__ = int.__hash__

    counted = [
        dataclasses.replace(each, attempt=None if each.attempt is None else Counted(each.attempt))
        for each in entries
    ]
    assert len(fold(counted).attempts) == 299, "the ninth was refused"
    assert looked_at < 4 * len(entries)


def test_a_command_folds_a_journal_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks again reads what is new alone; another file in its place is read as a whole."""
    read: list[int] = []
    real = Journal.read

    def counted(self: Journal, after_seq: int = 0, **more: Any) -> Any:
        for each in real(self, after_seq, **more):
            read.append(each.seq)
            yield each

    monkeypatch.setattr(Journal, "read", counted)
    monkeypatch.setattr(snapshot, "_EVERY", 1 << 20)
    path = tmp_path / "journal.db"
    with kept(path) as journal:
        first = newest_record(journal)
        whole = len(read)
        for _ in range(3):
            assert newest_record(journal) is not None
        assert len(read) == whole
        journal.append("job_warning", at=1e7, attempt=3, data={"message": "new"})
        assert newest_record(journal).warnings[-1] == "attempt 3: new"
        assert len(read) == whole + 1
        assert newest_record(journal) == read_record(journal) != first
    path.rename(tmp_path / "aside")
    with Journal.create(path) as other:
        other.append(Kind.CREATED.value, at=5.0, data=created())
        assert newest_record(other).created_at == 5.0


def test_a_reader_begins_at_the_newest_snapshot(tmp_path: Path) -> None:
    """What it reads does not grow with the run's age: older entries may even be unreadable."""
    path = tmp_path / "journal.db"
    with kept(path) as journal:
        before = read_record(journal)
    spoil(path, "UPDATE events SET data = '[1]' WHERE seq < 50 AND kind != 'snapshot'")
    with Journal.open(path) as journal:
        assert read_record(journal) == before


@pytest.mark.parametrize("damage", ["version", "byte", "type", "later", "foreign"])
def test_a_snapshot_that_cannot_be_trusted_is_passed_over(tmp_path: Path, damage: str) -> None:
    """One of another version, or a damaged one, costs time and nothing else."""
    path = tmp_path / "journal.db"
    with kept(path) as journal:
        before = read_record(journal)
        newest = journal.newest(Kind.SNAPSHOT.value)
        assert newest is not None
        data = dict(newest.data)
    match damage:
        case "version":
            body = data["record"].replace("job-1", "job-2")
            data |= {"fold": "0-of-another", "record": body, "sha256": snapshot._digest(body)}
        case "byte":
            data["record"] = data["record"].replace("job-1", "job-2")
        case "type":
            data["record"] = ["not", "a", "text"]
        case "later":
            body = json.dumps({**json.loads(data["record"]), "seq": 10**6})
            data |= {"record": body, "sha256": snapshot._digest(body)}
        case "foreign":
            data = {}
    spoil(path, "UPDATE events SET data = ? WHERE seq = ?", json.dumps(data), newest.seq)
    with Journal.open(path) as journal:
        assert read_record(journal) == before


def test_an_entry_written_while_a_snapshot_is_made_is_not_lost(tmp_path: Path) -> None:
    """A user's wish that slips in before the snapshot still counts."""
    with Journal.create(tmp_path / "journal.db") as journal:
        journal.append(Kind.CREATED.value, at=0.0, data=created())
        for kind, at, attempt, *rest in launched(1.0):
            journal.append(kind, at=at, attempt=attempt, data=rest[0] if rest else None)
        for number in range(EVERY):
            journal.append("job_warning", at=2.0, attempt=1, data={"message": str(number)})
        record = read_record(journal)
        journal.append(Kind.USER_STOP.value, at=3.0)
        snapshot.keep_snapshot(journal, record, None, now=4.0)

        assert snapshots(journal) == [record.seq + 2]
        assert read_record(journal).wish is Kind.USER_STOP


def test_snapshots_tell_nothing_in_the_story(tmp_path: Path) -> None:
    """They are for readers of the journal, not of the run."""
    with kept(tmp_path / "journal.db") as journal:
        kinds = {line.kind for line in history_lines(journal.events())}
        assert "saved" in kinds
        assert Kind.SNAPSHOT.value not in kinds


def test_the_form_of_a_record_is_part_of_its_snapshots() -> None:
    """A field that is added to any part of a record makes older snapshots unfit."""

    @dataclasses.dataclass
    class Before:
        step: int

    @dataclasses.dataclass
    class After:
        step: int
        loss: float | None

    before, after = TypedJson(Before, {}).form, TypedJson(After, {}).form
    assert before.partition("(")[2] != after.partition("(")[2]
    assert "Save(" in snapshot._RECORD.form


def test_a_record_keeps_few_saves_and_the_right_ones() -> None:
    """Of a million saves the newest are kept, the slowest, the final ones, and fewer of the old."""
    lines = [saved(2.0 + n, n, duration_s=50.0 if n == 7 else 1.0) for n in range(3000)]
    lines[40] = saved(42.0, 40, checkpoint_kind="final")
    record = made(*launched(), training(), *lines)
    saves = record.attempts[0].saves
    steps = [save.step for save in saves]

    assert len(saves) <= KEPT_SAVES
    assert steps == sorted(steps)
    assert steps[-KEPT_SAVES // 2 :] == list(range(3000))[-KEPT_SAVES // 2 :]
    assert {7, 40} <= set(steps)


def test_keys_are_known_whatever_made_the_journal(tmp_path: Path) -> None:
    """An event is looked up in the journal, also in one from before there was an index."""
    path = tmp_path / "journal.db"
    with Journal.create(path) as journal:
        journal.append("job_saved", at=1.0, attempt=1, data={"key": "events/a"})
    spoil(path, "DROP INDEX events_by_key")
    with Journal.open(path) as journal:
        assert journal.knows("events/a")
        journal.index_keys()
        assert journal.knows("events/a")
        assert not journal.knows("events/b")


def test_a_batch_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    """All of a batch is in the journal, or none of it."""
    with Journal.create(tmp_path / "journal.db") as journal:
        journal.append("a", at=1.0)
        with contextlib.suppress(KeyError), journal.all_or_nothing():
            journal.append("b", at=2.0)
            raise KeyError
        with journal.all_or_nothing():
            journal.append("c", at=3.0)
        assert [entry.kind for entry in journal.events()] == ["a", "c"]


def test_a_long_run_is_adopted_from_its_ends(tmp_path: Path) -> None:
    """Old chunks are left in the store, and a controller does not read them either."""
    store = MemoryStore()
    told = [
        (keys.event(1, at=1e9 + n, node=0, rank=0, count=n), Event(**fields(n)))
        for n in range(3000)
    ]
    for begin in range(0, 3000, 100):
        part = [(key, event.to_json()) for key, event in told[begin : begin + 100]]
        store.put(keys.chunk(part[-1][0]), event_chunk.pack(part))
    store.put(keys.launch(1), b'{"nodes": 1}')
    counting = FaultyStore(store)
    with Journal.create(tmp_path / "journal.db") as journal:
        journal.append(Kind.CREATED.value, at=0.0, data=created())
        rebuild = Rebuild(journal, LocalLauncher(tmp_path, LocalOptions()), "job-1")
        rebuild.attempts(counting)

        attempt = read_record(journal).attempts[0]
        assert attempt.started_at == 1e9
        assert attempt.last_save is not None
        assert attempt.last_save.step == 2999
        assert rebuild.chunks_left == 28
        assert all(journal.knows(info.key) for info in store.list(keys.events(1)))
    assert counting.calls["get"] < 12


def fields(number: int) -> dict[str, Any]:
    """Return what an event of a long attempt is made of."""
    kind = "saved" if number else "started"
    return {"kind": kind, "at": 1e9 + number, "attempt": 1, "data": {"step": number}}


def spoil(path: Path, statement: str, *values: object) -> None:
    """Change a journal as no program of ours can."""
    stranger = sqlite3.connect(path)
    stranger.execute("DROP TRIGGER events_keep_what_was_written")
    stranger.execute(statement, values)
    stranger.commit()
    stranger.close()
