"""A profile of some steps: what is asked for, when it begins, and what each rank answers.

`spotguard profile` asks, the job's first rank says with which step it begins, and each rank that
took part writes its answer last, behind its trace.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from spotguard.events.masking import masked
from spotguard.events.untrusted import (
    amount,
    an_object,
    integer,
    needed,
    parse_object,
    seconds,
    text,
)

SCHEMA = 1
MOST_STEPS = 100
MOST_PROFILES = 999_999
MOST_TRACE_BYTES = 16 << 20
"""Of one rank's trace as it is stored, compressed."""
STEP, DATA, SAVING, RANKS = (f"spotguard/{name}" for name in ("step", "data", "save", "ranks"))
"""What the runtime marks in a trace: a step, and its waits for data, for saves, for other ranks."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What a user asks an attempt for; one at a time."""

    number: int
    """Of the attempt's profiles, from 1."""
    steps: int
    asked_at: float

    def to_json(self) -> bytes:
        """Return the request as the bytes the store keeps."""
        return json.dumps(masked({"schema": SCHEMA, **self.__dict__}), sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> ProfileRequest:
        """Return the request that `to_json` wrote; `Refused` if it is none."""
        body = parse_object(raw, "the request")
        return cls(
            number=needed(integer(body, "number", low=1, high=MOST_PROFILES), "number"),
            steps=needed(integer(body, "steps", low=1, high=MOST_STEPS), "count of steps"),
            asked_at=needed(seconds(body, "asked_at"), "instant"),
        )


@dataclass(frozen=True, kw_only=True)
class ProfileBegin:
    """What all ranks do, as the first one has decided."""

    number: int
    first_step: int
    """Steps done before the first one that is recorded; the second one before it warms up."""
    steps: int
    problem: str = ""
    """Why nothing is recorded; empty if it is."""

    def to_json(self) -> bytes:
        """Return the word as the bytes the store keeps."""
        return json.dumps(masked({"schema": SCHEMA, **self.__dict__}), sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> ProfileBegin:
        """Return the word that `to_json` wrote; `Refused` if it is none."""
        body = parse_object(raw, "the beginning")
        return cls(
            number=needed(integer(body, "number", low=1, high=MOST_PROFILES), "number"),
            first_step=needed(integer(body, "first_step", low=0), "step"),
            steps=needed(integer(body, "steps", low=1, high=MOST_STEPS), "count of steps"),
            problem=text(body, "problem") or "",
        )


@dataclass(frozen=True, kw_only=True)
class ProfileAnswer:
    """What one rank recorded and knows of itself."""

    rank: int
    node: int
    world_size: int
    first_step: int
    steps: int
    """Recorded: fewer than asked for if they have too many operations, or the loop ended."""
    duration_s: float
    """From the first recorded step's beginning to the last one's end."""
    cpu_s: float
    """Processor time of the process meanwhile, all threads together."""
    cores: int
    """That the process may use."""
    load: float | None
    """Processes of the node that wanted a core, in the last minute's mean; None is unknown."""
    device: str
    """As torch calls it, such as `NVIDIA H100 80GB HBM3`; `cpu` without a GPU."""
    trace_bytes: int
    """Of the stored trace; 0 if this rank keeps none."""
    problem: str = ""
    """Why there is no trace, if there should be one."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the levers depend on: `loader`, `optimizers`, `compiled`, `parameter_kinds` and
    `threads`."""

    def to_json(self) -> bytes:
        """Return the answer as the bytes the store keeps."""
        return json.dumps(masked({"schema": SCHEMA, **self.__dict__}), sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> ProfileAnswer:
        """Return the answer that `to_json` wrote; `Refused` if it is none."""
        body = parse_object(raw, "the answer")
        return cls(
            rank=needed(integer(body, "rank", low=0), "rank"),
            node=needed(integer(body, "node", low=0), "node"),
            world_size=needed(integer(body, "world_size", low=1), "number of ranks"),
            first_step=needed(integer(body, "first_step", low=0), "step"),
            steps=needed(integer(body, "steps", low=0), "count of steps"),
            duration_s=amount(body, "duration_s") or 0.0,
            cpu_s=amount(body, "cpu_s") or 0.0,
            cores=integer(body, "cores", low=1) or 1,
            load=amount(body, "load"),
            device=text(body, "device") or "cpu",
            trace_bytes=integer(body, "trace_bytes", low=0) or 0,
            problem=text(body, "problem") or "",
            facts=an_object(body.get("facts", {}), "its facts"),
        )
