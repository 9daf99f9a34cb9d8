from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.events.states import EndReason
from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.preemption import stop_consensus
from spotguard.runtime.preemption.stop_consensus import (
    BEFORE_LOOP,
    StopGate,
    StopRequest,
    StopWatch,
)
from spotguard.testing import FakeClock, FakeRendezvous
from spotguard.testing.coordination import FakeCoordinator

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 10.0  # of a test; nothing ever takes this long unless it hangs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchers look every millisecond instead of every fifty."""
    monkeypatch.setattr(stop_consensus, "_POLL_S", 0.001)


def request(reason: EndReason = EndReason.TERMINATED, **over: Any) -> StopRequest:
    """Return a request that nobody is in a hurry for."""
    return StopRequest(reason=reason, message="a test", **over)


@dataclass
class Member:
    """One rank: a training thread that meets the others at each step, and a watcher."""

    rank: int
    words: FakeRendezvous
    barrier: threading.Barrier
    total: int
    rng: random.Random
    ask_at: dict[int, StopRequest] = field(default_factory=dict)
    evaluations: dict[int, int] = field(default_factory=dict)
    """Steps before which the ranks evaluate, and how many batches."""
    ask_in_evaluation: dict[int, StopRequest] = field(default_factory=dict)
    """Batches of an evaluation at which it is told to stop."""
    stop_after: int | None = None
    left_at: tuple[int, int] | None = None
    """Steps finished, and batches of an evaluation after them."""
    problem: BaseException | None = None

    def __post_init__(self) -> None:
        self.gate = StopGate()
        self.watch = StopWatch(
            gate=self.gate,
            coordinator=self.words.rank(self.rank),
            rank=self.rank,
            world_size=self.barrier.parties,
            reserve_s=lambda: 0.0,
            on_agreed=self._agreed,
            agree_timeout_s=PATIENCE_S,
        )
        self.thread = threading.Thread(target=self._train)

    def _agreed(self, _: StopRequest, stop_after: int) -> None:
        self.stop_after = stop_after

    def _train(self) -> None:
        finished = 0
        pace_s = self.rng.choice([0, 0, 0.0002, 0.001])

        def collective() -> None:
            time.sleep(self.rng.random() * pace_s)
            self.barrier.wait(PATIENCE_S)  # all ranks or nobody

        if not self.gate.start(finished):
            self.left_at = (finished, 0)
            return
        try:
            while finished < self.total and self.gate.passes(finished):
                for batch in range(self.evaluations.get(finished, 0)):
                    if batch in self.ask_in_evaluation:
                        self.watch.request(self.ask_in_evaluation[batch])
                    if not self.gate.enter_evaluation(finished, batch):
                        self.left_at = (finished, batch)
                        return
                    collective()
                if finished in self.ask_at:
                    self.watch.request(self.ask_at[finished])
                if not self.gate.enter(finished):
                    break
                collective()
                finished += 1
        except threading.BrokenBarrierError as problem:
            self.problem = problem
        self.left_at = (finished, 0)


def team(seed: int) -> list[Member]:
    """Return ranks of random number, speed and notice times, whose words are randomly late."""
    rng = random.Random(seed)
    world = rng.randint(2, 4)
    late = random.Random(seed + 1)

    def delay(*_: object) -> None:
        if late.random() < 0.1:
            time.sleep(late.random() * 0.002)

    words = FakeRendezvous(before=delay)
    barrier = threading.Barrier(world)
    total = rng.randint(3, 25)
    evaluations = {rng.randrange(total): rng.randint(1, 6) for _ in range(rng.randint(0, 3))}
    members = [
        Member(
            rank,
            words,
            barrier,
            total,
            random.Random(rng.random()),
            evaluations=evaluations,
        )
        for rank in range(world)
    ]
    at = rng.randrange(total)
    for member in rng.sample(members, rng.randint(1, world)):
        when = min(max(at + rng.choice([0, 0, 0, -1, 1, 2]), 0), total - 1)
        asked = request(rng.choice([EndReason.TERMINATED, EndReason.PREEMPTED]))
        if rng.random() < 0.5:
            member.ask_at[when] = asked
        else:
            member.ask_in_evaluation[rng.randrange(4)] = asked
            evaluations[when] = max(evaluations.get(when, 0), 4)
    return members


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_all_ranks_leave_at_the_same_step(block: int) -> None:
    """In 1000 random teams: whoever is told, whenever, all leave at one place, and nobody hangs.

    Ranks are up to a step or a batch of an evaluation apart, and the requests of several may cross.
    """
    for seed in range(block * 125, block * 125 + 125):
        members = team(seed)
        for member in members:
            member.watch.start()
        for member in members:
            member.thread.start()
        for member in members:
            member.thread.join(PATIENCE_S)
            member.watch._thread.join(PATIENCE_S)

        assert [m.problem for m in members] == [None] * len(members), f"seed {seed} hung"
        assert len({m.left_at for m in members}) == 1, f"seed {seed} parted"
        assert {m.stop_after for m in members} == {(members[0].left_at or (0,))[0]}, f"seed {seed}"
        agreed = {m.watch.agreed for m in members}
        assert len(agreed) == 1, f"seed {seed}: {agreed}"
        assert not next(iter(agreed)).solo  # type: ignore[union-attr]


def watch_of(
    gate: StopGate, words: Any, *, rank: int = 0, world: int = 1, **over: Any
) -> tuple[StopWatch, list[tuple[StopRequest, int]]]:
    """Return a watch, and the agreements that it comes to."""
    told: list[tuple[StopRequest, int]] = []
    arguments: dict[str, Any] = {"reserve_s": lambda: 0.0, "agree_timeout_s": 0.02}
    watch = StopWatch(
        gate=gate, coordinator=words, rank=rank, world_size=world,
        on_agreed=lambda r, s: told.append((r, s)), **(arguments | over),
    )  # fmt: skip
    return watch, told


def settle(watch: StopWatch) -> None:
    """Let a watch run to its agreement."""
    watch.start()
    watch._thread.join(PATIENCE_S)
    assert not watch._thread.is_alive()


@pytest.mark.parametrize("how", ["silent", "muted", "lost"])
def test_a_silent_peer_costs_a_bounded_time(how: str) -> None:
    """A frozen node, one that cannot be heard, or a dead rendezvous: this rank goes on its own."""
    words = FakeRendezvous()
    gate = StopGate()
    gate.start(6)
    assert gate.enter(6)
    if how == "muted":
        words.mute(1)
        words.rank(1).set("stop/entered/1", "[9, 0]")
    watch, told = watch_of(gate, words.rank(0), world=2)
    watch.request(request())
    if how == "lost":
        words.lose(0)
        watch._coordinator = NeverFails(words.rank(0))  # type: ignore[assignment]
    started = time.monotonic()
    settle(watch)

    [(agreed, stop_after)] = told
    assert agreed.solo
    assert stop_after == 7, "the step that it is in: without the others no further one can end"
    assert not gate.enter(7)
    assert time.monotonic() - started < 5


def test_who_has_lost_a_peer_asks_nobody() -> None:
    """The loop is closed where it is, at once, though the rendezvous is as dead as the peer."""
    words = FakeRendezvous()
    gate = StopGate()
    gate.start(6)
    assert gate.enter(6)
    watch, told = watch_of(gate, words.rank(0), world=2)
    words.lose(0)
    assert watch.stop_alone(request(EndReason.NODE_LOST))

    [(agreed, stop_after)] = told
    assert (agreed.reason, agreed.solo, stop_after) == (EndReason.NODE_LOST, True, 7)
    assert watch.agreed == agreed
    assert not gate.enter(7)
    watch.request(request())
    settle(watch)
    assert len(told) == 1, "a stop is agreed once"


def test_a_loss_does_not_overrule_what_was_agreed() -> None:
    """The peers leave after an agreement, too: that is no loss, and the reason stays."""
    gate = StopGate()
    watch, told = watch_of(gate, FakeRendezvous().rank(0), world=1)
    watch.request(request())
    settle(watch)
    assert not watch.stop_alone(request(EndReason.NODE_LOST))
    assert [agreed.reason for agreed, _ in told] == [EndReason.TERMINATED]


class NeverFails:
    """A coordinator that can be connected to, though contact is lost by then."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def connect(self) -> Any:
        """Return the connection that fails at each use."""
        return self.inner


def test_contact_lost_without_a_request_is_no_reason_to_stop() -> None:
    """A rendezvous that is gone is found by the collectives; until then training goes on."""
    words = FakeRendezvous()
    gate = StopGate()
    watch, told = watch_of(gate, words.rank(0), world=2)
    connection = words.rank(0)
    words.lose(0)

    assert watch._due(connection) is None
    assert told == []
    assert gate.enter(3)
    watch.request(request())
    own = watch._due(connection)
    assert own is not None
    assert own.solo, "its own request still counts"


def test_contact_lost_in_the_middle_of_the_agreement() -> None:
    """The rendezvous dies between two words: nobody waits on, this rank saves by itself."""
    words = FakeRendezvous()

    def die(rank: int, operation: str, key: str) -> None:
        if (operation, key) == ("get", "stop/entered/1"):
            words.lose(rank)

    words.before = die
    gate = StopGate()
    gate.start(2)
    watch, told = watch_of(gate, words.rank(0), world=2, agree_timeout_s=PATIENCE_S)
    watch.request(request())
    settle(watch)

    assert told[0][0].solo
    assert told[0][1] == 2


def test_the_request_of_one_rank_reaches_all() -> None:
    """Ranks that heard nothing themselves take over reason, deadline and time of warning."""
    words = FakeRendezvous()
    asked = request(EndReason.PREEMPTED, deadline_at=time.time() + 0.5)
    watches = []
    for rank in range(3):
        gate = StopGate()
        gate.start(4 + rank % 2)
        watches.append(
            (
                gate,
                *watch_of(
                    gate,
                    words.rank(rank),
                    rank=rank,
                    world=3,
                    agree_timeout_s=5.0,
                    reserve_s=lambda: 60.0,
                ),
            )
        )
    watches[2][1].request(asked)
    for _, watch, _ in watches:
        watch.start()
    for gate, watch, told in watches:
        watch._thread.join(PATIENCE_S)
        [(agreed, stop_after)] = told
        assert (agreed.reason, agreed.deadline_at) == (asked.reason, asked.deadline_at)
        assert agreed.warned_at == pytest.approx(time.time(), abs=60)
        assert stop_after == 5
        assert not gate.enter(5)


@pytest.mark.parametrize("asks", [True, False])
def test_no_rank_is_patient_while_it_holds_the_loop(*, asks: bool) -> None:
    """Whoever has asked: an answer that takes 30 seconds is lost contact, and the loop goes on."""
    words = FakeRendezvous()
    words.words["stop/entered/1"] = "[0, 0]"
    if not asks:
        words.words["stop/request"] = request().to_json()
    told: list[float] = []

    class Told(FakeCoordinator):
        def hurry(self, patience_s: float) -> None:
            told.append(patience_s)

    watch, _ = watch_of(StopGate(), NeverFails(Told(words, 0)), world=2, agree_timeout_s=0.5)
    if asks:
        watch.request(request())
    settle(watch)
    assert told[-1] == 0.5


def test_a_rank_behind_trains_up_to_the_stop() -> None:
    """The stop lies after the rank that is furthest; the others finish that step with it."""
    words = FakeRendezvous()
    words.rank(1).set("stop/entered/1", "[8, 0]")
    gate = StopGate()
    gate.start(7)
    assert gate.agree(words.rank(0), 0, 2, 1.0) == (8, True)

    assert gate.enter(7)
    assert not gate.enter(8)


def test_a_rank_in_set_up_joins_the_loop_that_others_are_in() -> None:
    """They need it for the step that they are in: it trains up to the stop, as one behind does."""
    words = FakeRendezvous()
    words.rank(1).set("stop/entered/1", "[8, 0]")
    gate = StopGate()
    assert gate.agree(words.rank(0), 0, 2, 1.0) == (8, True)

    assert gate.start(7)
    assert gate.enter(7)
    assert not gate.enter(8)


@pytest.mark.parametrize("how", ["all in set-up", "the other one is silent", "it is gone"])
def test_no_loop_begins_after_a_stop_in_set_up(how: str) -> None:
    """Nobody trains, as far as this rank knows: it leaves at once, and begins no more."""
    words = FakeRendezvous()
    gate = StopGate()
    if how == "it is gone":
        assert gate.close() == BEFORE_LOOP
    else:
        if how == "all in set-up":
            words.rank(1).set("stop/entered/1", f"[{BEFORE_LOOP}, 0]")
        agreed = gate.agree(words.rank(0), 0, 2, 0.02)
        assert agreed == (BEFORE_LOOP, how == "all in set-up")

    assert not gate.start(7)
    assert not gate.passes(7)
    assert not gate.enter(7)


def test_no_step_is_entered_while_the_ranks_agree() -> None:
    """The lock is what makes it right: what was published stays true until the stop is set."""
    words = FakeRendezvous()
    asked = threading.Event()
    words.before = lambda rank, operation, key: asked.set() if "entered/1" in key else None
    gate = StopGate()
    gate.start(3)
    entered: list[bool] = []
    agreeing = threading.Thread(target=gate.agree, args=(words.rank(0), 0, 2, PATIENCE_S))
    agreeing.start()
    assert asked.wait(PATIENCE_S)
    training = threading.Thread(target=lambda: entered.append(gate.enter(3)))
    training.start()
    training.join(0.05)
    assert training.is_alive(), "the loop went on during the agreement"
    words.rank(1).set("stop/entered/1", "[3, 0]")
    agreeing.join(PATIENCE_S)
    training.join(PATIENCE_S)

    assert entered == [False]


@pytest.mark.parametrize(("within_s", "is_heard"), [(600.0, True), (60.0, False)])
def test_a_rank_that_fails_asks_what_its_cloud_has_said(
    clock: FakeClock, within_s: float, is_heard: bool
) -> None:
    """A machine that goes in two minutes may have begun to; one that goes some day has not."""
    watch, _ = watch_of(StopGate(), Alone())
    watch.request(request(EndReason.PREEMPTED, deadline_at=clock.now() + 120))
    assert (watch.heard(within_s) is not None) is is_heard


def test_a_rank_that_fails_asks_what_others_were_told() -> None:
    """One of three was told, and this one used what its shutdown has ended."""
    words, asked = FakeRendezvous(), request(warned_at=1.0)
    words.rank(2).first("stop/request", asked.to_json())
    watch, _ = watch_of(StopGate(), words.rank(0), world=3)
    assert watch.heard(600.0) == asked


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    """The wall clock of the stopping module."""
    fake = FakeClock()
    monkeypatch.setattr(stop_consensus, "clock", fake)
    return fake  # type: ignore[return-value]


def test_a_notice_leaves_time_to_train(clock: FakeClock) -> None:
    """Two minutes' notice, 30 seconds needed to save: train on for 90 seconds, not one less."""
    watch, _ = watch_of(StopGate(), Alone(), reserve_s=lambda: 30.0)
    watch.request(request(EndReason.PREEMPTED, deadline_at=clock.now() + 120))

    assert watch._mine_due() is None
    clock.advance(89)
    assert watch._mine_due() is None
    clock.advance(1)
    due = watch._mine_due()
    assert due is not None
    assert due.warned_at == clock.now() - 90


def test_the_reserve_is_asked_anew(clock: FakeClock) -> None:
    """When saves turn out slower than thought, the stop comes earlier."""
    need_s = [10.0]
    watch, _ = watch_of(StopGate(), Alone(), reserve_s=lambda: need_s[0])
    watch.request(request(EndReason.PREEMPTED, deadline_at=clock.now() + 60))
    assert watch._mine_due() is None
    need_s[0] = 61.0

    assert watch._mine_due() is not None


def test_a_reserve_that_cannot_be_reckoned_is_that_of_before(clock: FakeClock) -> None:
    """The main thread tracks one more model just then; the stop comes when it was to come."""
    answers: list[float] = [30.0]

    def reserve_s() -> float:
        if not answers:
            raise RuntimeError("dictionary changed size during iteration")
        return answers.pop()

    watch, _ = watch_of(StopGate(), Alone(), reserve_s=reserve_s)
    watch.request(request(EndReason.PREEMPTED, deadline_at=clock.now() + 60))
    assert watch._mine_due() is None
    clock.advance(29)
    assert watch._mine_due() is None
    clock.advance(1)
    assert watch._mine_due() is not None


def test_a_look_that_fails_ends_no_watch(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be read is told once, and the next look finds the request all the same."""
    words = FakeRendezvous()
    words.words["stop/request"] = "no JSON"
    watch, told = watch_of(StopGate(), words.rank(0), world=2)

    def mend(rank: int, operation: str, key: str) -> None:
        looks.append(key)
        if looks.count("stop/request") == 3:
            words.words["stop/request"] = request().to_json()

    looks: list[str] = []
    words.before = mend
    settle(watch)
    assert [agreed.reason for agreed, _ in told] == [EndReason.TERMINATED]
    assert sum("looks again" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("reason", "deadline_s"),
    [
        (EndReason.PREEMPTED, None),
        (EndReason.TERMINATED, 30.0),
        (EndReason.BUDGET, None),
        (EndReason.DEADLINE, None),
        (EndReason.STOPPED, None),
        (EndReason.RESIZED, None),
        (EndReason.FENCED, None),
    ],
)
def test_everything_else_is_due_at_once(
    clock: FakeClock, reason: EndReason, deadline_s: float | None
) -> None:
    """SIGTERM's grace is short, money is spent by the second: only a dated notice waits."""
    watch, _ = watch_of(StopGate(), Alone(), reserve_s=lambda: 5.0)
    watch.request(request(reason, deadline_at=deadline_s and clock.now() + deadline_s))

    due = watch._mine_due()
    assert due is not None
    assert due.reason is reason


@pytest.mark.parametrize(("noticed_s", "grace_s"), [(100, 30), (20, 30)])
def test_the_most_telling_reason_and_the_nearest_deadline_win(
    clock: FakeClock, noticed_s: float, grace_s: float
) -> None:
    """SIGTERM ends the wait of a notice, and what is told is that the cloud took the node."""
    watch, _ = watch_of(StopGate(), Alone())
    now = clock.now()
    notice = request(EndReason.PREEMPTED, deadline_at=now + noticed_s, warned_at=now)
    watch.request(notice)
    watch.request(request(EndReason.TERMINATED, deadline_at=now + grace_s))

    assert watch._mine_due() == replace(notice, deadline_at=now + min(noticed_s, grace_s))


def test_a_deadline_that_comes_after_the_agreement_counts() -> None:
    """Asked to stop, in no hurry, and then told by SIGTERM that time is short: it is."""
    watch, told = watch_of(StopGate(), Alone())
    watch.request(request(EndReason.STOPPED))
    settle(watch)
    [(agreed, _)] = told
    assert watch.nearest(agreed) == agreed
    for deadline_at in (90.0, 60.0, 70.0):
        watch.request(request(EndReason.TERMINATED, deadline_at=deadline_at))

    assert watch.nearest(agreed) == replace(agreed, deadline_at=60.0)


def test_a_withdrawn_notice_stops_nothing(clock: FakeClock) -> None:
    """Azure takes evictions back; other requests stay, also another source's of the same kind."""
    watch, _ = watch_of(StopGate(), Alone())
    watch.request(request(EndReason.PREEMPTED, deadline_at=clock.now() + 50, source="azure"))
    watch.withdraw("azure")
    clock.advance(60)
    assert watch._mine_due() is None

    watch.request(request(EndReason.PREEMPTED, deadline_at=clock.now() + 50, source="file"))
    watch.withdraw("azure")
    assert watch._mine_due() is None
    clock.advance(60)
    due = watch._mine_due()
    assert due is not None
    assert due.source == "file"
    watch.withdraw("file")

    watch.request(request(EndReason.BUDGET))
    watch.withdraw("azure")
    due = watch._mine_due()
    assert due is not None
    assert due.reason is EndReason.BUDGET


@pytest.mark.parametrize(
    ("left_s", "expected"), [(None, 5.0), (100, 5.0), (6, 3.0), (0, 0.5), (-9, 0.5)]
)
def test_the_agreement_leaves_time_for_the_save(
    clock: FakeClock, left_s: float | None, expected: float
) -> None:
    """Waiting for silent ranks takes at most half of what can be spared, and five seconds."""
    watch, _ = watch_of(StopGate(), Alone(), agree_timeout_s=5.0, reserve_s=lambda: 10.0)
    deadline_at = None if left_s is None else clock.now() + 10 + left_s

    assert watch._timeout_s(request(deadline_at=deadline_at)) == pytest.approx(expected)


def test_a_request_survives_its_way_to_the_others() -> None:
    """Every field comes back from the words between ranks."""
    asked = request(EndReason.PREEMPTED, warned_at=1.5, deadline_at=99.25, solo=True)

    assert StopRequest.from_json(asked.to_json()) == asked


def test_a_single_process_stops_where_it_is() -> None:
    """Alone there is nobody to agree with: it leaves after the step that it is in."""
    gate = StopGate()
    gate.start(10)
    watch, told = watch_of(gate, Alone())
    watch.request(request())
    watch.request(request(EndReason.BUDGET))
    settle(watch)

    assert [(r.reason, s) for r, s in told] == [(EndReason.TERMINATED, 10)]
    assert not told[0][0].solo
    assert not gate.enter(10)


def test_a_closed_watch_is_quiet() -> None:
    """After the job has ended, requests change nothing any more."""
    watch, told = watch_of(StopGate(), Alone())
    watch.close()
    settle(watch)
    watch.request(request())

    assert told == []
