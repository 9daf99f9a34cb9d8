"""Asks a living job for a profile through its store, and reads what it left. Blocks.

Who asks does not need to control the run: whoever may write into its store may ask.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from spotguard.control.report.profile.document import make_profile
from spotguard.control.report.profile.trace import unpack
from spotguard.errors import AlreadyExists, EnvironmentFailure, NotFound, StoreError, UsageError
from spotguard.events import keys
from spotguard.events.profile import (
    MOST_PROFILES,
    MOST_TRACE_BYTES,
    ProfileAnswer,
    ProfileBegin,
    ProfileRequest,
)
from spotguard.events.untrusted import Refused
from spotguard.shared.units import SystemClock, format_duration
from spotguard.storage.small_objects import get_small
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.report.profile.document import ProfileDocument
    from spotguard.control.status.view import RunView
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

STALE_S: Final = 600.0
"""A request that nobody took back, and nobody answered, counts for nothing after so long."""
_LOOK_S, _LOOK_AT_BUCKET_S = 0.5, 2.0
"""Each look at a bucket costs money."""
_MOST_RANKS = 64
"""Answers that are read; of larger jobs the first ranks' say enough."""
_STRAGGLERS_S = 15.0
"""How long the other ranks' answers are waited for, once the first rank's is there."""


class Asking:
    """One profile of a run: asks, waits, and takes the request back."""

    def __init__(
        self,
        store: ObjectStore,
        look: Callable[[], RunView],
        *,
        patience_s: float,
        tell: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        """Prepare to ask.

        Args:
            store: the run's own.
            look: returns how the run stands now.
            patience_s: how long nothing new may come: no step while steps are recorded, no word
                of the job's else.
            tell: hears what is waited for.
            clock: to wait by, and for the request's instant; this machine's unless given.
        """
        self._store = store
        self._look = look
        self._clock = clock or SystemClock()
        self._poll_s = _LOOK_S if is_folder(store.url) else _LOOK_AT_BUCKET_S
        self._patience_s = patience_s
        self._tell = tell

    def ask(self, steps: int) -> tuple[int, int]:
        """Have some steps recorded; return the attempt and the profile's number.

        Raises:
            UsageError: the run is at rest, or another profile of it is under way.
            EnvironmentFailure: the attempt ended first, took no step, or has too few left.
        """
        view = self._look()
        attempt = _living_attempt(view)
        number, etag = self._wish(attempt, steps)
        self._tell(f"attempt {attempt} is asked for a profile of {steps} steps ...")
        try:
            self._wait(attempt, number)
        finally:
            with contextlib.suppress(StoreError):
                found = self._store.head(keys.profile_request(attempt))
                if found is not None and found.etag == etag:
                    self._store.delete(found.key)
        return attempt, number

    def _wish(self, attempt: int, steps: int) -> tuple[int, str]:
        """Write the request; return its number and its etag."""
        key = keys.profile_request(attempt)
        found = self._store.head(key)
        if found is not None:
            self._refuse_second(attempt, key)
        begin = self._newest_beginning(attempt)
        used = {*_numbers(self._store, attempt), begin.number if begin is not None else 0}
        number = max(used) + 1
        if number > MOST_PROFILES:
            raise UsageError("this attempt has too many profiles")
        asked = ProfileRequest(number=number, steps=steps, asked_at=self._clock.now())
        try:
            if found is None:
                etag = self._store.put(key, asked.to_json(), if_absent=True)
            else:
                etag = self._store.put(key, asked.to_json(), if_match=found.etag)
        except AlreadyExists:
            raise _second(attempt) from None
        return number, etag

    def _refuse_second(self, attempt: int, key: str) -> None:
        try:
            asked = ProfileRequest.from_json(get_small(self._store, key))
        except (Refused, NotFound):
            return
        if asked.number in _numbers(self._store, attempt):
            return  # answered, and only not taken back
        if self._clock.now() - asked.asked_at < STALE_S:
            raise _second(attempt)

    def _wait(self, attempt: int, number: int) -> None:
        """Return once the ranks have answered, or the first of them long ago."""
        seen: object = None
        heard_at = self._clock.monotonic()
        answered_at: float | None = None
        first_step: int | None = None
        while True:
            now = self._clock.monotonic()
            answers = _answered_ranks(self._store, attempt, number)
            if 0 in answers:
                answered_at = answered_at if answered_at is not None else now
                expected = read_answer(self._store, attempt, number, 0).world_size
                is_late = now - answered_at > _STRAGGLERS_S
                if len(answers) >= min(expected, _MOST_RANKS) or is_late:
                    return
            view = self._look()
            begin = self._beginning(attempt, number)
            if not answers:
                _refuse_end(view, attempt)
            first_step = view.step if first_step is None else first_step
            word = (_recorded_until(begin, view), begin is not None, len(answers))
            if word != seen:
                seen, heard_at = word, now
            patience_s = max(self._patience_s, 5.0 * (view.step_s or 0.0))
            if now - heard_at > patience_s:
                raise _silence(view, patience_s, trains=view.step != first_step)
            self._clock.sleep(self._poll_s)

    def _beginning(self, attempt: int, number: int) -> ProfileBegin | None:
        """Return with which step the ranks begin, once the first one has said so.

        Raises:
            EnvironmentFailure: it has said that nothing is recorded.
        """
        begin = self._newest_beginning(attempt)
        if begin is None or begin.number != number:
            return None
        if begin.problem:
            raise EnvironmentFailure(f"Nothing can be profiled: {begin.problem}.")
        return begin

    def _newest_beginning(self, attempt: int) -> ProfileBegin | None:
        try:
            return ProfileBegin.from_json(get_small(self._store, keys.profile_begin(attempt)))
        except (NotFound, Refused):
            return None


def _recorded_until(begin: ProfileBegin | None, view: RunView) -> int | None:
    """Return how far the job is on its way to the end of the recording: no later step is news."""
    if begin is None or view.step is None:
        return None
    return min(view.step, begin.first_step + begin.steps)


def _silence(view: RunView, patience_s: float, *, trains: bool) -> EnvironmentFailure:
    """Return what ends the waiting: the job does not train, or does not answer."""
    waited = format_duration(patience_s)
    if trains:
        return EnvironmentFailure(
            f"{view.run_id} trains, at step {view.step or 0}, and left no profile for {waited}.",
            hint="a job that was launched by an older spotguard knows of no profiles; what became "
            f"of it otherwise: spotguard logs {view.run_id}",
        )
    return EnvironmentFailure(
        f"{view.run_id} took no step for {waited}, so there is nothing to profile: it is "
        f"{view.state.label} at step {view.step or 0}.",
        hint="a step that takes longer: --patience 30m; "
        f"what it does: spotguard logs {view.run_id}",
    )


def _living_attempt(view: RunView) -> int:
    if view.state.settled or not view.attempts:
        kept = [each.attempt for each in view.attempts]
        hint = f"what is kept of its attempts: --attempt {kept[-1]}" if kept else ""
        raise UsageError(
            f"{view.run_id} is {view.state.label}, so no step can be profiled.", hint=hint
        )
    return view.attempts[-1].attempt


def _refuse_end(view: RunView, attempt: int) -> None:
    """Raise if the attempt that was asked has ended: a stop goes before a profile."""
    own = next((each for each in view.attempts if each.attempt == attempt), None)
    over = own is None or own.ended_at is not None or view.attempts[-1].attempt != attempt
    if over or view.state.settled:
        why = own.end_detail if own is not None and own.end_detail else view.state.label
        raise EnvironmentFailure(
            f"Attempt {attempt} of {view.run_id} ended before its profile was stored ({why}).",
            hint="ask again once the next attempt trains",
        )


def _second(attempt: int) -> UsageError:
    return UsageError(
        f"Another profile of attempt {attempt} is under way.",
        hint="wait for it; one whose command was killed is forgotten after "
        f"{format_duration(STALE_S)}",
    )


def read_profile(
    run_id: str,
    store: ObjectStore,
    attempt: int,
    *,
    number: int | None = None,
    rank: int | None = None,
    raw: bool = True,
) -> tuple[ProfileDocument, bytes | None]:
    """Return what a kept profile tells, and the trace of the rank of which it tells.

    Args:
        run_id: the run.
        store: the run's own.
        attempt: whose profile.
        number: of the profile; None is the newest with a trace.
        rank: whose time; None: the slowest, or the first if ranks are even.
        raw: fetch the trace itself, too, once more: only one is held at a time.

    Raises:
        UsageError: there is none, or none of that rank.
        EnvironmentFailure: what is there cannot be used.
    """
    numbers = sorted(_numbers(store, attempt)) if number is None else [number]
    if not numbers:
        raise UsageError(
            f"Attempt {attempt} of {run_id} has no profile.",
            hint=f"while it trains: spotguard profile {run_id}",
        )
    for each in reversed(numbers):
        answers = _answers(store, attempt, each)
        with_trace = [answer.rank for answer in answers if answer.trace_bytes]
        if with_trace or each == numbers[0]:
            break
    if not with_trace:
        problem = next((answer.problem for answer in answers if answer.problem), "no trace is kept")
        raise EnvironmentFailure(f"Profile {each} of attempt {attempt} tells nothing: {problem}.")
    if rank is not None and rank not in with_trace:
        raise UsageError(
            f"--rank {rank}: no trace of it is kept",
            hint=f"there are those of {', '.join(map(str, with_trace))}",
        )
    places = {
        key_rank: keys.profile_trace(attempt, profile=each, rank=key_rank)
        for key_rank in with_trace
    }

    def trace_of(key_rank: int) -> bytes:
        return unpack(get_small(store, places[key_rank], most_bytes=MOST_TRACE_BYTES))

    try:
        told = make_profile(run_id, attempt, each, answers, trace_of, rank=rank, trace_key=places)
        return told, trace_of(told.rank) if raw else None
    except Refused as problem:
        raise EnvironmentFailure(
            f"Profile {each} of attempt {attempt} cannot be read: {problem}."
        ) from None


def read_answer(store: ObjectStore, attempt: int, number: int, rank: int) -> ProfileAnswer:
    """Return what a rank answered.

    Raises:
        EnvironmentFailure: it makes no sense.
    """
    key = keys.profile_answer(attempt, profile=number, rank=rank)
    try:
        return ProfileAnswer.from_json(get_small(store, key))
    except Refused as problem:
        raise EnvironmentFailure(f"{key} makes no sense: {problem}.") from None


def _answers(store: ObjectStore, attempt: int, number: int) -> list[ProfileAnswer]:
    ranks = sorted(_answered_ranks(store, attempt, number))[:_MOST_RANKS]
    return [read_answer(store, attempt, number, rank) for rank in ranks]


def _answered_ranks(store: ObjectStore, attempt: int, number: int) -> set[int]:
    prefix = f"{keys.profiles(attempt)}{number:06d}/"
    found = (keys.parse_profile_answer(info.key) for info in store.list(prefix))
    return {pair[1] for pair in found if pair is not None}


def _numbers(store: ObjectStore, attempt: int) -> set[int]:
    """Return the numbers of an attempt's profiles of which anything is there."""
    folders = store.list_folders(keys.profiles(attempt))
    names = (folder.rstrip("/").rpartition("/")[2] for folder in folders)
    return {int(name) for name in names if name.isdigit() and len(name) == 6}
