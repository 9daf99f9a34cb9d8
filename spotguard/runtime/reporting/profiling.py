"""A profile of some steps, for who asks for it through the run store.

The thread that reports looks for the request; the first rank decides with which step all begin. The
loop's thread starts and stops torch's profiler between two steps, after one step of warm-up, which
also tells how large a trace becomes, and one in which it is off. A thread of its own stores the
trace; it waits for saves. A word to stop ends all of it, and an evaluation and the script's own
profiler end what is recorded. Whatever fails here is told to who asked; the training goes on.
Nothing here draws a random number or touches a tensor.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import math
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from spotguard.errors import NotFound
from spotguard.events import keys
from spotguard.events.profile import (
    DATA,
    MOST_TRACE_BYTES,
    ProfileAnswer,
    ProfileBegin,
    ProfileRequest,
)
from spotguard.events.untrusted import Refused
from spotguard.runtime.reporting.other_profilers import script_profiles_itself
from spotguard.runtime.reporting.recording import Recording, cores, device_name, load
from spotguard.shared.node_locks import is_saving
from spotguard.shared.paths import scratch
from spotguard.storage.deadline import give_up_after
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

MOST_RANKS_WITH_TRACES: Final = 16
"""In larger jobs the first rank of each node keeps its trace, and no other."""
_MOST_BYTES = 48 << 20
"""Of a trace before it is compressed: some 170 000 operations."""
_MOST_RAW_BYTES = 192 << 20
"""Of a trace that became larger than its warm-up said; the reader takes no more than 256 MiB."""
_LONGEST_STEP_S = 120.0
_LEAD = 2
"""Steps from the beginning of the warm-up to the first one that counts."""
_MOST_WARM_UPS = 3
"""Where evaluations come in between."""
_LONGEST_PROBLEM = 500
_ITSELF = "the script profiles itself with torch.profiler at this moment"
_TOO_LONG = f"a step takes longer than {_LONGEST_STEP_S:.0f} s, too long to be recorded"
_COPY_BYTES = 1 << 20
_PAUSE_S = 0.2
_UPLOAD_S = 60.0
_NOTHING = contextlib.nullcontext()


class Progress(NamedTuple):
    """Where the loop is."""

    finished: int
    total: int | None
    """None: it has not begun."""
    step_s: float


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Which rank of which attempt this is, and what it may use."""

    attempt: int
    node: int
    rank: int
    local_rank: int
    world_size: int
    heartbeat_s: float
    saving_file: str | None

    @property
    def keeps_trace(self) -> bool:
        """True if this rank's trace is stored."""
        return self.world_size <= MOST_RANKS_WITH_TRACES or self.local_rank == 0


class Profiling:
    """This rank's part in profiles. `look` is for the thread that reports, all else for the loop's.

    Between steps it costs one comparison as long as nobody asks.
    """

    def __init__(
        self,
        store: ObjectStore,
        place: RankPlace,
        *,
        progress: Callable[[], Progress],
        told_to_stop: Callable[[], bool],
    ) -> None:
        self._store = store
        self._place = place
        self._progress = progress
        self._told_to_stop = told_to_stop
        self.facts: Callable[[], dict[str, Any]] = dict
        """Returns what the levers depend on."""
        self._seen = ""
        self._begin: ProfileBegin | None = None
        """What is to be recorded, or is; set by one thread, taken back by the other."""
        self._recording: Recording | None = None
        self._until = self._warm_ups = 0
        self._storing: threading.Thread | None = None
        self._closed = threading.Event()

    # ------------------------------------------------------------------ the reporting thread's

    def look(self) -> None:
        """Look for a request, or for the first rank's word on one. One request to the store.

        Raises:
            StoreError: the store cannot be asked.
        """
        if self._begin is not None or self._is_storing:
            return
        is_first = self._place.rank == 0
        attempt = self._place.attempt
        key = keys.profile_request(attempt) if is_first else keys.profile_begin(attempt)
        found = self._store.head(key)
        if found is None or found.etag == self._seen:
            return
        try:
            raw = get_small(self._store, key)
            begin = self._decided(raw) if is_first else ProfileBegin.from_json(raw)
        except (Refused, NotFound):
            begin, self._seen = None, found.etag
        if begin is None:
            return
        if is_first:
            self._store.put(keys.profile_begin(attempt), begin.to_json())
        self._seen = found.etag
        if not begin.problem:
            self._begin = begin

    def _decided(self, raw: bytes) -> ProfileBegin | None:
        """Return with which step all ranks begin; None as long as no step is under way."""
        asked = ProfileRequest.from_json(raw)
        finished, total, step_s = self._progress()
        place = self._place
        if total is None or self._told_to_stop() or (place.world_size > 1 and not step_s):
            return None  # a step tells how many there are until all ranks have heard
        heard_s = 0.0 if place.world_size == 1 else 1.5 * place.heartbeat_s + 1.0
        lead = 1 + _LEAD + math.ceil(heard_s / max(step_s, 1e-4))
        first = max(finished + 1 + _LEAD, min(finished + lead, total - asked.steps))
        steps = min(asked.steps, total - first)
        problem = ""
        if step_s > _LONGEST_STEP_S:
            problem = _TOO_LONG
        elif steps < 1:
            left = max(0, total - finished)
            problem = f"of {total} steps {left} {'is' if left == 1 else 'are'} left, too few"
        return ProfileBegin(
            number=asked.number,
            first_step=first,
            steps=asked.steps if problem else steps,
            problem=problem,
        )

    # ------------------------------------------------------------------ the loop's

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return what names in the trace what is done within it; costs nothing outside a profile.

        `name` is one of those in `events.profile`.
        """
        recording = self._recording
        if recording is None:
            return _NOTHING
        if name == DATA and recording.step_s > _LONGEST_STEP_S:
            with self._training_goes_on():
                self._cut(self._progress().finished, _TOO_LONG, within_step=True)
            return _NOTHING
        return recording.mark(name)

    def between_steps(self, finished: int) -> None:
        """Begin to record, or end it, where that is due; the loop is about to begin a step."""
        if self._begin is not None:
            with self._training_goes_on():
                self._go_on(self._begin, finished)

    def evaluation_begins(self, finished: int, *, within_step: bool) -> None:
        """End what is recorded: an evaluation has any number of operations.

        `within_step`: it comes in the body of a step that has begun.
        """
        begin, recording = self._begin, self._recording
        if begin is None or recording is None:
            return
        with self._training_goes_on():
            if self._warm_ups < _MOST_WARM_UPS and not self._has_whole_step(finished):
                self._recording = None
                self._begin = replace(begin, first_step=finished + 1 + _LEAD)
                recording.stop(within_step=True)
            else:
                told = "evaluations come too often: no whole step lies between two of them"
                self._cut(finished, told, within_step=within_step)

    def loop_ended(self, finished: int) -> None:
        """Keep what is recorded: no further step comes."""
        if self._begin is None or self._told_to_stop():
            return
        with self._training_goes_on():
            self._cut(finished, "the loop ended before its first step was recorded")

    def close(self, timeout_s: float) -> None:
        """Let the profiler go, and wait for what is being stored unless the job was told to stop.

        Python crashes at its end with a profiler that is on. Blocks `timeout_s` at most.
        """
        if self._told_to_stop():
            self._closed.set()
        with self._training_goes_on():
            self._drop()
        if self._storing is not None:
            self._storing.join(timeout_s)
            self._closed.set()
            self._storing.join(_PAUSE_S)

    def _training_goes_on(self) -> AbstractContextManager[None]:
        """Have nothing that fails within reach the loop; who asked is told."""
        begin, recording = self._begin, self._recording
        return _telling(lambda problem: self._fail(begin, self._recording or recording, problem))

    def _fail(self, begin: ProfileBegin | None, recording: Recording | None, problem: str) -> None:
        self._recording = self._begin = None
        self._warm_ups = 0
        if recording is not None:
            with contextlib.suppress(Exception):
                recording.stop()
        if begin is not None:
            self._answer(begin, problem)

    def _go_on(self, begin: ProfileBegin, finished: int) -> None:
        recording = self._recording
        if self._told_to_stop():
            self._drop()
        elif recording is None:
            if finished >= begin.first_step + begin.steps:  # this rank heard of it too late
                self._answer(begin, "this rank heard of it when the steps were over")
            elif finished >= begin.first_step - _LEAD:
                self._warm_up(begin)
        elif recording.is_unwanted:
            self._answer(begin, _ITSELF)
        elif recording.first is None and recording.is_on:
            self._end_warm_up(begin, recording, finished)
        elif recording.first is None:
            recording.begin(finished)
        elif finished >= self._until:
            self._keep(begin, recording, finished)
        else:
            recording.next_step()

    def _warm_up(self, begin: ProfileBegin) -> None:
        if script_profiles_itself():
            self._answer(begin, _ITSELF)
            return
        self._warm_ups += 1
        self._recording = Recording(
            with_trace=self._place.keeps_trace, give_way=lambda: self._give_way(begin)
        )

    def _give_way(self, begin: ProfileBegin) -> None:
        with self._training_goes_on():
            self._answer(begin, _ITSELF)

    def _end_warm_up(self, begin: ProfileBegin, recording: Recording, finished: int) -> None:
        size = recording.end_warm_up()
        if size > _MOST_RAW_BYTES:
            self._answer(begin, _too_large(size))
            return
        self._until = begin.first_step + begin.steps
        if size:
            self._until = min(self._until, finished + 1 + max(1, _MOST_BYTES // size))

    def _has_whole_step(self, finished: int) -> bool:
        recording = self._recording
        return recording is not None and recording.first is not None and finished > recording.first

    def _cut(self, finished: int, problem: str, *, within_step: bool = False) -> None:
        """Keep what is recorded, or answer why there is nothing."""
        begin, recording = self._begin, self._recording
        assert begin is not None
        if recording is not None and self._has_whole_step(finished):
            self._keep(begin, recording, finished, within_step=within_step)
        else:
            self._answer(begin, problem)

    def _drop(self, *, within_step: bool = False) -> None:
        recording, self._recording, self._begin = self._recording, None, None
        self._warm_ups = 0
        if recording is not None:
            recording.stop(within_step=within_step)

    # ------------------------------------------------------------------ what is kept

    def _keep(
        self,
        begin: ProfileBegin,
        recording: Recording,
        finished: int,
        *,
        within_step: bool = False,
    ) -> None:
        assert recording.first is not None
        self._drop(within_step=within_step)
        answer = self._answer_with(
            first_step=recording.first,
            steps=finished - recording.first,
            duration_s=recording.duration_s,
            cpu_s=recording.cpu_s,
            facts=self.facts(),
        )
        if self._place.rank == 0:
            log.info("profile %d: %d steps recorded", begin.number, answer.steps)
        self._store_later(begin.number, answer, recording)

    def _answer(self, begin: ProfileBegin, problem: str) -> None:
        self._drop()
        answer = self._answer_with(
            first_step=begin.first_step, steps=0, duration_s=0.0, cpu_s=0.0, problem=problem
        )
        self._store_later(begin.number, answer, None)

    def _answer_with(self, **recorded: Any) -> ProfileAnswer:
        """Return an answer of this rank, with what is true of it now."""
        place = self._place
        return ProfileAnswer(
            rank=place.rank,
            node=place.node,
            world_size=place.world_size,
            cores=cores(),
            load=load(),
            device=device_name(),
            trace_bytes=0,
            **recorded,
        )

    @property
    def _is_storing(self) -> bool:
        return self._storing is not None and self._storing.is_alive()

    def _store_later(self, number: int, answer: ProfileAnswer, recording: Recording | None) -> None:
        self._storing = threading.Thread(
            target=self._store_all,
            args=(number, answer, recording),
            name="spotguard-profile",
            daemon=True,
        )
        self._storing.start()

    def _store_all(self, number: int, answer: ProfileAnswer, recording: Recording | None) -> None:
        def answer_problem(problem: str) -> None:
            small = replace(answer, trace_bytes=0, problem=problem, facts={})
            self._put_answer(number, small)

        with _telling(answer_problem):
            self._store_recorded(number, answer, recording)

    def _store_recorded(
        self, number: int, answer: ProfileAnswer, recording: Recording | None
    ) -> None:
        if recording is not None and self._place.keeps_trace:
            trace, problem = self._trace_of(recording)
            if trace is None and not problem:
                return
            if trace is not None:
                key = keys.profile_trace(self._place.attempt, profile=number, rank=self._place.rank)
                with give_up_after(_UPLOAD_S):
                    self._store.put(key, trace)
            answer = replace(answer, trace_bytes=len(trace or b""), problem=problem)
        self._put_answer(number, answer)

    def _put_answer(self, number: int, answer: ProfileAnswer) -> None:
        if self._may_upload():
            key = keys.profile_answer(self._place.attempt, profile=number, rank=self._place.rank)
            with give_up_after(_UPLOAD_S):
                self._store.put(key, answer.to_json())

    def _trace_of(self, recording: Recording) -> tuple[bytes | None, str]:
        """Return the compressed trace, or why there is none; neither if the job is to stop."""
        with scratch("spotguard-profile-") as folder:
            raw, packed = folder / "trace.json", folder / "trace.json.gz"
            recording.write(raw)
            if raw.stat().st_size > _MOST_RAW_BYTES:
                return None, _too_large(raw.stat().st_size)
            with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                while chunk := source.read(_COPY_BYTES):
                    if self._closed.is_set() or self._told_to_stop():
                        return None, ""
                    target.write(chunk)
            size = packed.stat().st_size
            if size > MOST_TRACE_BYTES:
                return None, f"the trace has {size} bytes, and {MOST_TRACE_BYTES} is the most"
            return (packed.read_bytes() if self._may_upload() else None), ""

    def _may_upload(self) -> bool:
        """Wait until no rank of this node saves; False if the job is told to stop, or ends."""
        path = self._place.saving_file
        while not (self._closed.is_set() or self._told_to_stop()):
            if path is None or not is_saving(path):
                return True
            self._closed.wait(_PAUSE_S)
        return False


@contextlib.contextmanager
def _telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Have nothing that fails within go any further; `tell` hears of it, and may fail as well."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001 - torch, the disk: no profile is worth a job
        log.warning("the profile failed, and the training goes on: %s", problem)
        with contextlib.suppress(Exception):
            tell(f"{type(problem).__name__}: {problem}"[:_LONGEST_PROBLEM])


def _too_large(size: int) -> str:
    return f"the trace of so few steps has {size} bytes, and {_MOST_RAW_BYTES} is the most"
