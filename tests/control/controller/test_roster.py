from __future__ import annotations

import errno
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from spotguard.control import run_folder
from spotguard.control.controller import environment
from spotguard.control.controller.environment import process_name
from spotguard.control.controller.roster import Roster, take_back

if TYPE_CHECKING:
    from pathlib import Path

RUN = "job-260101-000000-abcd"
OTHER = "job-260101-000001-abcd"
ENVIRON = {"PATH": "/bin", "AWS_PROFILE": "team", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI"}


@pytest.fixture
def roster(home: Path) -> Roster:
    """The roster of a process that is not there."""
    return Roster(home / "controllers" / "some")


def test_an_order_that_came_meanwhile_is_not_taken_back(roster: Roster) -> None:
    """A run that is resumed while its control ends is looked after again, not forgotten."""
    first = roster.give(RUN)
    second = roster.give(RUN)
    roster.finish(RUN, first, "it came to rest")
    assert roster.orders() == {RUN: second}
    assert roster.problem(RUN) is None

    roster.finish(RUN, second, "its journal is damaged")
    assert roster.orders() == {}
    assert roster.problem(RUN) == "its journal is damaged"
    assert roster.give(RUN) == roster.orders()[RUN]
    assert roster.problem(RUN) is None


def test_a_process_leaves_only_without_orders(roster: Roster) -> None:
    """What is ordered is looked after; who hands over at this moment holds it, too."""
    order = roster.give(RUN)
    assert not roster.leave()
    roster.finish(RUN, order, None)
    with roster.handing_over():
        assert not roster.leave()
    assert roster.leave()
    assert not roster.path.exists()
    roster.finish(RUN, order, None)
    assert roster.orders() == {}


def test_the_process_of_a_roster_is_seen_while_it_lives(roster: Roster) -> None:
    """One process holds it; another one does not get it."""
    assert roster.pid() is None
    with roster.held(patience_s=0.0) as first:
        assert first
        assert roster.pid()
        with roster.held(patience_s=0.0) as second:
            assert not second
    assert roster.pid() is None


def test_a_run_is_taken_back_from_whoever_has_it(home: Path) -> None:
    """Its order goes, those of other runs stay; what is no run's name is no order."""
    rosters = [Roster(home / "controllers" / name) for name in ("one", "two")]
    for roster in rosters:
        roster.give(RUN)
    kept = rosters[1].give(OTHER)
    (rosters[1].path / "runs" / "..strange").touch()
    take_back(RUN)
    assert [roster.orders() for roster in rosters] == [{}, {OTHER: kept}]


@pytest.mark.parametrize(
    "change",
    [{"AWS_PROFILE": "mine"}, {"AWS_ENDPOINT_URL": "http://localhost"}, {"PATH": "/venv:/bin"}],
    ids=str,
)
def test_another_environment_has_another_process(home: Path, change: dict[str, str]) -> None:
    """Credentials, endpoints and programs are those of the `up` that began the run."""
    assert process_name(home, ENVIRON) == process_name(home, dict(reversed(ENVIRON.items())))
    assert process_name(home, ENVIRON) != process_name(home, {**ENVIRON, **change})


def test_another_window_has_the_same_process(home: Path) -> None:
    """Where the terminal is matters to no run."""
    window = {"PWD": "/there", "TMUX_PANE": "%3", "SSH_TTY": "/dev/pts/1", "COLUMNS": "80"}
    assert process_name(home, ENVIRON) == process_name(home, {**ENVIRON, **window})


def test_other_code_has_another_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of an older version keeps its runs; it gets none of a newer `up`."""
    before = process_name(home, ENVIRON)
    monkeypatch.setattr(environment, "__version__", "99.0")
    assert process_name(home, ENVIRON) != before


def test_no_value_of_the_environment_is_written_down(home: Path) -> None:
    """What names a process is keyed by a secret of the home, which only its user can read."""
    name = process_name(home, ENVIRON)
    [key] = [path for path in home.rglob("*") if path.is_file()]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert not any(value in key.read_text() + name for value in ENVIRON.values())
    key.write_text("another home's")
    assert process_name(home, ENVIRON) != name


def test_orders_that_cannot_be_read_are_not_taken_for_none(
    roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network folder that stalls, or a process without descriptors, lets go of no run."""
    roster.give(RUN)

    def stalls(*_: object) -> list[str]:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", stalls)
        with pytest.raises(OSError, match="Stale"):
            roster.orders()
        assert not roster.leave()
    assert set(roster.orders()) == {RUN}


def test_a_full_disk_keeps_no_order_alive(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that cannot be controlled is begun again and again."""
    order = roster.give(RUN)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    roster.finish(RUN, order, "its journal cannot be written")
    assert roster.orders() == {}


def test_a_lock_that_was_removed_while_it_was_waited_for_is_none(
    roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would look after one roster: one of them holds a file of nobody's."""
    roster.give(RUN)
    real = run_folder._flock

    def removed_meanwhile(descriptor: int, patience_s: float) -> bool:
        shutil.rmtree(roster.path)
        return real(descriptor, patience_s)

    monkeypatch.setattr(run_folder, "_flock", removed_meanwhile)
    with roster.held(patience_s=0.0) as alone:
        assert not alone
