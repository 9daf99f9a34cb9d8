"""What a job, a node or a stranger writes into the store never ends a controller."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.fold import fold, read_record
from spotguard.control.journal.journal import Entry
from spotguard.control.journal.record import JOB_PREFIX
from spotguard.control.status.history_words import history_lines
from spotguard.control.status.make_view import run_view
from spotguard.events import keys
from spotguard.events.event import JobEvent
from spotguard.events.states import RunState
from tests.checkpoint.crashes.mutation import mutants
from tests.control.made import launched, made
from tests.control.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord, StepProgress

KEY = keys.event(1, at=1_000.0, node=7, rank=7, count=1)
BODY: dict[str, Any] = {
    "schema": 1,
    "kind": "saved",
    "at": "2025-01-01T00:00:00Z",
    "attempt": 1,
    "node": 7,
    "rank": 7,
    "data": {"step": 3},
}


def show(record: RunRecord, live: StepProgress | None) -> None:
    """Make the picture of a run that `status` prints."""
    view = run_view(record, live=live, now=9.0, controller_alive=False, store_url="memory://")
    json.dumps(view.to_json(), ensure_ascii=False).encode()


def event(**changes: Any) -> bytes:
    """Return an event's bytes with some fields changed."""
    return json.dumps({**BODY, **changes}).encode()


HOSTILE = {
    "an infinite node": event(node=1).replace(b'"node": 1', b'"node": 1e999'),
    "an infinite rank": event(rank=1).replace(b'"rank": 1', b'"rank": Infinity'),
    "a huge attempt": event(attempt=10**30),
    "a step of 401 digits": event(data={"step": 10**400}),
    "seconds of 401 digits": event(data={"step": 1, "train_s": 10**400}),
    "5000 digits": event().replace(b'"step": 3', b'"step": ' + b"7" * 5000),
    "a list for skipped": event(kind="started", data={"skipped": 5}),
    "no text for an instant": event(at=5),
    "the year 0": event(at="0001-01-01T00:00:00+23:00"),
    "the last year": event(kind="notice", at="9999-12-31T23:59:59-23:00"),
    "deep nesting": event().replace(b'{"step": 3}', b'{"a":' * 900 + b"1" + b"}" * 900),
    "deeper nesting": b"[" * 100_000,
    "half a character": event(kind="warning", data={"message": "\ud800"}),
    "another attempt": event(attempt=2),
    "a kind that is no word": event(kind=[1]),
    "an enormous text": event(kind="warning", data={"message": "x" * 20_000_000}),
    "no object": b"[]",
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_one_malformed_event_ends_no_run(what: str, tmp_path: Path) -> None:
    """It is set aside, or read as far as it makes sense; the run goes on, over restarts, too."""
    world = World(tmp_path)
    world.store.put(KEY, HOSTILE[what])
    world.run_until(8.0)
    world.run_until(4.0)

    record = world.run()

    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert world.kinds().count("set_aside") <= 1, "told once"
    with world.journal() as journal:
        list(history_lines(journal.read()))
        show(record, None)


@pytest.mark.parametrize("what", ["an infinite node", "no object", "deeper nesting", "not UTF-8"])
def test_what_is_refused_is_told_once(what: str, tmp_path: Path) -> None:
    """The user hears of it by its key, once, however often the controller is started."""
    world = World(tmp_path)
    world.store.put(KEY, HOSTILE[what])
    for _ in range(3):
        world.run_until(5.0)

    assert world.kinds().count("set_aside") == 1
    assert [KEY in warning for warning in world.record().warnings] == [True]


def test_a_malformed_line_of_a_chunk_is_set_aside_alone(tmp_path: Path) -> None:
    """The other events of the chunk are read; a key that is no text reaches no database."""
    world = World(tmp_path)
    good = keys.event(1, at=2_000.0, node=7, rank=7, count=2)
    lines = [
        b'{"key": %s, "event": %s}' % (json.dumps(good).encode(), event(data={"step": 4})),
        b'{"key": "\\ud800", "event": %s}' % event(),
        b'{"key": [1], "event": %s}' % event(),
        b"[" * 50_000,
    ]
    world.store.put(keys.chunk(KEY), b"\n".join(lines) + b"\n")

    record = world.run()

    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert world.kinds().count("set_aside") == 3
    with world.journal() as journal:
        assert journal.knows(good)


@pytest.mark.parametrize(
    "beat",
    [
        b"[]",
        b"[" * 100_000,
        b'{"schema": 1, "at": 1e999, "attempt": 1, "node": 3, "step": 1}',
        b'{"schema": 1, "at": 5, "attempt": 1, "node": 3, "step": 1' + b"0" * 400 + b"}",
        b'{"schema": 1, "at": 5, "attempt": 1, "node": 3, "step": 2, "epoch": [1]}',
    ],
)
def test_a_malformed_heartbeat_ends_no_run(beat: bytes, tmp_path: Path) -> None:
    """The other nodes' are read."""
    world = World(tmp_path)
    world.store.put(keys.heartbeat(1, 3), beat)

    record = world.run()

    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED


def test_what_an_older_controller_took_in_ends_no_run(tmp_path: Path) -> None:
    """A journal in which such data stands is folded and told all the same."""
    world = World(tmp_path)
    world.run_until(5.0)
    poison: list[dict[str, Any]] = [
        {"skipped": 5},
        {"step": 10**400, "train_s": 10**400, "duration_s": 10**400},
        {"step": True, "node": [], "exit_code": {}, "deadline_at": 5, "reason": []},
        {"reason": "finished", "traceback": 5, "step": 1e300},
    ]
    with world.journal() as journal:
        for kind in JobEvent:
            for data in poison:
                if kind is not JobEvent.ENDED:
                    journal.append(JOB_PREFIX + kind.value, at=1.0, attempt=1, data=data)

    record = world.run()

    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    with world.journal() as journal:
        list(history_lines(journal.read()))
        assert read_record(journal) == record


@pytest.mark.slow
@pytest.mark.same_everywhere
def test_no_data_of_a_job_makes_the_record_or_its_story_fail() -> None:
    """Ten thousand events of all kinds whose data nobody wrote: folded, told and shown."""
    data = {
        "step": 5,
        "total_steps": 10,
        "resumed_step": 1,
        "resumed_from": "checkpoints/000000000001-000001/",
        "skipped": [{"checkpoint": "a", "problem": "b"}],
        "node_up_at": "2025-01-01T00:00:00Z",
        "init_at": "2025-01-01T00:00:00Z",
        "deadline_at": "2025-01-01T00:00:00Z",
        "train_s": 1.5,
        "duration_s": 1.5,
        "size_bytes": 100,
        "exit_code": 1,
        "node": 0,
        "told": True,
        "reason": "preempted",
        "saved_step": 5,
        "message": "m",
        "traceback": "t",
        "world_size": 2,
        "seen_at": 1.0,
        "checkpoint_kind": "final",
        "loss": 0.1,
        "step_s": 0.1,
    }
    record = made(*launched())
    kinds = [JOB_PREFIX + kind.value for kind in JobEvent] + ["progress"]
    raws = mutants([json.dumps(data, sort_keys=True).encode()] * 20 + [b"{}"], 10_000, seed=3)
    for number, raw in enumerate(raws):
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if not isinstance(found, dict):
            continue
        kind = kinds[number % len(kinds)]
        entry = Entry(seq=record.seq + 1, at=5.0, kind=kind, attempt=1, data=found)
        after = fold([entry], record)
        list(history_lines([*_past(), entry]))
        show(after, after.attempts[-1].progress)


def _past() -> list[Entry]:
    created = {
        "run_id": "job-1",
        "name": "job",
        "store_root": "memory://",
        "limits": {"budget_usd": None, "nodes_min": 1, "nodes_max": 1},
        "spec": {},
    }
    lines: list[Any] = [("run_created", 0.0, None, created), *launched()]
    return [
        Entry(seq=seq, kind=kind, at=at, attempt=number, data=rest[0] if rest else {})
        for seq, (kind, at, number, *rest) in enumerate(lines, 1)
    ]
