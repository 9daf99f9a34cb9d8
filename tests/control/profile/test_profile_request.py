"""Asking a living job for a profile, one at a time, and giving up in a sentence."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.report.profile import profile_request
from spotguard.control.report.profile.profile_request import STALE_S, Asking, read_profile
from spotguard.control.report.profile.trace import unpack
from spotguard.errors import EnvironmentFailure, UsageError
from spotguard.events import keys
from spotguard.events.profile import ProfileBegin, ProfileRequest
from spotguard.events.states import RunState
from spotguard.testing import FakeClock, MemoryStore
from tests.cli import pictures
from tests.control.profile.test_costs import answer, event, step, trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.status.view import RunView
    from spotguard.storage.base import ObjectStore

ATTEMPT = 4
"""The one that lives in the picture."""


@dataclass
class Asked:
    """A command that asks; `happens` is what the world does before each of its looks."""

    happens: Callable[[int], None] = lambda _: None
    store: ObjectStore = field(default_factory=MemoryStore)
    clock: FakeClock = field(default_factory=FakeClock)
    picture: RunView = field(default_factory=pictures.run)
    looks: int = 0

    def ask(self, steps: int = 5) -> tuple[int, int]:
        """Ask the run in the picture."""
        asking = Asking(
            self.store,
            self._look,
            patience_s=60.0,
            tell=lambda _: None,
            clock=self.clock,
        )
        return asking.ask(steps)

    def _look(self) -> RunView:
        self.happens(self.looks)
        self.looks += 1
        return self.picture

    def is_asked(self) -> bool:
        """Return whether the request stands."""
        return self.store.head(keys.profile_request(ATTEMPT)) is not None


def respond(
    store: ObjectStore, *ranks: int, number: int = 1, world_size: int = 3, attempt: int = ATTEMPT
) -> None:
    """Have ranks answer, with a trace each."""
    for rank in ranks:
        packed = gzip.compress(trace(step(), event("aten::mm", 0, 50 + rank)))
        place = {"profile": number, "rank": rank}
        store.put(keys.profile_trace(attempt, **place), packed)
        told = answer(rank, trace_bytes=len(packed), world_size=world_size)
        store.put(keys.profile_answer(attempt, **place), told.to_json())


def begin(store: ObjectStore, first_step: int = 9, problem: str = "") -> None:
    """Have the first rank say with which step all begin."""
    word = ProfileBegin(number=1, first_step=first_step, steps=5, problem=problem)
    store.put(keys.profile_begin(ATTEMPT), word.to_json())


def test_it_waits_for_all_ranks_and_takes_the_request_back() -> None:
    """What they stored is told, of the first rank where they are even."""
    asked = Asked()
    asked.happens = lambda look: respond(asked.store, *range(min(look, 3)))
    assert asked.ask() == (ATTEMPT, 1)
    assert not asked.is_asked()
    told, raw = read_profile("r", asked.store, ATTEMPT)
    assert (told.number, told.rank, len(told.ranks)) == (1, 0, 3)
    assert raw == trace(step(), event("aten::mm", 0, 50))
    assert read_profile("r", asked.store, ATTEMPT, rank=2)[0].rank == 2
    with pytest.raises(UsageError, match="--rank 9"):
        read_profile("r", asked.store, ATTEMPT, rank=9)


def test_a_rank_that_never_answers_is_not_waited_for() -> None:
    """The first one's answer tells how many there are; some seconds later it is enough."""
    asked = Asked()
    asked.happens = lambda look: respond(asked.store, 0) if look else None
    asked.ask()
    assert sum(asked.clock.slept) < 20


def test_two_at_once() -> None:
    """The second is refused as long as the first may be alive, by its own instant."""
    first = Asked()
    body = ProfileRequest(number=1, steps=5, asked_at=first.clock.now())
    first.store.put(keys.profile_request(ATTEMPT), body.to_json())
    with pytest.raises(UsageError, match="under way"):
        first.ask()
    assert first.is_asked()  # the other's
    first.clock.advance(STALE_S)
    first.happens = lambda look: respond(first.store, 0, world_size=1) if look > 1 else None
    assert first.ask() == (ATTEMPT, 1)


def test_one_that_is_answered_and_not_taken_back_stands_in_nobodys_way() -> None:
    """Its command was killed a moment ago; the next profile has the next number."""
    asked = Asked()
    body = ProfileRequest(number=1, steps=5, asked_at=asked.clock.now())
    asked.store.put(keys.profile_request(ATTEMPT), body.to_json())
    respond(asked.store, 0)
    asked.happens = lambda look: respond(asked.store, 0, number=2, world_size=1) if look else None
    assert asked.ask() == (ATTEMPT, 2)


def test_a_run_at_rest() -> None:
    """No step comes; what is kept is named."""
    asked = Asked(picture=pictures.run(state=RunState.STOPPED))
    with pytest.raises(UsageError, match="stopped") as problem:
        asked.ask()
    assert "--attempt 4" in problem.value.hint
    assert not asked.is_asked()
    with pytest.raises(UsageError, match="launching"):
        Asked(picture=pictures.run(state=RunState.LAUNCHING, attempts=())).ask()


def test_a_job_that_takes_no_step() -> None:
    """The patience is over, and the request is taken back; a long step has more of it."""
    asked = Asked()
    with pytest.raises(EnvironmentFailure, match="took no step for 1 min"):
        asked.ask()
    assert not asked.is_asked()
    slow = Asked(picture=pictures.run(step_s=100.0))
    slow.happens = lambda look: respond(slow.store, 0, world_size=1) if look > 200 else None
    slow.ask()


def test_a_stop_goes_first() -> None:
    """The attempt ends before anything is stored: its reason is told."""
    asked = Asked()
    ended = replace(asked.picture.attempts[-1], ended_at=1.0, end_detail="preempted by aws")

    def end(look: int) -> None:
        if look == 3:
            attempts = (*asked.picture.attempts[:-1], ended)
            asked.picture = replace(asked.picture, attempts=attempts)

    asked.happens = end
    with pytest.raises(EnvironmentFailure, match=r"stored \(preempted by aws\)"):
        asked.ask()
    assert not asked.is_asked()


def test_what_the_first_rank_refuses() -> None:
    """Too few steps are left: the job says so itself."""
    asked = Asked()
    asked.happens = lambda look: begin(asked.store, problem="too few are left") if look else None
    with pytest.raises(EnvironmentFailure, match="too few"):
        asked.ask()
    asked.looks = 0
    asked.happens = lambda look: respond(asked.store, 0, number=2, world_size=1) if look else None
    assert asked.ask() == (ATTEMPT, 2)  # what was refused once is not refused for good


@pytest.mark.parametrize("hears", [True, False])
def test_a_job_that_trains_and_never_answers(hears: bool) -> None:
    """A job of an older spotguard says nothing at all; one may also fail once it has recorded."""
    asked = Asked()

    def train(look: int) -> None:
        assert look < 1000, "waits for ever"
        asked.picture = replace(asked.picture, step=look)
        if hears and look == 1:
            begin(asked.store, first_step=300)

    asked.happens = train
    with pytest.raises(EnvironmentFailure):
        asked.ask()
    assert sum(asked.clock.slept) > (150 + 60 if hears else 60)  # steps on the way there count
    assert not asked.is_asked()


def test_traces_are_unpacked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have hundreds of megabytes."""
    store = MemoryStore()
    respond(store, *range(4))
    held = [0]
    most = []

    class Unpacked(bytes):
        def __del__(self) -> None:
            held[0] -= 1

    def unpack_one(packed: bytes) -> bytes:
        held[0] += 1
        most.append(held[0])
        return Unpacked(unpack(packed))

    monkeypatch.setattr(profile_request, "unpack", unpack_one)
    read_profile("r", store, ATTEMPT)
    assert max(most) == 1


def test_what_is_kept_and_cannot_be_used() -> None:
    """Nothing, no trace, or a damaged one: each in a sentence."""
    store = MemoryStore()
    with pytest.raises(UsageError, match="has no profile"):
        read_profile("r", store, ATTEMPT)
    key = keys.profile_answer(ATTEMPT, profile=1, rank=0)
    store.put(key, answer(0, trace_bytes=0, problem="the loop ended").to_json())
    with pytest.raises(EnvironmentFailure, match="the loop ended"):
        read_profile("r", store, ATTEMPT)
    respond(store, 0, number=2)
    assert read_profile("r", store, ATTEMPT)[0].number == 2
    store.put(keys.profile_trace(ATTEMPT, profile=2, rank=0), b"rubbish")
    with pytest.raises(EnvironmentFailure, match="damaged"):
        read_profile("r", store, ATTEMPT)
    store.put(key, b"rubbish")
    with pytest.raises(EnvironmentFailure, match="makes no sense"):
        read_profile("r", store, ATTEMPT, number=1)
