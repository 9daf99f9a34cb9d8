"""A training state that is to be saved, what was saved, and why it could not be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from spotguard.errors import CheckpointError

if TYPE_CHECKING:
    from spotguard.events.states import CheckpointKind
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


class WithoutOthers(CheckpointError):
    """This rank cannot save alone, and the others have no part in it: the store is not to blame."""


class OutOfContact(WithoutOthers):
    """The other ranks cannot be heard: their rendezvous is gone, perhaps with the first of them."""
