"""Plays one draw: lives its lives, one attempt after another, and leaves the verdict to others."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.lineage import CheckpointRef
from spotguard.checkpoint.manifest import load_manifest
from spotguard.control.supervisor.policy import Policy
from spotguard.errors import SpotguardError
from spotguard.events import keys
from spotguard.launch.local.interruption_timing import RELEASE_GRACE_S
from tests.property.child.moments import ONCE
from tests.property.child.rank import ASKED
from tests.property.patience import Patience
from tests.runtime.harness.processes import Job, Jobs, Zygote

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.events.event import Event
    from tests.property.draw import Draw, Life
    from tests.property.scripts import Script

RUN = "a-run"
TOLD = 75
PATIENCE_S = 60.0
"""How long an attempt may stand still; more than a collective waits for a peer that died."""
_SAVING = {"shard": 0.4, "manifest": 0.4, "committed": 0.4}
"""How many of these moments come depends on the saves: the first ones are taken."""


@dataclass
class Attempt:
    """One life as it was lived."""

    number: int
    life: Life
    codes: list[int]
    said: list[str]
    struck: bool
    events: list[Event]
    saved_before: int
    """The newest step that any attempt before it said to be saved."""
    missing: list[str]
    """Checkpoints that it named as it ended, and that were not there."""
    nth: int = 0
    was_at: int = -1
    """The step at which it was struck."""

    @property
    def finished(self) -> bool:
        """True if every rank came to the script's end."""
        return not any(self.codes)

    @property
    def ends(self) -> list[dict[str, Any]]:
        """What it said of its end, each time that it did."""
        return [event.data for event in self.events if event.kind == "ended"]


@dataclass
class Play:
    """The run of a draw, in a folder of its own."""

    draw: Draw
    script: Script
    folder: Path
    zygote: Zygote
    counts: dict[int, list[dict[str, int]]]
    """For each number of ranks, how often moments come on each, undisturbed."""
    steps: int
    """That the script does in all."""
    bug: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    hangs: str = ""

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.zygote, self.folder, prelude="tests.property.child.rank")
        self._saved = 0
        self._sleeping: list[Job] = []
        """Frozen ranks of attempts before, which wake once a later one has claimed the run."""

    @property
    def began_on(self) -> int:
        """Return the ranks of the last attempt that began from nothing."""
        started = [
            (event.data["resumed_from"], attempt.life.world)
            for attempt in self.attempts
            for event in attempt.events
            if event.kind == "started"
        ]
        anew = [world for resumed_from, world in started if resumed_from is None]
        return anew[-1] if anew else self.attempts[0].life.world

    @property
    def planned(self) -> int:
        """Return the steps that the script does, left early or not."""
        share = self.draw.leave_at
        return max(1, round(share * self.steps)) if share else self.steps

    def run(self) -> None:
        """Live until the script has finished, or something hangs."""
        lives = self.draw.lives
        try:
            for number, life in enumerate(lives, 1):
                self.attempts.append(self._live(number, life))
                if self.attempts[-1].finished:
                    break
        except Hangs as problem:
            self.hangs = str(problem)
        finally:
            self._clean_up()

    def _live(self, number: int, life: Life) -> Attempt:
        nth = self._nth(life)
        ranks = self._start(number, life, nth)
        codes = self._see_them_end(ranks, number, life)
        told = self.folder / f"struck-{number}"
        events = [event for event in self.jobs.events(RUN) if event.attempt == number]
        ends = [event.data for event in events if event.kind == "ended"]
        named = [str(end["checkpoint"]) for end in ends if end["checkpoint"] is not None]
        attempt = Attempt(
            number=number,
            life=life,
            codes=codes,
            said=[rank.said for rank in ranks],
            struck=told.exists() or (self.folder / f"fault-{number}").exists(),
            events=events,
            saved_before=self._saved,
            missing=[prefix for prefix in named if not self._intact(prefix)],
            nth=nth,
            was_at=json.loads(told.read_text())["step"] if told.exists() else -1,
        )
        saved = [end["saved_step"] or 0 for end in attempt.ends]
        self._saved = max([self._saved, *saved])
        return attempt

    def _nth(self, life: Life) -> int:
        """Return which of the times that the moment is left to come is the one."""
        if not life.kind or life.at in ONCE or life.at == "set-up":
            return 1
        if life.at in _SAVING:
            return 1 + int(3 * life.place)
        every = self.counts.get(life.world, [{}])
        count = every[min(life.victim, len(every) - 1)].get(life.at, 1)
        left = 1.0 - self._newest_step() / max(self.steps, 1)
        return 1 + int(life.place * max(1.0, count * left))

    def _intact(self, prefix: str) -> bool:
        try:
            load_manifest(self.jobs.store(RUN), prefix)
        except SpotguardError:
            return False
        return True

    def _newest_step(self) -> int:
        store = self.jobs.store(RUN)
        try:
            folders = list(store.list_folders(keys.CHECKPOINTS))
        except OSError:
            return 0
        refs = [CheckpointRef.of(folder) for folder in folders]
        whole = [ref.step for ref in refs if ref and store.head(keys.manifest(ref.prefix))]
        return max(whole, default=0)

    def _start(self, number: int, life: Life, nth: int) -> list[Job]:
        asked: dict[str, Any] = {"folder": str(self.folder), "run_id": RUN, "bug": self.bug}
        if life.kind:
            blow = {"kind": life.kind, "at": life.at, "nth": nth, "victim": life.victim}
            asked["blow"] = blow
        if life.fault:
            asked["fault"] = {"kind": life.fault, "at": life.fault_at, "nth": 1}
        if self.draw.leave_at:
            asked["leave_at"] = self.planned
        store = {"SPOTGUARD_STORE": "s3://property"} if self.draw.bucket else {}
        return self.jobs.start_ranks(
            life.world,
            script=self.script.path,
            each=lambda rank: {
                "SPOTGUARD_NODE": rank,  # each rank is the first of a node of its own
                "LOCAL_RANK": 0,
                "SPOTGUARD_NOTICE_FILE": self.folder / f"notice-{number}-{rank}",
            },
            LOCAL_WORLD_SIZE=1,
            TORCHELASTIC_RUN_ID=RUN,
            HF_HUB_OFFLINE=1,
            SPOTGUARD_RUN_ID=RUN,
            SPOTGUARD_ATTEMPT=number,
            SPOTGUARD_HEARTBEAT_S=0.1,
            SPOTGUARD_SAVE_EVERY=self.draw.save.replace("_", " "),
            SPOTGUARD_PEER_TIMEOUT="1s" if life.kind in ("freeze", "wake") else "10s",
            SPOTGUARD_TRACE_SAMPLES=self.folder / "samples.jsonl",
            **{ASKED: json.dumps(asked)},
            **store,
            **self.script.env,
        )

    def _see_them_end(self, ranks: list[Job], number: int, life: Life) -> list[int]:
        """Return the exit codes; do what the controller does with who stays when a rank is lost."""
        patience = Patience(ranks, PATIENCE_S)
        due: list[tuple[Patience, signal.Signals]] | None = None
        while not all([rank.is_over() for rank in ranks]):  # a list: each is to be asked
            self._wake(number)
            if life.kind == "wake" and self._is_left_behind(ranks, number, life.victim):
                self._sleeping.append(ranks[life.victim])
                return [-signal.SIGKILL if rank.code is None else rank.code for rank in ranks]
            if patience.is_over():
                raise Hangs(f"attempt {number}: some of its ranks do not end")
            if life.kind == "freeze":
                self._thaw(ranks, number, life.victim)
            if due is None and (any(map(_is_lost, ranks)) or self._is_silent(number, life)):
                down_s = Policy().survivor_patience_s
                kill = Patience(ranks, down_s + RELEASE_GRACE_S)
                due = [(Patience(ranks, down_s), signal.SIGTERM), (kill, signal.SIGKILL)]
                if life.kind == "raise":  # as torchrun does
                    due[0] = (Patience(ranks, 0.0), signal.SIGTERM)
            if due and due[0][0].is_over():
                _signal(ranks, due.pop(0)[1])
            time.sleep(0.01)
        return [rank.wait() for rank in ranks]

    def _thaw(self, ranks: list[Job], number: int, victim: int) -> None:
        """Kill the frozen rank once the others have left it behind."""
        if self._is_left_behind(ranks, number, victim):
            _signal([ranks[victim]], signal.SIGKILL)

    def _is_silent(self, number: int, life: Life) -> bool:
        """Tell whether a rank is frozen outside of the loop, where a controller alone judges it."""
        return is_frozen_outside(life) and (self.folder / f"struck-{number}").exists()

    def _is_left_behind(self, ranks: list[Job], number: int, victim: int) -> bool:
        others = [rank for rank in ranks if rank is not ranks[victim]]
        struck = (self.folder / f"struck-{number}").exists()
        return struck and all(rank.code is not None for rank in others)

    def _wake(self, number: int) -> None:
        """Wake the frozen ranks of earlier attempts once this one has claimed the run."""
        if self._sleeping and number in self.jobs.claims(RUN):
            _signal(self._sleeping, signal.SIGCONT)
            self._sleeping.clear()

    def _clean_up(self) -> None:
        for job in self.jobs.started:
            if job.code is None:
                if self.hangs:
                    _signal([job], signal.SIGUSR1)
                    time.sleep(0.3)
                _signal([job], signal.SIGKILL)
                job.wait()


class Hangs(Exception):
    """An attempt does not end."""


def is_frozen_outside(life: Life) -> bool:
    """Tell whether a rank is frozen in its set-up or after its loop: the others wait for it."""
    return life.kind in ("freeze", "wake") and life.at in ("set-up", "after-loop")


def _is_lost(rank: Job) -> bool:
    return rank.code not in (None, 0, TOLD)


def _signal(jobs: list[Job], number: signal.Signals) -> None:
    for job in jobs:
        if not job.is_over():
            job.kill(number)
