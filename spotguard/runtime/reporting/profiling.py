"""A profile of some steps, for who asks for it through the run store.

The thread that reports looks for the request; the first rank decides with which step all begin. The
loop's thread starts and stops torch's profiler between two steps, after one step of warm-up, which
also tells how large a trace becomes. A thread of its own stores the trace; it waits for saves, and
a word to stop ends all of it. Nothing here draws a random number or touches a tensor.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import math
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from spotguard.errors import NotFound, StoreError
from spotguard.events import keys
from spotguard.events.profile import (
    MOST_TRACE_BYTES,
    ProfileAnswer,
    ProfileBegin,
    ProfileRequest,
)
from spotguard.events.untrusted import Refused
from spotguard.runtime.reporting.recording import (
    Recording,
    cores,
    device_name,
    load,
    profiles_itself,
)
from spotguard.shared.right_of_way import is_saving
from spotguard.storage.deadline import give_up_after
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

MOST_RANKS_WITH_TRACES: Final = 16
"""In larger jobs the first rank of each node keeps its trace, and no other."""
_MOST_BYTES = 48 << 20
"""Of a trace before it is compressed: some 170 000 operations."""
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
        self._until = 0
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
        lead = 2 + math.ceil(heard_s / max(step_s, 1e-4))
        first = max(finished + 2, min(finished + lead, total - asked.steps))
        steps = min(asked.steps, total - first)
        if steps < 1:
            left = max(0, total - finished)
            problem = f"of {total} steps {left} {'is' if left == 1 else 'are'} left, too few"
            return ProfileBegin(
                number=asked.number, first_step=first, steps=asked.steps, problem=problem
            )
        return ProfileBegin(number=asked.number, first_step=first, steps=steps)

    # ------------------------------------------------------------------ the loop's

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return what names in the trace what is done within it; costs nothing outside a profile.

        `name` is one of those in `events.profile`.
        """
        recording = self._recording
        return _NOTHING if recording is None else recording.mark(name)

    def between_steps(self, finished: int) -> None:
        """Begin to record, or end it, where that is due; the loop is about to begin a step."""
        if self._begin is not None:
            self._go_on(self._begin, finished)

    def _go_on(self, begin: ProfileBegin, finished: int) -> None:
        recording = self._recording
        if self._told_to_stop():
            self._drop()
        elif recording is None:
            if finished >= begin.first_step + begin.steps:  # this rank heard of it too late
                self._answer(begin, "this rank heard of it when the steps were over")
            elif finished >= begin.first_step - 1:
                self._warm_up(begin)
        elif recording.first is None:
            most = recording.end_warm_up(_MOST_BYTES)
            self._until = min(begin.first_step + begin.steps, finished + most)
            recording.begin(finished)
        elif finished >= self._until:
            self._keep(begin, finished)
        else:
            recording.next_step()

    def _warm_up(self, begin: ProfileBegin) -> None:
        if profiles_itself():
            self._answer(begin, "the script profiles itself with torch.profiler at this moment")
            return
        self._recording = Recording(with_trace=self._place.keeps_trace)

    def loop_ended(self, finished: int) -> None:
        """Keep what is recorded: no further step comes."""
        begin, recording = self._begin, self._recording
        if begin is None or self._told_to_stop():
            return
        if recording is not None and recording.first is not None and finished > recording.first:
            self._keep(begin, finished)
        else:
            self._answer(begin, "the loop ended before its first step was recorded")

    def close(self, timeout_s: float) -> None:
        """Let the profiler go, and wait for what is being stored unless the job was told to stop.

        Python crashes at its end with a profiler that is on. Blocks `timeout_s` at most.
        """
        if self._told_to_stop():
            self._closed.set()
        self._drop()
        if self._storing is not None:
            self._storing.join(timeout_s)
            self._closed.set()
            self._storing.join(_PAUSE_S)

    def _drop(self) -> None:
        recording, self._recording, self._begin = self._recording, None, None
        if recording is not None:
            recording.stop()

    # ------------------------------------------------------------------ what is kept

    def _keep(self, begin: ProfileBegin, finished: int) -> None:
        recording = self._recording
        assert recording is not None
        assert recording.first is not None
        recording.stop()
        place = self._place
        answer = ProfileAnswer(
            rank=place.rank,
            node=place.node,
            world_size=place.world_size,
            first_step=recording.first,
            steps=finished - recording.first,
            duration_s=recording.duration_s,
            cpu_s=recording.cpu_s,
            cores=cores(),
            load=load(),
            device=device_name(),
            trace_bytes=0,
            facts=self.facts(),
        )
        if place.rank == 0:
            log.info("profile %d: %d steps recorded", begin.number, answer.steps)
        self._store_later(begin.number, answer, recording)
        self._recording = self._begin = None

    def _answer(self, begin: ProfileBegin, problem: str) -> None:
        place = self._place
        answer = ProfileAnswer(
            rank=place.rank,
            node=place.node,
            world_size=place.world_size,
            first_step=begin.first_step,
            steps=0,
            duration_s=0.0,
            cpu_s=0.0,
            cores=cores(),
            load=load(),
            device=device_name(),
            trace_bytes=0,
            problem=problem,
        )
        self._drop()
        self._store_later(begin.number, answer, None)

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
        attempt, rank = self._place.attempt, self._place.rank
        try:
            if recording is not None and self._place.keeps_trace:
                trace, problem = self._trace_of(recording)
                if trace is None and not problem:
                    return
                if trace is not None:
                    with give_up_after(_UPLOAD_S):
                        key = keys.profile_trace(attempt, profile=number, rank=rank)
                        self._store.put(key, trace)
                answer = replace(answer, trace_bytes=len(trace or b""), problem=problem)
            if self._may_upload():
                with give_up_after(_UPLOAD_S):
                    key = keys.profile_answer(attempt, profile=number, rank=rank)
                    self._store.put(key, answer.to_json())
        except (StoreError, OSError) as problem:
            log.warning("the profile could not be stored: %s", problem)

    def _trace_of(self, recording: Recording) -> tuple[bytes | None, str]:
        """Return the compressed trace, or why there is none; neither if the job is to stop."""
        with tempfile.TemporaryDirectory(prefix="spotguard-profile-") as folder:
            raw, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
            recording.write(raw)
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
