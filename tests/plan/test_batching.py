from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotguard.batching import MicroBatch, micro_batches, rank_range, split_micro_batches
from spotguard.plan.batch import BatchPlan

sizes = st.integers(1, 300)


@given(global_batch=sizes, micro_batch=sizes)
def test_micro_batches_tile_the_global_batch(global_batch: int, micro_batch: int) -> None:
    """Every sample is in exactly one micro-batch, in order, none is larger than asked for."""
    cut = micro_batches(global_batch, micro_batch)
    samples = [i for batch in cut for i in range(batch.start, batch.start + batch.size)]
    assert samples == list(range(global_batch))
    assert [batch.index for batch in cut] == list(range(len(cut)))
    assert all(0 < batch.size <= micro_batch for batch in cut)
    assert sum(batch.weight(global_batch) for batch in cut) == pytest.approx(1.0)


@given(count=sizes, world_size=sizes)
def test_ranks_tile_the_micro_batches(count: int, world_size: int) -> None:
    """On any number of ranks each micro-batch is trained on exactly once, the load even."""
    shares = [rank_range(count, world_size, rank) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(count))
    lengths = [len(share) for share in shares]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_the_example_of_the_page() -> None:
    """20 samples by 8 are 8 + 8 + 4 with weights 0.4, 0.4, 0.2; two ranks own [0, 1] and [2]."""
    assert split_micro_batches(20, 8) == [8, 8, 4]
    assert [batch.weight(20) for batch in micro_batches(20, 8)] == [0.4, 0.4, 0.2]
    assert [list(rank_range(3, 2, rank)) for rank in range(2)] == [[0, 1], [2]]
    assert micro_batches(20, 8)[2] == MicroBatch(2, 16, 4)


def test_the_weighted_mean_is_the_global_mean() -> None:
    """Weighting each micro-batch's mean by its share gives the mean, also with a short last one."""
    losses = [float(i * i) for i in range(20)]
    cut = micro_batches(20, 8)
    means = [sum(losses[b.start : b.start + b.size]) / b.size for b in cut]
    weighted = sum(m * b.weight(20) for m, b in zip(means, cut, strict=True))
    assert weighted == pytest.approx(sum(losses) / 20)


def test_a_rank_without_work_owns_nothing() -> None:
    """More ranks than micro-batches is allowed; the surplus ranks are empty-handed."""
    assert [len(rank_range(2, 4, rank)) for rank in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("wrong", [(0, 1, 0), (1, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_impossible_shares_are_refused(wrong: tuple[int, int, int]) -> None:
    """No rank beyond the last, no empty batch."""
    with pytest.raises(ValueError, match="must be"):
        rank_range(*wrong)
    with pytest.raises(ValueError, match="micro_batch must be 1 or more, not 0"):
        split_micro_batches(1, 0)


@pytest.mark.parametrize(
    ("ranks", "accumulation", "busy"),
    [(1, 64, 1.0), (4, 16, 1.0), (5, 13, 64 / 65), (64, 1, 1.0), (65, 1, 64 / 65)],
)
def test_a_plan_says_the_accumulation(ranks: int, accumulation: int, busy: float) -> None:
    """Accumulation follows from the number of ranks; the global batch does not change."""
    plan = BatchPlan(global_batch=512, micro_batch=8, world_size=ranks)
    assert (plan.micro_batches, plan.accumulation) == (64, accumulation)
    assert plan.busy == pytest.approx(busy)
    assert sum(len(plan.rank(rank)) for rank in range(ranks)) == 64
