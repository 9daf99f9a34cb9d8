"""The script's own DataLoader, taken apart: its batches, its order, and the part of it that counts.

Needs no framework: each integration takes training data in this way.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from spotguard.errors import UsageError
from spotguard.integrations.torch_data import make_loader
from spotguard.integrations.trained_beside import trained_beside
from spotguard.runtime.data.first_attempt import BatchSizes, FirstAttempt, claimed_sizes
from tests.runtime.data.test_loader import PLAIN, Numbers, make, trained

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 24


def taken(sampler: Any = None, **how: Any) -> tuple[Any, int | None]:
    """Return the loader that is made of a script's own, and its steps per epoch."""

    def loader(dataset: Any, *, per_rank: str, **options: Any) -> Any:
        taken: dict[str, Any] = {name: options.get(name, PLAIN.get(name)) for name in _ASKED}
        return make(dataset, **taken)

    own = DataLoader(Numbers(SIZE), batch_size=4, sampler=sampler)
    begun = FirstAttempt(how.pop("ranks_meant", 1))
    run = SimpleNamespace(
        seed=3,
        loader=loader,
        reference_world_size=begun.world_size,
        sizes_meant=partial(begun.sizes_meant, world_size=begun.world_size),
    )
    how = {"caller": "X", "global_batch_size": None, "accumulated": 1, **how}
    return make_loader(run, own, **how)  # type: ignore[arg-type]


_ASKED = (*PLAIN, "weights", "sampler")


def epoch_of(loader: Any, steps: int | None) -> list[int]:
    """Return the samples of the first epoch, in order."""
    assert steps is not None
    return [index for step in range(steps) for index in trained([loader], step)]


class Backwards(Sampler[int]):
    """The last sample first."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE - 1, -1, -1))


class Halves(RandomSampler):
    """A kind of shuffling of its own: the first half of the data comes first."""

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        return iter(sorted(order, key=lambda index: index >= SIZE // 2))


class ByWeight(DistributedSampler[int]):
    """As projects have it that train by weights on several ranks."""

    def __iter__(self) -> Iterator[int]:
        return iter([0] * len(self))


def test_a_sampler_that_draws_some_is_asked() -> None:
    """`RandomSampler(num_samples=8)` has epochs of 8 samples, none of them twice."""
    order = epoch_of(*taken(RandomSampler(Numbers(SIZE), num_samples=8)))
    assert len(order) == len(set(order)) == 8


def test_a_subclass_gives_its_own_order() -> None:
    """What a script's class makes of a known one is kept, or refused where ranks share it out."""
    order = epoch_of(*taken(Halves(Numbers(SIZE))))
    assert sorted(order[: SIZE // 2]) == list(range(SIZE // 2)) != order[: SIZE // 2]
    with pytest.raises(UsageError, match="a ByWeight shares out samples by rank"):
        taken(ByWeight(Numbers(SIZE), num_replicas=2, rank=0))
    with pytest.raises(UsageError, match="a ByWeight shares out samples by rank"):
        taken(ByWeight(Numbers(SIZE), num_replicas=2, rank=0), limit=2)


def test_torchdatas_sampler_that_only_counts_is_taken_for_torchs() -> None:
    """`StatefulDistributedSampler` is made for loaders with state; its order is the known one."""
    stateful: Any = type(
        "StatefulDistributedSampler",
        (DistributedSampler,),
        {"__module__": "torchdata.stateful_dataloader.sampler"},
    )
    order = epoch_of(*taken(stateful(Numbers(SIZE), num_replicas=2, rank=0)))
    assert sorted(order) == list(range(SIZE)) != order


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(Numbers(SIZE)),
        RandomSampler(Numbers(SIZE)),
        DistributedSampler(Numbers(SIZE), num_replicas=2, rank=0),
        Backwards(),
        WeightedRandomSampler([1.0] * 4 + [0.0] * (SIZE - 4), SIZE),
        WeightedRandomSampler([1.0] * SIZE, 16, replacement=False),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_limit_counts_in_every_order(sampler: Any) -> None:
    """Two batches of an epoch, or a half of them, are the first that the order gives."""
    order = epoch_of(*taken(sampler, limit=2))
    assert len(order) == 8
    assert len(epoch_of(*taken(sampler, limit=0.5))) == (8 if len(sampler) == 16 else 12)
    if isinstance(sampler, Backwards):
        assert order == list(range(SIZE - 1, SIZE - 9, -1))
    elif isinstance(sampler, WeightedRandomSampler) and sampler.replacement:
        assert set(order) <= set(range(4))


def test_a_limit_of_a_stream_is_its_epoch() -> None:
    """A stream has no length, but so many batches of it are an epoch; no part of it is."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(SIZE))

    def steps(limit: float | None) -> int | None:
        run: Any = SimpleNamespace(seed=3, loader=lambda *_, **__: None)
        run.sizes_meant = partial(FirstAttempt(1).sizes_meant, world_size=1)
        how: dict[str, Any] = {"global_batch_size": None, "accumulated": 2}
        return make_loader(run, DataLoader(Stream(), 4), caller="X", limit=limit, **how)[1]

    assert steps(None) is None
    assert steps(6) == 3
    with pytest.raises(UsageError, match=r"a part \(0.5\) of a stream"):
        steps(0.5)


def test_batches_that_ranks_split_are_the_global_ones() -> None:
    """Where each rank has a part of the script's batch, the global batch is that batch."""
    loader, _ = taken(ranks_meant=2, splits_batches=True)
    assert (loader.global_batch_size, loader.micro_batch_size) == (4, 2)
    loader, _ = taken(ranks_meant=2)
    assert (loader.global_batch_size, loader.micro_batch_size) == (8, 4)


@pytest.mark.parametrize(
    ("now", "accumulated", "ranks", "meant"),
    [
        (8, 3, 2, (96, 8)),  # the same batch for each rank, as most scripts have it
        (8, 3, 1, (96, 8)),
        (16, 3, 2, (96, 8)),  # `batch_size // ranks`
        (32, 3, 1, (96, 8)),
        (10, 3, 3, (96, 8)),  # which leaves a rest
        (8, 6, 2, (96, 8)),  # `accumulated // ranks`
        (8, 12, 1, (96, 8)),
        (6, 3, 2, (72, 6)),  # another batch, which the checkpoint refuses
        (16, 3, 4, (192, 16)),  # on as many ranks it is no division
    ],
)
def test_a_batch_that_is_divided_by_the_ranks_is_the_one_that_the_run_began_with(
    now: int, accumulated: int, ranks: int, meant: tuple[int, int]
) -> None:
    """A script that shares out a fixed batch goes on after a loss of nodes; others are as ever."""
    begun = FirstAttempt(4, BatchSizes(96, 8))
    assert begun.sizes_meant(now, accumulated, ranks) == meant
    old = FirstAttempt(4)  # of a claim that tells no sizes
    assert old.sizes_meant(now, accumulated, ranks) == (now * accumulated * 4, now)


def test_a_claim_tells_sizes_to_the_attempts_after_it() -> None:
    """They come back as they were; sizes that were found by trying, and no numbers, are none."""
    told = {
        "world_size": 3,
        "batch": claimed_sizes({"global_batch_size": 9, "micro_batch_size": 3}),
    }
    first = FirstAttempt.told_by(told)
    assert first == FirstAttempt(3, BatchSizes(9, 3))
    assert FirstAttempt.of_text(first.to_text()) == first
    found = claimed_sizes({"global_batch_size": 9, "micro_batch_size": "auto"})
    for batch in (found, None, [9, 3], {"global_batch_size": True, "micro_batch_size": 3}):
        alone = FirstAttempt.told_by({"world_size": 3, "batch": batch})
        assert alone == FirstAttempt(3)
        assert FirstAttempt.of_text(alone.to_text()) == alone
    assert FirstAttempt.told_by({}) is None
    assert FirstAttempt.told_by({"world_size": "3"}) is None


def test_what_an_optimizer_trains_beside_the_model_is_tracked() -> None:
    """Parameters of a loss or of a plain list are saved; what the model has is saved once."""
    model, loss = torch.nn.Linear(2, 2), torch.nn.Linear(3, 1)
    own = torch.optim.SGD(model.parameters(), 1.0)
    plain = torch.zeros(1, requires_grad=True)
    losses: list[torch.Tensor] = [*loss.parameters(), plain]
    groups: list[dict[str, Any]] = [{"params": [*model.parameters()]}, {"params": losses}]
    both = torch.optim.SGD(groups)
    assert trained_beside([own], [model]) == {}
    found = trained_beside([own, both], [model])["trained_beside"]
    assert [id(p) for p in found.parameters()] == [id(p) for p in losses]
    names = ["optimizer1_group1_0", "optimizer1_group1_1", "optimizer1_group1_2"]
    assert list(found.state_dict()) == names
