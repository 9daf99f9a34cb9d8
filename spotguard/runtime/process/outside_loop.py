"""Optimizer steps that no loop of ours has asked for: the script trains without spotguard.

Such a script can neither be stopped in time nor resumed, and a launched one is paid for all the
same. The sign is not silence, which a long set-up has, too, but steps: the first few are told, and
if they go on for long, a launched job is ended. A learning-rate finder or the like steps before the
loop as well; `run.warm_up` says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook as hook_steps

from spotguard.errors import JobFailed, SpotguardError
from spotguard.events import env, keys
from spotguard.events.event import Event, JobEvent
from spotguard.events.states import EndReason
from spotguard.storage import PrefixedStore, open_store
from spotguard.storage.deadline import give_up_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("spotguard")

TOLD_AFTER_STEPS = 3
_WORD_S = 10.0

WAYS_IN = """three ways in:
  for step in run.steps(loader, total=...):            a loop of ours
  spotguard.integrations                               Trainer, Lightning, Accelerate in one line
  run.restore(...), run.begin_step(), run.end_step()   a loop of your own"""


@dataclass(frozen=True)
class Patience:
    """How much is to be seen before a launched job is ended."""

    steps: int
    seconds: float


WITHOUT_RUN = Patience(steps=20, seconds=30.0)
"""Nothing has called `spotguard.init`: no loop of ours is likely to come."""
WITH_RUN = Patience(steps=100, seconds=300.0)
"""A warm-up may come before the loop."""


class OutsideLoop:
    """Counts what optimizers do while no loop of ours is under way; the first rank only.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._off = False
        self._count = 0
        self._first_at = 0.0
        self._end: Callable[[SpotguardError], object] = _end_without_run
        self._tell: Callable[[str], object] = _tell_without_run
        self._patience = WITHOUT_RUN
        self._hook: Any = None

    def stepped_without_run(self) -> None:
        """Take note of a step, unless a run of this process looks for itself."""
        if self._hook is None and not self._off:
            self.stepped()

    def join(
        self, *, tell: Callable[[str], object], end: Callable[[SpotguardError], object] | None
    ) -> None:
        """Have a run tell, and end the job; None for a run that nobody launched."""
        self._tell, self._patience = tell, WITH_RUN
        self._end = end or (lambda _: None)
        self._off, self._count = False, 0
        self._hook = self._hook or hook_steps(lambda *_: self.stepped())

    def enter(self) -> None:
        """Look no more: a loop of ours begins, or the run is over."""
        self._off = True
        self._tell, self._end = _tell_without_run, _end_without_run  # those of a run hold it
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """Within it steps are not counted."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def stepped(self) -> None:
        """Take note that an optimizer has stepped; may end the process."""
        if self._off or threading.current_thread() is not threading.main_thread():
            return
        now = self._clock()
        if not self._count:
            self._first_at = now
        self._count += 1
        lasts_s = now - self._first_at
        if self._count == TOLD_AFTER_STEPS:
            self._tell(
                f"{self._count} optimizer steps were taken outside of a loop of spotguard: what "
                f"this script trains is neither saved nor resumed; {WAYS_IN}"
            )
        if self._count >= self._patience.steps and lasts_s >= self._patience.seconds:
            self._off = True
            self._end(
                JobFailed(
                    f"{self._count} optimizer steps in {lasts_s:.0f} s, in no loop of spotguard",
                    hint=WAYS_IN,
                )
            )


def _tell_without_run(message: str) -> None:
    sys.stderr.write(f"spotguard: {message}\n")
    _write(JobEvent.WARNING, message=message)


def _end_without_run(problem: SpotguardError) -> None:
    label = EndReason.UNPROTECTED.label
    sys.stderr.write(f"spotguard: {label}: {problem.message}; {problem.hint}\n")
    _write(
        JobEvent.ENDED,
        reason=str(EndReason.UNPROTECTED),
        step=0,
        resumed_step=0,
        train_s=0.0,
        message=problem.message,
    )
    sys.stderr.flush()
    os._exit(problem.exit_code)  # a framework may catch whatever is raised in its loop


def _write(kind: JobEvent, **data: object) -> None:
    """Write an event of a job that never called `init`, as far as its launcher said where to."""
    run_id, store_url = os.environ.get(env.RUN_ID), os.environ.get(env.STORE)
    attempt = os.environ.get(env.ATTEMPT, "")
    if not run_id or not store_url or not attempt.isdigit():
        return
    node = os.environ.get(env.NODE) or os.environ.get("GROUP_RANK") or "0"
    event = Event(
        kind=kind.value,
        at=time.time(),
        attempt=int(attempt),
        node=int(node) if node.isdigit() else 0,
        rank=0,
        data=dict(data),
    )
    key = keys.event(event.attempt, at=event.at, node=event.node, rank=0, count=1)
    try:
        with give_up_after(_WORD_S):
            PrefixedStore(open_store(store_url), run_id).put(key, event.to_json())
    except SpotguardError as problem:
        log.warning("%s could not be written down: %s", kind.value, problem)


outside_loop = OutsideLoop()
"""The one of this process."""
