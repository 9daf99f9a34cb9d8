"""Every reader of what others may write, with documents to mutate and the errors it may raise."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.lineage import Claim
from spotguard.checkpoint.manifest import Manifest
from spotguard.control.handover.adopt import _end_in
from spotguard.control.handover.run_json import read_run_json
from spotguard.control.journal.launches import Launches
from spotguard.control.supervisor.lease import Lease, read_holder
from spotguard.errors import DamagedCheckpoint, SpecError, StateMismatch, UsageError
from spotguard.events import keys
from spotguard.events.checksummed import with_checksum
from spotguard.events.event import Event, Heartbeat
from spotguard.events.event_chunk import pack, unpack
from spotguard.events.regrouping import Group, Joining
from spotguard.events.untrusted import Refused, parse_object
from spotguard.runtime.preemption.notices import AwsNotices, AzureNotices
from spotguard.runtime.reporting.node_reports import parse_stop
from spotguard.shared.units import parse_duration_s
from spotguard.spec import setting_layers
from spotguard.spec.setting import usd
from spotguard.testing import FakeClock, MemoryStore
from tests.checkpoint.crashes.mutation import mutants, survive
from tests.checkpoint.crashes.savings import body_of, make_manifest
from tests.checkpoint.test_fuzz import bare, headers, parse, seal
from tests.control.journal.test_fuzz_run_json import ORIGINAL

if TYPE_CHECKING:
    from collections.abc import Callable

AT = 1_700_000_000.0
_DATE = "Mon, 19 Sep 2016 18:29:47 GMT"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader."""

    read: Callable[[bytes], Any]
    refusals: tuple[type[Exception], ...]
    originals: tuple[bytes, ...]

    def fuzz(self, count: int, seed: int) -> int:
        """Read so many mutants: each is refused, or read, at once; return how many were read.

        Raises:
            AssertionError: one was neither; names it, and the seed.
        """
        inputs = mutants(self.originals, count, seed=seed)
        try:
            return survive(self.read, inputs, self.refusals, lambda raw, found: None)[0]
        except AssertionError as problem:
            raise AssertionError(f"seed {seed}: {problem}") from problem


class _Aws(AwsNotices):
    """A metadata service that says one thing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def _get(self, path: str) -> tuple[int, str, dict[str, str]]:
        return 200, self._text, {"date": _DATE}


def _azure(raw: bytes) -> Any:
    source = AzureNotices()
    answer: tuple[int, str, dict[str, str]] = (200, _text(raw), {"date": _DATE})
    source._http = lambda *_: answer  # type: ignore[assignment]
    return source.check()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _lease(raw: bytes) -> Any:
    store = MemoryStore()
    store.put(keys.LEASE, raw)
    return read_holder(store)


def _a_lease() -> bytes:
    store = MemoryStore()
    Lease(store, FakeClock(AT), "one").take()
    raw = store.get(keys.LEASE)
    return raw[: raw.index(b',"checksum"')] + b"}"


def _launches(raw: bytes) -> Any:
    return Launches._of_json(Path("/runs/gpt-1/launches.json"), parse_object(raw, "it"))


def _run(raw: bytes) -> Any:
    store = MemoryStore()
    store.put(keys.RUN, raw)
    return read_run_json(store, "memory://gpt")


def _header(text: bytes) -> Any:
    padded = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    return parse(len(padded).to_bytes(8, "little") + padded + bytes(300))


def _settings(raw: bytes) -> Any:
    toml = _text(raw)
    return setting_layers._table_layer(
        setting_layers._parsed(toml, "file"), toml, "file", Path("/"), ""
    )


_EVENT = Event(kind="saved", at=AT, attempt=1, node=7, rank=7, data={"step": 3}).to_json()
_CLAIM = Claim(attempt=3, claimed_at=AT, resumed_from=None, writer="a/1/x", extra={"n": 1})
_BEAT = Heartbeat(
    at=AT,
    attempt=1,
    node=0,
    step=412,
    total_steps=600,
    epoch=0,
    train_s=9.5,
    step_s=0.1,
    loss=0.25,
    saved_step=400,
    saved_at=AT,
)
_END = {"gone_at": AT, "reason": "finished", "exit_code": 0, "last_step": 5, "detail": "so"}
_LAUNCH = {"cluster": "gpt-1", "nodes": 2, "market": "spot", "price_usd_per_h": 0.5, "zone": "a"}
_LAUNCHES = {
    "schema": 1,
    "run_id": "gpt-1",
    "store_root": "file:///store",
    "spec": {"schema": 1, "script": "/job.py", "workdir": "/", "name": "gpt", "store": "/s"},
    "clusters": {"gpt-1-7": 7, "gpt-1-8r2": 8},
    "wish": "user_down",
}
_MANIFEST = make_manifest(state={"a": [1.5, {"$": "x"}], "$float": {}})
_TOML = b"""
budget = 20.5
deadline = "1h30m"
save_every = "10m"
nodes = "1:4"
store = "s3://bucket/runs"
[env]
NAME = "value"
[local]
speed_up = 30
interrupt = ["node=1@step=50:notice"]
"""
_DURATIONS = (b"90", b"1h30m", b"2d", b"500ms", b"1.5h 3 s", b"1e3")
_AMOUNTS = (b"20", b"$20.50", b"0.0001", b"1e3", b"1,000")


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


_REFUSED = (Refused,)
READERS = {
    "event": Reader(read=Event.from_json, refusals=_REFUSED, originals=(_EVENT,)),
    "chunk": Reader(
        read=lambda raw: list(unpack(raw)),
        refusals=(),
        originals=(pack([(keys.event(1, at=AT, node=7, rank=7, count=1), _EVENT)] * 2),),
    ),
    "heartbeat": Reader(read=Heartbeat.from_json, refusals=_REFUSED, originals=(_BEAT.to_json(),)),
    "claim": Reader(
        read=lambda raw: Claim.from_json(with_checksum(raw)),
        refusals=(DamagedCheckpoint,),
        originals=(
            bare(_CLAIM),
            bare(replace(_CLAIM, resumed_from=keys.checkpoint(10, 2))),
        ),
    ),
    "group": Reader(
        read=Group.from_json,
        refusals=_REFUSED,
        originals=(Group(attempt=2, nodes=(0, 2), host="10.0.0.1", port=29500, at=AT).to_json(),),
    ),
    "joining": Reader(
        read=Joining.from_json,
        refusals=_REFUSED,
        originals=(Joining(node=1, leaves=False, host="10.0.0.1", port=29500).to_json(),),
    ),
    "lease": Reader(
        read=lambda raw: _lease(with_checksum(raw)), refusals=(), originals=(_a_lease(),)
    ),
    "run.json": Reader(read=_run, refusals=(UsageError,), originals=(_json(ORIGINAL),)),
    "launches.json": Reader(
        read=_launches, refusals=(Refused, UsageError), originals=(_json(_LAUNCHES),)
    ),
    "launch.json": Reader(
        read=lambda raw: parse_object(raw, "it"), refusals=_REFUSED, originals=(_json(_LAUNCH),)
    ),
    "end.json": Reader(
        read=lambda raw: _end_in(parse_object(raw, "it")),
        refusals=_REFUSED,
        originals=(_json(_END),),
    ),
    "stop.json": Reader(
        read=parse_stop,
        refusals=(),
        originals=(_json({"reason": "stopped", "message": "asked to"}),),
    ),
    "manifest": Reader(
        read=lambda raw: Manifest.from_json(seal(raw)),
        refusals=(DamagedCheckpoint, StateMismatch),
        originals=(_json(body_of(_MANIFEST)),),
    ),
    "shard header": Reader(read=_header, refusals=(DamagedCheckpoint,), originals=tuple(headers())),
    "notice of AWS": Reader(
        read=lambda raw: _Aws(_text(raw)).check(),
        refusals=(ValueError,),
        originals=(_json({"action": "terminate", "time": "2025-01-01T00:00:00Z"}),),
    ),
    "notice of Azure": Reader(
        read=_azure,
        refusals=(ValueError,),
        originals=(
            _json(
                {
                    "Events": [
                        {
                            "EventId": "a",
                            "EventType": "Preempt",
                            "NotBefore": _DATE,
                        }
                    ]
                }
            ),
        ),
    ),
    "settings": Reader(read=_settings, refusals=(SpecError,), originals=(_TOML,)),
    "duration": Reader(
        read=lambda raw: parse_duration_s(_text(raw)),
        refusals=(ValueError,),
        originals=_DURATIONS,
    ),
    "money": Reader(read=lambda raw: usd(_text(raw)), refusals=(ValueError,), originals=_AMOUNTS),
}
