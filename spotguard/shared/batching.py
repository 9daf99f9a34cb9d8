"""How a global batch is cut and shared out; the one arithmetic that job and plan have in common.

A global batch of `G` samples is cut into `M = ceil(G / m)` micro-batches of `m` samples, the last
one shorter when `m` does not divide `G`. Their borders never depend on the number of ranks. Rank
`r` of `W` owns a contiguous range of them: with `q, x = divmod(M, W)`, the first `x` ranks own
`q + 1` and the others `q`. So sizes differ by at most one, the ranges tile `0..M-1` in order for
every `W`, and a rank beyond the `M`-th owns none.

A micro-batch's mean loss counts with weight `size / G`. The weights of all ranks add up to 1, so
the summed gradient is the mean over the global batch whatever `W` is. For example `G = 20, m = 8`
is cut into 8 + 8 + 4 with weights 0.4, 0.4, 0.2; on two ranks they are shared as [0, 1] and [2].

The last global batch of an epoch of `N` samples has `N mod G` (if that is not 0): it is cut and
weighted by the same rules with its own size in place of `G`, or left out (`drop_last`).

A global batch that follows the ranks (`lr_scaling`) has another `G` in each attempt. Then an
attempt's steps are counted from the place that it began at: the rest of that epoch is cut into
batches of its `G`, and so is every epoch after it.

GPUs that differ: a larger `m` on some ranks would move the borders whenever such a rank comes or
goes, and with them dropout masks and sums. So all ranks have the same `m`, which the smallest GPU
must hold, and a faster rank owns more of the micro-batches: with `speeds`, each in turn goes to
the rank that would be done with it first. The ranges still tile `0..M-1` in order.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One slice of a global batch: samples `start` to `start + size - 1`."""

    index: int
    start: int
    size: int

    def weight(self, global_batch: int) -> float:
        """Return the share of the global batch, by which its mean loss counts."""
        return self.size / global_batch


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What one training step means for `world_size` ranks.

    `M = ceil(global_batch / micro_batch)` micro-batches over `W` ranks: each rank accumulates
    `ceil(M / W)` or one less. The step lasts as long as the largest share, so the ranks are busy
    for `M / (W * ceil(M / W))` of it: 64 micro-batches keep 4, 8 and 16 ranks fully busy, 5 ranks
    98 % (13 each but for one), and of 65 ranks one idles: it joins the collectives with weight 0.
    """

    global_batch: int
    micro_batch: int
    world_size: int
    speeds: tuple[float, ...] = ()
    """Relative speed of each rank, where GPUs differ; empty if they do not."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a global batch, on whatever number of ranks."""
        return len(split_micro_batches(self.global_batch, self.micro_batch))

    @property
    def accumulation(self) -> int:
        """Micro-batches that the rank with most of them accumulates in a step."""
        return max(self._counts)

    @property
    def least(self) -> int:
        """Micro-batches of the rank with fewest, 0 where ranks idle."""
        return min(self._counts)

    @property
    def idle_ranks(self) -> int:
        """Ranks without work: they join the collectives with weight 0."""
        return self._counts.count(0)

    @property
    def busy(self) -> float:
        """Share (0..1) of the ranks' power in a step that is work, as far as whole batches go."""
        speeds = self.speeds or (1.0,) * self.world_size
        lasts = max(count / speed for count, speed in zip(self._counts, speeds, strict=True))
        return self.micro_batches / (sum(speeds) * lasts)

    def rank(self, rank: int) -> range:
        """Return the indexes of the micro-batches that `rank` owns."""
        return rank_range(self.micro_batches, self.world_size, rank, speeds=self.speeds)

    def weights(self, rank: int) -> list[float]:
        """Return the weights of the micro-batches that `rank` owns; those of all add up to 1."""
        cut = micro_batches(self.global_batch, self.micro_batch)
        return [cut[index].weight(self.global_batch) for index in self.rank(rank)]

    @property
    def _counts(self) -> list[int]:
        if self.speeds:
            return [len(self.rank(rank)) for rank in range(self.world_size)]
        share, larger = divmod(self.micro_batches, self.world_size)
        return [share + 1] * larger + [share] * (self.world_size - larger)


class EpochPlace(NamedTuple):
    """Where a step begins: after so many samples in the order of an epoch (all from 0)."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How epochs of `samples` are cut into global batches; the same on any number of ranks."""

    samples: int
    global_batch: int
    drop_last: bool = False
    first: EpochPlace = field(default_factory=EpochPlace)
    """Where steps of this size begin; the steps before it may have had another."""

    @functools.cached_property
    def steps(self) -> int:
        """Optimizer steps in a whole epoch."""
        return self._steps_in(self.samples)

    @functools.cached_property
    def _second_epoch(self) -> int:
        """The step that the epoch after that of `first` begins with; each step asks for it."""
        return self.first_step_of(self.first.epoch + 1)

    @property
    def begins_at_epoch_end(self) -> bool:
        """True if `first` lies within an epoch of which not one batch of this size is left."""
        return self.first.samples > 0 and self._second_epoch == self.first.step

    @property
    def left_out(self) -> int:
        """Samples at the end of each whole epoch's order that are not trained on."""
        return self.samples % self.global_batch if self.drop_last else 0

    def at(self, step: int) -> tuple[int, range]:
        """Return the epoch of a step, and the places in its order of the step's global batch."""
        next_epoch = self._second_epoch
        if step < next_epoch:
            epoch, position = self.first.epoch, step - self.first.step
            start = self.first.samples + position * self.global_batch
        else:
            more, position = divmod(step - next_epoch, self.steps)
            epoch, start = self.first.epoch + 1 + more, position * self.global_batch
        return epoch, range(start, min(start + self.global_batch, self.samples))

    def first_step_of(self, epoch: int) -> int:
        """Return the step that an epoch begins with; `first` for those that began before it."""
        if epoch <= self.first.epoch:
            return self.first.step
        rest = self._steps_in(self.samples - self.first.samples)
        return self.first.step + rest + (epoch - self.first.epoch - 1) * self.steps

    def continued(self, step: int, global_batch: int) -> EpochPlan:
        """Return the plan that goes on at `step` with another size."""
        epoch, places = self.at(step)
        return replace(self, global_batch=global_batch, first=EpochPlace(step, epoch, places.start))

    def _steps_in(self, samples: int) -> int:
        full, rest = divmod(samples, self.global_batch)
        return full if self.drop_last or not rest else full + 1


def split_micro_batches(global_batch: int, micro_batch: int) -> list[int]:
    """Return the sizes of the micro-batches; they add up to `global_batch`.

    Raises:
        ValueError: a size is below 1.
    """
    _at_least_one(global_batch=global_batch, micro_batch=micro_batch)
    full, rest = divmod(global_batch, micro_batch)
    return [micro_batch] * full + [rest] * bool(rest)


def micro_batches(global_batch: int, micro_batch: int) -> list[MicroBatch]:
    """Return the micro-batches in order, each with its place in the global batch."""
    return [
        MicroBatch(index, index * micro_batch, size)
        for index, size in enumerate(split_micro_batches(global_batch, micro_batch))
    ]


def rank_range(
    micro_batch_count: int, world_size: int, rank: int, *, speeds: tuple[float, ...] = ()
) -> range:
    """Return the indexes of the micro-batches that `rank` owns; empty for a rank without work.

    Args:
        micro_batch_count: Micro-batches of the step.
        world_size: Ranks.
        rank: Which of them.
        speeds: Each rank's relative speed, the same tuple on all of them; empty: all are equal.

    Raises:
        ValueError: a count is below 1, there is no such rank, or `speeds` are not `world_size`
            numbers above 0.
    """
    _at_least_one(micro_batch_count=micro_batch_count, world_size=world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 to {world_size - 1}, not {rank}")
    if speeds:
        _one_for_each(speeds, world_size)
        starts = _starts_by_speed(micro_batch_count, speeds)
        return range(starts[rank], starts[rank + 1])
    share, larger = divmod(micro_batch_count, world_size)
    start = rank * share + min(rank, larger)
    return range(start, start + share + (rank < larger))


@functools.lru_cache(maxsize=8)
def _starts_by_speed(count: int, speeds: tuple[float, ...]) -> list[int]:
    """Return where each rank's range begins, and where the last one ends.

    One by one to whoever would have done it first: no other sharing of whole micro-batches lets
    the slowest rank be done earlier. Among equal speeds the first ranks get more, as without.
    """
    counts = [0] * len(speeds)
    done_at = [(1 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(done_at)
    for _ in range(count):
        rank = done_at[0][1]
        counts[rank] += 1
        heapq.heapreplace(done_at, ((counts[rank] + 1) / speeds[rank], rank))
    return [0, *itertools.accumulate(counts)]


def _one_for_each(speeds: tuple[float, ...], world_size: int) -> None:
    if len(speeds) != world_size:
        raise ValueError(f"speeds must be {world_size} numbers, one for each rank: {speeds}")
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"speeds must be numbers above 0: {speeds}")


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be 1 or more, not {count}")
