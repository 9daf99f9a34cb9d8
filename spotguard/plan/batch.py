"""How a global batch falls onto a number of ranks; the arithmetic is `spotguard.batching`'s."""

from __future__ import annotations

from dataclasses import dataclass

from spotguard.batching import rank_range, split_micro_batches


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What one training step means for `world_size` ranks.

    `M = ceil(global_batch / micro_batch)` micro-batches over `W` ranks: each rank accumulates
    `ceil(M / W)` or one less. The step lasts as long as the largest share, so the ranks are busy
    for `M / (W * ceil(M / W))` of it: 64 micro-batches keep 4, 8 and 16 ranks fully busy, 5 ranks
    98 % (13 each but for one), and of 65 ranks one idles.
    """

    global_batch: int
    micro_batch: int
    world_size: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a global batch, on whatever number of ranks."""
        return len(split_micro_batches(self.global_batch, self.micro_batch))

    @property
    def accumulation(self) -> int:
        """Micro-batches that the busiest rank accumulates in a step."""
        return len(self.rank(0))

    @property
    def busy(self) -> float:
        """Share (0..1) of the ranks' time in a step that is work, as far as whole batches go."""
        return self.micro_batches / (self.world_size * self.accumulation)

    def rank(self, rank: int) -> range:
        """Return the indexes of the micro-batches that `rank` owns."""
        return rank_range(self.micro_batches, self.world_size, rank)
