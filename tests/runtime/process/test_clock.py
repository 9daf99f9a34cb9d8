from __future__ import annotations

import json
import os
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.runtime.preemption import notices
from spotguard.runtime.preemption.notices import AwsNotices, AzureNotices, FileNotices
from spotguard.runtime.process import clock
from spotguard.shared import steady_clock
from spotguard.shared.steady_clock import SteadyClock, clock_kept_at, elapsed_s
from spotguard.shared.units import to_iso
from spotguard.storage import open_store
from spotguard.storage.patterns.clock_comparison import seconds_ahead
from spotguard.testing import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

HOUR_S = 3600.0
_true_time = time.time


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> SteadyClock:
    """The run's clock in this process, right at first, and not for the tests that follow."""
    fresh = SteadyClock()
    monkeypatch.setattr(clock, "RUN_CLOCK", fresh)
    return fresh


def jump(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the machine's own clock jump."""
    monkeypatch.setattr(time, "time", lambda: _true_time() + seconds)


@pytest.mark.parametrize("ahead_s", [-2 * HOUR_S, -30.0, 0.0, 30.0, HOUR_S])
def test_clocks_are_compared_through_the_store(
    tmp_path: Path, mine: SteadyClock, ahead_s: float
) -> None:
    """However long the nodes took to come, only the difference between the clocks is found."""
    store = open_store(str(tmp_path))
    store.put("launch.json", json.dumps({"written_at": _true_time() - ahead_s - 500}).encode())
    os.utime(tmp_path / "launch.json", (_true_time() - 500, _true_time() - 500))

    found = seconds_ahead(store, "launch.json", "mine", mine)

    assert found == pytest.approx(ahead_s, abs=1.0)
    assert (found == 0.0) is (ahead_s == 0.0), "what is too small to be told is no difference"
    assert store.head("mine") is None, "nothing is left behind"
    assert clock.compare(store, "launch.json", "mine") == pytest.approx(ahead_s, abs=1.0)
    assert clock.now() == pytest.approx(_true_time() - ahead_s, abs=1.0)
    assert clock.compare(store, "launch.json", "mine") == 0.0, "it is right now"


@pytest.mark.parametrize(
    "body",
    [
        None,
        *(b"", b"[]", b"{}", b'{"written_at": "now"}', b'{"written_at": true}'),
        *(b'{"written_at": 1e999}', b'{"written_at": NaN}', b"[" * 100_000),
    ],
)
def test_what_says_no_time_changes_no_clock(mine: SteadyClock, body: bytes | None) -> None:
    """A launch that was not published, or by an older version, or by a stranger."""
    store = MemoryStore()
    if body is not None:
        store.put("launch.json", body)

    assert seconds_ahead(store, "launch.json", "mine", mine) is None
    assert clock.compare(store, "launch.json", "mine") == 0.0
    assert clock.now() == pytest.approx(_true_time(), abs=1.0)


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
def test_a_jump_moves_no_steady_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Nor one that is started after the jump, from the same file: a restarted controller's."""
    monkeypatch.setattr(steady_clock, "_FRESH_S", 0.0)  # this machine began long ago
    path = tmp_path / "clock.json"
    before = clock_kept_at(path)
    jump(monkeypatch, seconds)
    after = clock_kept_at(path)

    assert before.now() == pytest.approx(_true_time(), abs=1.0)
    assert after.now() == pytest.approx(before.now(), abs=0.01)
    assert after.machine_ahead_s == pytest.approx(seconds, abs=1.0)


@pytest.mark.skipif(steady_clock._boot_id() is None, reason="nothing tells its boots apart")
def test_a_machine_that_boots_with_a_clock_behind_is_set_right_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hardware's clock is an hour behind; seconds later it hears the true time. An hour would
    be missing in each bill until the next boot. All processes follow that step, and none later."""
    monkeypatch.setattr(steady_clock, "_FRESH_S", elapsed_s() + 1000.0)
    path = tmp_path / "clock.json"
    jump(monkeypatch, -HOUR_S)
    first, second = clock_kept_at(path), clock_kept_at(path)
    assert first.now() == pytest.approx(_true_time() - HOUR_S, abs=1.0)

    jump(monkeypatch, 0.0)
    for each in (first, clock_kept_at(path)):
        assert each.now() == pytest.approx(_true_time(), abs=1.0)
    jump(monkeypatch, HOUR_S)
    monkeypatch.setattr(steady_clock, "_FRESH_S", 0.0)
    for each in (first, second, clock_kept_at(path)):
        assert each.now() == pytest.approx(_true_time(), abs=1.0)
        assert each.now() == pytest.approx(first.now(), abs=0.01)


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S, -1.0])
def test_a_fresh_machine_follows_one_step_and_none_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """What is not told to other processes by the file is the same in this one."""
    monkeypatch.setattr(steady_clock, "_FRESH_S", elapsed_s() + 1000.0)
    folder = tmp_path / "none"
    kept = clock_kept_at(folder / "clock.json")
    follows = seconds > 0 and steady_clock._boot_id() is not None
    for step in (seconds, 2 * seconds):
        jump(monkeypatch, step)
        expected = _true_time() + (seconds if follows else 0.0)
        assert kept.now() == pytest.approx(expected, abs=1.0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot": "x"}', '{"zero": 1e999, "boot": "x"}'])
def test_a_clock_file_that_makes_no_sense_is_made_anew(tmp_path: Path, text: str) -> None:
    """Also one of an earlier boot: the machine's own clock is read once more."""
    path = tmp_path / "clock.json"
    path.write_text(text)

    assert clock_kept_at(path).now() == pytest.approx(_true_time(), abs=1.0)
    assert clock_kept_at(tmp_path / "none" / "clock.json").now() == pytest.approx(
        _true_time(), abs=1.0
    )
    if steady_clock._boot_id() is not None:
        assert json.loads(path.read_text())["boot"] == steady_clock._boot_id()


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
@pytest.mark.parametrize("make", [AwsNotices, AzureNotices])
def test_a_notice_is_understood_by_the_clock_of_who_gave_it(
    mine: SteadyClock, monkeypatch: pytest.MonkeyPatch, make: Any, seconds: float
) -> None:
    """A node whose clock is an hour ahead or behind has its two minutes all the same."""
    true_now = int(_true_time())
    date, deadline = (formatdate(at, usegmt=True) for at in (true_now, true_now + 100))
    event = {"EventType": "Preempt", "NotBefore": deadline}
    body = {"action": "stop", "time": to_iso(true_now + 100), "Events": [event]}
    source = make()
    source._http = lambda *_, **__: (200, json.dumps(body), {"date": date})
    jump(monkeypatch, seconds)

    notice = source.check()

    assert notice.deadline_at == pytest.approx(mine.now() + 100, abs=5.0)


def test_a_fresh_notice_file_is_of_now(
    tmp_path: Path, mine: SteadyClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wrote it had the clock that stamped it, whatever this process believes."""
    source = FileNotices(str(tmp_path / "notice"))
    assert source.check() is None
    (tmp_path / "notice").write_text(json.dumps({"deadline_at": to_iso(_true_time() + 30)}))
    jump(monkeypatch, HOUR_S)

    notice = source.check()

    assert notice is not None
    assert notice.deadline_at == pytest.approx(clock.now() + 30, abs=5.0)


def test_garbage_in_a_date_is_no_date() -> None:
    """The machine's own clock is taken then."""
    assert notices._in_run_time(5.0, "yesterday") == pytest.approx(5.0, abs=1.0)
