"""A training state that is to be saved, what was saved, and why it could not be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from spotguard.errors import CheckpointError
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint.early_end import is_early_end
from spotguard.runtime.process import clock
from spotguard.shared.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.runtime.checkpoint.staging import Plan
    from spotguard.runtime.state.tree import Leaf


@dataclass(frozen=True, kw_only=True)
class Capture:
    """The whole training state at a step boundary; tensors still live."""

    step: int
    kind: CheckpointKind
    tree: dict[str, Any]
    leaves: list[Leaf]
    own: Any
    """What is this rank's alone: random states, and its place in data that only it reads."""
    counters: dict[str, Any]
    sharded: bool
    """True if no rank alone has the whole state."""

    @cached_property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors of this rank."""
        return sum(leaf.size_bytes for leaf in self.leaves)


class Held(NamedTuple):
    """A captured state whose bytes are copied: whatever the script does with its objects now."""

    capture: Capture
    plan: Plan
    data: memoryview


class Open(NamedTuple):
    """What the script does between two steps, and begins anew after a resume from there."""

    evaluation: bool = False
    epoch_end: bool = False

    @classmethod
    def of(cls, counters: Mapping[str, Any]) -> Open:
        """Return what the counters of a checkpoint say; of earlier versions they say nothing."""
        return cls(counters.get("evaluating") is True, counters.get("epoch_end") is True)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A committed checkpoint."""

    step: int
    checkpoint: str
    kind: CheckpointKind
    at: float
    size_bytes: int
    stall_s: float
    duration_s: float
    ended_early: bool | None = None
    """Whether it says that the training is over; None if another rank knows."""

    @classmethod
    def of(cls, capture: Capture, prefix: str) -> Saved:
        """Return what was just committed, without what it cost."""
        saved = cls._now(capture.step, capture.kind, prefix, capture.size_bytes)
        return replace(saved, ended_early=is_early_end(capture.counters))

    @classmethod
    def by_other(cls, step: int, prefix: str) -> Saved:
        """Return what another rank has just committed, which cost this one nothing."""
        return cls._now(step, CheckpointKind.EMERGENCY, prefix, 0)

    @classmethod
    def _now(cls, step: int, kind: CheckpointKind, prefix: str, size_bytes: int) -> Saved:
        return cls(
            step=step,
            checkpoint=prefix,
            kind=kind,
            at=clock.now(),
            size_bytes=size_bytes,
            stall_s=0.0,
            duration_s=0.0,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the history says of it, beside its step."""
        return {
            "checkpoint": self.checkpoint,
            "checkpoint_kind": str(self.kind),
            "size_bytes": self.size_bytes,
            "stall_s": round(self.stall_s, 6),
            "duration_s": round(self.duration_s, 6),
        }

    @property
    def words(self) -> str:
        """Return what the log says of it."""
        size, took = format_bytes(self.size_bytes), format_duration(self.duration_s)
        return f"saved step {self.step} ({self.kind.label}, {size}, {took})"


class WithoutOthers(CheckpointError):
    """This rank cannot save alone, and the others have no part in it: the store is not to blame."""


class OutOfContact(WithoutOthers):
    """The other ranks cannot be heard: their rendezvous is gone, perhaps with the first of them."""


class Declined(CheckpointError):
    """A rank has the state no more, and says so: it is not saved, and nothing has failed."""
