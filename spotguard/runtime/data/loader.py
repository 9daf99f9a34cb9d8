"""Elastic data loading: which samples a rank reads at a step is arithmetic, not state.

Everything follows from the step number: epoch, position in the epoch, the samples of the global
batch, their split into micro-batches and this rank's share of those. So there is no sampler
state to save, and a resume with another number of ranks reads each sample exactly once. Data that
has no indices, or no length, is read by `streaming`; global batches follow the ranks in
`batch_scaling`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spotguard.errors import UsageError
from spotguard.runtime.checks.dataset_state import DatasetSettings, SampleReading
from spotguard.runtime.data.reading import InWorker, SeededDataset, by_workers
from spotguard.runtime.data.sampling import (
    FromSampler,
    InOrder,
    Order,
    Sampling,
    Shuffled,
    Weighted,
)
from spotguard.runtime.state.rng import mix, seed_everything
from spotguard.shared.batching import EpochPlan, rank_range, split_micro_batches
from spotguard.shared.typo_guess import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from spotguard.runtime.data.batch_scaling import LearningRateScale

_TRAIN = 0x14057B7EF767814F
"""Another stream than `READ`: a dataset's own draws do not shift the dropout masks."""


AUTO = "auto"
"""What `micro_batch_size` is where the largest that fits is to be found."""
_STACKING = (
    "torch.utils.data._utils.collate.default_collate",
    "transformers.data.data_collator.default_data_collator",
    *(
        f"transformers.data.data_collator.{kind}"
        for kind in (
            "DefaultDataCollator",
            "DataCollatorWithPadding",
            "DataCollatorForTokenClassification",
            "DataCollatorForMultipleChoice",
            "DataCollatorForSeq2Seq",
        )
    ),
)
"""Functions and classes of collators that draw no random number."""
_LEAVES_OUT_COLUMNS = "transformers.trainer_utils.RemoveColumnsCollator"


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


class _Cut(NamedTuple):
    """How a step is cut into micro-batches, and who has which."""

    sizes: list[int]
    """The samples of each micro-batch."""
    starts: list[int]
    """Where each begins in the global batch; and where the last one ends."""
    ranges: list[range]
    """The micro-batches of each rank."""


class Loader(ABC):
    """What the loop asks of data: this rank's micro-batches, and how to find the place again."""

    has_own_state = False
    """True if a rank knows its own place only: no rank can save that of all."""
    any_world = True
    """True if a step's micro-batches are the same on every number of ranks."""
    shared: Any = None
    """The place at the last step boundary, the same on all ranks, as JSON; None: the step says."""
    own: Any = None
    """This rank's part of it, as JSON; None if it has none."""
    evened: bool = False
    """True if all ranks have as many micro-batches of a step, some of them with weight zero."""
    dealt: bool = False
    """True if ranks get micro-batches in turn; else each has neighbours."""
    undivided: bool = False
    """True if a rank has one micro-batch of a step, which may have several backward passes."""
    begins_at_epoch_end: bool = False
    """True if this attempt begins within an epoch of which it has no step left, but its end."""
    again: Sequence[Share] = ()
    """What `read` gives first, of data with indices: it was read before, and is compared."""
    remembered: dict[str, Any] | None = None
    """The size of micro-batches that was found, and for which device; None if it was given."""
    dataset: Any
    """What is read by index; of streams and draws there is none."""
    probe: Callable[[Any], torch.Tensor] | None = None
    """Returns the loss of a micro-batch, where its size is to be found."""
    scale: LearningRateScale | None = None
    """Scales the optimizers' rates with the global batch, where that follows the ranks."""
    settings: DatasetSettings = DatasetSettings()
    """The dataset's plain values, which the script may change as it trains."""
    tracked: frozenset[int] = frozenset()
    """The ids of what the script tracks: it is saved and restored."""
    tell: Callable[[str], None] | None = None
    """Hears, once, what is wrong with how the data are read."""
    begins_epoch = False
    """Set where the script begins an epoch of its own: it may have changed the dataset."""

    def __init__(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int | None,
        seed: int,
        reseed: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        rank: int,
        world_size: int,
        speeds: Sequence[float] | None = None,
    ) -> None:
        check_sizes(global_batch_size, micro_batch_size)
        self.global_batch_size = global_batch_size
        self.micro_batch_size = min(micro_batch_size or global_batch_size, global_batch_size)
        self.seed = seed
        self._reseed = reseed
        self.collate = collate_fn or _default_collate
        self.rank = rank
        self._world_size = world_size
        self._speeds = tuple(speeds or ())
        self._cuts: dict[int, _Cut] = {}
        """By the samples of a step."""
        self._range(1, rank)  # so that wrong speeds are refused now

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what must not change between a save and a resume."""

    @abstractmethod
    def epoch_of(self, step: int) -> int:
        """Return the epoch (from 0) that step `step` (from 0) belongs to."""

    @abstractmethod
    def first_step_of(self, epoch: int) -> int:
        """Return the step (from 0) that epoch `epoch` (from 0) begins with.

        Raises:
            UsageError: a stream has no length.
        """

    @abstractmethod
    def shares(self, step: int) -> list[Share]:
        """Return this rank's micro-batches of step `step` (from 0), at least one."""

    @abstractmethod
    def read(self, first_step: int, last_step: int) -> Generator[tuple[Share, Any], None, None]:
        """Yield this rank's micro-batches of steps `first_step` to `last_step` - 1, in order."""

    @abstractmethod
    def keep(self, finished: int) -> None:
        """Take down the place after `finished` steps, in `shared` and `own`: it may be saved."""

    @abstractmethod
    def restore(self, shared: Any, own: dict[int, Any], world_size: int) -> str | None:
        """Go to the place of a checkpoint; return a warning if it cannot be the very same.

        Args:
            shared: What `shared` was.
            own: What `own` was on each rank that had one.
            world_size: How many ranks there were.
        """

    def begin(self, first: int) -> dict[str, Any] | None:
        """Begin at step `first`, after `restore`; return what is other from here on, to be told."""
        return None

    def look_at_dataset(self) -> None:
        """Take the dataset as it is now for what the script has set up, where there is one."""
        return

    def roots(self) -> list[tuple[str, Any]]:
        """Return what a sample may depend on beside its index, where samples have one."""
        return []

    def checksum(self, step: int) -> int | None:
        """Return what must be the same on all ranks, besides `identity`; None if that is all."""
        return None

    def remembers(self, step: int) -> bool:
        """Return whether the micro-batches of a step that is done can be told once more."""
        return True

    def seed_training(self, share: Share, salt: int = 0) -> None:
        """Seed the random state that the forward pass of `share` sees, in the phase of `salt`."""
        if self._reseed:
            seed_everything(mix(self.seed, share.step, share.number) ^ _TRAIN ^ salt)

    def ranges(self, step: int) -> list[range]:
        """Return which micro-batches of step `step` each rank trains on, by rank."""
        return self._cut(self._samples(step)).ranges

    def reading(self) -> dict[str, Any]:
        """Return how it reads, by the names of `torch.utils.data.DataLoader`'s options."""
        return {}

    def _samples(self, step: int) -> int:
        """Return how many samples the global batch of a step has."""
        return self.global_batch_size

    def _cut(self, samples: int) -> _Cut:
        """Return how a step of so many samples is cut."""
        if samples not in self._cuts:
            sizes = split_micro_batches(samples, self.micro_batch_size)
            ranges = [self._range(len(sizes), rank) for rank in range(self._world_size)]
            self._cuts[samples] = _Cut(sizes, [0, *itertools.accumulate(sizes)], ranges)
        return self._cuts[samples]

    def _shares(self, step: int, places: range, order: Order | None = None) -> list[Share]:
        """Return this rank's part of a step: of the samples at `places` in the epoch's order.

        Without an order, places are samples.
        """
        sizes, starts, ranges = self._cut(len(places))
        mine = ranges[self.rank]

        def share(index: int, weight: float, *, last: bool) -> Share:
            part = places[starts[index] : starts[index + 1]]
            samples = part if order is None else order[part.start : part.stop]
            return Share(step, index, weight, tuple(samples), last)

        if not mine:  # it joins the collectives with a zero weight, so that nobody waits for it
            return [share(0, 0.0, last=True)]
        return [share(i, sizes[i] / starts[-1], last=i == mine[-1]) for i in mine]

    def _range(self, micro_batch_count: int, rank: int) -> range:
        if self.dealt:
            return range(rank, micro_batch_count, self._world_size)
        try:
            return rank_range(micro_batch_count, self._world_size, rank, speeds=self._speeds)
        except (TypeError, ValueError) as problem:
            raise UsageError(
                f"run.loader: {problem}",
                hint="pass each rank's relative speed, the same list on all ranks",
            ) from problem


class ElasticLoader(Loader):
    """Cuts a map-style dataset into global batches and those into micro-batches.

    The batch at a step depends on `(seed, step)` only. Made by `run.loader(...)`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool,
        drop_last: bool,
        weights: Any = None,
        sampler: Any = None,
        num_workers: int,
        options: dict[str, Any],
        micro_batch_size: int | str | None = None,
        probe: Callable[[Any], torch.Tensor] | None = None,
        **common: Any,
    ) -> None:
        self.probe = _checked_probe(micro_batch_size, probe)
        size = None if isinstance(micro_batch_size, str) else micro_batch_size
        super().__init__(**common, micro_batch_size=size)
        _check_dataset(dataset)
        self.dataset = dataset
        self.drop_last = drop_last
        self._num_workers = num_workers
        self._options = _checked_options(options)
        init = self._options.get("worker_init_fn")
        self._of_workers = {**self._options, "worker_init_fn": InWorker(init)}
        self._size = len(dataset)
        self._sampling = _sampling(
            self._size, self.seed, shuffle=shuffle, weights=weights, sampler=sampler
        )
        length = self._sampling.length
        if length < (self.global_batch_size if drop_last else 1):
            raise UsageError(
                f"run.loader: an epoch has {length} samples, too few for one global batch of "
                f"{self.global_batch_size}",
                hint="lower global_batch_size, or leave drop_last off",
            )
        self._plan = EpochPlan(
            samples=length, global_batch=self.global_batch_size, drop_last=drop_last
        )

    def settle(self, size: int, device: dict[str, Any]) -> None:
        """Cut steps into micro-batches of `size`, which this smallest device holds."""
        self.micro_batch_size = min(size, self.global_batch_size)
        self._cuts.clear()
        self.remembered = {"size": self.micro_batch_size, **device}

    def share_to_try(self, step: int, size: int) -> Share:
        """Return a micro-batch of `size` samples, those of step `step` and what comes after."""
        epoch, places = self._plan.at(step)
        order = self._sampling.order(epoch)
        indices = (order[(places.start + n) % self._sampling.length] for n in range(size))
        return Share(step, 0, 1.0, tuple(indices), False)

    def batch_of(self, share: Share) -> Any:
        """Read a micro-batch here and now."""
        dataset = self._seeded(watches=False)
        return self.collate(dataset.__getitems__(share))

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the dataset, on this attempt's number of ranks."""
        return self._plan.steps

    def __len__(self) -> int:
        """Return `steps_per_epoch`."""
        return self.steps_per_epoch

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a save and a resume."""
        return {
            "samples": self._size,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size if self.probe is None else AUTO,
            **self._sampling.identity(),
            "drop_last": self.drop_last,
            "seed": self.seed,
        }

    def epoch_of(self, step: int) -> int:
        """Return the epoch (from 0) that step `step` (from 0) belongs to."""
        return self._plan.at(step)[0]

    def first_step_of(self, epoch: int) -> int:
        """Return the step (from 0) that epoch `epoch` (from 0) begins with."""
        return self._plan.first_step_of(epoch)

    def shares(self, step: int) -> list[Share]:
        """Return this rank's micro-batches of step `step` (from 0), at least one."""
        epoch, places = self._plan.at(step)
        order = self._sampling.order(epoch)
        return self._shares(step, places, order)

    def _samples(self, step: int) -> int:
        return len(self._plan.at(step)[1])

    def read(self, first_step: int, last_step: int) -> Generator[tuple[Share, Any], None, None]:
        """Yield this rank's micro-batches of steps `first_step` to `last_step` - 1, in order.

        Worker processes are shut down when the iterator is closed.
        """
        if self._num_workers:
            options = {"num_workers": self._num_workers, **self._of_workers}
            yield from by_workers(self, self._seeded, first_step, last_step, options)
            return
        may_draw = not (_only_stacks(self.collate) and _only_holds(self.dataset))
        dataset = self._seeded(self._reseed and may_draw)
        if _only_holds(self.dataset) and _only_stacks(self.collate):
            dataset.own = None
        shares = (s for step in range(first_step, last_step) for s in self.shares(step))
        for share in itertools.chain(self.again, shares):
            batch = self.collate(dataset.__getitems__(share))
            if dataset.own is not None:
                dataset.own.end(self.tell)
            yield share, batch

    def _seeded(self, reseed: bool | None = None, *, watches: bool = True) -> SeededDataset:
        """Return the dataset such as it is read."""
        in_workers = self._num_workers > 0
        reseed = self._reseed if reseed is None else reseed
        own = SampleReading(
            self.roots(),
            reseeds=reseed,
            leaves_alone=() if in_workers else self.tracked,
            watches=watches and not self.rank,
        )
        return SeededDataset(self.dataset, self.seed, reseed, own)

    def roots(self) -> list[tuple[str, Any]]:
        """Return what a sample may depend on beside its index."""
        return [("dataset", self.dataset), ("collate_fn", self.collate)]

    def reading(self) -> dict[str, Any]:
        """Return how it reads, by the names of `torch.utils.data.DataLoader`'s options."""
        options = ("pin_memory", "persistent_workers", "prefetch_factor")
        told = {name: self._options.get(name) for name in options}
        return {"num_workers": self._num_workers, **told}

    def with_workers(self, count: int) -> ElasticLoader:
        """Return a loader of the same batches that is read by so many worker processes."""
        other = copy.copy(self)
        other._num_workers = count
        return other

    def checksum(self, step: int) -> int | None:
        """Return the checksum of the sampler's order of the step's epoch, if there is a sampler."""
        return self._sampling.checksum(self.epoch_of(step))

    def look_at_dataset(self) -> None:
        """Take the dataset as it is now for what the script has set up."""
        self.settings = DatasetSettings(self.roots())

    def remembers(self, step: int) -> bool:
        """Return False where the sampler's order of that step would have to be drawn anew."""
        return self._sampling.remembers(self.epoch_of(step))

    def keep(self, finished: int) -> None:
        """Take down the sampler's state, if it has one."""
        sampling = self._sampling
        self.shared = sampling.state(self.epoch_of(finished)) if sampling.has_state else None

    def restore(self, shared: Any, own: dict[int, Any], world_size: int) -> str | None:
        """Have a sampler draw again what it had drawn."""
        if shared is not None:
            self._sampling.restore(shared)
        return None


def _only_holds(dataset: Any) -> bool:
    """Return True if reading from `dataset` cannot draw random numbers: seeding would be idle."""
    kind = type(dataset)
    return kind in (list, tuple, torch.Tensor) or (
        kind.__name__ == "TensorDataset" and kind.__module__ == "torch.utils.data.dataset"
    )


def _only_stacks(collate_fn: Any) -> bool:
    """Return True for functions that make a batch without a random number, of torch and others."""
    if collate_fn is _default_collate:
        return True
    of = collate_fn if hasattr(collate_fn, "__name__") else type(collate_fn)
    name = f"{of.__module__}.{of.__name__}"
    if name == _LEAVES_OUT_COLUMNS:  # the Trainer puts it around its collator
        return _only_stacks(collate_fn.data_collator)
    return name in _STACKING


def _default_collate(samples: list[Any]) -> Any:
    # torch.utils.data takes 30 ms to import, which a script without a loader need not pay.
    from torch.utils.data import default_collate

    return default_collate(samples)


def _sampling(size: int, seed: int, *, shuffle: bool, weights: Any, sampler: Any) -> Sampling:
    if weights is not None and sampler is not None:
        raise UsageError("run.loader: give either weights or a sampler, not both")
    if weights is not None:
        return Weighted(weights, size, seed)
    if sampler is not None:
        return FromSampler(sampler, size, seed)
    return Shuffled(size, seed) if shuffle else InOrder(size)


def _checked_probe(
    size: int | str | None, probe: Callable[[Any], torch.Tensor] | None
) -> Callable[[Any], torch.Tensor] | None:
    """Return what the size of micro-batches is tried with, if it is to be found."""
    if size != AUTO:
        if isinstance(size, str):
            raise UsageError(
                f"run.loader: micro_batch_size is {size!r}; allowed: a number, {AUTO!r}"
            )
        if probe is not None:
            raise UsageError('run.loader: probe says nothing without micro_batch_size="auto"')
        return None
    if not callable(probe):
        raise UsageError(
            'run.loader: micro_batch_size="auto" needs to know what is done with a batch',
            hint="probe=lambda batch: loss_fn(model(batch[0]), batch[1]) returns its loss",
        )
    return probe


_OURS = {
    "batch_size": "global_batch_size and micro_batch_size say how many samples",
    "in_order": "batches come in order, so that a resume finds its place",
}
"""Options of `torch.utils.data.DataLoader` that would cut or order the samples anew."""


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for `torch.utils.data.DataLoader`, whether workers will need them or not.

    Raises:
        UsageError: one is unknown there, or decides what `run.loader` decides.
    """
    from torch.utils.data import DataLoader

    for name in options:
        if name in _OURS:
            raise UsageError(f"run.loader does not take {name}", hint=_OURS[name])
    known = set(inspect.signature(DataLoader).parameters) - {"dataset", *_OURS}
    for name in options:
        if name not in known:
            raise UsageError(
                f"run.loader has no option {name!r}, nor has torch.utils.data.DataLoader",
                hint=did_you_mean(name, known),
            )
    return options


def _check_dataset(dataset: Any) -> None:
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"run.loader: {type(dataset).__name__} has no length and no indices",
            hint="pass a map-style dataset (with __len__ and __getitem__)",
        )
    if not len(dataset):
        raise UsageError("run.loader: the dataset has 0 samples")


def check_sizes(global_batch_size: int, micro_batch_size: int | None) -> None:
    """Raise `UsageError` unless both are whole numbers above 0."""
    for name, value in (
        ("global_batch_size", global_batch_size),
        ("micro_batch_size", 1 if micro_batch_size is None else micro_batch_size),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"run.loader: {name} is {value!r}, but must be a whole number above 0")
