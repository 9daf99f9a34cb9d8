"""The supervisor: looks, asks the machine what to do, does it, writes it down.

Crash-only: it holds nothing that matters in memory. A new supervisor on the same journal, store
and launcher goes on where a killed one was, whatever it was doing.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.alert_rules import due
from spotguard.control.journal.fold import allotment_to_json
from spotguard.control.journal.ledger import Ledger
from spotguard.control.journal.nodes.offer import offer_to_json, place_key
from spotguard.control.journal.record import Kind
from spotguard.control.journal.stored.places import place_data, publish_place
from spotguard.control.journal.stored.published_launch import (
    Over,
    publish,
    publish_missing_ends,
    verdict,
)
from spotguard.control.journal.team.gate import TeamGate, give_back_words
from spotguard.control.supervisor.actions import (
    Action,
    Alert,
    AskDown,
    AskToStop,
    BackOff,
    BeginPhase,
    Conclude,
    Drop,
    GiveUp,
    GoOn,
    Intend,
    Launch,
    LoseContact,
    LoseSight,
    NoteGone,
    NoteLaunched,
    NoteRefused,
    NoteReleased,
    NoteUp,
    OnAhead,
    RegainContact,
    RegainSight,
    SendDown,
    Settle,
    TakeOver,
    Wait,
    WriteStop,
    needs_no_store,
)
from spotguard.control.supervisor.decide import EXIT_UNFINISHED, decide
from spotguard.control.supervisor.end_reason import paid
from spotguard.control.supervisor.logs import log_tail
from spotguard.control.supervisor.market_notes import MarketNotes
from spotguard.control.supervisor.next_nodes import sweep_used_up
from spotguard.control.supervisor.notify import Notifier
from spotguard.control.supervisor.observer import Lookout
from spotguard.control.supervisor.placement.seen_places import hazard_of
from spotguard.control.supervisor.request import (
    ask_to_stop,
    cluster_name,
    launch_data,
    launch_request,
)
from spotguard.errors import NoCapacity, SpotguardError, StoreError
from spotguard.events import env, keys
from spotguard.events.states import EndReason, RunState
from spotguard.launch.base import Unreachable, charged_node_s
from spotguard.policy.plan.job import planned_markets
from spotguard.spec.model import JobSpec
from spotguard.storage.patterns.clock_comparison import WRITTEN_AT
from spotguard.storage.remote.bounded import BoundedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spotguard.control.journal.journal import Journal
    from spotguard.control.journal.launches import Launches
    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.control.journal.sweep.comparison import Comparison
    from spotguard.control.journal.team.budget import TeamBudget
    from spotguard.control.supervisor.lease import Lease
    from spotguard.control.supervisor.policy import Policy
    from spotguard.launch.base import Launcher
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

TICK_S = 0.1
_STORE_RETRY_S = 5.0
"""How long until a store that cannot be written is tried again: its own retries come on top."""
_ACTS_PER_TICK = 50
_JUMP_S = 2.0
"""Time servers set clocks right by less than this every day."""


class Supervisor:
    """Drives one run until it settles. Not thread-safe; one for a run at any time."""

    def __init__(
        self,
        *,
        journal: Journal,
        launcher: Launcher,
        store: ObjectStore,
        clock: Clock,
        policy: Policy,
        live_path: Path,
        tick_s: float = TICK_S,
        lease: Lease | None = None,
        launches: Launches | None = None,
        machine_clock: Callable[[], float] | None = None,
        market_path: Path | None = None,
        cache_key: str | None = None,
        budgets: Sequence[TeamBudget] = (),
        comparison: Comparison | None = None,
        rest: Callable[[RunRecord, bool], None] | None = None,
    ) -> None:
        """`store` is the run's own, below its run id; `live_path` gets the newest progress.

        `launches` are named there before they are made. `machine_clock` is told about when it
        jumps, while `clock` goes on evenly. `market_path` keeps what is seen of spot markets, over
        runs; None keeps nothing. `cache_key` is the secret by which nodes believe what earlier ones
        kept of their cached folders; without it nothing is kept. `budgets` are the sums that it
        shares with other runs, and `comparison` is with the other points of its sweep. `rest`
        blocks until the next look, given the record and whether the last look led to anything; None
        sleeps for `tick_s`.
        """
        self._rest_until_next = rest or (lambda *_: clock.sleep(tick_s))
        self._acted = False
        self._cache_key = cache_key
        self._machine_clock = machine_clock
        told = journal.newest(Kind.CLOCK_MOVED.value)
        self._told_ahead_s = 0.0 if told is None else float(told.data["ahead_s"])
        self._lease = lease
        self._launches = launches
        self._launcher = launcher
        self._store = store if isinstance(store, BoundedStore) else BoundedStore(store, clock=clock)
        self._clock = clock
        self._policy = policy
        self._ledger = Ledger(journal, clock)
        self._team = TeamGate(budgets, self._ledger, clock) if budgets else None
        self._comparison = comparison
        self._spec = JobSpec.from_json(self._ledger.record.spec)
        self._placing = self._ledger.record.placing
        self._published = self._placing is None
        """The run store says where the run is."""
        self._unasked: str | None = None
        """The cluster of an intent of this very process, until it is asked for: no other can be."""
        self._adopted = journal.newest(Kind.ADOPTED.value) is not None
        self._market = MarketNotes(market_path, self._ledger.record)
        self._notifier = Notifier(self._spec.notify, self._ledger, clock)
        self._lookout = Lookout(
            self._ledger,
            launcher=launcher,
            store=self._store,
            clock=clock,
            policy=policy,
            markets=frozenset(planned_markets(self._spec)),
            live_path=live_path,
            sightings=self._market.sightings,
        )

    @property
    def record(self) -> RunRecord:
        """What the journal says."""
        return self._ledger.record

    def run(self, *, goes_on: bool = False) -> RunRecord:
        """Drive the run until it settles, or a phase begins; return its last record.

        The next phase is for a supervisor with that phase's launcher, which `goes_on`: it is not
        told as a new controller.
        """
        if not goes_on:
            self._ledger.write(Kind.CONTROLLER_STARTED, {"pid": os.getpid()})
        self._hear_wish()
        while self.record.settled is None and self.record.placing == self._placing:
            alone = self._lookout.alone = not self._may_act()
            if self._lease is not None and self._lease.lost_to:
                self._hand_over(self._lease.lost_to)
                return self.record
            if not alone and not self._place_is_known():
                self._clock.sleep(_STORE_RETRY_S)
                self._ledger.catch_up()
                continue
            if not (alone or goes_on):
                publish_missing_ends(self._store, self.record)
                goes_on = True
            self._tell_jump()
            self.tick(alone=alone)
            self._market.update(self.record)
            self._note_alerts()
            self._notifier.tell(last=self.record.settled is not None)
            if self.record.settled is None and self.record.placing == self._placing:
                self._rest()
        return self.record

    def _rest(self) -> None:
        acted, self._acted = self._acted, False
        self._rest_until_next(self.record, acted)

    def _hear_wish(self) -> None:
        """Write down what the user asked for while the journal could not be written."""
        wish = self._launches and self._launches.wish
        if wish and self.record.settled is None and self.record.wish is None:
            self._ledger.write(wish)

    def _place_is_known(self) -> bool:
        """Have the run store know where the run goes on, before anything is launched there.

        Else who has to rebuild a lost journal would ask the wrong launcher, and nodes live on.
        Returns False as long as it can't be written, unless nothing is to be launched.
        """
        record = self.record
        if self._published or record.of_this_place or record.wish is not None:
            return True
        try:
            publish_place(self._store, record)
        except StoreError as problem:
            self._lookout.note_store_lost(problem.message)
            return False
        self._published = True
        self._lookout.note_store_back()
        return True

    def _hand_over(self, to: str) -> None:
        """Bring this machine's part of the run to rest: what happens to it is written elsewhere."""
        self._ledger.write(Kind.TAKEN_OVER, {"by": to})
        back = f"spotguard adopt {self._store.url.rstrip('/')}"
        self._settle(
            Settle(
                state=RunState.STOPPED,
                detail=f"on this machine: taken over by {to}; `{back}` brings it back",
                exit_code=EXIT_UNFINISHED,
            )
        )

    def _come_to_rest(self, action: Settle) -> bool:
        problem = "" if self._team is None else self._team.release()
        if problem is None:
            return False
        if problem:
            told = f"{action.detail}; {give_back_words(self.record)} ({problem})"
            action = replace(action, detail=told)
        self._settle(action)
        return True

    def _settle(self, action: Settle) -> None:
        self._ledger.write(Kind.SETTLED, {**asdict(action), "state": action.state.value})

    def _may_act(self) -> bool:
        """Tell whether no other machine can have taken the run over."""
        return self._lease is None or self._lease.keep()

    def _tell_jump(self) -> None:
        """Write down that the machine's own clock jumped, which the run's time does not follow."""
        if self._machine_clock is None:
            return
        ahead_s = self._machine_clock() - self._clock.now()
        if abs(ahead_s - self._told_ahead_s) > _JUMP_S:
            data = {"by_s": ahead_s - self._told_ahead_s, "ahead_s": ahead_s}
            self._ledger.write(Kind.CLOCK_MOVED, data)
            self._told_ahead_s = ahead_s

    def _note_alerts(self) -> None:
        """Write down what the user wants to hear of, once, if anybody is told at all."""
        if not self._spec.notify:
            return
        for each in due(self.record, self._clock.now()):
            self._ledger.write(Kind.NOTED, {"key": each.key, "text": each.text})

    def tick(self, *, alone: bool = False) -> None:
        """Look and act until there is nothing more to do now.

        `alone`: the store can't confirm that this machine still controls the run, so that only is
        done which ends what its clusters cost.
        """
        if self._team is not None and not alone:
            self._team.tell()
            if self._team.waits and self._waits_for_the_team():
                return
        for _ in range(_ACTS_PER_TICK):
            self._ledger.catch_up()
            seen = self._lookout.look(unasked=self._unasked)  # which adds to the record
            if self._comparison is not None and not alone:
                self._comparison.look(self._ledger, self._lookout.step)
            action = decide(self.record, seen, self._clock.now(), self._policy)
            if isinstance(action, Wait) or (alone and not needs_no_store(action)):
                return
            self._acted = True
            if not self._act(action):
                return

    def _waits_for_the_team(self) -> bool:
        """Tell whether nothing is to be done but to ask the team again: that may take weeks."""
        self._ledger.catch_up()  # the user may have a wish
        record, deadline_at = self.record, self.record.limits.deadline_at
        in_time = deadline_at is None or self._clock.now() < deadline_at
        return bool(record.queued and not record.may_cost and record.wish is None and in_time)

    # ------------------------------------------------------------ acting

    def _act(self, action: Action) -> bool:
        """Carry out one action; return False if it is to be tried again at the next tick."""
        attempt = self._ledger.record.current
        if isinstance(action, OnAhead):
            attempt, action = self.record.ahead, action.action
        number = attempt.number if attempt is not None else None
        match action:
            case Intend():
                return self._intend(action)
            case BackOff():
                self._ledger.write(Kind.WAITING, asdict(action))
            case BeginPhase():
                begun = place_data(
                    JobSpec.from_json(self.record.job), action.phase, self.record.limits
                )
                self._ledger.write(Kind.PHASE_BEGUN, begun)
                return False
            case Alert():
                self._ledger.write(Kind.ALERT, {"percent": action.percent})
            case Settle():
                return self._come_to_rest(action)
            case NoteReleased():
                self._note_released(self._attempt(action.attempt), action)
            case SendDown(attempt=int(ended)):
                self._send_down(self._attempt(ended))
            case TakeOver():
                return self._take_over()
            case _ if attempt is None:
                raise AssertionError(f"{action} without an attempt")
            case Launch():
                return self._launch(attempt)
            case NoteLaunched():
                self._ledger.write(Kind.LAUNCHED, {"found": True}, attempt=number)
            case Drop():
                self._publish(keys.launch(attempt.number), None)
                self._ledger.write(Kind.DROPPED, {"why": action.why}, attempt=number)
                self._forget(attempt)
            case NoteGone():
                gone = {"gone_at": action.gone.at, "gone_latest_at": action.gone.latest_at}
                self._ledger.write(Kind.NODES_GONE, gone, attempt=number)
            case GiveUp():
                self._give_up(attempt, action)
            case NoteUp():
                self._ledger.write(Kind.CLUSTER_UP, {"at": action.at}, attempt=number)
            case NoteRefused():
                self._note_refusal(attempt, action, late=True)
            case AskToStop():
                asked = {"reason": action.reason.value, "why": self.record.wish_why}
                self._ledger.write(Kind.STOP_ASKED, asked, attempt=number)
            case WriteStop():
                return self._write_stop(attempt, action.reason)
            case AskDown():
                data: dict[str, Any] = {"reason": action.reason.value, "detail": action.detail}
                if action.reason is EndReason.FAILED:  # a cloud forgets the log with the cluster
                    data["log"] = log_tail(
                        self._launcher, self._store, attempt, attempt.failed_node
                    )
                self._ledger.write(Kind.DOWN_ASKED, data, attempt=number)
            case SendDown():
                self._send_down(attempt)
            case LoseContact():
                self._ledger.write(Kind.CONTACT_LOST, {"detail": action.detail}, attempt=number)
            case RegainContact():
                self._ledger.write(Kind.CONTACT_BACK, attempt=number)
            case LoseSight():
                self._ledger.write(Kind.CLOUD_SILENT, {"detail": action.detail}, attempt=number)
            case RegainSight():
                self._ledger.write(Kind.CLOUD_BACK, attempt=number)
            case Conclude():
                self._ledger.write(
                    Kind.ATTEMPT_ENDED, self._verdict(attempt, action), attempt=attempt.number
                )
                if not action.leaving:
                    self._forget(attempt)
            case GoOn():
                self._go_on(attempt, action)
        return True

    def _attempt(self, number: int) -> AttemptRecord:
        found = self.record.attempt(number)
        assert found is not None, f"attempt {number} is not in the record"
        return found

    def _note_released(self, attempt: AttemptRecord, action: NoteReleased) -> None:
        """Publish the verdict on an ended attempt whose nodes are gone, and write that down.

        In this order: who dies in between does both again.
        """
        assert attempt.end is not None
        gone: dict[str, Any] = {
            "gone_at": action.gone.at,
            "gone_latest_at": action.gone.latest_at,
            "charged_node_s": self._charged_node_s(attempt),
        }
        end = replace(attempt.end, leaving=False, **gone)
        self._publish(keys.end(attempt.number), verdict(replace(attempt, end=end)))
        gone["unseen"] = action.unseen
        self._ledger.write(Kind.RELEASED, gone, attempt=attempt.number)
        self._forget(attempt)

    def _go_on(self, attempt: AttemptRecord, action: GoOn) -> None:
        group = action.group
        self._ledger.write(
            Kind.WENT_ON,
            {
                "after": attempt.number,
                "ended": self._verdict(attempt, action.verdict),
                "at": group.at,
                "cluster": attempt.cluster,
                "members": list(group.nodes),
                "nodes": len(group.nodes),
                "offer": offer_to_json(attempt.offer),
                "allotment": allotment_to_json(action.allotment),
            },
            attempt=group.attempt,
        )
        begun = self._ledger.record.current
        assert begun is not None
        self._publish_launch(begun)

    def _take_over(self) -> bool:
        """Let the attempt that waits for its turn begin, unless it has heard the end itself."""
        ahead = self.record.ahead
        assert ahead is not None
        now, down_at = self._clock.now(), ahead.allotment.down_at
        goes_on = self.record.wish is None and (down_at is None or now < down_at)
        if goes_on and self._publish(keys.go(ahead.number), {"at": now}) is not None:
            return False
        self._ledger.write(Kind.TOOK_OVER, attempt=ahead.number)
        return True

    def _charged_node_s(self, attempt: AttemptRecord) -> float | None:
        """Ask the cloud what it charges for an attempt that is gone; None if it does not say."""
        return charged_node_s(self._launcher, attempt.cluster, attempt.offer, attempt.nodes)

    def _give_up(self, attempt: AttemptRecord, action: GiveUp) -> None:
        data = {"why": action.why, **paid(attempt, action.gone, self._charged_node_s)}
        self._ledger.write(Kind.GIVEN_UP, data, attempt=attempt.number)
        self._publish_launch(attempt, over=Over.GIVEN_UP, why=action.why)
        self._forget(attempt)

    def _intend(self, action: Intend) -> bool:
        if not self._lookout.store_answers():
            return False
        if self._team is not None and not action.ahead and not self._team.admits():
            return self._team.is_over and self._come_to_rest(sweep_used_up(self.record))
        number = self._ledger.record.next_number
        name = cluster_name(self._ledger.record.run_id, number, self._ledger.record.refused)
        self._ledger.write(
            Kind.INTENDED,
            {
                "cluster": name,
                "nodes": action.nodes,
                "offer": offer_to_json(action.offer),
                "allotment": allotment_to_json(action.allotment),
                "why": action.why,
                "ahead": action.ahead,
            },
            attempt=number,
        )
        self._market.asked(self._attempt(number))
        # An adopted journal may not know of all refusals, and so not of all names.
        self._unasked = None if self._adopted else name
        return True

    def _launch(self, attempt: AttemptRecord) -> bool:
        if self._team is not None and not self._team.pays(attempt):
            if attempt is not self.record.ahead:
                return False
            # The attempt that still trains must not wait for this one.
            self._give_up(attempt, GiveUp(why="its team does not pay for it now", gone=None))
            return True
        unwritten = self._publish_launch(attempt)
        if unwritten is not None:  # who adopts the run would never ask for this cluster
            self._lookout.note_store_lost(unwritten.message)
            if attempt is self.record.ahead:
                self._give_up(attempt, GiveUp(why="the store does not answer", gone=None))
            else:
                data = {"why": "the store does not answer"}
                self._ledger.write(Kind.DROPPED, data, attempt=attempt.number)
            return True
        now, record, market = self._clock.now(), self._ledger.record, self._market.sightings()
        hazard = hazard_of(record, attempt, now, market)
        is_new, self._unasked = attempt.cluster == self._unasked, None
        if self._launches is not None:
            self._launches.remember(attempt.cluster, attempt.number)
        try:
            request = launch_request(record, attempt, self._spec, now=now, hazard=hazard)
            keyed = {**request.env, env.KEY: secrets.token_hex(32)}  # kept nowhere but there
            if self._cache_key is not None:
                keyed[env.CACHE_KEY] = self._cache_key
            self._launcher.launch(replace(request, env=keyed, is_new=is_new))
        except NoCapacity as problem:
            self._note_refusal(attempt, NoteRefused(problem.message), late=False)
        except Unreachable as problem:  # it may have been taken all the same: ask again
            log.warning("launch of attempt %s: %s", attempt.number, problem)
            return False
        except SpotguardError as problem:
            self._ledger.write(
                Kind.LAUNCH_FAILED, {"problem": problem.message}, attempt=attempt.number
            )
        else:
            self._ledger.write(Kind.LAUNCHED, attempt=attempt.number)
        return True

    def _note_refusal(self, attempt: AttemptRecord, refusal: NoteRefused, *, late: bool) -> None:
        data = {
            "nodes": attempt.nodes,
            "place": place_key(attempt.offer),
            "problem": refusal.problem,
            "late": late,
            "lasting": refusal.lasting,
            "busy": refusal.busy,
            "quota_full": refusal.quota_full,
            **paid(attempt, refusal.gone, self._charged_node_s),
        }
        self._ledger.write(Kind.NO_CAPACITY, data, attempt=attempt.number)
        if not (refusal.lasting or refusal.busy):  # neither tells of the nodes
            self._market.refused(attempt, self._clock.now())
        if self.record.lost_launches:  # the next launch, which would tell of them, may be far
            self._publish_launch(attempt, over=Over.REFUSED, why=refusal.problem)
        else:
            self._publish(keys.launch(attempt.number), None)
        self._forget(attempt)

    def _forget(self, attempt: AttemptRecord) -> None:
        """Name a cluster no more of which nothing is left."""
        if self._launches is not None:
            self._launches.forget(attempt.cluster)

    def _write_stop(self, attempt: AttemptRecord, reason: EndReason) -> bool:
        try:
            ask_to_stop(self._store, attempt.number, reason)
        except StoreError as problem:
            self._lookout.note_store_lost(problem.message)
            return False
        self._ledger.write(Kind.STOP_WRITTEN, attempt=attempt.number)
        return True

    def _send_down(self, attempt: AttemptRecord) -> None:
        try:
            self._launcher.down(attempt.cluster)
        except SpotguardError as problem:
            self._ledger.write(
                Kind.DOWN_FAILED, {"problem": problem.message}, attempt=attempt.number
            )
        else:
            self._ledger.write(Kind.DOWN_SENT, attempt=attempt.number)

    def _verdict(self, attempt: AttemptRecord, action: Conclude) -> dict[str, Any]:
        """Publish why an attempt ended, and return it as the journal keeps it."""
        traceback = action.traceback
        if action.reason is EndReason.FAILED and traceback is None:
            kept = attempt.down and attempt.down.log
            traceback = kept or log_tail(self._launcher, self._store, attempt, attempt.failed_node)
        self._lookout.note_progress(attempt)
        steps = [step for step in (attempt.last_step, self._lookout.step) if step is not None]
        known = attempt.started_at is not None or self._lookout.step > 0
        end = {
            **asdict(replace(action, traceback=traceback)),
            "reason": action.reason.value,
            "last_step": max(steps) if known else None,
            "last_beat_at": self._lookout.beat_at,
            "saved": attempt.saved,
            "charged_node_s": None if action.leaving else self._charged_node_s(attempt),
        }
        if action.leaving:
            # Not published yet: who rebuilds a lost journal must not take its nodes for gone.
            return end
        del end["leaving"]
        problem = self._publish(keys.end(attempt.number), end)
        if problem is not None and action.reason is EndReason.FAILED and attempt.job_end is None:
            # A job on a full store can neither save nor say why it leaves: it looks like a crash.
            detail = f"{problem.message}; the job could not report its end there"
            end |= {"reason": EndReason.STORE_FAILED.value, "detail": detail, "traceback": None}
        return end

    def _publish_launch(
        self, attempt: AttemptRecord, *, over: Over | None = None, why: str = ""
    ) -> StoreError | None:
        """Publish what is launched, or came to nothing; the nodes set their clocks by it."""
        said = {} if over is None else {"over": over.value, "why": why}
        body = {**launch_data(self.record, attempt), WRITTEN_AT: self._clock.now(), **said}
        return self._publish(keys.launch(attempt.number), body)

    def _publish(self, key: str, body: dict[str, Any] | None) -> StoreError | None:
        return publish(self._store, key, body)
