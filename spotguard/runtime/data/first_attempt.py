"""The sizes of a run's first attempt, by which scripts of frameworks mean their batches.

A framework's batch size is for each rank. Many scripts compute it from the number of ranks
(`batch_size // trainer.world_size`), and so hand over another one once nodes are gone. If it comes
to the global batch that the run began with, the run goes on with the sizes that it began with.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIZES = ("global_batch_size", "micro_batch_size")


class BatchSizes(NamedTuple):
    """Samples of an optimizer step over all ranks, and of a forward pass."""

    of_step: int
    of_micro_batch: int


class FirstAttempt(NamedTuple):
    """What the claim of the run's first attempt tells."""

    world_size: int
    sizes: BatchSizes | None = None
    """None in claims of versions before this one, and where sizes were found by trying."""

    @classmethod
    def told_by(cls, extra: Mapping[str, Any]) -> FirstAttempt | None:
        """Return what a claim tells beside its number; None if it tells no number of ranks."""
        world_size: Any = extra.get("world_size")
        if not _is_size(world_size):
            return None
        batch = extra.get("batch")
        sizes = [batch.get(name) for name in _SIZES] if isinstance(batch, dict) else [None]
        return cls(world_size, BatchSizes(*sizes) if all(map(_is_size, sizes)) else None)

    def to_text(self) -> str:
        """Return it as a line for other ranks."""
        return json.dumps([self.world_size, *(self.sizes or ())])

    @classmethod
    def of_text(cls, text: str) -> FirstAttempt:
        """Return what `to_text` was called on."""
        world_size, *sizes = json.loads(text)
        return cls(world_size, BatchSizes(*sizes) if sizes else None)

    def sizes_meant(self, batch_size: int, accumulated: int, world_size: int) -> BatchSizes:
        """Return the sizes of a script that has `batch_size` for each of its `world_size` ranks.

        They are those of the first attempt's ranks, unless the script has divided what the run
        began with by the ranks of now.
        """
        meant = BatchSizes(batch_size * accumulated * self.world_size, batch_size)
        begun = self.sizes
        if begun is None or begun == meant or world_size == self.world_size:
            return meant
        share = max(1, begun.of_step // (world_size * accumulated))
        rounds = max(1, begun.of_step // (world_size * batch_size))
        return begun if batch_size == share or accumulated == rounds else meant


def claimed_sizes(identity: Mapping[str, Any]) -> dict[str, int]:
    """Return what a claim tells of a loader's sizes: those that are numbers."""
    return {name: identity[name] for name in _SIZES if _is_size(identity.get(name))}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
