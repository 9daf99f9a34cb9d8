"""Elastic data loading: which samples a rank reads at a step is arithmetic, not state.

Everything follows from the step number: epoch, position in the epoch, the samples of the global
batch, their split into micro-batches and this rank's share of those. So there is no sampler
state to save, and a resume with another number of ranks reads each sample exactly once.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spotguard.batching import rank_range, split_micro_batches
from spotguard.errors import UsageError
from spotguard.runtime.order import Permutation
from spotguard.runtime.randomness import mix, seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

_READ, _TRAIN = 0x5851F42D4C957F2D, 0x14057B7EF767814F
"""Two streams, so that a dataset's own draws do not shift the dropout masks."""


class Share(NamedTuple):
    """One micro-batch as one rank trains on it."""

    step: int
    number: int
    """Which of the step's micro-batches."""
    weight: float
    """Its samples over the step's samples; 0 for a rank that has nothing to do."""
    indices: tuple[int, ...]
    last: bool
    """True for this rank's last one in the step: the one after which gradients are synchronised."""


class ElasticLoader:
    """Cuts a map-style dataset into global batches and those into micro-batches.

    The batch at a step depends on `(seed, step)` only. Made by `run.loader(...)`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        reseed: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
        options: dict[str, Any],
        rank: int,
        world_size: int,
    ) -> None:
        _check(dataset, global_batch_size, micro_batch_size, drop_last)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = min(micro_batch_size or global_batch_size, global_batch_size)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self._reseed = reseed
        self._collate = collate_fn or _default_collate
        self._num_workers = num_workers
        self._options = options
        self._rank = rank
        self._world_size = world_size
        self._size = len(dataset)
        full, rest = divmod(self._size, global_batch_size)
        self.steps_per_epoch = full if drop_last or not rest else full + 1
        """Optimizer steps in one pass over the dataset."""
        self._order: tuple[int, Sequence[int] | Permutation] | None = None

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a save and a resume."""
        return {
            "samples": self._size,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }

    def epoch_of(self, step: int) -> int:
        """Return the epoch (from 0) that step `step` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def shares(self, step: int) -> list[Share]:
        """Return this rank's micro-batches of step `step` (from 0), at least one."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch_size
        count = min(self.global_batch_size, self._size - start)
        sizes = split_micro_batches(count, self.micro_batch_size)
        starts = [0, *itertools.accumulate(sizes)]
        mine = rank_range(len(sizes), self._world_size, self._rank)
        order = self._order_of(epoch)

        def share(index: int, weight: float, *, last: bool) -> Share:
            span = range(start + starts[index], start + starts[index] + sizes[index])
            return Share(step, index, weight, tuple(order[i] for i in span), last)

        if not mine:  # it joins the collectives with a zero weight, so that nobody waits for it
            return [share(0, 0.0, last=True)]
        return [share(i, sizes[i] / count, last=i == mine[-1]) for i in mine]

    def read(self, first_step: int, last_step: int) -> Generator[tuple[Share, Any], None, None]:
        """Yield this rank's micro-batches of steps `first_step` to `last_step` - 1, in order.

        Worker processes ignore the SIGTERM of others (a notice reaches the whole process tree,
        and the save still needs them out of its way, not dead in the middle of a queue) and are
        shut down when the iterator is closed.
        """
        shares = (s for step in range(first_step, last_step) for s in self.shares(step))
        if not self._num_workers:
            may_draw = self._collate is not _default_collate or not _only_holds(self.dataset)
            dataset = _Seeded(self.dataset, self.seed, self._reseed and may_draw)
            for share in shares:
                yield share, self._collate(dataset.__getitems__(share))
            return
        ahead, behind = itertools.tee(shares)
        from torch.utils.data import DataLoader

        # Else starting workers would draw from the script's generator, once more after a resume.
        own_seeds = torch.Generator().manual_seed(mix(self.seed, first_step, self._rank, _READ))
        quiet = _Quiet(self._options.get("worker_init_fn"))
        batches: Iterable[Any] = DataLoader(
            _Seeded(self.dataset, self.seed, self._reseed),  # type: ignore[arg-type]
            batch_sampler=ahead,  # type: ignore[arg-type]  # a Share stands for its list of indices
            collate_fn=self._collate,
            num_workers=self._num_workers,
            **{"generator": own_seeds, **self._options, "worker_init_fn": quiet},
        )
        yield from zip(behind, batches, strict=True)

    def seed_training(self, share: Share) -> None:
        """Seed the random state that the forward pass of `share` sees."""
        if self._reseed:
            seed_everything(mix(self.seed, share.step, share.number) ^ _TRAIN)

    def _order_of(self, epoch: int) -> Sequence[int] | Permutation:
        if not self.shuffle:
            return range(self._size)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, Permutation(self._size, mix(self.seed, epoch)))
        return self._order[1]


class _Seeded:
    """A dataset that is asked for a `Share` and seeds its randomness by it, in any process."""

    def __init__(self, dataset: Any, seed: int, reseed: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._reseed = reseed

    def __getitems__(self, share: Share) -> list[Any]:
        if self._reseed:
            seed_everything(mix(self._seed, share.step, share.number) ^ _READ)
        together = getattr(self._dataset, "__getitems__", None)
        if together is not None:
            return list(together(list(share.indices)))
        return [self._dataset[index] for index in share.indices]

    def __len__(self) -> int:
        return len(self._dataset)


def _only_holds(dataset: Any) -> bool:
    """Return True if reading from `dataset` cannot draw random numbers: seeding would be idle."""
    kind = type(dataset)
    return kind in (list, tuple, torch.Tensor) or (
        kind.__name__ == "TensorDataset" and kind.__module__ == "torch.utils.data.dataset"
    )


class _Quiet:
    """Worker start: from here on only the SIGTERM of its own job ends a worker.

    The one that torchrun or a cloud sends to the whole process tree does not. Ignoring it
    altogether would let a job hang at its exit, which terminates its workers and waits for them.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        if hasattr(signal, "sigwaitinfo"):  # macOS has none: there SIGTERM ends a worker
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()
        if self._then is not None:
            self._then(worker)


def _obey(job: int) -> None:
    """End this worker when its job, the process `job`, sends it SIGTERM."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != job:
        pass
    os._exit(0)


def _default_collate(samples: list[Any]) -> Any:
    # torch.utils.data takes 30 ms to import, which a script without a loader need not pay.
    from torch.utils.data import default_collate

    return default_collate(samples)


def _check(
    dataset: Any, global_batch_size: int, micro_batch_size: int | None, drop_last: bool
) -> None:
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"run.loader: {type(dataset).__name__} has no length and no indices",
            hint="pass a map-style dataset (with __len__ and __getitem__)",
        )
    for name, value in (
        ("global_batch_size", global_batch_size),
        ("micro_batch_size", 1 if micro_batch_size is None else micro_batch_size),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"run.loader: {name} is {value!r}, but must be a whole number above 0")
    if len(dataset) < (global_batch_size if drop_last else 1):
        raise UsageError(
            f"run.loader: the dataset has {len(dataset)} samples, too few for one global batch",
            hint="lower global_batch_size, or leave drop_last off",
        )
