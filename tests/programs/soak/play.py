"""Plays one run of the soak, and says in sentences what was wrong with it."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spotguard.checkpoint.manifest import load_manifest
from spotguard.control.supervisor.policy import Policy
from spotguard.errors import SpotguardError
from spotguard.events import keys
from spotguard.launch.local.interruption_timing import RELEASE_GRACE_S
from spotguard.storage import open_store
from spotguard.testing import read_sample_trace
from tests.programs.soak.patience import Patience
from tests.programs.soak.scenario import Kind, Life, Scenario
from tests.runtime.harness.processes import PATIENCE_S, Job, Jobs

if TYPE_CHECKING:
    from spotguard.events.event import Event
    from spotguard.events.sample_log_reader import TracedStep
    from tests.runtime.harness.processes import Zygote

SCRIPT = Path(__file__).parent / "jobs" / "train.py"
RUN, CALM = "a-run", "calm"
RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""How far weights may lie from an undisturbed run's where only rounding may differ."""

_TOLD = 75
_LOOK_S, _POLL_S = 0.002, 0.02
_SAID_AS = {
    Kind.NOTICE: {"preempted"},
    Kind.TERM_ONE: {"terminated"},
    Kind.TERM_ALL: {"terminated"},
    Kind.TERM_REPEATED: {"terminated"},
    Kind.TERM_THEN_KILL: {"terminated", "node_lost"},
    Kind.INT_ALL: {"stopped", "node_lost"},
    Kind.KILL_ONE: {"node_lost"},
    Kind.FREEZE: {"node_lost"},
    Kind.STOP: {"stopped"},
    Kind.RAISE: {"failed", "terminated", "node_lost"},  # torchrun ends the others
}
_NOTHING_LOST = {Kind.NOTICE, Kind.TERM_ONE, Kind.TERM_ALL, Kind.TERM_REPEATED, Kind.STOP}
"""After these the checkpoint is that of the very last step."""


@dataclass
class Play:
    """One run: played in a folder of its own, with what was found wrong."""

    scenario: Scenario
    zygote: Zygote
    folder: Path
    wrong: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """How lives ended, in words, for the summary."""

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.zygote, self.folder)
        self.store = open_store(str(self.folder / "spotguard-runs" / RUN))
        self._saved = 0
        self._last_world = 0

    def run(self) -> None:
        """Live all lives, then the undisturbed run, and compare."""
        try:
            for attempt, life in enumerate(self.scenario.lives, 1):
                if self._live(attempt, life):
                    break
            self._calm()
            self._compare()
        except AssertionError as problem:  # a job that does not end says so
            self.wrong.append(str(problem))
            _say_where_they_are(self.jobs.started)
        finally:
            self._clean_up()

    # ------------------------------------------------------------------ lives

    def _live(self, attempt: int, life: Life) -> bool:
        """Live one life and look at what it left; True if the training is finished."""
        ranks = self._start(RUN, life.world, attempt, life)
        if life.kind is not None:
            self._disturb(ranks, attempt, life)
        codes = self._see_them_end(ranks)
        finished = not any(codes)
        self._last_world = life.world
        if finished:
            self.ends["finished first" if life.kind else "finished"] += 1
        elif life.kind is None:
            self._complain(attempt, f"nobody disturbed it, and it ended with {codes}", ranks)
        else:
            self.ends[life.kind.value] += 1
        self._look(attempt, life, codes, ranks)
        return finished

    def _see_them_end(self, ranks: list[Job]) -> list[int]:
        """Return the exit codes; do what the controller does with who stays when a rank is lost.

        Ranks that know of each other leave by themselves. One that dies before that, in set-up,
        leaves the others in torch's rendezvous, where they would wait for it for half an hour.
        """
        patience = Patience(ranks, PATIENCE_S)
        due: list[tuple[Patience, signal.Signals]] | None = None
        while not all([rank.is_over() for rank in ranks]):  # a list: each is to be asked
            assert not patience.is_over(), "some of its ranks do not end"
            if due is None and any(_is_lost(rank) for rank in ranks):
                down_s = Policy().survivor_patience_s
                kill = Patience(ranks, down_s + RELEASE_GRACE_S)
                due = [(Patience(ranks, down_s), signal.SIGTERM), (kill, signal.SIGKILL)]
            if due and due[0][0].is_over():
                _signal(ranks, due.pop(0)[1])
            time.sleep(_POLL_S)
        return [rank.wait() for rank in ranks]

    def _start(self, run_id: str, world: int, attempt: int, life: Life | None) -> list[Job]:
        training = self.scenario.training
        raises = life is not None and life.kind is Kind.RAISE

        def each(rank: int) -> dict[str, Any]:
            mistake = {"raise_after": life.after_steps} if raises and life else {}
            return {
                "SOAK": json.dumps(
                    training.asked(**(mistake if self._is_victim(life, rank) else {}))
                ),
                "LOCAL_RANK": 0,  # each rank is the first of a node of its own
                "SPOTGUARD_NODE": rank,
                "SPOTGUARD_NOTICE_FILE": self._notice(run_id, attempt, rank),
            }

        return self.jobs.start_ranks(
            world,
            script=SCRIPT,
            each=each,
            SPOTGUARD_RUN_ID=run_id,
            SPOTGUARD_ATTEMPT=attempt,
            SPOTGUARD_HEARTBEAT_S=0.1,
            SPOTGUARD_PEER_TIMEOUT="1s" if life and life.kind is Kind.FREEZE else "10s",
            SPOTGUARD_TRACE_SAMPLES=self._trace(run_id),
        )

    def _is_victim(self, life: Life | None, rank: int) -> bool:
        return life is not None and rank == life.victim

    def _notice(self, run_id: str, attempt: int, rank: int) -> Path:
        return self.folder / f"notice-{run_id}-{attempt}-{rank}"

    def _trace(self, run_id: str) -> Path:
        return self.folder / f"samples-{run_id}.jsonl"

    # ------------------------------------------------------------------ disturbances

    def _disturb(self, ranks: list[Job], attempt: int, life: Life) -> None:
        victim = ranks[life.victim]
        _wait_for_steps(victim, life.after_steps + 1, Patience(ranks, PATIENCE_S))
        if life.kind is Kind.RAISE:
            return self._end_as_torchrun_does(ranks, victim)
        time.sleep(life.delay_s)
        if life.kind is Kind.NOTICE:
            self._notice(RUN, attempt, life.victim).touch()
        elif life.kind is Kind.STOP:
            word = json.dumps({"reason": "stopped", "message": "by the soak"}).encode()
            self.store.put(keys.stop(attempt), word)
        elif life.kind is Kind.TERM_ONE:
            _signal([victim], signal.SIGTERM)
        elif life.kind is Kind.INT_ALL:
            _signal(ranks, signal.SIGINT)
        elif life.kind is Kind.KILL_ONE:
            _signal([victim], signal.SIGKILL)
        elif life.kind is Kind.KILL_ALL:
            _signal(ranks, signal.SIGKILL)
        elif life.kind is Kind.FREEZE:
            self._freeze(ranks, victim)
        else:
            self._terminate(ranks, life)
        return None

    def _terminate(self, ranks: list[Job], life: Life) -> None:
        _signal(ranks, signal.SIGTERM)
        if life.kind is Kind.TERM_REPEATED:
            for _ in range(2):
                time.sleep(life.pause_s)
                _signal(ranks, signal.SIGTERM)
        elif life.kind is Kind.TERM_THEN_KILL:
            time.sleep(life.pause_s)
            _signal(ranks, signal.SIGKILL)

    def _freeze(self, ranks: list[Job], victim: Job) -> None:
        """Freeze a rank until the others have left it behind."""
        _signal([victim], signal.SIGSTOP)
        patience = Patience(ranks, PATIENCE_S)
        while not all([rank.is_over() for rank in ranks if rank is not victim]):
            assert not patience.is_over(), "the others do not leave a frozen rank behind"
            time.sleep(_POLL_S)
        _signal([victim], signal.SIGKILL)

    def _end_as_torchrun_does(self, ranks: list[Job], victim: Job) -> None:
        """Once the script has failed on one rank, end the others."""
        victim.wait()
        _signal(ranks, signal.SIGTERM)

    # ------------------------------------------------------------------ what it left

    def _look(self, attempt: int, life: Life, codes: list[int], ranks: list[Job]) -> None:
        """Compare what the life said of itself with what happened, and with what is stored."""
        events = [event for event in self.jobs.events(RUN) if event.attempt == attempt]
        self._look_at_start(attempt, events, ranks)
        ends = [event.data for event in events if event.kind == "ended"]
        for end in ends:
            if end["checkpoint"] is not None and not self._intact(end["checkpoint"]):
                self._complain(attempt, f"it names {end['checkpoint']}, which is not there", ranks)
        self._saved = max([self._saved, *(end["saved_step"] or 0 for end in ends)])
        if life.kind is None or life.after_steps < 0 or not any(codes):
            return
        self._look_at_codes(attempt, life, codes, ranks)
        self._look_at_words(attempt, life, ends, ranks)

    def _look_at_start(self, attempt: int, events: list[Event], ranks: list[Job]) -> None:
        """What an attempt goes on from is the newest that any before it said to be saved."""
        for event in events:
            if event.kind == "started" and event.data["resumed_step"] < self._saved:
                resumed = event.data["resumed_step"]
                said = f"it goes on from step {resumed}, but step {self._saved} was told as saved"
                self._complain(attempt, said, ranks)

    def _intact(self, prefix: str) -> bool:
        try:
            load_manifest(self.store, prefix)
        except SpotguardError:
            return False
        return True

    def _look_at_codes(self, attempt: int, life: Life, codes: list[int], ranks: list[Job]) -> None:
        killed = {Kind.KILL_ONE, Kind.FREEZE, Kind.KILL_ALL, Kind.TERM_THEN_KILL}
        for rank, code in enumerate(codes):
            may_be = {_TOLD}
            if life.kind in killed and (rank == life.victim or life.kind in _ALL_KILLED):
                may_be = {-signal.SIGKILL, _TOLD}
            elif life.kind is Kind.RAISE:
                may_be = {1} if rank == life.victim else {1, _TOLD, -signal.SIGTERM}
                if rank != life.victim and self._in_last_step(ranks[life.victim]):
                    may_be.add(0)
            if code not in may_be and not (code == 0 and life.kind in killed):
                self._complain(attempt, f"{life.kind}: the codes are {codes}", ranks)
                return

    def _in_last_step(self, rank: Job) -> bool:
        """Return whether the rank ended in the last step, whose end others do not wait for."""
        return f"step {self.scenario.training.steps - 1}\n" in rank.said

    def _look_at_words(
        self, attempt: int, life: Life, ends: list[dict[str, Any]], ranks: list[Job]
    ) -> None:
        assert life.kind is not None
        if life.kind is Kind.KILL_ALL:
            return
        may_be = _SAID_AS[life.kind] | {"finished"}  # on the last step all may be done
        reasons = {end["reason"] for end in ends}
        silent = life.kind in _MAY_BE_SILENT or (life.world == 1 and life.kind in _OF_OTHERS)
        silent = silent or (life.kind in _OF_OTHERS and _some_in_set_up(ranks))
        unsaid = life.kind is Kind.RAISE and "failed" not in reasons
        if not reasons <= may_be or not (reasons or silent) or unsaid:
            self._complain(attempt, f"{life.kind}: told as {sorted(reasons)}", ranks)
        for end in ends:
            if life.kind in _NOTHING_LOST and end["saved_step"] != end["step"]:
                said = f"{life.kind}: saved {end['saved_step']} of {end['step']}: {end['message']}"
                self._complain(attempt, said, ranks)

    # ------------------------------------------------------------------ the end

    def _calm(self) -> None:
        ranks = self._start(CALM, self.scenario.calm_world, 1, None)
        codes = self._see_them_end(ranks)
        if any(codes):
            self._complain(0, f"the undisturbed run ended with {codes}", ranks)

    def _compare(self) -> None:
        if self.wrong:
            return
        ours = [self._final(RUN, rank) for rank in range(self._last_world)]
        calm = [self._final(CALM, rank) for rank in range(self.scenario.calm_world)]
        for rank, state in enumerate(ours):
            of_calm = calm[rank] if len(calm) == len(ours) else calm[0]
            self._compare_state(rank, state, of_calm)
        self._compare_samples()

    def _compare_state(self, rank: int, ours: dict[str, Any], calm: dict[str, Any]) -> None:
        if list(ours) != list(calm):
            self.wrong.append(f"rank {rank} has {list(ours)}, undisturbed {list(calm)}")
        for name, value in ours.items():
            of_ranks = name.startswith("buffer") and not self.scenario.one_world
            if of_ranks:  # statistics of what a rank saw differ with the number of ranks
                continue
            if not _agree(value, calm[name], bitwise=self.scenario.bitwise):
                off = np.abs(value - calm[name]).max()
                self.wrong.append(f"the end differs on rank {rank}: {name} by {off:.3g}")

    def _compare_samples(self) -> None:
        """Each step was trained on the very samples of the undisturbed run, each once."""
        ours, calm = (read_sample_trace(self._trace(name)) for name in (RUN, CALM))
        if _samples(ours) != _samples(calm):
            self.wrong.append("samples were repeated, left out, or came in other steps")
        seen = [(step.epoch, sample) for step in ours for sample in step.samples]
        if len(seen) != len(set(seen)):
            self.wrong.append("an epoch has samples twice")

    def _final(self, run_id: str, rank: int) -> dict[str, Any]:
        with np.load(self.folder / f"final-{run_id}-{rank}.npz", allow_pickle=False) as file:
            return dict(file)

    def _complain(self, attempt: int, what: str, ranks: list[Job]) -> None:
        said = "\n".join(f"rank {n} said:\n{rank.said}" for n, rank in enumerate(ranks))
        (self.folder / f"complaint-{attempt}.txt").write_text(f"{what}\n{said}")
        self.wrong.append(f"attempt {attempt}: {what}")

    def _clean_up(self) -> None:
        for job in self.jobs.started:
            if job.code is None:
                _signal([job], signal.SIGKILL)
                job.wait()


_ALL_KILLED = {Kind.KILL_ALL, Kind.TERM_THEN_KILL}
_MAY_BE_SILENT = {Kind.TERM_THEN_KILL}
_OF_OTHERS = {Kind.KILL_ONE, Kind.FREEZE}
"""Kinds that only another rank can tell of."""


def _wait_for_steps(job: Job, count: int, patience: Patience) -> None:
    """Return once the job has begun so many steps, or is over."""
    while f"\n{job.said}".count("\nstep ") < count and not job.is_over():
        assert not patience.is_over(), f"it does not get to its step {count}:\n{job.said}"
        time.sleep(_LOOK_S)


def _some_in_set_up(ranks: list[Job]) -> bool:
    """Return whether a rank had not begun to train when others had: they had no ring yet."""
    return not all("step " in rank.said for rank in ranks)


def _is_lost(rank: Job) -> bool:
    return rank.code not in (None, 0, _TOLD)


def _signal(jobs: list[Job], number: signal.Signals) -> None:
    for job in jobs:
        if not job.is_over():
            job.kill(number)


def _say_where_they_are(jobs: list[Job]) -> None:
    """Have each job that still runs print the stacks of its threads: who waits for whom."""
    _signal(jobs, signal.SIGUSR1)
    time.sleep(0.5)


def _agree(one: Any, other: Any, *, bitwise: bool) -> bool:
    if bitwise:
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return bool(np.allclose(one, other, rtol=RELATIVE, atol=ABSOLUTE))


def _samples(steps: list[TracedStep]) -> list[tuple[int, int, list[int]]]:
    return [(step.step, step.epoch, step.samples) for step in steps]
