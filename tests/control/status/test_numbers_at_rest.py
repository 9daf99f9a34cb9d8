"""The numbers of a run at rest are read from beside its journal, and only while they are true."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control import api
from spotguard.control.journal import snapshot
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind
from spotguard.control.report import measures, numbers_at_rest
from spotguard.control.report.numbers_at_rest import run_line, signs_of
from spotguard.control.run_folder import RunFolder
from spotguard.events.states import RunState
from tests.control.run_folders import make_run
from tests.control.world import RUN_ID, World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The folder of a run that trained, was stopped, and has been read at rest."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    path = tmp_path / "home" / "runs" / RUN_ID
    path.mkdir(parents=True)
    world = World(path, total_steps=40)
    world.run_until(6.0)
    world.write(Kind.USER_STOP)
    world.run()
    folder = RunFolder(path)
    run_line(folder)
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose journals are opened from here on."""
    runs: list[str] = []
    real = Journal.open.__func__  # type: ignore[attr-defined]

    def opens(cls: type[Journal], /, path: Path, **more: bool) -> Journal:
        runs.append(path.parent.name)
        return real(cls, path, **more)  # type: ignore[no-any-return]

    monkeypatch.setattr(Journal, "open", classmethod(opens))
    return runs


def test_a_run_at_rest_is_read_once(folder: RunFolder, opened: list[str]) -> None:
    """By all that list runs, in this process and any other; what is told is the very same."""
    fleet = api.fleet()
    fleet.refresh()
    lines, numbers = fleet.summaries(), fleet.measures()
    assert opened == []
    assert api.list_runs() == lines
    assert opened == []
    folder.at_rest_path.unlink()
    again = api.fleet()
    again.refresh()
    assert set(opened) == {RUN_ID}
    assert again.summaries() == lines
    assert again.measures() == numbers
    assert lines[0].state is RunState.STOPPED
    assert lines[0].spent_usd
    assert numbers[0].saves > 0
    assert numbers[0].time[0].seconds > 0


def test_one_that_goes_on_again_is_read_again(folder: RunFolder) -> None:
    """A resume is a change of the journal: what was kept counts no more."""
    fleet = api.fleet()
    fleet.refresh()
    with folder.journal() as journal:
        limits = journal.events()[0].data["limits"]
        journal.append(Kind.RESUMED.value, at=folder.clock().now(), data={"limits": limits})
    assert not run_line(folder).state.settled
    assert fleet.refresh()
    assert not fleet.summaries()[0].state.settled


def _changed(**changes: Any) -> Callable[[RunFolder], None]:
    def change(folder: RunFolder) -> None:
        told = json.loads(folder.at_rest_path.read_text())
        folder.at_rest_path.write_text(json.dumps({**told, **changes}))

    return change


def _another_file(folder: RunFolder) -> None:
    copy = folder.journal_path.with_suffix(".copy")
    copy.write_bytes(folder.journal_path.read_bytes())
    status = folder.journal_path.stat()
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.rename(folder.journal_path)


@pytest.mark.parametrize(
    "spoil",
    [
        _changed(measures='{"summary": 1}'),
        _changed(made_by="another version"),
        _changed(signs=[1, 2, 3]),
        _changed(sha256=None),
        lambda folder: folder.at_rest_path.write_bytes(b"\xff\x00"),
        lambda folder: folder.at_rest_path.write_text("[" * 100_000),
        lambda folder: folder.at_rest_path.write_text("[]"),
        lambda folder: folder.live_path.write_text("{}"),
        _another_file,
    ],
)
def test_what_cannot_be_trusted_is_made_anew(
    folder: RunFolder, opened: list[str], spoil: Callable[[RunFolder], object]
) -> None:
    """A cache that is damaged, old, or of another file costs one reading, and nothing else."""
    before = run_line(folder)
    assert opened == []
    spoil(folder)
    assert run_line(folder) == before
    assert opened == [RUN_ID]
    assert run_line(folder) == before
    assert opened == [RUN_ID]


def test_what_was_written_while_it_was_read_is_not_missed(
    folder: RunFolder, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of a journal that has changed by then are told, and not kept."""
    folder.at_rest_path.unlink()
    real = measures.run_measures

    def slowly(*given: Any) -> Any:
        with folder.journal() as journal:
            journal.append(Kind.USER_STOP.value, at=1.7e9)
        return real(*given)

    monkeypatch.setattr(numbers_at_rest, "run_measures", slowly)
    assert run_line(folder).state is RunState.STOPPED
    assert not folder.at_rest_path.exists()


def test_where_nothing_can_be_written_all_is_told(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a home that may only be read."""
    folder.at_rest_path.unlink()
    monkeypatch.setattr(
        RunFolder, "at_rest_path", property(lambda self: self.path / "none" / "at-rest.json")
    )
    assert run_line(folder).state is RunState.STOPPED


def test_another_form_makes_another_cache(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the numbers as of the record: a version with one field more reads the journal."""
    form = numbers_at_rest._maker()
    numbers_at_rest._maker.cache_clear()
    monkeypatch.setattr(snapshot, "fingerprint", lambda: "other")
    try:
        assert numbers_at_rest._maker() != form
        assert numbers_at_rest.kept(folder, signs_of(folder)) is None
    finally:
        numbers_at_rest._maker.cache_clear()


def test_a_run_that_goes_on_keeps_nothing(folder: RunFolder, tmp_path: Path) -> None:
    """Its money runs while nothing is written."""
    make_run(tmp_path / "home", "job-9")
    other = RunFolder(tmp_path / "home" / "runs" / "job-9")
    run_line(other)
    assert not other.at_rest_path.exists()
    assert folder.at_rest_path.exists()
