"""How a global batch is cut and shared out; the one arithmetic that job and plan have in common.

A global batch of `G` samples is cut into `M = ceil(G / m)` micro-batches of `m` samples, the last
one shorter when `m` does not divide `G`. Their borders never depend on the number of ranks. Rank
`r` of `W` owns a contiguous range of them: with `q, x = divmod(M, W)`, the first `x` ranks own
`q + 1` and the others `q`. So sizes differ by at most one, the ranges tile `0..M-1` in order for
every `W`, and a rank beyond the `M`-th owns none.

A micro-batch's mean loss counts with weight `size / G`. The weights of all ranks add up to 1, so
the summed gradient is the mean over the global batch whatever `W` is. For example `G = 20, m = 8`
is cut into 8 + 8 + 4 with weights 0.4, 0.4, 0.2; on two ranks they are shared as [0, 1] and [2].
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One slice of a global batch: samples `start` to `start + size - 1`."""

    index: int
    start: int
    size: int

    def weight(self, global_batch: int) -> float:
        """Return the share of the global batch, by which its mean loss counts."""
        return self.size / global_batch


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


def rank_range(micro_batch_count: int, world_size: int, rank: int) -> range:
    """Return the indexes of the micro-batches that `rank` owns; empty for a rank without work.

    Raises:
        ValueError: a count is below 1, or there is no such rank.
    """
    _at_least_one(micro_batch_count=micro_batch_count, world_size=world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 to {world_size - 1}, not {rank}")
    share, larger = divmod(micro_batch_count, world_size)
    start = rank * share + min(rank, larger)
    return range(start, start + share + (rank < larger))


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be 1 or more, not {count}")
