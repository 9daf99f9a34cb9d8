"""What a run is, and how it makes the loaders of its data: the part of `Run` before the loop."""

from __future__ import annotations

import logging
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError
from spotguard.runtime.data.batch_scaling import ScaledElasticLoader, learning_rate_scale
from spotguard.runtime.data.drawn_by_script import DrawnLoader
from spotguard.runtime.data.loader import AUTO, ElasticLoader, Loader
from spotguard.runtime.data.streaming import StreamLoader, is_stream, refuse_indexed_options
from spotguard.runtime.data.undivided_steps import UndividedLoader
from spotguard.runtime.data.whole_batches import BatchedLoader
from spotguard.runtime.data.whole_stream import WholeStreamLoader
from spotguard.runtime.preemption.worker_signals import leave_workers_to_their_job
from spotguard.runtime.state.tracked import TrackedModule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from spotguard.runtime.data.first_attempt import BatchSizes, FirstAttempt
    from spotguard.runtime.job import Job

log = logging.getLogger("spotguard")


class RunData:
    """Who this process is in its run, and the loaders that it reads its part of the data with."""

    def __init__(self, job: Job, *, reseed: bool, bitwise: bool) -> None:
        self._job = job
        self._reseed = reseed
        self._bitwise = bitwise

    @property
    def id(self) -> str:
        """Return the run's id."""
        return self._job.run_id

    @property
    def attempt(self) -> int:
        """Return the number of this attempt, from 1."""
        return self._job.attempt

    @property
    def rank(self) -> int:
        """Return this process's rank, from 0."""
        return self._job.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks in this attempt; it may differ in the next."""
        return self._job.world_size

    @property
    def finished_steps(self) -> int:
        """Return the optimizer steps done in all attempts; 0 until the state is restored."""
        return self._job.keeper.finished

    @property
    def ended_early(self) -> str | None:
        """Return why the training has ended before its last step; None unless it has."""
        return self._job.keeper.early_end.why

    @property
    def reference_world_size(self) -> int:
        """Return the number of ranks of the run's first attempt; blocks for one read of the store.

        Batch sizes of frameworks are for each rank: this says what they come to in all.
        """
        return self._first_attempt.world_size

    def sizes_meant(self, batch_size: int, accumulated: int = 1) -> BatchSizes:
        """Return the sizes that a framework's script means; blocks for one read of the store.

        They are what `batch_size` samples for each rank, and as many batches accumulated, come to
        in the run's first attempt. A script that divides a fixed batch by the ranks of each attempt
        means what the run began with.

        Args:
            batch_size: Samples of a batch of one rank, as the script has it in this attempt.
            accumulated: Batches whose gradients are accumulated for a step.
        """
        sizes = self._first_attempt.sizes_meant(batch_size, accumulated, self.world_size)
        if sizes.of_micro_batch != batch_size and self.rank == 0:
            log.info(
                "batch_size=%d on %d ranks is a part of the run's global batch of %d: it goes on "
                "with that, in micro-batches of %d as it began",
                *(batch_size, self.world_size, *sizes),
            )
        return sizes

    @cached_property
    def _first_attempt(self) -> FirstAttempt:
        return self._job.first_attempt()

    @property
    def device(self) -> torch.device:
        """Return this rank's device: its GPU, or the CPU."""
        return self._job.device

    @property
    def tracked_modules(self) -> list[torch.nn.Module]:
        """Return the modules that are tracked so far."""
        modules = (
            item for item in self._job.keeper.objects.values() if isinstance(item, TrackedModule)
        )
        return [item.value for item in modules]

    @property
    def seed(self) -> int:
        """Return the run's seed."""
        return self._job.settings.seed

    def loader(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | str | None = None,
        probe: Callable[[Any], torch.Tensor] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        weights: Sequence[float] | torch.Tensor | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        speeds: Sequence[float] | None = None,
        lr_scaling: str | None = None,
        reference_world_size: int | None = None,
        lr_warmup_steps: int | None = None,
        replay: bool = False,
        read_by_all: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        per_rank: str | None = None,
        **options: Any,
    ) -> Loader:
        """Return a loader whose global batches do not depend on the number of ranks.

        A map-style dataset gives each sample of an epoch exactly once, over any interruptions and
        numbers of ranks. So does a `sampler`: what it gives for an epoch is drawn at once (8 bytes
        a sample), on every rank the same way; it must be a function of the seeded generators, of
        `set_epoch(epoch)` and of its `state_dict()`, which is saved. `weights` draw at random, so
        that no sample comes exactly once: the draws are the same ones on any number of ranks.

        A stream has `state_dict()` and `load_state_dict()`, and is this rank's own part of the
        data. Nothing is repeated or left out while the number of ranks stays the same; when it
        changes, another pass begins, with a warning. Given as a function `f(shard, shards)` that
        opens one part, it is exact on any number of ranks. So it is with `read_by_all`. See
        docs/elastic.md.

        With `lr_scaling` the global batch follows the number of ranks, each of which has the same
        part of it, and the learning rate follows the batch. Each sample of an epoch still comes
        exactly once; steps, their randomness and the weights are those of the numbers of ranks.

        Args:
            dataset: Map-style: `len(dataset)` and `dataset[i]`; or a stream: an iterable, a
                torchdata `StatefulDataLoader`, or a function that opens a shard of one.
            global_batch_size: Samples per optimizer step, over all ranks.
            micro_batch_size: Samples per forward pass; fixed for the run, whatever the ranks. Or
                `auto`: the most that fit into the smallest device's memory, found before the first
                step by trying; a resume on such devices keeps what was found. Global batches stay
                the same.
            probe: For `auto`: returns the loss of a micro-batch, as the loop computes it. The next
                samples are tried: where samples differ in length, let it pad to the longest.
            shuffle: Another seeded order each epoch; False reads in index order. Not for streams,
                nor with `weights` or a `sampler`: these have their own order.
            drop_last: Leave out the last, partial global batch of an epoch.
            weights: For each sample how likely it is drawn, with replacement, as many draws an
                epoch as there are samples; 8 bytes of memory for each, on each rank.
            sampler: Of the whole dataset's indices, with `__len__` and `__iter__`.
            batch_sampler: Gives lists of the whole dataset's indices, each of which stays together:
                it is one micro-batch, as losses with in-batch negatives need. Else as `sampler`.
                A step has `global_batch_size / micro_batch_size` of them; `micro_batch_size` is
                by default the sampler's `batch_size`.
            speeds: Each rank's relative speed, where GPUs differ: faster ranks get more of the
                micro-batches. The same list on all ranks.
            lr_scaling: `linear` or `sqrt`: the rule by which the optimizers' rates follow.
            reference_world_size: With `lr_scaling`, the number of ranks that `global_batch_size`
                and the script's learning rate are for.
            lr_warmup_steps: With `lr_scaling`, the optimizer steps in which the rate goes from one
                factor to another (default 100).
            replay: For a stream without `state_dict()`, such as webdataset's: a resume finds its
                place by reading again what was read of the pass, which must come in the same order.
            read_by_all: For a stream of all the data, the same on each rank: every rank reads all
                of it, and trains on its own micro-batches of each step.
            collate_fn: Makes a batch of samples, as in `torch.utils.data.DataLoader`.
            num_workers: Worker processes that read ahead, over the ends of epochs, too. They begin
                anew where the script has changed its dataset: `data.set_epoch(epoch.number)`.
            per_rank: For loops of a framework. `even`: all ranks have as many micro-batches of a
                step, some of them their last one again, with weight zero; so each may hold
                collectives. `dealt`: as `even`, but a rank's micro-batches are not neighbours: they
                are dealt in turn, as Accelerate deals a DataLoader's batches. `one`: a rank has
                one, as large as its part of the step.
            **options: Further options of `torch.utils.data.DataLoader` (with `num_workers`).

        Raises:
            UsageError: a size makes no sense, or the dataset has neither indices nor a state.
        """
        leave_workers_to_their_job()  # as since the start, but of classes that were imported since
        common: dict[str, Any] = {
            "global_batch_size": self._at_most(global_batch_size),
            "micro_batch_size": micro_batch_size,
            "seed": self._job.settings.seed,
            "reseed": self._reseed,
            "collate_fn": collate_fn,
            "rank": self.rank,
            "world_size": self.world_size,
            "speeds": speeds,
        }
        _refuse_auto_with(
            micro_batch_size,
            a_stream=is_stream(dataset),
            lr_scaling=lr_scaling is not None,
            exact_bitwise=self._bitwise,
            per_rank=per_rank is not None,
            a_batch_sampler=batch_sampler is not None,
        )
        if batch_sampler is not None:
            _refuse_with_batch_sampler(
                a_stream=is_stream(dataset),
                weights=weights is not None,
                sampler=sampler is not None,
                drop_last=drop_last,
                lr_scaling=lr_scaling is not None,
                per_rank_one=per_rank == "one",
            )
        if per_rank not in (None, "even", "one", "dealt"):
            raise UsageError(f"run.loader: per_rank is {per_rank!r}; allowed: even, one, dealt")
        if per_rank == "dealt" and self._bitwise:
            raise UsageError(
                'run.loader: per_rank="dealt" and init(exact="bitwise") exclude each other',
                hint='leave exact="bitwise" out: samples stay the same on any number of ranks',
            )
        scale = learning_rate_scale(
            lr_scaling,
            reference=reference_world_size,
            warmup_steps=lr_warmup_steps,
            stream=is_stream(dataset),
            bitwise=self._bitwise,
        )
        if is_stream(dataset):
            refuse_indexed_options(
                weights=weights,
                sampler=sampler,
                drop_last=drop_last,
                num_workers=num_workers,
                **options,
            )
            streams = WholeStreamLoader if read_by_all else StreamLoader
            return _even(streams(dataset, replay=replay, **common), per_rank)
        if replay or read_by_all:
            name = "replay" if replay else "read_by_all"
            raise UsageError(
                f"run.loader: {name} is for streams; this dataset has indices",
                hint="leave it out: a resume finds its place in them by itself",
            )
        make: Callable[..., Loader] = UndividedLoader if per_rank == "one" else ElasticLoader
        if scale:
            make = partial(ScaledElasticLoader, scale=scale)
        if batch_sampler is not None:
            make = partial(BatchedLoader, batch_sampler=batch_sampler, asked_for=global_batch_size)
        loader = make(
            dataset,
            shuffle=shuffle,
            drop_last=drop_last,
            weights=weights,
            sampler=sampler,
            num_workers=num_workers,
            options=options,
            probe=probe,
            **common,
        )
        return _even(loader, per_rank)

    def draws(
        self,
        draw: Callable[[int], Any],
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        speeds: Sequence[float] | None = None,
    ) -> Loader:
        """Return a loader whose micro-batches the script draws itself, at random.

        For a language model's `get_batch`, which picks places of one long text with replacement:

            loader = run.draws(
                lambda samples: get_batch("train", samples), global_batch_size=480,
                micro_batch_size=12)

        `draw(samples)` returns a micro-batch of so many samples. Python's, NumPy's and torch's
        global generators are seeded for each, by step and place in the step, so that the samples
        of a step are the same on any number of ranks; `draw` must draw from nothing else. With
        `init(reseed=False)` they are each rank's own.

        Args:
            draw: Called with the number of samples, `micro_batch_size` or a rest.
            global_batch_size: Samples per optimizer step, over all ranks.
            micro_batch_size: Samples per forward pass.
            speeds: As for `loader`.

        Raises:
            UsageError: a size makes no sense, or `draw` cannot be called.
        """
        if draw is None:
            raise UsageError("run.draws needs a function that draws a batch, not None")
        return self._drawn(draw, global_batch_size, micro_batch_size, speeds)

    def episodes(
        self,
        per_step: int,
        *,
        at_once: int = 1,
        speeds: Sequence[float] | None = None,
    ) -> Loader:
        """Return a loader for jobs without data, such as reinforcement learning.

        Its micro-batches are ranges of numbers: of the episodes to play, counted through the run.

            for step in run.steps(run.episodes(24), total=1_000):
                for numbers in step:
                    step.backward(torch.stack([play(number) for number in numbers]).mean())
                optimizer.step()
                optimizer.zero_grad()

        They are shared out over the ranks, some of which may play one more than others. The global
        generators are seeded for each, so that what is played does not depend on the number of
        ranks; an environment with a generator of its own is seeded with the number.

        Args:
            per_step: Episodes per optimizer step, over all ranks.
            at_once: Episodes of a micro-batch, for environments that play several at a time.
            speeds: As for `loader`.

        Raises:
            UsageError: a number makes no sense.
        """
        return self._drawn(None, per_step, at_once, speeds)

    def _drawn(
        self,
        draw: Callable[[int], Any] | None,
        global_batch_size: int,
        micro_batch_size: int | None,
        speeds: Sequence[float] | None,
    ) -> Loader:
        return DrawnLoader(
            draw,
            global_batch_size=self._at_most(global_batch_size),
            micro_batch_size=micro_batch_size,
            seed=self.seed,
            reseed=self._reseed,
            rank=self.rank,
            world_size=self.world_size,
            speeds=speeds,
        )

    def _at_most(self, samples: int) -> int:
        """Return the samples of a step: in a smoke few, for a CPU shall be done with them soon."""
        most = self._job.settings.smoke_samples
        return min(samples, most) if most and isinstance(samples, int) else samples


def _refuse_auto_with(size: int | str | None, **others: bool) -> None:
    """Raise if the size of micro-batches is to be found where it must be known beforehand."""
    named = [name.replace("_", " ") for name, is_given in others.items() if is_given]
    if size == AUTO and named:
        raise UsageError(
            f'run.loader: micro_batch_size="auto" and {named[0]} exclude each other',
            hint="give micro_batch_size a number",
        )


def _refuse_with_batch_sampler(**others: bool) -> None:
    """Raise if something else than the batch sampler would say what is in a batch."""
    for name, is_given in others.items():
        if is_given:
            raise UsageError(
                f"run.loader: batch_sampler and {name.replace('_', ' ')} exclude each other",
                hint="the batch sampler alone says which samples an epoch has, and which meet",
            )


def _even(loader: Loader, per_rank: str | None) -> Loader:
    loader.evened = per_rank in ("even", "dealt")
    loader.dealt = per_rank == "dealt"
    return loader
