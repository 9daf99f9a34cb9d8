"""Events: what the job and the controller write down, each with its time and its data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from spotguard.events.keys import MAX_ATTEMPT
from spotguard.events.masking import masked
from spotguard.events.metric import newest_values
from spotguard.events.untrusted import (
    Refused,
    an_object,
    instant,
    integer,
    needed,
    number,
    parse_object,
    seconds,
    text,
)
from spotguard.shared.units import to_iso

SCHEMA = 1
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")


class JobEvent(str, Enum):
    """What a job can report into the run store, and the keys of each event's `data`.

    STARTED   world_size, nodes, resumed_from (checkpoint prefix or null), resumed_step,
              total_steps, notice_source, skipped: [{checkpoint, problem}],
              node_up_at (ISO or null): the first command ran on the node, init_at (ISO)
    FIRST_STEP  step: the first one that this attempt finished
    NOTICE    source, action, deadline_at (ISO or null), detail
    WITHDRAWN source
    AGREED    reason, stop_step, by_rank
    SAVED     step, checkpoint, checkpoint_kind, size_bytes, stall_s, duration_s, train_s
    SAVE_FAILED  step, problem
    FITS      emergency_s, grace_s, fits, message: does an emergency save fit the cloud's notice
    PEER_LOST problem, step
    NODE_EXITED  exit_code (negative: a signal), told: the node was told to leave; written by the
              node's agent, for launchers that do not see exit codes
    GIVEN_BACK  allocation: its node had Slurm cancel it
    CACHE_RESTORED  from_attempt, files, size_bytes, duration_s, problems (how many files are not
              back): before the script began, written by the node's agent
    RESCALED  step, global_batch_size, global_batch_size_before, lr_factor, lr_factor_before (times
              the script's rate), lr_warmup_steps, message: the global batch follows the ranks
    HYPERPARAMETERS  message, differences: [[object, key, old, new]]: at a resume the script's new
              values count
    WARNING   message
    ENDED     reason (EndReason), step, resumed_step, saved_step, saved_at (ISO or null),
              checkpoint, train_s, warned_at (ISO or null), deadline_at (ISO or null), message,
              traceback
    """

    STARTED = "started"
    FIRST_STEP = "first_step"
    NOTICE = "notice"
    WITHDRAWN = "notice_withdrawn"
    AGREED = "stop_agreed"
    SAVED = "saved"
    SAVE_FAILED = "save_failed"
    FITS = "emergency_fit"
    PEER_LOST = "peer_lost"
    NODE_EXITED = "node_exited"
    GIVEN_BACK = "given_back"
    CACHE_RESTORED = "cache_restored"
    RESCALED = "rescaled"
    HYPERPARAMETERS = "hyperparameters"
    WARNING = "warning"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of a run's story."""

    kind: str
    at: float
    """Seconds since the epoch."""
    attempt: int
    node: int = 0
    rank: int = 0
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the event as the bytes the store keeps: without secrets."""
        body = {
            "schema": SCHEMA,
            "kind": str(getattr(self.kind, "value", self.kind)),
            "at": to_iso(self.at),
            "attempt": self.attempt,
            "node": self.node,
            "rank": self.rank,
            "data": masked(self.data),
        }
        return json.dumps(body, sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Event:
        """Return the event that `to_json` wrote.

        Raises:
            Refused: it is not an event of a schema this version reads.
        """
        return cls.from_body(parse_object(raw, "the event"))

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Event:
        """Return the event of a parsed JSON object; `Refused` as `from_json`."""
        if integer(body, "schema") != SCHEMA:
            raise Refused(f"it is no event of schema {SCHEMA}")
        kind = needed(text(body, "kind"), "kind")
        if not _KIND.fullmatch(kind):
            raise Refused("its kind is no word")
        return cls(
            kind=kind,
            at=needed(instant(body, "at"), "instant"),
            attempt=needed(integer(body, "attempt", low=0, high=MAX_ATTEMPT), "attempt"),
            node=needed(integer(body, "node", low=0), "node"),
            rank=needed(integer(body, "rank", low=0), "rank"),
            data=an_object(body.get("data"), "its data"),
        )


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A node's last sign of life, overwritten in place."""

    at: float
    attempt: int
    node: int
    step: int
    """Steps finished."""
    total_steps: int | None
    epoch: int
    train_s: float
    """Seconds this attempt spent in finished steps."""
    step_s: float | None
    """Seconds of a recent step."""
    loss: float | None
    saved_step: int | None
    saved_at: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest finite values of what the script logged and the runtime measured."""

    def to_json(self) -> bytes:
        """Return the heartbeat as the bytes the store keeps."""
        return json.dumps({"schema": SCHEMA, **self.__dict__}, sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Heartbeat:
        """Return the heartbeat that `to_json` wrote; `Refused` if it is none."""
        body = parse_object(raw, "the heartbeat")
        return cls(
            at=needed(seconds(body, "at"), "instant"),
            attempt=needed(integer(body, "attempt", low=0, high=MAX_ATTEMPT), "attempt"),
            node=needed(integer(body, "node", low=0), "node"),
            step=needed(integer(body, "step", low=0), "step"),
            total_steps=integer(body, "total_steps", low=0),
            epoch=integer(body, "epoch", low=0) or 0,
            train_s=number(body, "train_s") or 0.0,
            step_s=number(body, "step_s"),
            loss=number(body, "loss"),
            saved_step=integer(body, "saved_step", low=0),
            saved_at=seconds(body, "saved_at"),
            metrics=newest_values(body),
        )
