"""One stream that every rank reads as a whole: the same samples in the same order on any ranks."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import IterableDataset

from spotguard.errors import UsageError
from spotguard.runtime.data.whole_stream import WholeStreamLoader
from tests.runtime.data.test_streaming import Lines

if TYPE_CHECKING:
    from collections.abc import Iterator


class Counted(IterableDataset[Any]):
    """A stream without a state, as most people write them."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        yield from range(self._size)


class Noisy(Lines):
    """Draws from a global generator for each sample."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample + random.random()


def make(source: Any, rank: int, world: int, **over: Any) -> WholeStreamLoader:
    """Return a loader of rank `rank` of `world`."""
    common: dict[str, Any] = {
        "global_batch_size": 7,
        "micro_batch_size": 2,
        "seed": 3,
        "reseed": True,
        "collate_fn": list,
    }
    return WholeStreamLoader(source, rank=rank, world_size=world, **(common | over))


def told(lives: list[tuple[int, int]], open_stream: Any, **over: Any) -> dict[int, list[Any]]:
    """Return the samples of each step, through lives of (ranks, steps), each a new process.

    All but the last are interrupted in the middle of a step that had begun to read.
    """
    found: dict[int, dict[int, Any]] = {}
    shared: Any = None
    first = 0
    for world, steps in lives:
        loaders = [make(open_stream(), rank, world, **over) for rank in range(world)]
        places = []
        for loader in loaders:
            assert loader.restore(shared, {}, world) is None
            loader.begin(first)
            loader.keep(first)
            reader = loader.read(first, first + steps + 1)
            for step in range(first, first + steps):
                for _ in loader.shares(step):
                    share, batch = next(reader)
                    if share.weight:
                        assert share.number not in found.setdefault(step, {})
                        found[step][share.number] = batch
                loader.keep(step + 1)
            places.append(json.loads(json.dumps(loader.shared)))
            next(reader)
            reader.close()
        assert all(place == places[0] for place in places), "any rank may save it alone"
        shared = places[0]
        first += steps
    return {step: [s for _, b in sorted(found[step].items()) for s in b] for step in found}


@pytest.mark.parametrize("kind", [lambda: Lines(size=30), lambda: Noisy(size=30)])
def test_any_ranks_read_one_order(kind: Any) -> None:
    """4, 2, 3, then 5 ranks, one of them idle: each step has the samples of one rank's life."""
    alone = told([(1, 12)], kind)

    assert told([(4, 3), (2, 2), (3, 4), (5, 3)], kind) == alone
    assert all(len(samples) == 7 for samples in alone.values())


def test_each_pass_gives_each_sample_once() -> None:
    """A stream of no state is read again up to its place; a pass that ends begins anew at once."""
    read = told([(2, 3), (3, 1), (1, 6)], lambda: Counted(20), replay=True)
    samples = [sample for step in sorted(read) for sample in read[step]]

    assert samples == [number % 20 for number in range(70)]


def test_a_stream_that_cannot_find_its_place_is_refused() -> None:
    """Without a state, and without the word that it may be read again."""
    with pytest.raises(UsageError, match=r"no state_dict\(\) either"):
        make(Counted(3), 0, 1)
    with pytest.raises(UsageError, match="a stream has no length"):
        make(Lines(), 0, 1).first_step_of(1)


def test_what_a_script_draws_next_is_the_same_however_much_was_passed_over() -> None:
    """Each rank passes over other samples, which may draw: its own numbers do not follow."""
    drawn = []
    for rank in range(3):
        loader = make(Noisy(size=30), rank, 3)
        loader.begin(0)
        loader.keep(0)
        reader = loader.read(0, 2)
        for _ in loader.shares(0):
            next(reader)
        random.seed(5)
        loader.keep(1)
        drawn.append(random.random())
        reader.close()
    assert drawn == [random.Random(5).random()] * 3
