"""A batch sampler's batches stay whole, and each comes once, whoever trains on it and when."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotguard.errors import UsageError
from spotguard.runtime.data.whole_batches import BatchedLoader
from tests.runtime.data.test_loader import PLAIN, Numbers
from tests.runtime.data.test_sampling import LIVES, read_through

if TYPE_CHECKING:
    from collections.abc import Iterator


class NoNeighbours:
    """Batches without two samples of one colour, so that some are short and more than its length.

    As sentence-transformers' NO_DUPLICATES: `len` is what equal batches would come to.
    """

    def __init__(self, size: int, batch_size: int = 3, colours: int = 4) -> None:
        self.size, self.batch_size, self.colours = size, batch_size, colours
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(self.size))
        random.Random(self.epoch).shuffle(left)
        while left:
            batch: list[int] = []
            for sample in left:
                if len(batch) < self.batch_size and sample % self.colours not in {
                    other % self.colours for other in batch
                }:
                    batch.append(sample)
            left = [sample for sample in left if sample not in batch]
            yield batch


def make(sampler: Any, size: int, *, rank: int = 0, world: int = 1, per_step: int = 2) -> Any:
    """Return the loader of one rank; a step has `per_step` batches."""
    samples = per_step * getattr(sampler, "batch_size", 3)
    over = PLAIN | {"global_batch_size": samples, "micro_batch_size": None}
    return BatchedLoader(
        Numbers(size),
        batch_sampler=sampler,
        asked_for=samples,
        rank=rank,
        world_size=world,
        **over,
    )


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 40), per_step=st.integers(1, 5), lives=LIVES)
def test_each_batch_is_whole_and_comes_once(
    size: int, per_step: int, lives: list[tuple[int, int]]
) -> None:
    """Over interruptions and numbers of ranks: the sampler's batches of each epoch, in order."""

    def ranks(world: int) -> list[BatchedLoader]:
        return [
            make(NoNeighbours(size), size, rank=rank, world=world, per_step=per_step)
            for rank in range(world)
        ]

    alone = ranks(1)[0]
    total = 3 * alone.steps_per_epoch
    undisturbed = read_through([], total, ranks)
    assert read_through(lives, total, ranks) == undisturbed
    sampler = NoNeighbours(size)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        steps = range(epoch * alone.steps_per_epoch, (epoch + 1) * alone.steps_per_epoch)
        shares = [share for step in steps for share in alone.shares(step)]
        assert [list(share.indices) for share in shares] == list(sampler)
        for step in steps:
            parts = [share for loader in ranks(3) for share in loader.shares(step)]
            assert sum(share.weight for share in parts) == pytest.approx(1.0)


class OfOneRank(NoNeighbours):
    """Knows of ranks itself."""

    num_replicas = 2


class Fewer(NoNeighbours):
    """Gives half of what it says."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[: len(self) // 2])


@pytest.mark.parametrize(
    ("sampler", "sentence"),
    [
        (OfOneRank(12), "OfOneRank cuts the batches by the number of ranks"),
        (Fewer(24), "says that it has 8 batches, but gave 4, too few for 4 steps of 2"),
        (range(4), "range has no batch_size"),
    ],
)
def test_what_cannot_be_resumed_or_counted_is_refused(sampler: Any, sentence: str) -> None:
    """One sentence, before the first step."""
    with pytest.raises(UsageError, match=sentence):
        make(sampler, 24).shares(0)


def test_batches_are_dealt_as_frameworks_deal_them() -> None:
    """Rank r of three has every third batch; together they have all, none twice."""
    loaders = [make(NoNeighbours(24), 24, rank=rank, world=3, per_step=6) for rank in range(3)]
    for loader in loaders:
        loader.dealt = True
    alone = [share.indices for share in make(NoNeighbours(24), 24, per_step=6).shares(0)]
    for rank, loader in enumerate(loaders):
        assert [share.indices for share in loader.shares(0)] == alone[rank::3]
        assert [share.last for share in loader.shares(0)] == [False, True]
