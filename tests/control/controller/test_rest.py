from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.controller import rest as rest_module
from spotguard.control.controller.rest import Bell, LetGo, Rest, Signs, signs_of
from spotguard.control.journal.fold import limits_to_json, read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.run_folder import RunFolder
from spotguard.testing.clock import FakeClock
from tests.control.made import intended

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from threading import Event

    from spotguard.control.journal.record import RunRecord


class FakeBell(Bell):
    """Lets time pass at once, and does something while it waits."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock
        self.meanwhile: Callable[[], object] = bool

    def wait(self, rung: Event, paths: tuple[str, ...], signs: Signs, seconds: float) -> bool:
        """Rest for the whole time, unless something is written in it."""
        self.meanwhile()
        if rung.is_set() or signs_of(paths) != signs:
            return True
        self._clock.advance(seconds)
        return False


class Resting:
    """A run that is looked at again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.clock = FakeClock()
        self.bell = FakeBell(self.clock)
        self.rest = Rest(self.folder, self.bell, self.clock)
        self.news = folder / "events"
        self.news.mkdir()
        created = {"run_id": "job", "name": "job", "store_root": "memory://", "spec": {}}
        with Journal.create(self.folder.journal_path):
            pass
        self.write(Kind.CREATED, {**created, "limits": limits_to_json(Limits())})
        kind, at, attempt, data = intended()
        with self.folder.journal() as journal:
            journal.append(kind, at=at, attempt=attempt, data=data)
            self.record: RunRecord = read_record(journal)

    def write(self, kind: Kind, data: dict[str, object] | None = None) -> None:
        """Write into the journal, as a command does."""
        with self.folder.journal() as journal:
            journal.append(kind.value, at=self.clock.now(), data=data)

    def next(self, *, acted: bool = False, unhurried: bool = False) -> float:
        """Rest until the next look; return for how long."""
        began_at = self.clock.monotonic()
        self.rest.until_next(self.record, (str(self.news),), acted=acted, unhurried=unhurried)
        return self.clock.monotonic() - began_at

    def fall_quiet(self) -> float:
        """Look for five minutes in which nothing happens; return the last rest."""
        until = self.clock.monotonic() + 300.0
        while self.clock.monotonic() < until:
            last = self.next()
        return last


@pytest.fixture
def run(tmp_path: Path) -> Resting:
    """A run with nodes."""
    return Resting(tmp_path)


def test_a_quiet_run_is_looked_at_less_and_less_until_something_is_done(run: Resting) -> None:
    """Ten times a second at first, each 2.5 s in the end: the job's signs of life are all seen."""
    assert run.next() == pytest.approx(0.1)
    assert run.fall_quiet() == pytest.approx(2.5)
    assert run.next(unhurried=True) == pytest.approx(5.0), "each look there is a request"
    assert run.next(acted=True) == pytest.approx(0.1)


@pytest.mark.parametrize("what", ["a wish", "an event"])
def test_news_ends_a_rest_at_once(run: Resting, what: str) -> None:
    """A user's stop and what the job reports are not waited for."""
    run.fall_quiet()

    def happens() -> None:
        run.bell.meanwhile = bool
        if what == "a wish":
            run.write(Kind.USER_STOP)
        else:
            (run.news / "1.json").touch()

    run.bell.meanwhile = happens
    assert run.next() == 0.0
    assert run.next() == pytest.approx(0.1), "more may follow"


def test_what_comes_while_the_run_is_looked_at_is_seen_at_the_next_look(run: Resting) -> None:
    """The look may have missed it, so the next one is soon; the run is no less quiet for it."""
    run.fall_quiet()
    run.write(Kind.USER_STOP)
    assert run.next() == pytest.approx(0.1)
    assert run.next() == pytest.approx(2.5)


def test_a_rest_ends_when_there_is_something_to_do(run: Resting) -> None:
    """Without nodes a run rests longer, and never past the instant for which it waits."""
    run.record = replace(run.record, attempts=())
    assert run.fall_quiet() == pytest.approx(10.0)
    run.record = replace(run.record, retry_at=run.clock.now() + 1.5)
    assert run.next() == pytest.approx(1.5)


def test_a_run_is_let_go_of_in_its_rest(run: Resting) -> None:
    """Whoever wants the run does not wait for the next look."""
    run.fall_quiet()
    run.bell.meanwhile = run.rest.let_go
    with pytest.raises(LetGo):
        run.next()
    with pytest.raises(LetGo):
        run.rest.sleep(5.0)


def test_letting_go_wakes_the_thread_that_rests(run: Resting) -> None:
    """Else a stop would wait for the end of a rest, or for a file that nobody writes."""
    bell = Bell()
    rest, ended = Rest(run.folder, bell), threading.Event()

    def look_after() -> None:
        with pytest.raises(LetGo):
            rest.sleep(3600.0)
        ended.set()

    threading.Thread(target=look_after, daemon=True).start()
    assert not ended.wait(0.2), "it rests"
    rest.let_go()
    assert ended.wait(60.0)


def test_a_slow_disk_makes_no_long_pause_between_looks_at_the_files(
    run: Resting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes time, and no core: who has a wish waits for the disk alone."""
    pauses: list[float] = []

    def slow_signs(paths: tuple[str, ...]) -> Signs:
        threading.Event().wait(0.02)
        return signs_of(paths)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        threading.Event().wait(0.005)

    clocks = {"perf_counter": time.perf_counter, "thread_time": time.thread_time}
    monkeypatch.setattr(rest_module, "time", SimpleNamespace(**clocks, sleep=sleep))
    monkeypatch.setattr(rest_module, "signs_of", slow_signs)
    paths = (str(run.news),)
    Bell().wait(threading.Event(), paths, signs_of(paths), 0.3)
    assert pauses
    assert max(pauses) == pytest.approx(0.1)
