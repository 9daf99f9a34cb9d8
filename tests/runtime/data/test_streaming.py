from __future__ import annotations

import json
import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from spotguard.errors import UnsupportedState, UsageError
from spotguard.runtime.data.streaming import StreamLoader, is_stream, refuse_indexed_options
from spotguard.runtime.state.inline_json import from_inline, to_inline
from tests.runtime.data.test_loader import Numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.runtime.data.loader import Loader


class Lines(IterableDataset[Any]):
    """A shard of numbered samples that knows its place, in another order each epoch."""

    def __init__(self, shard: int = 0, size: int = 7) -> None:
        self.shard = shard
        self.size = size
        self.epoch = 0
        self.at = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        while self.at < self.size:
            self.at += 1
            yield self.shard * 1000 + self.epoch * 100 + order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"at": self.at, "epoch": torch.tensor(self.epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        assert state["epoch"] == self.epoch, "it is told its epoch first"
        self.at = state["at"]


def make(source: Any, *, rank: int = 0, world: int = 1, **over: Any) -> StreamLoader:
    """Return a loader of rank `rank` of `world`."""
    common: dict[str, Any] = {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seed": 3,
        "reseed": True,
        "collate_fn": list,
    }
    return StreamLoader(source, rank=rank, world_size=world, **(common | over))


def through_json(loader: Loader) -> Any:
    """Return what a loader kept, as it comes back from a manifest."""
    return json.loads(json.dumps(loader.own))


def life(
    loaders: list[StreamLoader], first: int, last: int
) -> tuple[dict[Any, Any], dict[int, Any]]:
    """Train on steps; return the batches by (step, micro-batch), and what each rank kept.

    It is interrupted in the middle of the next step: that had read already.
    """
    found: dict[Any, Any] = {}
    own: dict[int, Any] = {}
    for rank, loader in enumerate(loaders):
        loader.keep(first)
        reader = loader.read(first, last + 1)
        for step in range(first, last):
            for _ in loader.shares(step):
                share, batch = next(reader)
                if share.weight:
                    assert (share.step, share.number) not in found
                    found[share.step, share.number] = batch
            loader.keep(step + 1)
        own[rank] = through_json(loader)
        next(reader)
        reader.close()
    return found, own


def lived(lives: list[tuple[int, int]], total: int, open_shard: Any, **over: Any) -> dict[Any, Any]:
    """Return all batches of a run of several lives of (ranks, steps), each a new process."""
    found: dict[Any, Any] = {}
    own: dict[int, Any] = {}
    step, before = 0, 0
    for world, steps in [*lives, (2, total)]:
        loaders = [make(open_shard, rank=rank, world=world, **over) for rank in range(world)]
        if before:
            for loader in loaders:
                assert loader.restore(None, own, before) is None
        until = min(step + steps, total)
        more, own = life(loaders, step, until)
        found |= more
        step, before = until, world
    return found


@settings(max_examples=50, deadline=None)
@given(
    global_batch=st.integers(1, 12),
    micro_batch=st.integers(1, 5),
    lives=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=4),
)
def test_shards_by_function_are_exact_on_any_number_of_ranks(
    global_batch: int, micro_batch: int, lives: list[tuple[int, int]]
) -> None:
    """Each shard is read in its order, pass after pass: no sample twice in one, none left out."""
    over = {"global_batch_size": global_batch, "micro_batch_size": micro_batch}
    found = lived(lives, 12, lambda shard, shards: Lines(shard), **over)
    assert found == lived([], 12, lambda shard, shards: Lines(shard), **over)

    for shard in {number for _, number in found}:
        read = [i for (_, number), batch in sorted(found.items()) if number == shard for i in batch]
        passes = [read[i : i + 7] for i in range(0, len(read), 7)]
        for epoch, samples in enumerate(passes):
            expected = {shard * 1000 + epoch * 100 + i for i in range(7)}
            assert len(set(samples)) == len(samples)
            assert set(samples) == expected if len(samples) == 7 else set(samples) < expected


@given(steps=st.lists(st.integers(0, 6), max_size=4), world=st.integers(1, 4))
def test_a_stream_of_each_rank_goes_on_where_it_was(steps: list[int], world: int) -> None:
    """On the same number of ranks nothing is repeated or left out, over any interruptions."""
    whole, _ = life([make(Lines(rank), rank=rank, world=world) for rank in range(world)], 0, 12)
    found: dict[Any, Any] = {}
    own: dict[int, Any] = {}
    first = 0
    for count in [*steps, 12]:
        loaders = [make(Lines(rank), rank=rank, world=world) for rank in range(world)]
        if own:
            assert [loader.restore(None, own, world) for loader in loaders] == [None] * world
        until = min(first + count, 12)
        more, own = life(loaders, first, until)
        found |= more
        first = until
    assert found == whole


def test_on_another_number_of_ranks_it_is_said_what_cannot_be_held() -> None:
    """Shards that are others have no place: they begin another pass, and a warning tells."""
    loaders = [make(Lines(rank), rank=rank, world=2) for rank in range(2)]
    _, own = life(loaders, 0, 3)
    later = make(Lines(0), rank=0, world=1)
    warning = later.restore(None, own, 2)

    assert warning is not None
    assert "saved by 2 ranks, now there are 1" in warning
    assert "read again, or be left out" in warning
    _, batch = next(later.read(3, 4))
    assert [i // 100 for i in batch] == [2, 2], "a pass that nobody had begun, of this rank's shard"


def test_a_checkpoint_without_places_is_told() -> None:
    """It begins anew, and says so."""
    warning = make(Lines()).restore(None, {}, 1)
    assert warning is not None
    assert "begin their pass 1: their places are not in the checkpoint" in warning


def test_an_idle_rank_reads_but_owns_nothing() -> None:
    """With more ranks than micro-batches it runs forward on the first one's data, weight 0."""
    idle = make(lambda shard, shards: Lines(shard), rank=5, world=6)
    share, batch = next(idle.read(0, 1))
    first = make(lambda shard, shards: Lines(shard), rank=0, world=6)
    assert (share.weight, share.last) == (0.0, True)
    assert batch == next(first.read(0, 1))[1]
    idle.keep(1)
    assert idle.own == {}


def test_the_function_is_told_which_shard_of_how_many() -> None:
    """As many shards as micro-batches in a step; a rank opens its own ones only."""
    opened: list[tuple[int, int]] = []

    def open_shard(shard: int, shards: int) -> Lines:
        opened.append((shard, shards))
        return Lines(shard)

    make(open_shard, rank=1, world=3)
    assert opened == [(2, 4)]


def test_reading_is_seeded_by_the_micro_batch() -> None:
    """Augmentations in a stream do not depend on the number of ranks either."""

    class Drawn(Lines):
        def __iter__(self) -> Iterator[Any]:
            return ((i, random.random(), float(torch.rand(()))) for i in super().__iter__())

    found = lived([(1, 2), (3, 2)], 6, lambda shard, shards: Drawn(shard))
    assert found == lived([], 6, lambda shard, shards: Drawn(shard))


class ByWorker(Lines):
    """Shares its samples out over worker processes, each with a shard of its own."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        self.shard = worker.id if worker else 0
        return super().__iter__()


def torchdata_loader(dataset: Any, **options: Any) -> Any:
    """Return a loader of torchdata's."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls what torch no longer likes
        return stateful.StatefulDataLoader(dataset, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_is_found_again(workers: int) -> None:
    """With worker processes that read ahead, too: what they read but nobody trained on counts not.

    Passes end where they end: the last, short batch of each is dropped.
    """

    def open_loader() -> Any:
        return torchdata_loader(ByWorker(size=9), batch_size=2, drop_last=True, num_workers=workers)

    def batches(found: dict[Any, Any]) -> list[list[int]]:
        return [batch.tolist() for _, batch in sorted(found.items())]

    over = {"global_batch_size": 4}
    whole, _ = life([make(open_loader(), **over)], 0, 7)
    first, own = life([make(open_loader(), **over)], 0, 3)
    later = make(open_loader(), **over)
    assert later.restore(None, own, 1) is None
    rest, _ = life([later], 3, 7)
    assert batches(first) + batches(rest) == batches(whole)
    assert len({i for batch in batches(whole) for i in batch}) == 28, "no sample twice in a pass"


class Stateless(IterableDataset[int]):
    """Cannot tell where it is."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


class Unstorable(Lines):
    """Has a state that is no plain data."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"file": object()}


class Full(Lines):
    """Puts all that it read ahead into its state."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"buffer": torch.empty(17 << 20, dtype=torch.uint8)}


class Empty(Lines):
    """Has nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("source", "over", "message"),
    [
        (Stateless(), {}, r"Stateless has no length and no indices, and no state_dict\(\)"),
        (iter([1]), {}, "list_iterator has no length and no indices"),
        (DataLoader(Stateless()), {}, "DataLoader has no length and no indices"),
        (lambda shard, shards: Stateless(), {}, "Stateless has no length"),
        (None, {}, "NoneType has no length"),
        (Lines(), {"world": 5}, "4 micro-batches, fewer than the 5 ranks"),
        (Lines(), {"global_batch_size": 0}, "global_batch_size is 0"),
    ],
)
def test_what_cannot_be_a_stream_is_refused(source: Any, over: Any, message: str) -> None:
    """One sentence with the way out, before training begins."""
    with pytest.raises(UsageError, match=message):
        make(source, **over)


@pytest.mark.parametrize(
    ("options", "over", "message"),
    [
        ({"batch_size": 4, "drop_last": True}, {}, "gives batches of 4, but micro_batch_size is 2"),
        ({"batch_size": 2}, {}, "must give whole micro-batches only"),
        (
            {"batch_size": 2, "drop_last": True},
            {"global_batch_size": 7},
            "whole micro-batches only",
        ),
    ],
)
def test_a_loader_whose_batches_are_others_is_refused(
    options: Any, over: Any, message: str
) -> None:
    """A short batch would count like a whole one."""
    with pytest.raises(UsageError, match=message):
        make(torchdata_loader(Lines(), **options), **over)


def test_states_that_cannot_be_kept_are_refused_at_the_start() -> None:
    """Not at the notice: what is no plain data, or too large for a manifest."""
    with pytest.raises(UnsupportedState, match=r"cannot store Unstorable\.file"):
        make(Unstorable()).keep(0)
    with pytest.raises(UnsupportedState, match="Full has 17 MB, at most 16 fit"):
        make(Full()).keep(0)


def test_a_stream_has_no_epochs() -> None:
    """`run.steps(loader, epochs=2)` cannot know its end."""
    with pytest.raises(UsageError, match="a stream has no length, so epochs= says nothing"):
        make(Lines()).first_step_of(2)


def test_an_empty_stream_is_no_endless_loop() -> None:
    """A pass without a sample is an error, not the first of infinitely many."""
    with pytest.raises(UsageError, match="a whole pass over Empty gave nothing"):
        next(make(Empty()).read(0, 1))


def test_options_of_indices_are_refused() -> None:
    """What would do nothing with a stream is not taken."""
    refuse_indexed_options(weights=None, drop_last=False, num_workers=0)
    with pytest.raises(UsageError, match="drop_last, num_workers cannot be used with a stream"):
        refuse_indexed_options(weights=None, drop_last=True, num_workers=2)


def test_a_stream_is_told_from_indices() -> None:
    """By what it has."""
    assert not any(map(is_stream, ([1], Numbers(3), torch.zeros(3), np.zeros(3))))
    assert all(map(is_stream, (Lines(), Stateless(), iter([1]), lambda a, b: None)))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, (2.5, None)], "b": b"raw"},
        {3: torch.arange(6).reshape(2, 3)[:, 1:], "bf16": torch.ones(2, dtype=torch.bfloat16)},
        {"empty": torch.empty(0, 3), "numpy": np.arange(3), "bool": torch.tensor(True)},
    ],
    ids=["plain", "tensors", "odd"],
)
def test_small_state_goes_through_json(value: Any) -> None:
    """Values, dtypes and shapes come back, in memory of their own."""
    came = from_inline(json.loads(json.dumps(to_inline(value, "x"))))
    assert repr(came) == repr(value)


class Plain:
    """A stream that does not know its place, in another order each epoch."""

    def __init__(self, shard: int = 0) -> None:
        self.shard = shard
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(7))
        random.Random(self.epoch).shuffle(order)
        yield from (self.shard * 1000 + self.epoch * 100 + item for item in order)


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_stream_without_a_state_is_replayed(stop: int) -> None:
    """What was read of the pass is read again and thrown away: nothing is left out or repeated."""

    def sources(shard: int, shards: int) -> Plain:
        return Plain(shard)

    whole = make(sources, replay=True)
    undisturbed = [batch for _, batch in whole.read(0, 9)]
    first = make(sources, replay=True)
    before = [batch for _, batch in first.read(0, stop)]
    first.keep(stop)
    again = make(sources, replay=True)
    assert again.restore(None, {0: first.own}, 1) is None
    after = [batch for _, batch in again.read(stop, 9)]
    assert before + after == undisturbed


def test_a_stream_without_a_state_is_refused_without_replay() -> None:
    """The hint names it, and that the order must be the same."""
    with pytest.raises(UsageError) as refused:
        make(Plain())
    assert "replay=True" in refused.value.hint
