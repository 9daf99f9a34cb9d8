"""Steps that cannot be divided: each rank has one micro-batch, as large as its part of the step.

For loops that step their optimizers once for each batch, whatever its size. What is in a global
batch stays the same on every number of ranks; how it is divided does not.
"""

from __future__ import annotations

from typing import Any

from spotguard.runtime.data.loader import ElasticLoader, Share


class UndividedLoader(ElasticLoader):
    """Puts a rank's micro-batches of a step together. Made by `run.loader(per_rank="one")`."""

    undivided = True

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a save and a resume."""
        return {**super().identity(), "per_rank": "one"}

    def shares(self, step: int) -> list[Share]:
        """Return this rank's only micro-batch of step `step` (from 0)."""
        parts = super().shares(step)
        indices = tuple(index for part in parts for index in part.indices)
        weight = sum(part.weight for part in parts)
        return [Share(step, self.rank, weight, indices, True)]

    def ranges(self, step: int) -> list[range]:
        """Return which micro-batches of step `step` each rank trains on, by rank."""
        return [range(rank, rank + 1) for rank in range(self._world_size)]
