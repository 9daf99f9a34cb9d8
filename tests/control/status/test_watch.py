"""Looks at a run cost what is new, whatever its age, and tell the same story."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal import snapshot
from spotguard.control.journal.fold import fold, read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import RunFolder
from spotguard.control.status import watch
from spotguard.control.status.history_words import history_lines, newest_lines
from spotguard.control.status.watch import Watch
from spotguard.errors import JournalDamaged
from spotguard.events.states import RunState
from tests.control.journal.test_snapshot import created, kept, spoil
from tests.control.made import launched

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.status.view import HistoryLine

_FIRST = 10
"""Lines that a first look tells in these tests."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_EVERY", 40)
    monkeypatch.setattr(snapshot, "_BYTES_PER_ENTRY", 1 << 20)
    monkeypatch.setattr(watch, "NEWEST", _FIRST)


def whole(journal: Journal) -> list[HistoryLine]:
    """Return the whole story."""
    return list(history_lines(journal.events()))


def test_looks_tell_every_line_once(tmp_path: Path) -> None:
    """The first look tells the newest and counts the others, the next ones what was appended."""
    folder = RunFolder(tmp_path)
    with kept(folder.journal_path) as journal:
        before = whole(journal)
        looks = Watch(folder)
        first = looks.look()
        assert first.news == tuple(before[-_FIRST:])
        assert first.earlier == len(before) - _FIRST
        assert first.view.state is RunState.PAUSED

        assert (looks.look().news, looks.look().earlier) == ((), 0)
        journal.append("job_warning", at=9e6 + 2, attempt=3, data={"message": "second"})
        journal.append("job_warning", at=9e6 + 1, attempt=3, data={"message": "first"})
        journal.append(Kind.RESUMED.value, at=9e6 + 3, data={"limits": created()["limits"]})
        later = looks.look()
        assert later.news == tuple(whole(journal)[-3:])
        assert [line.text for line in later.news][:2] == ["first", "second"]
        assert later.view.state is not RunState.PAUSED
        assert looks.look().news == ()


def test_a_later_look_reads_nothing_old(tmp_path: Path) -> None:
    """All that it has seen may be unreadable by then."""
    folder = RunFolder(tmp_path)
    kept(folder.journal_path).close()
    looks = Watch(folder)
    before = looks.look()
    spoil(folder.journal_path, "UPDATE events SET data = '[1]'")
    with folder.journal() as journal:
        journal.append(Kind.USER_STOP.value, at=9e6 + 1)
    after = looks.look()
    assert [line.kind for line in after.news] == [Kind.USER_STOP.value]
    assert after.view.attempts == before.view.attempts


def test_the_newest_lines_are_those_of_the_whole_story(tmp_path: Path) -> None:
    """Cost by then included, though what is read begins at the snapshot before them."""
    path = tmp_path / "journal.db"
    with kept(path) as journal:
        story = whole(journal)
        for count in (1, 7, 60, len(story), len(story) + 5):
            lines, earlier = newest_lines(journal, count)
            assert lines == story[-count:]
            assert earlier == max(0, len(story) - count)
        assert story[-7].cost_usd
    spoil(path, "UPDATE events SET data = '[1]' WHERE seq < 50 AND kind != 'snapshot'")
    with Journal.open(path) as journal:
        assert newest_lines(journal, 7)[0] == story[-7:]


def test_what_is_not_told_hides_no_line(tmp_path: Path) -> None:
    """Thousands of progress reports lie between a quiet run's happenings."""
    with Journal.create(tmp_path / "journal.db") as journal:
        journal.append(Kind.CREATED.value, at=0.0, data=created())
        for kind, at, attempt, *rest in launched(1.0):
            journal.append(kind, at=at, attempt=attempt, data=rest[0] if rest else None)
        with journal.all_or_nothing():
            for number in range(500):
                journal.append(Kind.PROGRESS.value, at=2.0, attempt=1, data={"step": number})
                if number == 400:
                    snapshot.keep_snapshot(journal, read_record(journal), None, now=2.0)
        lines, earlier = newest_lines(journal, 2)
        assert [line.kind for line in lines] == [Kind.INTENDED.value, Kind.LAUNCHED.value]
        assert earlier == 1


def test_what_comes_while_a_first_look_is_taken_is_told_by_the_next(tmp_path: Path) -> None:
    """The lines end where the picture does."""
    with kept(tmp_path / "journal.db") as journal:
        record = fold(journal.events())
        story = whole(journal)
        journal.append(Kind.USER_STOP.value, at=9e6 + 1)
        assert newest_lines(journal, 3, until=record.seq) == (story[-3:], len(story) - 3)


def test_a_journal_in_the_place_of_another_is_read_from_its_start(tmp_path: Path) -> None:
    """`adopt` puts a new one there; the number of the last event seen says nothing then."""
    folder = RunFolder(tmp_path)
    kept(folder.journal_path).close()
    looks = Watch(folder)
    assert looks.look().view.attempts
    folder.journal_path.rename(tmp_path / "journal.db.damaged")
    with Journal.create(folder.journal_path) as journal:
        journal.append(Kind.CREATED.value, at=0.0, data=created())
    after = looks.look()
    assert [line.kind for line in after.news] == [Kind.CREATED.value]
    assert not after.view.attempts


@pytest.mark.parametrize("data", ["[1]", '{"reason": "nonsense"}', "{}"])
def test_news_that_make_no_sense_are_damage(tmp_path: Path, data: str) -> None:
    """One sentence with the way out, as for every other command."""
    folder = RunFolder(tmp_path)
    with kept(folder.journal_path) as journal:
        looks = Watch(folder)
        looks.look()
        number = journal.append(Kind.STOP_ASKED.value, at=9e6 + 1, attempt=3)
    spoil(folder.journal_path, "UPDATE events SET data = ? WHERE seq = ?", data, number)
    with pytest.raises(JournalDamaged, match="cannot be read"):
        looks.look()
