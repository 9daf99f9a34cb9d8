"""Micro-batches as they are read: seeded by their place, here or by workers that read ahead."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from spotguard.runtime.state.rng import mix, seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from spotguard.runtime.checks.dataset_state import SampleReading
    from spotguard.runtime.data.loader import Loader, Share

READ = 0x5851F42D4C957F2D
"""The stream of a dataset's own draws."""
_RESTARTS_TOLD = 3
_STARTED_ANEW = (
    "the script changes its dataset in each step, so that worker processes begin anew in each: "
    "read with num_workers=0, or let a sample depend on its index alone"
)


class SeededDataset:
    """A dataset that is asked for a `Share` and seeds its randomness by it, in any process."""

    def __init__(
        self, dataset: Any, seed: int, reseed: bool, own: SampleReading | None = None
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._reseed = reseed
        self.own = own
        """What a sample may depend on beside its index; None if there is nothing."""
        self.in_worker = False

    def __getitems__(self, share: Share) -> list[Any]:
        seed = mix(self._seed, share.step, share.number) ^ READ
        if self._reseed:
            seed_everything(seed)
        if self.own is None:
            return self._samples(share)
        self.own.begin(seed)
        samples = self._samples(share)
        if self.in_worker:
            self.own.end(None)
        return samples

    def _samples(self, share: Share) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is not None:
            return list(together(list(share.indices)))
        return [self.dataset[index] for index in share.indices]

    def __len__(self) -> int:
        return len(self.dataset)


class InWorker:
    """Begins a worker process: the dataset that it asks for is the script's, then and later."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        """Make ready in the process of a worker, whatever its number."""
        from torch.utils.data import get_worker_info

        info: Any = get_worker_info()
        info.dataset.in_worker = True
        object.__setattr__(info, "dataset", info.dataset.dataset)  # else it lets nobody change it
        if self._init is not None:
            self._init(worker)


def by_workers(
    loader: Loader,
    seeded: Callable[..., SeededDataset],
    first: int,
    last: int,
    options: dict[str, Any],
) -> Generator[tuple[Share, Any], None, None]:
    """Yield the micro-batches of steps `first` to `last` - 1 that worker processes read ahead.

    Workers have the dataset as it was when they began. So once the script has changed it, what
    they have read ahead is dropped, and others begin with the dataset as it is now.

    Args:
        loader: Says what a step's micro-batches are.
        seeded: Returns the dataset as it is read.
        first: The first step.
        last: The step after the last one.
        options: Of `torch.utils.data.DataLoader`.
    """
    begun, in_a_row = first, 0
    while begun < last:
        # Else starting workers would draw from the script's generator, once more after a resume.
        seeds = torch.Generator().manual_seed(mix(loader.seed, begun, loader.rank, READ))
        dataset = seeded(watches=begun == first)
        end = yield from _until_changed(
            loader, dataset, begun, last, {"generator": seeds, **options}
        )
        in_a_row = in_a_row + 1 if end == begun + 1 else 0
        if in_a_row == _RESTARTS_TOLD and loader.tell is not None:
            loader.tell(_STARTED_ANEW)
        begun = end


def _until_changed(
    loader: Loader, dataset: SeededDataset, first: int, last: int, options: dict[str, Any]
) -> Generator[tuple[Share, Any], None, int]:
    """Yield micro-batches; return the first step that was not read: the dataset has changed."""
    from torch.utils.data import DataLoader

    shares = (share for step in range(first, last) for share in loader.shares(step))
    again, loader.again = loader.again, []  # of this attempt's beginning only
    ahead, behind = itertools.tee(itertools.chain(again, shares))
    loader.begins_epoch = False
    values, whole = loader.settings.now(), loader.settings.hash()
    batches = iter(
        DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=ahead,  # type: ignore[arg-type]  # a Share stands for its indices
            collate_fn=loader.collate,
            **options,
        )
    )
    step: int | None = None
    for share in behind:
        if step is not None and share.step != step:
            begins = loader.begins_epoch or loader.epoch_of(share.step) != loader.epoch_of(step)
            loader.begins_epoch = False
            if loader.settings.differ(values) or (begins and loader.settings.hash() != whole):
                return share.step
        step = share.step
        yield share, next(batches)
    return last
