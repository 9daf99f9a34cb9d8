from __future__ import annotations

import os
import random
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from spotguard.errors import UsageError
from spotguard.runtime.data.loader import ElasticLoader, Share
from spotguard.runtime.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

WORLDS = st.integers(min_value=1, max_value=9)


class Numbers(Dataset[int]):
    """Sample `i` is `i`; remembers nothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Each sample draws from all three global generators, as an augmentation does."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


PLAIN: dict[str, Any] = {
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "shuffle": True,
    "drop_last": False,
    "seed": 3,
    "reseed": True,
    "collate_fn": None,
    "num_workers": 0,
    "options": {},
}
"""A loader's arguments, where a test asks for nothing special."""


def make(dataset: Any = None, *, size: int = 0, rank: int = 0, world: int = 1, **over: Any) -> Any:
    """Return a loader of rank `rank` of `world`."""
    dataset = Numbers(size) if dataset is None else dataset
    return ElasticLoader(dataset, rank=rank, world_size=world, **(PLAIN | over))


def ranks(world: int, size: int, **over: Any) -> list[ElasticLoader]:
    """Return the loaders of all ranks."""
    return [make(size=size, rank=rank, world=world, **over) for rank in range(world)]


def trained(loaders: list[ElasticLoader], step: int) -> list[int]:
    """Return the samples that all ranks together train on at a step, in rank order."""
    return [i for loader in loaders for s in loader.shares(step) if s.weight for i in s.indices]


@pytest.mark.slow
@pytest.mark.same_everywhere
@settings(max_examples=300)
@given(
    size=st.integers(min_value=1, max_value=90),
    global_batch=st.integers(min_value=1, max_value=40),
    micro_batch=st.integers(min_value=1, max_value=12),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(min_value=0, max_value=2**32),
    lives=st.lists(st.tuples(WORLDS, st.integers(min_value=0, max_value=12)), max_size=6),
    last_world=WORLDS,
)
def test_every_epoch_reads_each_sample_exactly_once(
    size: int,
    global_batch: int,
    micro_batch: int,
    drop_last: bool,
    shuffle: bool,
    seed: int,
    lives: list[tuple[int, int]],
    last_world: int,
) -> None:
    """Whatever the batch sizes and however often the number of ranks changes, and where.

    Two epochs; a life trains some steps with some number of ranks, the last one trains the rest.
    With `drop_last` nothing is read twice and less than one global batch is left out.
    """
    if drop_last and size < global_batch:
        size += global_batch
    over = {
        "global_batch_size": global_batch,
        "micro_batch_size": micro_batch,
        "drop_last": drop_last,
        "shuffle": shuffle,
        "seed": seed,
    }
    per_epoch = ranks(1, size, **over)[0].steps_per_epoch
    undisturbed = [trained(ranks(1, size, **over), step) for step in range(2 * per_epoch)]
    read: list[list[int]] = []
    for world, steps in [*lives, (last_world, 2 * per_epoch)]:
        loaders = ranks(world, size, **over)
        until = min(len(read) + steps, 2 * per_epoch)
        read += [trained(loaders, step) for step in range(len(read), until)]

    assert read == undisturbed
    for epoch in range(2):
        steps_of_epoch = read[epoch * per_epoch : (epoch + 1) * per_epoch]
        samples = Counter(i for step in steps_of_epoch for i in step)
        assert set(samples.values()) == {1}
        left_out = size - len(samples)
        assert left_out == (size % global_batch if drop_last else 0)


@given(
    size=st.integers(min_value=1, max_value=60),
    global_batch=st.integers(min_value=1, max_value=40),
    micro_batch=st.integers(min_value=1, max_value=12),
    world=st.integers(min_value=1, max_value=50),
)
def test_weights_of_all_ranks_add_up_to_one(
    size: int, global_batch: int, micro_batch: int, world: int
) -> None:
    """The summed gradient is the mean over the global batch, also over the last, partial one."""
    loaders = ranks(world, size, global_batch_size=global_batch, micro_batch_size=micro_batch)
    for step in range(loaders[0].steps_per_epoch):
        shares = [share for loader in loaders for share in loader.shares(step)]
        count = sum(len(share.indices) for share in shares if share.weight)

        assert sum(share.weight for share in shares) == pytest.approx(1, abs=1e-12)
        for share in shares:
            assert share.weight in (0, len(share.indices) / count)


@pytest.mark.slow
@given(world=st.integers(min_value=1, max_value=20), step=st.integers(min_value=0, max_value=5))
def test_each_rank_synchronises_once_a_step(world: int, step: int) -> None:
    """Every rank, with work or without, has one last micro-batch: it never misses a collective."""
    for loader in ranks(world, 23, global_batch_size=10, micro_batch_size=3):
        assert [share.last for share in loader.shares(step)].count(True) == 1
        assert loader.shares(step)[-1].last


def test_the_last_batch_of_an_epoch_may_be_smaller() -> None:
    """11 samples in batches of 4: the third step has 3, whose weights are thirds."""
    loader = make(size=11, shuffle=False)

    assert loader.steps_per_epoch == 3
    assert [s.indices for s in loader.shares(2)] == [(8, 9), (10,)]
    assert [s.weight for s in loader.shares(2)] == [2 / 3, 1 / 3]
    assert [s.indices for s in loader.shares(3)] == [(0, 1), (2, 3)]
    assert [loader.epoch_of(step) for step in range(5)] == [0, 0, 0, 1, 1]


def test_a_rank_without_work_takes_a_zero_weight() -> None:
    """With more ranks than micro-batches the idle ones take part, but add nothing."""
    loaders = ranks(5, 8)

    idle = [loader.shares(1) for loader in loaders[2:]]
    assert all(len(shares) == 1 and shares[0].weight == 0 for shares in idle)
    assert all(len(shares[0].indices) == 2 for shares in idle), "a real batch, to run forward on"


def drawn(loader: ElasticLoader, share: Share) -> tuple[float, ...]:
    """Return what a forward pass of the share draws from the three generators."""
    loader.seed_training(share)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_randomness_depends_on_the_micro_batch_not_on_the_rank() -> None:
    """Dropout masks of a micro-batch are the same on 1, 2, 3 and 4 ranks, and differ otherwise."""
    by_world = []
    for world in (1, 2, 3, 4):
        draws = {}
        for loader in ranks(world, 40, global_batch_size=8):
            for step in range(5):
                for share in loader.shares(step):
                    draws[step, share.number] = drawn(loader, share)
        by_world.append(draws)

    assert by_world[0] == by_world[1] == by_world[2] == by_world[3]
    assert len(set(by_world[0].values())) == 20


def test_without_reseeding_the_global_generators_are_left_alone() -> None:
    """`reseed=False` leaves all randomness to the script, also that of reading."""
    loader = make(Noisy(8), reseed=False)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = (torch.get_rng_state(), random.getstate())
    loader.seed_training(loader.shares(0)[0])

    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    first = [batch for _, batch in make(Noisy(8), reseed=False).read(0, 1)]
    again = [batch for _, batch in make(Noisy(8), reseed=False).read(0, 1)]
    assert not torch.equal(first[0][:, 1:], again[0][:, 1:]), "somebody reseeded"


def collected(loader: ElasticLoader, first: int, last: int) -> list[tuple[Share, Any]]:
    """Return all that a loader reads."""
    return list(loader.read(first, last))


def test_workers_give_the_same_batches() -> None:
    """Reading ahead in worker processes changes neither order nor augmentation."""
    alone = collected(make(Noisy(11), rank=1, world=2), 1, 6)
    ahead = collected(make(Noisy(11), rank=1, world=2, num_workers=2), 1, 6)

    assert [share for share, _ in alone] == [share for share, _ in ahead]
    for (_, one), (_, other) in zip(alone, ahead, strict=True):
        assert torch.equal(one, other)


def test_workers_do_not_touch_the_scripts_randomness() -> None:
    """Starting workers draws nothing from the global generator: a resume starts them anew."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    reader = make(Noisy(8), reseed=False, num_workers=1).read(0, 2)
    next(reader)
    reader.close()

    assert torch.equal(torch.get_rng_state(), before)


class Broken(Numbers):
    """Cannot read sample 3."""

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ValueError("sample 3 is broken")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_fails_says_so(workers: int) -> None:
    """The dataset's own error reaches the script, from a worker too, and is not swallowed."""
    with pytest.raises(ValueError, match="sample 3 is broken"):
        collected(make(Broken(8), shuffle=False, num_workers=workers), 0, 2)


class Together(Numbers):
    """Reads a whole list of samples at once, as many fast datasets do."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [1000 + index for index in indices]


def test_a_dataset_that_reads_lists_is_asked_for_lists() -> None:
    """`__getitems__` of the dataset is used, where there is one."""
    [(share, batch), *_] = collected(make(Together(8), shuffle=False), 0, 1)

    assert share.indices == (0, 1)
    assert batch.tolist() == [1000, 1001]


def test_options_reach_the_workers() -> None:
    """The script's own `worker_init_fn` still runs, and so does its `collate_fn`."""
    loader = make(
        Numbers(4),
        shuffle=False,
        num_workers=1,
        collate_fn=list,
        options={"worker_init_fn": mark_worker, "prefetch_factor": 1},
    )

    assert [batch for _, batch in loader.read(0, 1)] == [[0, 1], [2, 3]]
    marked = make(Marked(4), num_workers=1, options={"worker_init_fn": mark_worker})
    assert len(collected(marked, 0, 1)) == 2


class Opened(Numbers):
    """Can only be read where `open_dataset` ran, and asks for itself as it is read."""

    file: int | None = None

    def open(self, file: int) -> None:
        """Open a file for this process."""
        self.file = file

    def __getitem__(self, index: int) -> int:
        own = get_worker_info()
        assert own is not None
        assert own.dataset is self
        assert self.file is not None
        return 100 * self.file + index


def open_dataset(worker: int) -> None:
    """Have this worker's copy of the dataset open a file, as those on LMDB or HDF5 do."""
    info: Any = get_worker_info()
    info.dataset.open(7)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_has_the_scripts_own_dataset(context: str) -> None:
    """What `worker_init_fn` does with it is there when it is read."""
    options = {"worker_init_fn": open_dataset, "multiprocessing_context": context}
    loader = make(Opened(4), shuffle=False, num_workers=1, collate_fn=list, options=options)
    assert [batch for _, batch in loader.read(0, 1)] == [[700, 701], [702, 703]]


def mark_worker(_worker: int) -> None:
    """Leave a mark that `Marked` looks for."""
    os.environ["MARKED_BY_TEST"] = "1"


class Marked(Numbers):
    """Can only be read where `mark_worker` ran."""

    def __getitem__(self, index: int) -> int:
        assert os.environ["MARKED_BY_TEST"] == "1"
        return index


class Stream(IterableDataset[int]):
    """Has no length and no indices."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    ("dataset", "over", "message"),
    [
        (Numbers(8), {"global_batch_size": 0}, "global_batch_size is 0"),
        (Numbers(8), {"global_batch_size": -4}, "global_batch_size is -4"),
        (Numbers(8), {"global_batch_size": 2.0}, "global_batch_size is 2.0"),
        (Numbers(8), {"global_batch_size": True}, "global_batch_size is True"),
        (Numbers(8), {"micro_batch_size": 0}, "micro_batch_size is 0"),
        (Numbers(8), {"micro_batch_size": "2"}, "micro_batch_size is '2'"),
        (Numbers(0), {}, "the dataset has 0 samples"),
        (Numbers(3), {"drop_last": True}, "an epoch has 3 samples, too few"),
        (Stream(), {}, "Stream has no length"),
        (iter([1]), {}, "list_iterator has no length"),
        (Numbers(8), {"options": {"collate": list}}, "no option 'collate'"),
        (Numbers(8), {"options": {"batch_size": 2}}, "does not take batch_size"),
        (Numbers(8), {"options": {"in_order": False}}, "does not take in_order"),
    ],
)
def test_nonsense_is_refused_by_name(dataset: Any, over: dict[str, Any], message: str) -> None:
    """A wrong size or dataset gives one sentence that names it, before training begins."""
    with pytest.raises(UsageError, match=message):
        make(dataset, **over)


def test_a_micro_batch_larger_than_the_global_one_is_the_global_one() -> None:
    """So is one that is not given."""
    assert make(size=9, micro_batch_size=100).micro_batch_size == 4
    assert make(size=9, micro_batch_size=None).micro_batch_size == 4


def test_identity_names_what_must_not_change() -> None:
    """Everything that decides which samples a step reads, and nothing about ranks or workers."""
    one = make(size=9).identity()

    assert one == make(size=9, rank=2, world=3, num_workers=2).identity()
    for change in (
        {"global_batch_size": 5},
        {"micro_batch_size": 1},
        {"shuffle": False},
        {"drop_last": True},
        {"seed": 4},
    ):
        assert make(size=9, **change).identity() != one
    assert make(size=10).identity() != one


def test_a_size_that_was_found_cuts_the_steps_that_were_looked_at_before() -> None:
    """Who asked how a step is cut before micro-batches were settled is told anew."""
    loader = make(size=8, world=2, rank=1, micro_batch_size="auto", probe=torch.sum)
    before = loader.ranges(0), [len(share.indices) for share in loader.shares(0)]
    loader.settle(1, {})
    after = loader.ranges(0), [len(share.indices) for share in loader.shares(0)]
    assert before == ([range(1), range(1, 1)], [4])
    assert after == ([range(2), range(2, 4)], [1, 1])


@pytest.mark.slow
def test_the_length_of_an_epoch_is_known() -> None:
    """`len(loader)` is the steps of a pass; a step knows whether it is the last of one."""
    [loader] = ranks(1, 50)
    loop: Any = SimpleNamespace(loader=loader)
    steps = [Step(loop, number, loader.epoch_of(number)) for number in range(3 * len(loader))]

    assert len(loader) == loader.steps_per_epoch == loader.first_step_of(1)
    ends = [step.number for step in steps if step.ends_epoch]
    assert ends == [loader.first_step_of(epoch) - 1 for epoch in (1, 2, 3)]
