"""The Trainer's data: what its own DataLoader is made of, and what stands in its place.

The Trainer then iterates over the optimizer steps of an epoch, each of which it takes for one
batch. What is in a step, this rank's micro-batches, is read when the step has begun.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from spotguard.errors import UsageError
from spotguard.runtime.data.whole_batches import refuse_one_ranks_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.runtime import Run, Step
    from spotguard.runtime.data.loader import Loader


def batch_size_of(plain: Any) -> int:
    """Return how many samples a batch of the Trainer's own DataLoader has.

    Raises:
        UsageError: it is no DataLoader, or makes no batches.
    """
    if not isinstance(plain, DataLoader):
        raise UsageError(
            f"get_train_dataloader returned a {type(plain).__name__}",
            hint="return a torch.utils.data.DataLoader, which spotguard takes apart",
        )
    refuse_one_ranks_batches(plain.batch_sampler)
    size = plain.batch_size or getattr(plain.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        made_by = "its dataset" if plain.batch_sampler is None else type(plain.batch_sampler)
        name = made_by if isinstance(made_by, str) else made_by.__name__
        raise UsageError(
            f"get_train_dataloader returned a DataLoader of which {name} makes the batches: it is "
            "not known how many samples these have",
            hint="give the DataLoader a batch_size, or its batch_sampler a batch_size attribute",
        )
    return size


def elastic_loader(
    plain: Any,
    run: Run,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    per_rank: str | None,
) -> Loader:
    """Return a loader of the same samples as `plain`, a DataLoader, in the order of its sampler.

    Shuffled is by the run's seed, so the order is not the one that the Trainer alone would have.
    Of a stream, every rank reads all, as under the Trainer. Batches of a batch sampler stay whole.

    Raises:
        UsageError: `plain` is cut in a way that another number of ranks could not have.
    """
    common: dict[str, Any] = {
        "global_batch_size": global_batch_size,
        "per_rank": per_rank,
        "collate_fn": plain.collate_fn,
    }
    if is_stream(plain.dataset):
        return run.loader(
            plain.dataset,
            **common,
            micro_batch_size=micro_batch_size,
            read_by_all=True,
            replay=True,
        )
    if plain.num_workers:
        common |= {
            "num_workers": plain.num_workers,
            "pin_memory": plain.pin_memory and torch.cuda.is_available(),
            "prefetch_factor": plain.prefetch_factor,
            "worker_init_fn": plain.worker_init_fn,
            "multiprocessing_context": plain.multiprocessing_context,
        }
    if type(plain.batch_sampler) is not BatchSampler:
        if micro_batch_size != batch_size_of(plain):
            raise UsageError(
                f"split_batches would cut the batches of a {type(plain.batch_sampler).__name__}",
                hint="leave split_batches out of accelerator_config",
            )
        return run.loader(plain.dataset, **common, batch_sampler=plain.batch_sampler)
    return run.loader(
        plain.dataset,
        **common,
        micro_batch_size=micro_batch_size,
        drop_last=plain.drop_last,
        **_order(plain.sampler),
    )


def is_stream(dataset: Any) -> bool:
    """Return True for what the Trainer takes for a stream."""
    return isinstance(dataset, IterableDataset)


def _order(sampler: Any) -> dict[str, Any]:
    """Return by which arguments of `run.loader` the order is the sampler's."""
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    whole = type(sampler) is RandomSampler and not sampler.replacement
    if whole and sampler.num_samples == len(sampler.data_source):
        return {"shuffle": True}
    return {"sampler": sampler}


def steps_of_an_epoch(dataset: Any, steps: int) -> DataLoader[Any]:
    """Return a DataLoader whose items stand for the `steps` optimizer steps of an epoch.

    It is a DataLoader so that the Trainer can skip steps that are done.
    """
    return _Steps(
        _Placeholders(dataset),
        batch_sampler=_Numbers(steps),
        collate_fn=_only,
        generator=torch.Generator(),  # the script's own is not drawn from
    )


class _Steps(DataLoader[Any]):
    """Counts, without the 15 microseconds that a DataLoader takes for an item."""

    def __iter__(self) -> Any:
        return iter(range(len(self)))


class _Placeholders(Dataset[int]):
    """Has the length of the dataset, which the Trainer reports, and numbers instead of samples."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, number: int) -> int:
        return number

    def __getattr__(self, name: str) -> Any:
        """Answer callbacks that ask the dataset for more."""
        if name == "_of":
            raise AttributeError(name)
        return getattr(self._of, name)


class _Numbers(BatchSampler):
    def __init__(self, count: int) -> None:
        super().__init__(range(count), 1, drop_last=False)


def _only(items: list[int]) -> int:
    return items[0]


class LossScale(NamedTuple):
    """What a Trainer divides the losses of a step's micro-batches by, and what is left to do."""

    accumulation: float = 1
    """What `current_gradient_accumulation_steps` says meanwhile."""
    argument: float = 1
    """What `args.gradient_accumulation_steps` says meanwhile."""
    share: float | None = None
    """What a loss is multiplied by to be its part of the global mean; None: it is a mean."""


class StepBatches(Mapping[str, Any]):
    """This rank's micro-batches of one step, as the Trainer sees them: its batch.

    To what the Trainer asks a batch for, this answers for all of them: whether it has a key, and
    what lies under it, laid out flat, of which it counts tokens.
    """

    def __init__(self, step: Step, batches: Sequence[Any], own: int, scale: LossScale) -> None:
        self.step = step
        self.scale = scale
        """What its losses are divided by, and how they count."""
        self.batches = batches
        """Those to train on, in order; one at least."""
        self.own = own
        """How many of them count; 0 for a rank that has nothing to do in this step."""

    def counted(self) -> Sequence[Any]:
        """Return the micro-batches that count."""
        return self.batches[: self.own]

    def in_turn(self) -> Iterator[Any]:
        """Yield what to train on: one for each forward pass, in the random state that it sees."""
        last = len(self.batches) - 1
        comes_again = len(self.step) > len(self.batches)
        for number, _ in enumerate(self.step):
            # One more than there are is the last again, for others to meet in the forward pass.
            batch = self.batches[min(number, last)]
            # A loss may take something out of its batch.
            yield copy.copy(batch) if comes_again and number >= last else batch

    def __contains__(self, key: object) -> bool:
        return key in self.batches[0]

    def __getitem__(self, key: str) -> Any:
        parts = [torch.as_tensor(batch[key]).reshape(-1) for batch in self.batches]
        return torch.cat(parts[: self.own] or [parts[0][:0]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.batches[0])

    def __len__(self) -> int:
        return len(self.batches[0])
