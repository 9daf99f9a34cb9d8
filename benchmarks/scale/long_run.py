"""Makes up a very long run, as months of training leave it: its store, and its journal."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.lineage import Claim
from spotguard.checkpoint.manifest import Manifest
from spotguard.checkpoint.shard import Block, shard_file, write_shard
from spotguard.control.journal.fold import allotment_to_json, limits_to_json
from spotguard.control.journal.job_events import journal_data
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.ledger import Ledger
from spotguard.control.journal.nodes.offer import offer_to_json
from spotguard.control.journal.record import JOB_PREFIX, Allotment, Kind, Limits
from spotguard.events import event_chunk, keys
from spotguard.events.event import Event, Heartbeat, JobEvent
from spotguard.events.event_chunk import LARGEST_CHUNK, MERGED_AT_ONCE
from spotguard.events.states import CheckpointKind, EndReason, RunState
from spotguard.shared.units import SystemClock, to_iso
from spotguard.testing.launcher import FAKE_OFFER
from spotguard.testing.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spotguard.spec.model import JobSpec

    Put = Callable[[str, bytes], None]
    """Stores bytes under a key of the run."""

RUN_ID = "long-run-260101-000000-abcd"
_BEGAN_AT = 1_767_225_600.0
_EVENT_S = 10.0
_SINCE_SNAPSHOT = 1500
_Row = tuple[float, str, "int | None", str]


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """How much happened."""

    checkpoints: int = 10_000
    events: int = 1_000_000
    attempts: int = 50

    def events_of(self, attempt: int) -> Iterator[tuple[str, Event]]:
        """Yield (key, event) of what one attempt's job reported: nearly all of it are saves."""
        count = self.events // self.attempts
        first = (attempt - 1) * count
        last = first + count - 1
        for number in range(first, first + count):
            at = _BEGAN_AT + number * _EVENT_S
            kind, data = JobEvent.SAVED, _saved(number, attempt)
            if number == first:
                kind, data = JobEvent.STARTED, _started(first, attempt)
            elif number == last and attempt < self.attempts:
                kind, data = JobEvent.ENDED, _ended(number)
            event = Event(kind=kind.value, at=at, attempt=attempt, data=data)
            yield keys.event(attempt, at=at, node=0, rank=0, count=number - first + 1), event

    @property
    def newest_attempt(self) -> int:
        """Return the number of the one that still lives."""
        return self.attempts

    # ------------------------------------------------------------ the store

    def fill(self, put: Put, spec: JobSpec) -> None:
        """Put all that the run's store has; the event log has merged the events."""
        body = {"schema": 1, "name": "long", "limits": limits_to_json(Limits())}
        body |= {"spec": spec.to_json(), "created_at": to_iso(_BEGAN_AT)}
        put(keys.RUN, json.dumps(body).encode())
        for attempt in range(1, self.attempts + 1):
            self._fill_attempt(put, attempt)
        self._fill_checkpoints(put)

    def _fill_attempt(self, put: Put, attempt: int) -> None:
        first = (attempt - 1) * self.events // self.attempts
        source = keys.checkpoint(first, attempt - 1) if attempt > 1 else None
        at = _BEGAN_AT + first * _EVENT_S
        claim = Claim(attempt=attempt, claimed_at=at, resumed_from=source, writer="w", extra={})
        put(keys.claim(attempt), claim.to_json())
        put(keys.launch(attempt), json.dumps(_intent(attempt)["offer"]).encode())
        if attempt < self.attempts:
            put(keys.end(attempt), json.dumps(self._end(attempt)).encode())
        put(keys.heartbeat(attempt, 0), _beat(attempt, at).to_json())
        self.put_events(put, attempt)

    def put_events(self, put: Put, attempt: int) -> None:
        """Put an attempt's events as its job leaves them."""
        for key, raw in _as_merged(self.events_of(attempt)):
            put(key, raw)

    def _fill_checkpoints(self, put: Put) -> None:
        memory = MemoryStore()
        block = Block(name="weight", dtype="F32", shape=(4,), data=bytes(16))
        shard = write_shard(memory, "checkpoints/a/", shard_file(0, 1), [block], metadata={})
        content = memory.get(f"checkpoints/a/{shard.file}")
        every, parent = self.events // self.checkpoints, None
        for number in range(self.checkpoints):
            step = (number + 1) * every
            attempt = min(self.attempts, -(-step * self.attempts // self.events))
            manifest = Manifest(
                run_id=RUN_ID,
                attempt=attempt,
                step=step,
                kind=CheckpointKind.PERIODIC,
                created_at=_BEGAN_AT + step * _EVENT_S,
                parent=parent,
                world_size=1,
                shards=(shard,),
                state={},
                ranks={},
                counters={},
                versions={},
            )
            put(f"{manifest.prefix}{shard.file}", content)
            put(keys.manifest(manifest.prefix), manifest.to_json())
            parent = manifest.prefix

    # ------------------------------------------------------------ the journal

    def write_journal(self, path: Path, store_root: str) -> None:
        """Write a journal as a controller kept it: its last snapshot is near the end."""
        rows = self._rows(store_root)
        count = self.events + self.events // LARGEST_CHUNK
        Journal.create(path).close()
        _insert(path, islice(rows, max(1, count - _SINCE_SNAPSHOT)))
        with Journal.open(path) as journal:
            Ledger(journal, SystemClock())
        _insert(path, rows)

    def _rows(self, store_root: str) -> Iterator[_Row]:
        yield _row(_BEGAN_AT, Kind.CREATED.value, None, created(store_root))
        for attempt in range(1, self.attempts + 1):
            at = _BEGAN_AT + (attempt - 1) * self.events // self.attempts * _EVENT_S
            yield _row(at, Kind.INTENDED.value, attempt, _intent(attempt))
            yield _row(at, Kind.LAUNCHED.value, attempt, {})
            told = list(self.events_of(attempt))
            for key, event in told:
                data = journal_data(key, event, seen_at=event.at)
                yield _row(event.at, JOB_PREFIX + event.kind, attempt, data)
            for key, _ in _as_merged(iter(told)):
                if keys.is_chunk(key):
                    yield _row(at, Kind.CHUNK_READ.value, attempt, {"key": key})
            yield _row(at, Kind.ATTEMPT_ENDED.value, attempt, self._end(attempt))
        settled = {"state": RunState.PAUSED.value, "detail": "made up", "exit_code": 11}
        yield _row(at, Kind.SETTLED.value, None, settled)

    def _end(self, attempt: int) -> dict[str, Any]:
        number = attempt * self.events // self.attempts
        at = _BEGAN_AT + number * _EVENT_S
        return {
            "reason": EndReason.PREEMPTED.value,
            "detail": "",
            "gone_at": at,
            "last_step": number,
            "training_ended_at": at,
            "traceback": None,
        }


def created(store_root: str) -> dict[str, Any]:
    """Return the data of a journal's first event."""
    return {
        "run_id": RUN_ID,
        "name": "long",
        "store_root": store_root,
        "limits": limits_to_json(Limits()),
        "spec": {},
    }


def _insert(path: Path, rows: Iterator[_Row]) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.executemany(
            "INSERT INTO events (at, kind, attempt, data) VALUES (?, ?, ?, ?)", rows
        )
    connection.close()


def _as_merged(told: Iterator[tuple[str, Event]]) -> Iterator[tuple[str, bytes]]:
    """Yield (key, bytes) of the objects in which an event log leaves these events."""
    stored = [(key, event.to_json()) for key, event in told]
    count = max(0, len(stored) // MERGED_AT_ONCE - 1) * MERGED_AT_ONCE
    merged, rest = stored[:count], stored[count:]
    bounds = [0, *range(MERGED_AT_ONCE, len(merged), LARGEST_CHUNK), len(merged)]
    for begin, end in pairwise(bounds):
        if begin < end:
            yield keys.chunk(merged[end - 1][0]), event_chunk.pack(merged[begin:end])
    yield from rest


def _row(at: float, kind: str, attempt: int | None, data: dict[str, Any]) -> _Row:
    return at, kind, attempt, json.dumps(data, sort_keys=True)


def _intent(attempt: int) -> dict[str, Any]:
    allotment = allotment_to_json(Allotment())
    return {
        "cluster": f"{RUN_ID}-{attempt}",
        "nodes": 1,
        "offer": offer_to_json(FAKE_OFFER),
        "allotment": allotment,
    }


def _started(step: int, attempt: int) -> dict[str, Any]:
    source = keys.checkpoint(step, attempt - 1) if attempt > 1 else None
    return {"world_size": 1, "nodes": 1, "resumed_from": source, "resumed_step": step}


def _saved(step: int, attempt: int) -> dict[str, Any]:
    return {
        "step": step,
        "checkpoint": keys.checkpoint(step, attempt),
        "checkpoint_kind": "periodic",
        "size_bytes": 4096,
        "stall_s": 0.01,
        "duration_s": 1.0,
        "train_s": step * _EVENT_S,
    }


def _ended(step: int) -> dict[str, Any]:
    return {"reason": EndReason.PREEMPTED.value, "step": step, "saved_step": step, "message": ""}


def _beat(attempt: int, at: float) -> Heartbeat:
    return Heartbeat(
        at=at,
        attempt=attempt,
        node=0,
        step=1,
        total_steps=None,
        epoch=0,
        train_s=1.0,
        step_s=0.1,
        loss=None,
        saved_step=None,
        saved_at=None,
    )
