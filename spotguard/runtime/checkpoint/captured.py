"""A training state that is to be saved, what was saved, and why it could not be."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from spotguard.checkpoint.tensors import ShardInfo
from spotguard.errors import CheckpointError, SpotguardError, StoreUnavailable
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint.early_end import is_early_end
from spotguard.runtime.checkpoint.own_state import EPOCH_BEGUN
from spotguard.runtime.process import clock
from spotguard.runtime.process.finite import FINITE, first_not_finite
from spotguard.shared.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.checkpoint.shard import ShardLayout
    from spotguard.runtime.checkpoint.own_state import EpochBegun
    from spotguard.runtime.checkpoint.staging import Plan
    from spotguard.runtime.state.tree import Leaf


_LOOKED_AT_IN_HURRY = 1 << 12
"""Elements of each tensor."""


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
    trained: Callable[[], Collection[str]] = tuple
    """Returns the names of the leaves that are weights which are trained."""

    @cached_property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors of this rank."""
        return sum(leaf.size_bytes for leaf in self.leaves)

    def first_not_finite(self, layout: ShardLayout, data: Sequence[memoryview]) -> str | None:
        """Return the first of this rank's weights whose copy holds NaN or an infinite value.

        A save in a hurry looks at the beginning of each only: weights that are NaN are so all over.
        """
        few = _LOOKED_AT_IN_HURRY if self.kind is CheckpointKind.EMERGENCY else None
        return first_not_finite(self.leaves, layout, data, self.trained(), most=few)


class Held(NamedTuple):
    """A captured state whose bytes are copied: whatever the script does with its objects now."""

    capture: Capture
    plan: Plan
    data: memoryview


class Between(NamedTuple):
    """Where the script is between two steps."""

    evaluating: bool = False
    """Within an evaluation, which a resume from here does again."""
    epoch_end: bool = False
    """After an epoch's last step, at what the script does there: a resume does it again."""
    epoch_begun: EpochBegun | None = None
    """Once the state holds what the top of an epoch's body has changed."""

    @classmethod
    def of(cls, counters: Mapping[str, Any], begun: EpochBegun | None) -> Between:
        """Return what the counters of a checkpoint say; of earlier versions they say nothing."""
        return cls(counters.get("evaluating") is True, counters.get("epoch_end") is True, begun)

    @property
    def comes_again(self) -> bool:
        """True if the script does something here that a resume does again."""
        return self.evaluating or self.epoch_end

    def counters(self) -> dict[str, Any]:
        """Return what a manifest says of it."""
        begun = self.epoch_begun
        return {
            "evaluating": self.evaluating,
            "epoch_end": self.epoch_end,
            EPOCH_BEGUN: begun and begun.counters(),
        }


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
    not_finite: str | None = None
    """What there is to say, once, of weights that are NaN or infinite; the rank that commits knows.
    """

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

    def with_health(self, not_finite: str | None, before: Sequence[Manifest]) -> Saved:
        """Return it with the name of a weight that is not finite, as the first that is so.

        `before` are the checkpoints before it, as far as they are known.
        """
        finite = [m.step for m in before if m.counters.get(FINITE) is not False]
        if not_finite is None or len(finite) < len(before):
            return self
        words = f"step {self.step} was saved with weights that are NaN or infinite: {not_finite}"
        if finite:
            words += f"; the checkpoint of step {max(finite)}, with finite ones, is kept"
        return replace(self, not_finite=words)

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


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank brings to a checkpoint."""

    shards: tuple[ShardInfo, ...]
    own: Any
    not_finite: str | None = None
    """The first of its weights that holds NaN or an infinite value."""

    def to_json(self) -> str:
        """Return it as the word that the first rank waits for."""
        shards = [shard.to_json() for shard in self.shards]
        return json.dumps({"shards": shards, "own": self.own, "not_finite": self.not_finite})

    @classmethod
    def from_json(cls, text: str) -> RankPart:
        """Return what `to_json` made a word of."""
        body = json.loads(text)
        shards = (ShardInfo.from_json(each, "a shard") for each in body["shards"])
        return cls(shards=tuple(shards), own=body["own"], not_finite=body["not_finite"])


class WithoutOthers(CheckpointError):
    """This rank cannot save alone, and the others have no part in it: the store is not to blame."""


class OutOfContact(WithoutOthers):
    """The other ranks cannot be heard: their rendezvous is gone, perhaps with the first of them."""


class Declined(CheckpointError):
    """A rank has the state no more, and says so: it is not saved, and nothing has failed."""


COMMITTED = "ok"
"""The first rank's word to the others: the save is committed."""
_FAILED, _LOST, _DECLINED, _AWAY = "!", "?", "-", "~"
REFUSALS = (_FAILED, _LOST, _DECLINED, _AWAY)
"""How a rank's word begins that is no success: its save failed, another rank is gone, it has no
such state, or its store is away."""


def told_refusal(problem: BaseException, said: str, *, lost: bool = False) -> str:
    """Return the word by which the other ranks hear that there will be no checkpoint."""
    kinds = ((Declined, _DECLINED), (StoreUnavailable, _AWAY))
    kind = next((word for each, word in kinds if isinstance(problem, each)), _FAILED)
    return f"{_LOST if lost else kind}{said}"


def heard_refusal(word: str, beginning: str) -> SpotguardError:
    """Return the error that another rank's word is."""
    kinds: dict[str, type[SpotguardError]] = {
        _FAILED: CheckpointError,
        _LOST: OutOfContact,
        _DECLINED: Declined,
        _AWAY: StoreUnavailable,
    }
    return kinds[word[0]](f"{beginning}{word[1:]}")


def word_of(step: int, kind: CheckpointKind, tries: int) -> str:
    """Return under what the ranks talk about a save; after `tries` that failed for all of them."""
    return f"save/{step}/{kind}/{tries}" if tries else f"save/{step}/{kind}"
