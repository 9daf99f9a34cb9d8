from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotguard.shared.batching import (
    BatchPlan,
    EpochPlan,
    MicroBatch,
    micro_batches,
    rank_range,
    split_micro_batches,
)

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


@given(count=st.integers(1, 200), speeds=st.lists(st.floats(0.1, 8), min_size=1, max_size=12))
def test_faster_ranks_get_more(count: int, speeds: list[float]) -> None:
    """The ranges still tile; nobody could hand over one micro-batch so that all are done earlier.

    Equal speeds share as without speeds.
    """
    world = len(speeds)
    shares = [rank_range(count, world, rank, speeds=tuple(speeds)) for rank in range(world)]
    assert [index for share in shares for index in share] == list(range(count))
    lasts = max(len(share) / speed for share, speed in zip(shares, speeds, strict=True))
    slowest = [r for r in range(world) if len(shares[r]) / speeds[r] == lasts]
    for taker in range(world):
        assert (len(shares[taker]) + 1) / speeds[taker] >= lasts * (1 - 1e-12) or taker in slowest
    equal = (speeds[0],) * world
    for rank in range(world):
        assert rank_range(count, world, rank, speeds=equal) == rank_range(count, world, rank)


def test_a_mixed_cluster_by_example() -> None:
    """One GPU of double speed beside two: half of the work is its, and all are busy."""
    plan = BatchPlan(global_batch=64, micro_batch=8, world_size=3, speeds=(2.0, 1.0, 1.0))
    assert [list(plan.rank(rank)) for rank in range(3)] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert (plan.accumulation, plan.least, plan.idle_ranks, plan.busy) == (4, 2, 0, 1.0)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, float("nan"))])
def test_impossible_speeds_are_refused(speeds: tuple[float, ...]) -> None:
    """One number above 0 for each rank."""
    with pytest.raises(ValueError, match="speeds must be"):
        rank_range(4, 2, 0, speeds=speeds)


@given(global_batch=sizes, micro_batch=sizes, world_size=sizes)
def test_weights_of_a_plan_add_up_to_one(
    global_batch: int, micro_batch: int, world_size: int
) -> None:
    """Over all ranks, idle ones and a short last micro-batch included, on any number of ranks."""
    plan = BatchPlan(global_batch=global_batch, micro_batch=micro_batch, world_size=world_size)
    counts = [len(plan.rank(rank)) for rank in range(world_size)]
    weights = [weight for rank in range(world_size) for weight in plan.weights(rank)]
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    assert (plan.accumulation, plan.least) == (max(counts), min(counts))
    assert plan.idle_ranks == counts.count(0) == max(0, world_size - plan.micro_batches)


@given(samples=st.integers(1, 500), global_batch=sizes, drop_last=st.booleans())
def test_global_batches_tile_an_epoch(samples: int, global_batch: int, drop_last: bool) -> None:
    """Each place in the order once; only the last batch is short, or left out on request."""
    plan = EpochPlan(samples=samples, global_batch=global_batch, drop_last=drop_last)
    batches = [plan.at(step)[1] for step in range(plan.steps)]
    assert [place for batch in batches for place in batch] == list(range(samples - plan.left_out))
    assert all(len(batch) == global_batch for batch in batches[: -1 if not drop_last else None])
    assert plan.left_out == (samples % global_batch if drop_last else 0)
