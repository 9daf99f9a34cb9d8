"""What is far too large, has no end, or takes quadratic time is refused within seconds."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.checkpoint.lineage import read_claim, restorable
from spotguard.checkpoint.manifest import load_manifest
from spotguard.control.journal.job_events import newest_events, read_beats
from spotguard.control.supervisor.lease import read_holder
from spotguard.errors import DamagedCheckpoint, NotFound, SpecError, StoreError
from spotguard.events import keys
from spotguard.events.states import EndReason
from spotguard.events.untrusted import Refused
from spotguard.launch.membership import read_group
from spotguard.runtime.reporting.node_reports import Reporter
from spotguard.spec.setting import Whole, duration, number, usd
from spotguard.spec.setting_layers import file_layer
from spotguard.storage import FileStore
from spotguard.storage.patterns.clock_comparison import seconds_ahead
from spotguard.testing import FakeClock, FaultyStore, MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.runtime.preemption.stop_consensus import StopRequest
    from spotguard.storage.base import ObjectStore

PREFIX = keys.checkpoint(1, 1)


def in_time(act: Callable[[], object]) -> None:
    """Do something that takes seconds of the processor at most, also on a slow machine."""
    started = time.process_time()
    act()
    assert time.process_time() - started < 10.0


@pytest.mark.parametrize("parse", [duration, number, usd, Whole(1)])
@pytest.mark.parametrize("text", ["1" * 200_000, "1h" * 100_000, "1." * 100_000, "1" * 4999 + "s"])
def test_no_value_takes_quadratic_time(parse: Callable[[str], object], text: str) -> None:
    """A duration, an amount of money and a number have an end."""

    def act() -> None:
        with pytest.raises(ValueError, match="not a"):
            parse(text)

    in_time(act)


@pytest.mark.parametrize(
    "toml",
    [
        "nodes = " + "7" * 4301,
        "nodes = " + "7" * 200_000,
        "a" + ".a" * 500_000 + " = 1",
        "x = " + "[" * 100_000,
        "# " + "x" * 5_000_000,
    ],
)
def test_a_file_of_settings_that_makes_no_sense_is_told_in_time(toml: str, tmp_path: Path) -> None:
    """One sentence, no traceback."""
    (tmp_path / "spotguard.toml").write_text(toml)

    def act() -> None:
        with pytest.raises(SpecError):
            file_layer(tmp_path / "spotguard.toml", "spotguard.toml")

    in_time(act)


def test_a_pipe_is_no_file_of_settings(tmp_path: Path) -> None:
    """Nobody waits for who would write into it."""
    os.mkfifo(tmp_path / "spotguard.toml")
    with pytest.raises(SpecError, match="no file"):
        file_layer(tmp_path / "spotguard.toml", "spotguard.toml")


def test_a_pipe_is_no_object(tmp_path: Path) -> None:
    """Whatever reads it finds nothing there, and does not wait."""
    store = FileStore(tmp_path)
    (tmp_path / "attempts").mkdir()
    os.mkfifo(tmp_path / "attempts" / "x")
    with pytest.raises(NotFound):
        store.get("attempts/x")
    with pytest.raises(NotFound):
        store.get_into("attempts/x", 0, memoryview(bytearray(1)))
    store.best_reads("attempts/x")
    assert store.head("attempts/x") is None
    assert list(store.list()) == []


def sparse(path: Path, size_bytes: int) -> None:
    """Make a file that is long and takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)


@pytest.mark.parametrize("kind", ["huge", "pipe", "folder"])
def test_a_claim_that_is_none_is_refused_in_time(kind: str, tmp_path: Path) -> None:
    """By its key and the way out; it does not pass for an attempt that made none."""
    store = FileStore(tmp_path)
    store.put(keys.launch(1), b"{}")
    place = tmp_path / keys.claim(1)
    if kind == "huge":
        sparse(place, 50_000_000_000)
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(place)

    def act() -> None:
        with pytest.raises(DamagedCheckpoint, match=r"attempts/000001/claim\.json is") as caught:
            next(restorable(store))
        assert "gives up what attempt 1 did" in caught.value.hint

    in_time(act)


ONE_EACH: dict[str, tuple[str, Callable[[ObjectStore], object]]] = {
    "lease": (keys.LEASE, lambda s: (found := read_holder(s)) is None or not found[0].damaged),
    "event": (keys.event(1, at=1e9, node=0, rank=0, count=0), lambda s: newest_events(s, 1)),
    "heartbeat": (keys.heartbeat(1, 0), lambda s: read_beats(s, 1)),
    "group": (keys.group(2), lambda s: read_group(s, 2)),
    "clock": ("theirs", lambda s: seconds_ahead(s, "theirs", "mine", FakeClock())),
    "manifest": (keys.manifest(PREFIX), lambda s: load_manifest(s, PREFIX)),
    "claim": (keys.claim(1), lambda s: read_claim(s, 1)),
}


@pytest.mark.parametrize("what", ONE_EACH)
def test_nothing_that_is_read_whole_is_read_whatever_its_size(what: str, tmp_path: Path) -> None:
    """Whoever can write into the store cannot fill the memory of who reads there."""
    key, read = ONE_EACH[what]
    sparse(tmp_path / key, 50_000_000_000)

    def act() -> None:
        with contextlib.suppress(DamagedCheckpoint, Refused):
            assert not read(FileStore(tmp_path))

    in_time(act)


def test_a_request_to_stop_that_is_far_too_large_means_stop(tmp_path: Path) -> None:
    """Only the controller writes there: whatever it wanted to say, it asked."""
    sparse(tmp_path / keys.stop(1), 50_000_000_000)
    heard: list[StopRequest] = []
    reporter = Reporter(
        FileStore(tmp_path), attempt=1, node=0, rank=0, heartbeat_s=1.0, heartbeat=None,
        on_stop=heard.append,
    )  # fmt: skip
    in_time(reporter._look_for_stop)
    assert [request.reason for request in heard] == [EndReason.STOPPED]


def test_a_request_to_stop_that_cannot_be_read_now_is_read_later() -> None:
    """A hiccup of the store swallows no word."""
    heard: list[StopRequest] = []
    store = FaultyStore(MemoryStore())
    reporter = Reporter(
        store, attempt=1, node=0, rank=0, heartbeat_s=1.0, heartbeat=None, on_stop=heard.append
    )
    store.put(keys.stop(1), b'{"reason":"budget"}')
    store.fail("get")
    with pytest.raises(StoreError):
        reporter._look_for_stop()
    reporter._look_for_stop()
    reporter._look_for_stop()
    assert [request.reason for request in heard] == [EndReason.BUDGET]


def test_a_manifest_of_500_megabytes_is_refused_in_time(tmp_path: Path) -> None:
    """It is not even read."""
    sparse(tmp_path / keys.manifest(PREFIX), 500_000_000)

    def act() -> None:
        with pytest.raises(DamagedCheckpoint, match="too large"):
            load_manifest(FileStore(tmp_path), PREFIX)

    in_time(act)
