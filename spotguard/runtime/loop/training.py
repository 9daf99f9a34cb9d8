"""The training of one attempt: from what it restores, step by step, to the end of the loop.

All loops are made of the three calls that are here: `begin` gives the next step, `end` says that
its weights are final, and `finish` is the end of the loop. `run.steps` makes them itself; a
framework that has a loop of its own makes them through `run.begin_step` and its like.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.errors import UsageError
from spotguard.events.event import JobEvent
from spotguard.events.profile import RANKS, SAVING
from spotguard.runtime.checkpoint import restore as restoring
from spotguard.runtime.checkpoint.captured import Between
from spotguard.runtime.checkpoint.rank_generators import RankGenerators
from spotguard.runtime.checkpoint.save_schedule import SaveSchedule
from spotguard.runtime.checks.own_collectives import OwnCollectives
from spotguard.runtime.checks.untracked_state import UntrackedState
from spotguard.runtime.data.loader import ElasticLoader
from spotguard.runtime.data.same_data import DataCheck
from spotguard.runtime.data.single_sample_batches import warning_of_lone_sample
from spotguard.runtime.distributed.bitwise_reduce import BitwiseSync
from spotguard.runtime.distributed.gradients import GradientSync, broadcast_initial, evened_out
from spotguard.runtime.distributed.model_parallel import groups_of_some_ranks, words_on_groups
from spotguard.runtime.distributed.optimizers import OptimizerWatch, hook_steps
from spotguard.runtime.distributed.weighted_mean import WeightedMeans
from spotguard.runtime.ending.leaving import ErrorsEndIt, Phase
from spotguard.runtime.loop.agreement import (
    check_fits,
    check_ranks_have_one_model,
    check_ranks_read_the_same,
    check_ranks_track_the_same,
)
from spotguard.runtime.loop.batch_probe import BatchProbe
from spotguard.runtime.loop.batch_trial import BatchTrial, end_without_curve
from spotguard.runtime.loop.epoch_top import EpochTop
from spotguard.runtime.loop.learning_check import LearningCheck
from spotguard.runtime.loop.loader_trial import LoaderTrial
from spotguard.runtime.loop.profile_facts import facts_of
from spotguard.runtime.loop.script_values import ScriptValues, tell_of_resume
from spotguard.runtime.loop.untracked_optimizers import UntrackedOptimizers
from spotguard.runtime.loop.untracked_parameters import refuse_untracked
from spotguard.runtime.process.clock import RUN_CLOCK
from spotguard.runtime.process.outside_loop import outside_loop
from spotguard.runtime.process.wait_for_turn import await_turn
from spotguard.runtime.state.best import Best, BestState
from spotguard.runtime.state.changed_setup import SetUp
from spotguard.runtime.state.rng import (
    BOUNDARY,
    EPOCH_END,
    EPOCH_TOP,
    mix,
    seed_everything,
    spread_over,
)
from spotguard.runtime.state.tracked import TrackedModule
from spotguard.runtime.step import Step, TrainingLoop

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.runtime.checkpoint.own_state import EpochBegun
    from spotguard.runtime.checks.fingerprint import Probe
    from spotguard.runtime.data.loader import Loader, Share
    from spotguard.runtime.data.sample_log import SampleTrace
    from spotguard.runtime.distributed.collectives import ProcessGroup
    from spotguard.runtime.job import Job

log = logging.getLogger("spotguard")

_Batch = TypeVar("_Batch")


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a run knows before its training begins."""

    job: Job
    ranks: ProcessGroup
    reseed: bool
    bitwise: bool
    trace: SampleTrace | None
    probe: Probe | None
    gives_back: ExitStack
    """Closed, it takes back hooks on models and optimizers."""


class Training:
    """The steps of this attempt. Made by `run.restore` and `run.steps`; for the main thread."""

    def __init__(self, circumstances: Circumstances, loader: Loader) -> None:
        self._of = circumstances
        self._job = job = circumstances.job
        self.loader = loader
        values = [item.value for item in job.keeper.objects.values()]
        modules = [v for v in values if isinstance(v, torch.nn.Module)]
        optimizers = [v for v in values if isinstance(v, torch.optim.Optimizer)]
        gives_back = circumstances.gives_back
        gives_back.callback(hook_steps(optimizers).close)  # first, as others hook onto them
        self._gradients: GradientSync | BitwiseSync
        if circumstances.bitwise:
            self._gradients = BitwiseSync(modules, optimizers, circumstances.ranks, loader)
        else:
            self._gradients = GradientSync(modules, optimizers, circumstances.ranks)
        self._gradients.meets_in_forward |= loader.evened
        gives_back.callback(self._gradients.close)
        circumstances.ranks.waits = lambda: job.profiling.mark(RANKS)
        job.profiling.facts = lambda: facts_of(loader, values)
        self._values = values
        self._values_set_up: ScriptValues
        self._ranks_may_change = job.settings.nodes_may_change
        self._read_before: Any = None
        """What the checkpoint to go on from keeps of the data."""
        self._optimizers: OptimizerWatch
        self._weights = WeightedMeans(modules, optimizers, self._total)
        if loader.scale is not None:
            loader.scale.attach(optimizers, lambda: job.keeper.finished)
            gives_back.callback(loader.scale.detach)
        self._schedule = SaveSchedule(
            job.settings.save_every,
            job.coordinator,
            job.rank,
            job.world_size,
            job.settings.hazard,
        )
        self._open = ExitStack()
        """Closed, it ends what reads the data."""
        self._errors_end_it = ErrorsEndIt(self._open, job.leaving)
        self._loop: TrainingLoop
        path = job.settings.try_loader_path
        self._learning: LearningCheck | None = None
        self._trial = LoaderTrial(path, loader, job.metrics) if path else None
        self.finished = 0
        """Steps done, by this attempt and those before it."""
        self._last = 0
        self._evaluated = 0
        """Batches of evaluations since the last boundary."""
        self._own_states: dict[str, Any] = {}
        """Of random generators that are this rank's own, in the checkpoint to go on from."""
        self._started = 0.0
        self._untracked: UntrackedState | None = None
        """Looks at the first steps for state that nobody tracks."""
        self._top: EpochTop | None = None
        """What knows of the top of an epoch's body, in a loop over epochs."""
        self.step: Step | None = None
        """The step under way."""

    def _total(self, value: float) -> float:
        """Return the sum of a number over the ranks, which must all call it."""
        whole = torch.tensor([value], dtype=torch.float64, device=self._job.device)
        if self._job.world_size > 1:
            self._of.ranks.add_up(whole)()
        return float(whole)

    # ------------------------------------------------------------------ the three calls

    def start(self, total: int | None, epochs: int | None, *, strict: bool) -> int:
        """Restore, claim the attempt and begin; return how many steps are done already."""
        job = self._job
        with self._errors_end_it:
            self.finished, self._last = self._restore(total, epochs, strict=strict)
            self._watch_optimizers()
            if job.rank == 0:
                of = (job.keeper.objects, job.warn_of_script, self.loader.roots())
                self._untracked = UntrackedState(*of)
            self._schedule.start(self.finished)
            job.begin_training(self.finished, self._last)
            self._warn_of_lone_sample()
            outside_loop.enter()
        may_compare = job.rank == 0 and self._of.reseed and not self.is_done
        data = DataCheck.of(self.loader, job.keeper.objects, self._read_before, may=may_compare)
        batches = self.loader.read(self.finished, self._last)
        self._open.callback(batches.close)  # its workers end with it
        mine: Iterator[tuple[Share, Any]] = batches
        if data is not None:
            mine = data.begin(batches, tell=job.warn_of_script)
            job.keeper.set_up.data = data.counters
        if job.rank == 0 and self._ranks_may_change:
            mine = OwnCollectives(lambda: job.keeper.progress()[1], job.warn_of_script).watch(mine)
        if self._gradients.meets_in_forward and job.world_size > 1:
            mine = evened_out(mine, job.rank, self.loader.ranges)
        mine = job.metrics.timed(mine, self.loader)
        self._loop = TrainingLoop(
            job=job,
            loader=self.loader,
            batches=mine,
            gradients=self._gradients,
            optimizers=self._optimizers,
            ranks=self._of.ranks,
            weights=self._weights,
            count_of=self._count_of,
            trained_once=self._trace_step,
            ended=lambda step: self._seed(step.number, BOUNDARY, 1),
        )
        return self.finished

    def begin(self, *, at_once: bool = False, reads_next: bool = False) -> Step | None:
        """Return the next step, None after the last one; leave, saved, if told to stop.

        `at_once`: nothing of the script's has run since the last boundary. Else what it changed
        since then, after an evaluation for example, belongs to the boundary from here on.
        `reads_next`: nothing of it runs before the first micro-batch, which seeds anew.
        """
        if self._job.phase is Phase.AFTER:
            return None
        if self.step is not None:
            raise UsageError(
                f"run.begin_step() came while step {self.step.number} is under way",
                hint="call run.end_step() when its weights are final",
            )
        with self._errors_end_it:
            if not at_once:
                self._take_boundary_again()
            self._record()
            if not self.is_done:
                return self._begin(reads_next=reads_next)
            self._finish(self.end_early)
        return None

    def end(self, *, epoch_until: int | None = None) -> None:
        """Take the state as it is for that after the step under way.

        With so many steps done the epoch ends. Then, and before it if no step is to follow, comes
        what the script does at the end of an epoch; it comes again after a resume from there.
        """
        if self.step is None:
            raise UsageError(
                "run.end_step() came without a step under way",
                hint="step = run.begin_step() comes first; it is None after the last one",
            )
        with self._errors_end_it:
            self._end(self.step, epoch_until)

    def finish(self, reason: str | None) -> None:
        """End the loop where it is; nothing happens if it has ended."""
        if self._job.phase is Phase.AFTER:
            return
        why = self.end_early or reason or (None if self.is_done else "ended early")
        if reason and not self.is_done:  # without one a framework decides again
            self._job.keeper.early_end.why = reason
        with self._errors_end_it:
            if self.step is None:
                self._take_boundary_again()
                self._record()
            self._finish(why)

    def _record(self) -> None:
        if self._of.probe is not None:
            self._of.probe.record(self.finished, self.loader.roots())

    @property
    def end_early(self) -> str | None:
        """Why the loop is to end before its last step, once it is."""
        return self._job.keeper.early_end.why

    @property
    def is_done(self) -> bool:
        """True once there is no step to begin: all are done, or the run was ended."""
        return self.finished >= self._last or self.end_early is not None

    def left(self) -> None:
        """Take note that the script left its loop in the body of a step, or after its last one."""
        job = self._job
        in_loop = job.phase is Phase.TRAINING
        is_between = in_loop and self.step is None
        between = Between(epoch_begun=self._leave_epoch_top()) if is_between else None
        # One that is about to end goes on with nothing, and may have been told to hurry.
        ends = job.leaving.begun.is_set() or (job.exits.called and not is_between)
        job.keeper.loop_left(copies=in_loop and not ends, between=between)

    def close(self) -> None:
        """End what reads the data."""
        self._open.close()

    def _finish(self, why: str | None) -> None:
        self._job.finish_loop(why, left_early=self.step is not None)
        self.step = None
        self.close()

    def _begin(self, *, reads_next: bool) -> Step:
        job, finished = self._job, self.finished
        job.keeper.at = job.keeper.at._replace(evaluating=False)
        job.hold(finished)
        job.end_phase(finished)
        job.profiling.between_steps(finished)
        if self._trial is not None:
            self._trial.between_steps(finished, self._last)
        if not job.gate.passes(finished, evaluated=self._evaluated > 0):
            job.leaving.at_agreed_step()
        if self._schedule.due(finished) or job.keeper.best.is_new:
            self._save_if_it_may(finished)
        if not reads_next:
            self._seed(finished, BOUNDARY, 0)
        self.step = job.keeper.current = Step(self._loop, finished, self.loader.epoch_of(finished))
        self._started = time.perf_counter()
        return self.step

    def _save_if_it_may(self, finished: int) -> None:
        job = self._job
        if not job.keeper.may_save():
            self._schedule.put_off(finished, step_s=job.keeper.step_s)
            return
        with job.profiling.mark(SAVING):
            job.keeper.save_in_background()
        self._schedule.saved(
            finished,
            step_s=job.keeper.step_s,
            stall_s=job.keeper.last_stall_s,
            duration_s=job.keeper.last_duration_s,
            age_s=job.age_s,
        )

    def _end(self, step: Step, epoch_until: int | None) -> None:
        step.forget_batches()
        if not step.is_complete:
            raise UsageError(
                "a step ended before all its micro-batches were trained on",
                hint="loop over all of them: for batch in step: ... step.backward(loss)",
            )
        self.finished += 1
        self.step, self._evaluated = None, 0
        self._optimizers.end_of_step()
        if self._learning is not None and (told := self._learning.after(step)):
            self._job.reporter.event(JobEvent.WARNING, **told)
        self.loader.keep(self.finished)
        seconds = time.perf_counter() - self._started
        ends_epoch = epoch_until is not None and (self.is_done or self.finished == epoch_until)
        self._job.finished_step(self.finished, seconds, step, ends_epoch=ends_epoch)
        if self._untracked is not None and not self._untracked.after_step(step.epoch):
            self._untracked = None

    # ------------------------------------------------------------------ between two steps

    @property
    def evaluation_was_cut(self) -> bool:
        """True if the evaluation before the first step was begun by an earlier attempt."""
        return self._job.keeper.resumed.evaluating

    @property
    def at_epoch_end(self) -> bool:
        """True while the script does what comes at the end of an epoch."""
        return self._job.keeper.at.epoch_end

    def expect_epochs(self) -> None:
        """Watch from here on what a script does before an epoch's steps and after them."""
        job = self._job
        job.keeper.watch_weights()  # it may change some before it evaluates there
        self._top = EpochTop(
            job.keeper,
            job.warn_of_script,
            with_random=not self._of.reseed,
            settings=self.loader.settings,
        )

    def begin_at_epoch_end(self) -> None:
        """Take it that this attempt begins with what the script does at the end of an epoch."""
        self._job.keeper.begin_at_epoch_end()

    def begin_epoch(self, number: int) -> None:
        """Make ready for what the script does at the top of an epoch's body, before its steps."""
        with self._errors_end_it:
            assert self._top is not None
            self._top.begin(number)
            self.loader.begins_epoch = True
        self._seed(number, EPOCH_TOP)

    def begin_epoch_end(self, number: int) -> None:
        """Make ready for what the script does at the end of an epoch, all its steps done."""
        with self._errors_end_it:
            self._leave_epoch_top()
        self._seed(number, EPOCH_END)

    def end_epoch(self) -> None:
        """Take what the script has done at the end of an epoch for a part of the boundary."""
        with self._errors_end_it:
            self._job.keeper.take_boundary_again()

    def _take_boundary_again(self) -> None:
        """Take the state as it is now for that of the last boundary, the top of an epoch done."""
        self._job.keeper.take_boundary_again(self._leave_epoch_top())

    def _leave_epoch_top(self) -> EpochBegun | None:
        """Take it that the script is done with the top of an epoch's body, if it was there."""
        return None if self._top is None else self._top.end()

    def evaluate(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield from `batches`; when told to stop, leave between two of them, saved."""
        job = self._job
        if self.step is not None and self.step.has_begun:
            raise UsageError(
                "run.evaluate() comes after the step's first micro-batch",
                hint="evaluate at the beginning of the loop's body: if step.number % 100 == 0: ..."
                " or call run.end_step() after the optimizer's step, and evaluate then",
            )
        job.keeper.watch_weights()
        job.profiling.evaluation_begins(self.finished, within_step=self.step is not None)
        # Until the next boundary: what the script makes of the batches belongs to the evaluation.
        evaluating = self.step is None and not self.at_epoch_end
        job.keeper.at = job.keeper.at._replace(evaluating=evaluating)
        for batch in batches:
            if not job.gate.enter_evaluation(job.keeper.finished, self._evaluated):
                job.leaving.at_agreed_step(halfway=True)
            self._evaluated += 1
            yield batch

    # ------------------------------------------------------------------ restoring

    def _restore(self, total: int | None, epochs: int | None, *, strict: bool) -> tuple[int, int]:
        """Restore, claim the attempt, and return the steps done already and those in all."""
        job = self._job
        refuse_untracked(job.keeper.objects, job.warn_of_script)
        self.loader.look_at_dataset()
        self.loader.tell = job.warn_of_script
        # The script may keep its loader, which must not keep the job.
        self._open.callback(setattr, self.loader, "tell", None)
        self.loader.tracked = frozenset(id(i.value) for i in job.keeper.objects.values())
        await_turn(job.settings, job.store, job.coordinator)
        job.keeper.set_up = SetUp(job.keeper.objects, job.warn_of_script)
        self._values_set_up = ScriptValues(job.keeper.objects, count=job.script_values)
        job.keeper.set_up.values = lambda: self._values_set_up.in_effect
        modules = [i.bare for i in job.keeper.objects.values() if isinstance(i, TrackedModule)]
        spread_over(modules)
        check_ranks_track_the_same(job.coordinator, job.rank, job.keeper.objects)
        check_ranks_have_one_model(job.coordinator, job.rank, job.keeper.set_up.shapes)
        self._values_set_up.check_ranks(job.coordinator, job.rank)
        if groups := groups_of_some_ranks(modules):
            job.warn_of_script(words_on_groups(groups))
        objects, saver = job.keeper.objects, job.keeper.saver
        ranks = job.coordinator, job.rank, job.world_size
        saver.generators = RankGenerators.found(objects, *ranks, restoring.TIMEOUT_S)
        saver.parts.leave_out(saver.generators.names)
        restored = restoring.restore(
            job.store,
            *ranks,
            objects,
            check=self._prepare_for,
            near=job.local_copy.store if job.local_copy else None,
            strict=strict,
        )
        if restored.manifest is None:
            broadcast_initial(modules, self._of.ranks)
        first = restored.manifest.step if restored.manifest else 0
        if job.rank == 0:
            claim_attempt(
                job.store,
                job.attempt,
                restored.prefix,
                job.claim_extra(self.loader.identity()),
                clock=RUN_CLOCK,
            )
        job.keeper.restored(restored, self.loader)
        job.keeper.best = Best(self._best_that_is_kept(job.keeper.best.now))
        if restored.manifest is not None:
            states, seed = self._own_states, job.settings.seed
            saver.generators.restore(states, restored.manifest, objects, job.rank, seed)
            self.loader.settings.restore(restored.manifest.counters.get("dataset"))
            self._restore_place(restored.manifest)
            if not self._of.reseed:
                self._restore_random(restored.manifest)
        change = self.loader.begin(first)
        last = self._last_step(total, epochs)
        self._heed_early_end(restored.manifest, total, epochs)
        if first < last and self.end_early is None:
            self._settle_micro_batches(restored.manifest, first)
        job.restored(restored, last)
        if restored.manifest is not None:
            tell_of_resume(job, self._values_set_up, restored.manifest, last)
            self._read_before = restored.manifest.counters.get("data")
            self._ranks_may_change |= restored.manifest.world_size != job.world_size
        self._ranks_may_change &= job.world_size > 1
        if change is not None and job.rank == 0:
            log.info("%s", change["message"])
            job.reporter.event(JobEvent.RESCALED, **change)
        check_ranks_read_the_same(job.coordinator, job.rank, self.loader.checksum(first))
        self.loader.keep(first)
        return first, last

    def _heed_early_end(
        self, manifest: Manifest | None, total: int | None, epochs: int | None
    ) -> None:
        """Do no step if the script has ended its training, and asks for no more than then."""
        counters = manifest.counters if manifest else {}
        ended = self._job.keeper.early_end.begin(total, epochs, counters)
        if ended and self._job.rank == 0:
            log.info("the training was ended before; it goes on if more steps are asked for")

    def _settle_micro_batches(self, manifest: Manifest | None, first: int) -> None:
        """Find how many samples fit, if that was asked for; the ranks do so together."""
        loader, gradients, job = self.loader, self._gradients, self._job
        trial = job.settings.try_batch
        if not isinstance(loader, ElasticLoader) or loader.probe is None:
            if trial is not None:
                end_without_curve(trial, loader)
            return
        assert isinstance(gradients, GradientSync)  # bitwise mode has refused it
        how = (loader, self._values, gradients, self._of.ranks, job.device)
        if trial is not None:
            BatchTrial(trial, *how).run(first)
        probe = BatchProbe(*how)
        if job.settings.smoke_samples is not None:
            probe.settle_untried()  # this machine's memory says nothing of the nodes'
            return
        told = probe.settle(manifest.counters.get("micro_batch") if manifest else None, first)
        if told is not None and job.rank == 0:
            log.info("%s", told)

    def _watch_optimizers(self) -> None:
        """Stand before the optimizers' steps; what was tried before is no step of the run's."""
        modules = [v for v in self._values if isinstance(v, torch.nn.Module)]
        optimizers = [v for v in self._values if isinstance(v, torch.optim.Optimizer)]
        job = self._job
        self._optimizers = OptimizerWatch(
            modules,
            optimizers,
            self._gradients,
            job.keeper,
            job.world_size,
            tell=job.warn_of_script,
            untracked=UntrackedOptimizers(job.keeper, job.warn_of_script).before_step,
        )
        self._of.gives_back.callback(self._optimizers.close)
        if job.settings.smoke_samples is not None:
            self._learning = LearningCheck(modules, optimizers)
            self._of.gives_back.callback(self._learning.close)

    def _last_step(self, total: int | None, epochs: int | None) -> int:
        """Return how many steps there are in all, as seen from where this attempt begins."""
        count = total if epochs is None else self.loader.first_step_of(epochs)
        assert count is not None
        return min(count, self._job.settings.max_steps or count)

    def _best_that_is_kept(self, best: BestState) -> BestState:
        """Return what the first rank finds, which has claimed the attempt by now."""
        job = self._job
        if best.value is None or best.is_new:
            return best
        if job.rank == 0:
            found = restoring.best_that_is_kept(job.store, best)
            job.coordinator.set("best", json.dumps(found.value))
            return found
        word = job.coordinator.get("best", restoring.TIMEOUT_S)
        return best if word is None else best._replace(value=json.loads(word))

    def _restore_place(self, manifest: Manifest) -> None:
        """Go on where the data was; what cannot be exact is told."""
        own = restoring.places_of_ranks(manifest)
        shared = manifest.counters.get("place")
        warning = self.loader.restore(shared, own, manifest.world_size)
        if warning:
            self._job.warn_of_script(warning)

    def _warn_of_lone_sample(self) -> None:
        modules = [value for value in self._values if isinstance(value, torch.nn.Module)]
        warning = warning_of_lone_sample(modules, self.loader, self.finished, self._last)
        if warning:  # the one rank that has that micro-batch says so
            self._job.warn(warning)

    def _restore_random(self, manifest: Manifest) -> None:
        if not restoring.restore_random(manifest, self._job.rank, self._job.world_size):
            self._job.reporter.event(
                JobEvent.WARNING,
                message="random states were not restored: the number of ranks changed",
            )

    def _prepare_for(self, manifest: Manifest) -> None:
        """Make the objects such as the checkpoint's were, if it fits this attempt."""
        check_fits(manifest, self.loader.identity(), self._job.run_id, self._job.attempt)
        self._values_set_up.refuse_other_classes(manifest)
        self._own_states = self._job.keeper.saver.generators.read(manifest, self._job.rank)
        self._job.keeper.set_up.follow(manifest.counters.get("changed_in_loop"))

    def _seed(self, *place: int) -> None:
        """Seed what the script draws from, by where it is, if that is asked for."""
        if self._of.reseed:
            seed_everything(mix(self._job.settings.seed, *place))

    def _count_of(self, step: int) -> int:
        """Return how many micro-batches this rank is given in a step."""
        of = self.loader.ranges(step)
        return max(1, *map(len, of if self._gradients.meets_in_forward else [of[self._job.rank]]))

    def _trace_step(self, step: Step) -> None:
        if self._of.trace is not None:
            self._of.trace.write(
                step=step.number,
                epoch=step.epoch,
                samples=step.samples,
                loss=0.0 if step.loss is None else float(step.loss),
            )
