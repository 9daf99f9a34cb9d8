from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from spotguard.errors import StateMismatch, UsageError
from tests.runtime.data.test_loader import Numbers, make, ranks, trained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.runtime.data.loader import ElasticLoader

LIVES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=4)


def read_through(lives: list[tuple[int, int]], total: int, make_ranks: Any) -> list[list[int]]:
    """Return what is trained on at each step, over lives of (ranks, steps), each a new process.

    Each life begins with what the one before saved, and reads some steps ahead of its training.
    """
    read: list[list[int]] = []
    saved: Any = None
    for world, steps in [*lives, (3, total)]:
        loaders: list[ElasticLoader] = make_ranks(world)
        for loader in loaders:
            loader.restore(saved, {}, world)
        until = min(len(read) + steps, total)
        for step in range(len(read), until):
            read.append(trained(loaders, step))
            for loader in loaders:
                loader.shares(step + 2)  # worker processes read ahead
                loader.keep(step + 1)
        saved = loaders[0].shared or saved
    return read


class Epochs(Sampler[int]):
    """Another order each epoch, from `set_epoch` alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class Learning(Sampler[int]):
    """Each order follows from the one before and from what training told it in between."""

    def __init__(self, size: int) -> None:
        self.order = torch.arange(size)
        self.told = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        self.order = self.order.roll(self.told + 1)
        return iter(self.order.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next order follows from."""
        return {"order": self.order, "told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.order, self.told = state["order"], state["told"]


SAMPLERS: dict[str, Callable[[int], Sampler[int]]] = {
    "epochs": Epochs,
    "learning": Learning,
    "torch": lambda size: RandomSampler(range(size)),
    "with a generator": lambda size: RandomSampler(range(size), generator=torch.Generator()),
    "subset": lambda size: SubsetRandomSampler(range(size)),
}


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(SAMPLERS)),
    size=st.integers(1, 40),
    global_batch=st.integers(1, 12),
    micro_batch=st.integers(1, 5),
    lives=LIVES,
)
def test_a_sampler_is_followed_over_interruptions_and_numbers_of_ranks(
    kind: str, size: int, global_batch: int, micro_batch: int, lives: list[tuple[int, int]]
) -> None:
    """Each epoch is what the sampler says, each sample once, whoever trains on it and when."""

    def ranks(world: int) -> list[ElasticLoader]:
        return [
            make(
                size=size,
                rank=rank,
                world=world,
                sampler=SAMPLERS[kind](size),
                global_batch_size=global_batch,
                micro_batch_size=micro_batch,
            )
            for rank in range(world)
        ]

    per_epoch = ranks(1)[0].steps_per_epoch
    undisturbed = read_through([], 3 * per_epoch, ranks)
    assert read_through(lives, 3 * per_epoch, ranks) == undisturbed
    for epoch in range(3):
        steps = undisturbed[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(i for step in steps for i in step) == list(range(size))


def test_what_a_sampler_learns_in_an_epoch_counts_for_the_next_one() -> None:
    """State that changes between two draws is saved, beside that which this epoch came from."""
    sampler = Learning(6)
    loader = make(size=6, sampler=sampler, global_batch_size=3)
    first = trained([loader], 0)
    sampler.told = 2
    loader.keep(1)

    resumed = make(size=6, sampler=Learning(6), global_batch_size=3)
    resumed.restore(loader.shared, {}, 1)
    assert [trained([resumed], step) for step in range(4)] == [
        first,
        *(trained([loader], step) for step in (1, 2, 3)),
    ]
    assert first == [5, 0, 1]
    assert trained([loader], 2) == [2, 3, 4]


def test_torchs_own_samplers_work_as_they_are() -> None:
    """Draws with replacement too, each epoch others; a resume draws the same ones."""
    weights = [0.0, 1.0, 2.0, 0.0]
    loaders = [
        make(size=4, sampler=WeightedRandomSampler(weights, 100), global_batch_size=50)
        for _ in range(2)
    ]
    epochs = [trained([loaders[0]], step) for step in range(4)]
    assert {i for epoch in epochs for i in epoch} == {1, 2}
    assert epochs[:2] != epochs[2:]
    assert trained([loaders[1]], 3) == epochs[3]


def test_drawing_leaves_the_scripts_randomness_alone() -> None:
    """An epoch's order is drawn in the middle of training; nothing else may shift by it."""
    torch.manual_seed(1)
    random.seed(1)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    make(size=9, sampler=RandomSampler(range(9)), reseed=False).shares(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index]


class Restless(Epochs):
    """Another order each time."""

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Ignore it."""


class Short(Epochs):
    """Gives one less than it says."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1))


class Batches(Epochs):
    """Gives lists."""

    def __iter__(self) -> Iterator[int]:
        return iter([[0, 1]])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Restless(9), "gives another order each time it is asked"),
        (Short(9), "says that it has 9 indices, but gave 8"),
        (Epochs(12), "gave the index 11, but the dataset has 0 to 8"),
        (Batches(9), "does not give sample indices"),
        (iter([1]), "sampler is a list_iterator, but must have __len__ and __iter__"),
        (DistributedSampler(Numbers(9), 2, 0), "shares out samples by rank"),
    ],
)
def test_a_sampler_that_cannot_be_followed_is_refused(sampler: Any, message: str) -> None:
    """One sentence, before the first sample."""
    with pytest.raises(UsageError, match=message):
        make(size=9, sampler=sampler).shares(0)


def test_another_order_after_a_resume_is_found_out() -> None:
    """A changed sampler is no silent repetition: the checkpoint knows what was drawn."""
    loader = make(size=9, sampler=Epochs(9))
    loader.shares(0)
    loader.keep(1)
    with pytest.raises(StateMismatch, match="another order for epoch 0"):
        make(size=9, sampler=SubsetRandomSampler(range(9))).restore(loader.shared, {}, 1)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60),
    global_batch=st.integers(1, 20),
    micro_batch=st.integers(1, 7),
    lives=LIVES,
)
def test_weighted_draws_do_not_depend_on_the_ranks(
    size: int, global_batch: int, micro_batch: int, lives: list[tuple[int, int]]
) -> None:
    """The same draws over any sequence of numbers of ranks and interruptions; none of weight 0."""

    def weighted(world: int) -> list[ElasticLoader]:
        weights = [float(i % 3 or i == 0) for i in range(size)]
        sizes = {"global_batch_size": global_batch, "micro_batch_size": micro_batch}
        return ranks(world, size, weights=weights, **sizes)

    total = 2 * weighted(1)[0].steps_per_epoch
    read = read_through(lives, total, weighted)
    assert read == read_through([], total, weighted)
    drawn = [i for step in read for i in step]
    assert len(drawn) == 2 * size
    assert all(i % 3 or i == 0 for i in drawn)


def test_draws_are_as_likely_as_their_weights() -> None:
    """Chi-squared over 200 000 draws; and draws one after the other are independent."""
    weights = np.array([1.0, 2.0, 0.0, 4.0, 0.5] * 40_000)
    loader = make(
        size=200_000, weights=weights, global_batch_size=200_000, micro_batch_size=200_000
    )
    samples = trained([loader], 0)
    drawn = np.array(samples) % 5
    counts = Counter(drawn.tolist())
    aim = {0: 1 / 7.5, 1: 2 / 7.5, 3: 4 / 7.5, 4: 0.5 / 7.5}
    assert set(counts) == set(aim)
    chi_squared = sum((counts[k] - 200_000 * p) ** 2 / (200_000 * p) for k, p in aim.items())
    assert chi_squared < 21  # 3 degrees of freedom: above 21 in one of 10 000 cases
    pairs = Counter(zip(drawn[:-1].tolist(), drawn[1:].tolist(), strict=True))
    expected = {(a, b): 199_999 * p * q for a, p in aim.items() for b, q in aim.items()}
    assert sum((pairs[k] - e) ** 2 / e for k, e in expected.items()) < 45  # 15 degrees
    assert trained([loader], 1) != samples, "each epoch draws anew"


def test_draws_never_change_between_versions() -> None:
    """They are part of a run: a resume with a newer spotguard must read on in the same ones."""
    loader = make(size=8, weights=range(8), global_batch_size=8)
    assert [trained([loader], step) for step in range(2)] == [
        [5, 4, 6, 4, 6, 2, 6, 3],
        [7, 7, 7, 6, 7, 2, 7, 1],
    ]


def test_other_weights_are_another_run() -> None:
    """A resume with other weights would draw other samples; the loader's identity tells."""
    one = make(size=3, weights=torch.tensor([1.0, 2.0, 3.0])).identity()
    assert one == make(size=3, weights=[1, 2, 3]).identity()
    assert one != make(size=3, weights=[1, 2, 4]).identity()
    assert one != make(size=3).identity()


@pytest.mark.parametrize(
    "weights", [[1.0], [[1.0, 1.0, 1.0]], [1, -1, 1], [0, 0, 0], [1, float("nan"), 1], ["a", 1, 1]]
)
def test_impossible_weights_are_refused(weights: Any) -> None:
    """One finite number from 0 for each sample, not all of them 0."""
    with pytest.raises(UsageError, match="weights are"):
        make(size=3, weights=weights)
    with pytest.raises(UsageError, match="either weights or a sampler"):
        make(size=3, weights=[1, 1, 1], sampler=Epochs(3))


class Huge(Numbers):
    """Ten billion samples."""

    def __init__(self) -> None:
        super().__init__(10**10)


def test_ten_billion_samples_resume_at_once() -> None:
    """In the midst of the third epoch: no loop over what was read, and no table of what is not.

    A loop would run into the time limit of every test, a table into that of memory.
    """
    step = 2 * 10**10 // 512 + 12_345_678
    tracemalloc.start()
    first = make(Huge(), global_batch_size=512, micro_batch_size=8).shares(step)
    others = [
        make(Huge(), global_batch_size=512, micro_batch_size=8, rank=r, world=3) for r in range(3)
    ]
    same = trained(others, step)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [i for share in first for i in share.indices] == same
    assert len(set(same)) == 512
    assert peak_bytes < 8_000_000
