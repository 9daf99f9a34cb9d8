from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.journal import Journal
from spotguard.errors import AlreadyExists, EnvironmentFailure, JournalDamaged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def filled(folder: Path, count: int = 60) -> Path:
    """Return the path of a journal with some events in it."""
    path = folder / "journal.db"
    with Journal.create(path) as journal:
        for number in range(count):
            journal.append(
                "thing", at=float(number), attempt=1, data={"number": number, "pad": "x" * 300}
            )
    return path


def test_events_come_back_in_order_and_whole(tmp_path: Path) -> None:
    """What was appended is read as it was written, and `after_seq` reads only what is new."""
    with Journal.create(tmp_path / "journal.db") as journal:
        first = journal.append("a", at=1.5, data={"x": [1, None, "ü"]})
        second = journal.append("b", at=2.5, attempt=3)

        entries = journal.events()
        assert [(entry.seq, entry.at, entry.kind, entry.attempt) for entry in entries] == [
            (first, 1.5, "a", None),
            (second, 2.5, "b", 3),
        ]
        assert entries[0].data == {"x": [1, None, "ü"]}
        assert [entry.kind for entry in journal.events(first)] == ["b"]


@pytest.mark.parametrize("statement", ["UPDATE events SET kind = 'x'", "DELETE FROM events"])
def test_nothing_written_can_be_changed(tmp_path: Path, statement: str) -> None:
    """The journal is append-only for any program, not only for ours."""
    path = filled(tmp_path, 2)
    stranger = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        stranger.execute(statement)
    stranger.close()


def test_the_files_are_private(tmp_path: Path) -> None:
    """The journal holds the values of the job's variables, so nobody else may read it."""
    path = tmp_path / "journal.db"
    with Journal.create(path) as journal:
        journal.append("a", at=1.0)
        modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {0o600}


def test_several_processes_may_append_at_once(tmp_path: Path) -> None:
    """A command's wish and the controller's acts never overwrite or lose one another."""
    path = tmp_path / "journal.db"
    Journal.create(path).close()

    def write(name: str) -> None:
        with Journal.open(path) as journal:
            for number in range(20):
                journal.append(name, at=float(number))

    writers = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with Journal.open(path) as journal:
        entries = journal.events()
    assert len(entries) == 80
    assert len({entry.seq for entry in entries}) == 80
    for name in "abcd":
        assert [entry.at for entry in entries if entry.kind == name] == list(map(float, range(20)))


def test_an_open_journal_sees_what_others_append(tmp_path: Path) -> None:
    """The controller reads a wish at its next tick, without opening the journal again."""
    with Journal.create(tmp_path / "journal.db") as controller:
        with Journal.open(tmp_path / "journal.db") as command:
            command.append("user_stop", at=1.0)
        assert [entry.kind for entry in controller.events()] == ["user_stop"]


def test_creating_over_a_file_is_refused(tmp_path: Path) -> None:
    """A run's journal is made once and never replaced."""
    path = filled(tmp_path, 1)
    with pytest.raises(AlreadyExists):
        Journal.create(path)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    """A journal that cannot be made says where and what to do."""
    with pytest.raises(EnvironmentFailure, match="cannot be created") as caught:
        Journal.create(tmp_path / "no" / "such" / "journal.db")
    assert "SPOTGUARD_HOME" in caught.value.hint


def overwrite(path: Path, at: int, raw: bytes) -> None:
    """Replace some bytes of a file."""
    whole = bytearray(path.read_bytes())
    whole[at : at + len(raw)] = raw
    path.write_bytes(whole)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "random pages": lambda path: overwrite(path, 4096, b"\xa5" * 8192),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "another schema": lambda path: overwrite(path, 60, (99).to_bytes(4, "big")),
    "another program": lambda path: overwrite(path, 68, (7).to_bytes(4, "big")),
    "text": lambda path: path.write_text("hello " * 100),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_journal_is_reported_and_left_alone(tmp_path: Path, damage: str) -> None:
    """One sentence says where it is, that nothing was changed, and what to do; and it is true."""
    path = filled(tmp_path)
    DAMAGE[damage](path)
    before = path.read_bytes() if path.exists() else None

    with pytest.raises(JournalDamaged) as caught:
        Journal.open(path).close()

    assert str(path) in caught.value.message
    assert "Nothing was changed" in caught.value.message
    assert f"spotguard adopt STORE/{tmp_path.name}" in caught.value.hint
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """An append that finds no room is refused in words; what was written stays readable."""
    path = filled(tmp_path, 3)
    with Journal.open(path) as journal:
        journal._connection.execute("PRAGMA max_page_count = 1")  # the smallest disk there is
        with pytest.raises(EnvironmentFailure, match="full"):
            journal.append("big", at=1.0, data={"blob": "x" * 100_000})
        assert len(journal.events()) == 3


def test_a_large_journal_opens_at_once_and_damage_is_found_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a million events is not looked through at each command."""
    path = filled(tmp_path, 600)
    raw = bytearray(path.read_bytes())
    page = len(raw) // 4096 // 2 * 4096
    raw[page : page + 4096] = bytes(4096)
    path.write_bytes(raw)
    with pytest.raises(JournalDamaged):
        Journal.open(path)

    monkeypatch.setattr("spotguard.control.journal.journal._CHECKED_BYTES", 0)
    with Journal.open(path) as journal:
        assert journal.newest("thing") is not None
        with pytest.raises(JournalDamaged):
            journal.events()


def test_a_loss_that_is_no_number_is_kept_as_unknown(tmp_path: Path) -> None:
    """SQLite's index on the data refuses NaN, which is no JSON: the run could not be adopted."""
    data = {"loss": float("nan"), "each": [1.0, float("inf")], "deep": {"x": float("-inf")}}
    with Journal.create(tmp_path / "journal.db") as journal:
        journal.append("progress", at=1.0, data=data)
        [entry] = journal.events()
    assert entry.data == {"loss": None, "each": [1.0, None], "deep": {"x": None}}


_LOOKS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
print(connection.execute("SELECT count(*) FROM events").fetchone()[0])
connection.close()
"""


def test_a_second_look_of_this_process_leaves_the_journal_to_its_controller(
    tmp_path: Path,
) -> None:
    """Or another process that looks would be the last in its eyes, and clear it up.

    The controller would go on in files that are gone: what it writes is lost, or cannot be written.
    """
    path = filled(tmp_path, count=2)

    def looks_elsewhere() -> int:
        words = [sys.executable, "-c", _LOOKS, str(path)]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    with Journal.open(path) as journal:
        journal.append("third", at=3.0)
        with Journal.open(path) as beside:
            assert len(beside.events()) == 3
        assert looks_elsewhere() == 3
        journal.append("fourth", at=4.0)
        assert looks_elsewhere() == 4
    assert looks_elsewhere() == 4
