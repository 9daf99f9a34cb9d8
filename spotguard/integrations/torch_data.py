"""The script's training data, read by our loader: one global batch on any number of ranks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from spotguard.errors import UsageError
from spotguard.integrations.partial_epochs import FirstOfEpoch, FirstOfSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime import Run
    from spotguard.runtime.data.loader import Loader

_WORKER_OPTIONS = (
    *("pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor"),
    "persistent_workers",
)


def make_loader(
    run: Run,
    given: Any,
    *,
    caller: str,
    global_batch_size: int | None,
    accumulated: int,
    per_rank: str = "even",
    splits_batches: bool = False,
    limit: float | None = None,
    in_order: bool = False,
) -> tuple[Loader, int | None]:
    """Return our loader over the data of the script's own, and its steps per epoch.

    Args:
        run: This process's run.
        given: The script's own loader, as it would be for one process.
        caller: What took it, for messages.
        global_batch_size: Samples per optimizer step; None: what the script's sizes come to on
            the ranks of the run's first attempt with `accumulated` batches for each step.
        accumulated: Batches that gradients were to be accumulated over.
        per_rank: As for `run.loader`.
        splits_batches: A batch of the script's is of all ranks together, each of which has a part.
        limit: Batches per epoch on the ranks that the script is for (an int), or which part of
            them (a float); None for all.
        in_order: Read in the dataset's order, whatever the loader does.

    Raises:
        UsageError: the data cannot be read in global batches; the message says why.
    """
    if not isinstance(given, DataLoader):
        raise _refusal_of_other_data(caller, given)
    if given.batch_size is None:
        raise UsageError(
            f"{caller}: the training DataLoader has no batch_size",
            hint="give it batch_size= in place of a batch_sampler",
        )
    if splits_batches:
        size = given.batch_size * accumulated
        micro_batch = -(-given.batch_size // run.reference_world_size)
    else:
        size, micro_batch = run.sizes_meant(given.batch_size, accumulated)
    size = global_batch_size or size
    common: dict[str, Any] = {
        "global_batch_size": size,
        "micro_batch_size": micro_batch,
        "collate_fn": given.collate_fn,
        "per_rank": per_rank,
    }
    if isinstance(given.dataset, IterableDataset):
        steps = _steps_of_stream(limit, accumulated, caller)
        return run.loader(given.dataset, **common), steps
    if given.num_workers:
        common["num_workers"] = given.num_workers
        common |= {name: getattr(given, name) for name in _WORKER_OPTIONS}
    samples = functools.partial(_samples, limit, size=size, accumulated=accumulated)
    loader = run.loader(
        given.dataset,
        drop_last=given.drop_last,
        **common,
        **_order(given, samples=samples, seed=run.seed, in_order=in_order),
    )
    return loader, loader.first_step_of(1)


def _refusal_of_other_data(caller: str, given: Any) -> UsageError:
    """Return why what is no DataLoader cannot be trained on, such as several of them."""
    several = getattr(given, "flattened", given)  # so Lightning's CombinedLoader names its own
    if isinstance(several, (list, tuple, dict)):
        return UsageError(
            f"{caller}: the training data is a {type(given).__name__} of {len(several)} loaders, "
            "whose samples are not counted together",
            hint="give it one DataLoader: a torch.utils.data.StackDataset has a sample of each "
            "dataset at a time, a ConcatDataset one after the other",
        )
    return UsageError(
        f"{caller}: the training data is a {type(given).__name__}, which cannot be "
        "divided among a changing number of ranks",
        hint="give it one torch.utils.data.DataLoader to train on",
    )


def _steps_of_stream(limit: float | None, accumulated: int, caller: str) -> int | None:
    """Return the steps of a part of a stream that is called an epoch; None if it has none."""
    if isinstance(limit, float):
        raise UsageError(
            f"{caller}: a part ({limit}) of a stream that has no length",
            hint="give the limit as a number of batches",
        )
    return None if limit is None else max(1, limit // accumulated)


def _samples(limit: float | None, length: int, size: int, accumulated: int) -> int | None:
    """Return how many of an epoch's `length` samples are read; None for all."""
    if limit is None:
        return None
    steps = -(-length // size)
    wanted = limit // accumulated if isinstance(limit, int) else int(steps * limit)
    return min(max(1, int(wanted)) * size, length)


def _order(
    given: DataLoader[Any], *, samples: Callable[[int], int | None], seed: int, in_order: bool
) -> dict[str, Any]:
    """Return the options of `run.loader` for the order of the script's own loader.

    By the very class: what a subclass does is its own affair, and its order is read as it gives it.
    `samples` returns how many are read of an epoch of so many; None for all.
    """
    sampler: Any = given.sampler
    kind, length = type(sampler), len(given.dataset)  # type: ignore[arg-type]
    if in_order or kind is SequentialSampler:
        shuffle = False
    elif kind is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        shuffle = True
    elif kind is DistributedSampler or _counts_only(kind):
        shuffle = sampler.shuffle
    else:
        return _own_order(sampler, length, samples)
    part = samples(length)
    if part is None:
        return {"shuffle": shuffle}
    return {"sampler": FirstOfEpoch(length, part, seed=seed if shuffle else None)}


def _counts_only(kind: type) -> bool:
    """Return True for torchdata's `StatefulDistributedSampler`: its order is that of torch's."""
    is_torchdata = kind.__module__.startswith("torchdata.")
    return is_torchdata and kind.__name__ == "StatefulDistributedSampler"


def _own_order(sampler: Any, length: int, samples: Callable[[int], int | None]) -> dict[str, Any]:
    """Return the options for what draws in its own way, or in that of our `weights`."""
    if isinstance(sampler, DistributedSampler) or not hasattr(sampler, "__len__"):
        return {"sampler": sampler}  # which refuses it
    part = samples(len(sampler))
    if part is not None:
        return {"sampler": FirstOfSampler(sampler, part)}
    draws_all = type(sampler) is WeightedRandomSampler and sampler.num_samples == length
    if draws_all and sampler.replacement:
        return {"weights": sampler.weights}
    return {"sampler": sampler}
