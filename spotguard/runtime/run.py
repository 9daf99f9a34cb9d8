"""The training loop's side of spotguard: `Run`, which `init` makes."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.checkpoint.manifest import check_run
from spotguard.errors import Fenced, SpotguardError, UsageError
from spotguard.events.event import JobEvent
from spotguard.runtime.checkpoint import restore as restoring
from spotguard.runtime.checkpoint.save_schedule import SaveSchedule
from spotguard.runtime.data.batch_scaling import ScaledElasticLoader, learning_rate_scale
from spotguard.runtime.data.loader import ElasticLoader, Loader, Share
from spotguard.runtime.data.sample_log import SampleTrace
from spotguard.runtime.data.streaming import StreamLoader, is_stream, refuse_indexed_options
from spotguard.runtime.distributed.bitwise_reduce import BitwiseSync
from spotguard.runtime.distributed.collectives import ProcessGroup
from spotguard.runtime.distributed.gradients import GradientSync, broadcast_initial, evened_out
from spotguard.runtime.distributed.optimizers import OptimizerWatch
from spotguard.runtime.ending.leaving import Phase
from spotguard.runtime.process.clock import RUN_CLOCK
from spotguard.runtime.state.rng import BOUNDARY, mix, seed_everything
from spotguard.runtime.state.tracked import TrackedModule, tracked
from spotguard.runtime.state.tree import Packed
from spotguard.runtime.step import Step, TrainingLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.runtime.job import Job
    from spotguard.runtime.reporting.trackers import Tracker

log = logging.getLogger("spotguard")

_Batch = TypeVar("_Batch")


@dataclass
class Taken:
    """What a run has taken of its process and of the script's objects, until `reset`."""

    in_loop: bool = False
    """True while the script holds the iterator of `run.steps`."""
    gives_back: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closed, it takes back hooks on models and optimizers, and closes files."""


class Run:
    """This process's part of a run. Made by `init`; all methods are for the main thread."""

    def __init__(self, job: Job, taken: Taken, *, reseed: bool, bitwise: bool) -> None:
        self._job = job
        self._taken = taken
        self._reseed = reseed
        self._bitwise = bitwise
        if bitwise:
            # Threads share out a sum or a product by their number, which ranks differ in.
            taken.gives_back.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        self._ranks = ProcessGroup(job.rank, job.world_size)
        job.metrics.communicated_s = lambda: self._ranks.waited_s
        self._loader: Loader
        self._gradients: GradientSync | BitwiseSync
        self._optimizers: OptimizerWatch
        self._step: Step | None = None
        self._end_early: str | None = None
        settings = job.settings
        self._trace = (
            SampleTrace(
                settings.trace_path,
                attempt=job.attempt,
                rank=job.rank,
                world_size=job.world_size,
            )
            if settings.trace_path
            else None
        )
        if self._trace is not None:
            taken.gives_back.callback(self._trace.close)
        self._probe = None
        if settings.probe_path:
            from spotguard.runtime.fingerprint import Probe

            self._probe = Probe(settings.probe_path, job, bitwise=bitwise)
            taken.gives_back.callback(self._probe.close)

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
    def device(self) -> torch.device:
        """Return this rank's device: its GPU, or the CPU."""
        return self._job.device

    @property
    def seed(self) -> int:
        """Return the run's seed."""
        return self._job.settings.seed

    def loader(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        weights: Sequence[float] | torch.Tensor | None = None,
        sampler: Any = None,
        speeds: Sequence[float] | None = None,
        lr_scaling: str | None = None,
        reference_world_size: int | None = None,
        lr_warmup_steps: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
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
        opens one part, it is exact on any number of ranks. See docs/elastic.md.

        With `lr_scaling` the global batch follows the number of ranks, each of which has the same
        part of it, and the learning rate follows the batch. Each sample of an epoch still comes
        exactly once; steps, their randomness and the weights are those of the numbers of ranks.

        Args:
            dataset: Map-style: `len(dataset)` and `dataset[i]`; or a stream: an iterable, a
                torchdata `StatefulDataLoader`, or a function that opens a shard of one.
            global_batch_size: Samples per optimizer step, over all ranks.
            micro_batch_size: Samples per forward pass; fixed for the run, whatever the ranks.
            shuffle: Another seeded order each epoch; False reads in index order. Not for streams,
                nor with `weights` or a `sampler`: these have their own order.
            drop_last: Leave out the last, partial global batch of an epoch.
            weights: For each sample how likely it is drawn, with replacement, as many draws an
                epoch as there are samples; 8 bytes of memory for each, on each rank.
            sampler: Of the whole dataset's indices, with `__len__` and `__iter__`.
            speeds: Each rank's relative speed, where GPUs differ: faster ranks get more of the
                micro-batches. The same list on all ranks.
            lr_scaling: `linear` or `sqrt`: the rule by which the optimizers' rates follow.
            reference_world_size: With `lr_scaling`, the number of ranks that `global_batch_size`
                and the script's learning rate are for.
            lr_warmup_steps: With `lr_scaling`, the optimizer steps in which the rate goes from one
                factor to another (default 100).
            collate_fn: Makes a batch of samples, as in `torch.utils.data.DataLoader`.
            num_workers: Worker processes that read ahead.
            **options: Further options of `torch.utils.data.DataLoader` (with `num_workers`).

        Raises:
            UsageError: a size makes no sense, or the dataset has neither indices nor a state.
        """
        common: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "seed": self._job.settings.seed,
            "reseed": self._reseed,
            "collate_fn": collate_fn,
            "rank": self.rank,
            "world_size": self.world_size,
            "speeds": speeds,
        }
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
            return StreamLoader(dataset, **common)
        make: Callable[..., Loader] = (
            partial(ScaledElasticLoader, scale=scale) if scale else ElasticLoader
        )
        return make(
            dataset,
            shuffle=shuffle,
            drop_last=drop_last,
            weights=weights,
            sampler=sampler,
            num_workers=num_workers,
            options=options,
            **common,
        )

    def track(self, **objects: Any) -> None:
        """Name what belongs to the training state; all of it is saved and restored.

        Modules, optimizers, anything with `state_dict()` and `load_state_dict()`, random
        generators (`random.Random`, `numpy.random.Generator`, `torch.Generator`), and dicts of
        plain values and tensors (restored in place).

        Raises:
            UnsupportedState: something cannot be stored safely; the message says what.
            UsageError: called after the loop has begun, or a name is taken.
        """
        if self._job.phase is not Phase.SETUP:
            raise UsageError("run.track() must come before run.steps()")
        for name, value in objects.items():
            if name in self._job.keeper.objects:
                raise UsageError(f"run.track: {name} is tracked already")
            item = tracked(name, value)
            item.pack(name, Packed())  # what cannot be stored is refused now, not at the notice
            self._job.keeper.objects[name] = item

    def end(self, reason: str = "ended early") -> None:
        """Finish the run at the end of this step, as if all steps were done (early stopping).

        All ranks must call it in the same step.
        """
        self._end_early = reason

    def best(self, value: float, *, mode: str = "min") -> bool:
        """Keep the state of this step's end if `value` is the best of the run so far.

        Such a checkpoint (kind `best`) stays until there is a better one, whatever retention
        deletes. The best value is part of the training state. All ranks must call it in the same
        step with the same value: reduce a metric over the ranks first.

        Args:
            value: The metric; NaN is never the best.
            mode: `min` if less is better (a loss), `max` if more is (an accuracy).

        Returns:
            True if it is the best.

        Raises:
            UsageError: another mode, or not called within a step.
        """
        if mode not in ("min", "max"):
            raise UsageError(f"run.best: mode is {mode!r}; allowed: min, max")
        if self._job.phase is not Phase.TRAINING:
            raise UsageError("run.best() belongs into the loop over run.steps()")
        return self._job.keeper.best.offer(float(value), mode)

    def log(self, step: int | None = None, **metrics: Any) -> None:
        """Note numbers for a step: `run.log(loss=loss, accuracy=0.9)`. Returns at once.

        They are stored with the heartbeats and before each checkpoint, and `spotguard status`
        shows the newest ones. Over all attempts there is one value for each step and name, the
        last that counts: what was logged after the checkpoint from which a later attempt went on
        is superseded by what that attempt logs.

        The first rank's are kept; other ranks may call it, too, which changes nothing. A value
        that differs between ranks is to be reduced first: `run.log(loss=step.mean_loss())`.

        Args:
            step: The step that they belong to, `step.number` of the one under way unless given.
            **metrics: Numbers, also NaN and infinite ones; NumPy's; tensors of one element, of
                which a GPU's is fetched later. For names that are no Python names:
                `run.log(**{"val/loss": 1.0})`.

        Raises:
            UsageError: something is not a number, or no name for a metric.
        """
        self._job.metrics.log(step, metrics)

    def report_to(self, tracker: Tracker) -> None:
        """Pass on what is logged to a tracker, such as those of `spotguard.integrations.tracking`.

        Call it before the loop, on all ranks; only the first one's has anything to do.

        Raises:
            UsageError: called after the loop has begun.
        """
        if self._job.phase is not Phase.SETUP:
            raise UsageError("run.report_to() must come before run.steps()")
        self._job.metrics.report_to(tracker)

    def evaluate(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield from `batches`; when told to stop, leave between two of them, saved.

        For evaluation loops inside the training loop, before the step's own micro-batches: there
        the state is that of a step boundary, and after a resume the evaluation begins anew. All
        ranks leave at the same batch, so the loop may hold collectives. After the training loop
        it only yields.

        Raises:
            UsageError: the step has begun: to leave then would lose what follows in its body.
        """
        job = self._job
        if job.phase is not Phase.TRAINING:
            yield from batches
            return
        if self._step is not None and self._step.has_begun:
            raise UsageError(
                "run.evaluate() comes after the step's first micro-batch",
                hint="evaluate at the beginning of the loop's body: if step.number % 100 == 0: ...",
            )
        for number, batch in enumerate(batches):
            if not job.gate.enter_evaluation(job.keeper.finished, number):
                job.leaving.at_agreed_step(halfway=True)
            yield batch

    def steps(
        self,
        loader: Loader,
        *,
        total: int | None = None,
        epochs: int | None = None,
        strict: bool = True,
    ) -> Iterator[Step]:
        """Yield the optimizer steps that are still to do; restores first, saves on the way.

        Leaves by `SystemExit` with code 75, saved, when told to stop. `break` ends the run early;
        `sys.exit` with an error fails it.

        Args:
            loader: From `run.loader`.
            total: Optimizer steps in all, or
            epochs: passes over the dataset. How many steps they take depends on the numbers of
                ranks, if the global batch follows them.
            strict: Refuse a checkpoint whose names or shapes are not the script's. False restores
                what fits and says what it left as the script made it: for a changed model.

        Raises:
            UsageError: neither or both of `total` and `epochs`, or nothing is tracked.
            StateMismatch: the script does not fit the checkpoint.
        """
        self._check(loader, total, epochs)
        job = self._job
        self._loader = loader
        self._prepare()
        every, coordinator = job.settings.save_every, job.coordinator
        self._taken.in_loop = True
        try:
            first, last = self._restore(total, epochs, strict=strict)
            schedule = SaveSchedule(every, coordinator, job.rank, job.world_size)
            schedule.start(first)
            job.begin_training(first, last)
            with closing(loader.read(first, last)) as batches:  # its workers end with it
                mine: Iterator[tuple[Share, Any]] = batches
                if self._gradients.meets_in_forward:
                    mine = evened_out(batches, self.rank, loader.ranges)
                mine = job.metrics.timed(mine, loader)
                yield from self._train(first, last, schedule, mine)
        except GeneratorExit:
            job.exits.loop_left(sys._getframe().f_back)
            raise
        except SpotguardError as problem:
            job.leaving.by_problem(problem)
        finally:
            self._taken.in_loop = False

    def _train(
        self,
        finished: int,
        last: int,
        schedule: SaveSchedule,
        batches: Iterator[tuple[Share, Any]],
    ) -> Iterator[Step]:
        job = self._job
        loop = TrainingLoop(
            job=job,
            loader=self._loader,
            batches=batches,
            gradients=self._gradients,
            optimizers=self._optimizers,
            ranks=self._ranks,
            trained_once=self._trace_step,
            ended=lambda step: self._seed_boundary(step.number, after=True),
        )
        while finished < last and self._end_early is None:
            job.hold(finished)
            if not job.gate.passes(finished):
                job.leaving.at_agreed_step()
            if schedule.due(finished) or job.keeper.best.is_new:
                job.keeper.save_in_background()
                schedule.saved(
                    finished,
                    step_s=job.keeper.step_s,
                    stall_s=job.keeper.last_stall_s,
                    duration_s=job.keeper.last_duration_s,
                    age_s=job.age_s,
                )
            self._seed_boundary(finished, after=False)
            step = self._step = Step(loop, finished, self._loader.epoch_of(finished))
            job.keeper.current = step
            started = time.perf_counter()
            try:
                yield step
            except GeneratorExit:
                job.keeper.loop_left()
                raise
            step.forget_batches()
            if not step.is_complete:
                raise UsageError(
                    "a step ended before all its micro-batches were trained on",
                    hint="loop over all of them: for batch in step: ... step.backward(loss)",
                )
            finished += 1
            self._optimizers.end_of_step()
            self._loader.keep(finished)
            job.finished_step(finished, time.perf_counter() - started, step)
            if self._probe is not None:
                self._probe.record(finished, sys._getframe(2))
        job.finish_loop(self._end_early)

    def _check(self, loader: Any, total: int | None, epochs: int | None) -> None:
        if not isinstance(loader, Loader):
            raise UsageError(
                f"run.steps needs a loader from run.loader(...), not a {type(loader).__name__}",
                hint="loader = run.loader(dataset, global_batch_size=..., micro_batch_size=...)",
            )
        if (total is None) == (epochs is None):
            raise UsageError("run.steps: give either total= (steps) or epochs=")
        if epochs is not None:
            loader.first_step_of(0)  # a stream refuses
        count, unit = (total, "steps") if epochs is None else (epochs, "epochs")
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"run.steps: {count!r} {unit} in all, but must be 1 or more")
        if not self._job.keeper.objects:
            raise UsageError(
                "run.steps: nothing is tracked, so nothing could be resumed",
                hint="call run.track(model=model, optimizer=optimizer) first",
            )
        if self._job.phase is not Phase.SETUP:
            raise UsageError(
                "run.steps() can be used once per process",
                hint="spotguard.reset() ends the run; then spotguard.init() begins another one",
            )

    def _last_step(self, total: int | None, epochs: int | None) -> int:
        """Return how many steps there are in all, as seen from where this attempt begins."""
        count = total if epochs is None else self._loader.first_step_of(epochs)
        assert count is not None
        cap = self._job.settings.max_steps
        return min(count, cap) if cap else count

    def _prepare(self) -> None:
        values = [item.value for item in self._job.keeper.objects.values()]
        modules = [v for v in values if isinstance(v, torch.nn.Module)]
        optimizers = [v for v in values if isinstance(v, torch.optim.Optimizer)]
        if self._bitwise:
            self._gradients = BitwiseSync(modules, optimizers, self._ranks, self._loader)
        else:
            self._gradients = GradientSync(modules, optimizers, self._ranks)
        self._taken.gives_back.callback(self._gradients.close)
        self._optimizers = OptimizerWatch(
            modules, optimizers, self._gradients, self._job.keeper, self.world_size
        )
        self._taken.gives_back.callback(self._optimizers.close)
        if self._loader.scale is not None:
            self._loader.scale.attach(optimizers, lambda: self._job.keeper.finished)
            self._taken.gives_back.callback(self._loader.scale.detach)

    def _restore(self, total: int | None, epochs: int | None, *, strict: bool) -> tuple[int, int]:
        """Restore, claim the attempt, and return the steps done already and those in all."""
        job = self._job
        restored = restoring.restore(
            job.store,
            job.coordinator,
            self.rank,
            self.world_size,
            job.keeper.objects,
            check=self._check_fits,
            near=job.local_copy.store if job.local_copy else None,
            strict=strict,
        )
        if restored.manifest is None:
            modules = [i.bare for i in job.keeper.objects.values() if isinstance(i, TrackedModule)]
            broadcast_initial(modules, self._ranks)
        first = restored.manifest.step if restored.manifest else 0
        if job.rank == 0:
            claim_attempt(
                job.store,
                job.attempt,
                restored.prefix,
                job.claim_extra(),
                clock=RUN_CLOCK,
            )
        job.keeper.restored(restored, self._loader)
        if restored.manifest is not None:
            self._restore_place(restored.manifest)
            if not self._reseed:
                self._restore_random(restored.manifest)
        change = self._loader.begin(first)
        last = self._last_step(total, epochs)
        job.restored(restored, last)
        if change is not None and job.rank == 0:
            log.info("%s", change["message"])
            job.reporter.event(JobEvent.RESCALED, **change)
        self._check_ranks_agree(first)
        self._loader.keep(first)
        return first, last

    def _check_ranks_agree(self, first: int) -> None:
        """Raise unless a sampler, if there is one, gives all ranks the same order to begin with."""
        mine = self._loader.checksum(first)
        if mine is not None and self._job.coordinator.first("order", str(mine)) != str(mine):
            raise UsageError(
                f"run.loader: the sampler gives rank {self.rank} another order than another rank",
                hint="it must not depend on the rank, nor on the order of a set: pass one sampler "
                "of the whole dataset",
            )

    def _restore_place(self, manifest: Manifest) -> None:
        """Go on where the data was; what cannot be exact is told."""
        own = restoring.places_of_ranks(manifest)
        shared = manifest.counters.get("place")
        warning = self._loader.restore(shared, own, manifest.world_size)
        if warning and self.rank == 0:
            log.warning("%s", warning)
            self._job.reporter.event(JobEvent.WARNING, message=warning)

    def _restore_random(self, manifest: Manifest) -> None:
        if not restoring.restore_random(manifest, self.rank, self.world_size):
            self._job.reporter.event(
                JobEvent.WARNING,
                message="random states were not restored: the number of ranks changed",
            )

    def _check_fits(self, manifest: Manifest) -> None:
        """Raise unless this attempt may go on from the checkpoint, with this loader."""
        check_run(manifest, self._job.run_id)
        if manifest.attempt >= self._job.attempt:
            raise Fenced(
                f"attempt {self._job.attempt} is already claimed",
                hint="each start of the job needs an attempt number of its own",
            )
        stored = manifest.counters.get("loader")
        mine = self._loader.identity()
        if stored is not None and stored != mine:
            changed = [
                f"{key} was {stored.get(key)!r} and is {mine.get(key)!r}"
                for key in {**stored, **mine}
                if stored.get(key) != mine.get(key)
            ]
            raise UsageError(
                f"run.loader changed since the checkpoint: {'; '.join(changed)}",
                hint="use the same values to resume, or start a new run",
            )

    def _seed_boundary(self, step: int, *, after: bool) -> None:
        if self._reseed:
            seed_everything(mix(self._job.settings.seed, step, BOUNDARY, int(after)))

    def _trace_step(self, step: Step) -> None:
        if self._trace is not None:
            self._trace.write(
                step=step.number,
                epoch=step.epoch,
                samples=step.samples,
                loss=0.0 if step.loss is None else float(step.loss),
            )
