"""The lookout: one look at the launcher and at the run store, noted where it matters."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.fold_attempt import progress_of
from spotguard.control.journal.job_events import JobNews
from spotguard.control.journal.nodes.made_of import machine_of
from spotguard.control.journal.record import Kind
from spotguard.control.supervisor.decide import Observation
from spotguard.control.supervisor.end_reason import without_store
from spotguard.control.supervisor.next_nodes import NoOffers, may_ask_ahead
from spotguard.control.supervisor.placement.moves import (
    cheaper_places,
    may_go_back_to_spot,
    may_move,
    may_regrow,
)
from spotguard.control.supervisor.placement.seen_places import place_name
from spotguard.errors import MissingExtra, SpotguardError, StoreError, UsageError
from spotguard.events import keys
from spotguard.events.states import Market
from spotguard.launch.base import ClusterState, ClusterView, KnowsFreeNodes, NodeEnd
from spotguard.launch.membership import read_group
from spotguard.policy.market.sightings import FREE, Sighting
from spotguard.policy.plan.carbon.estimate import GREEN, greener_first
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from spotguard.control.journal.ledger import Ledger
    from spotguard.control.journal.record import AttemptRecord, StepProgress
    from spotguard.control.supervisor.policy import Policy
    from spotguard.events.event import Heartbeat
    from spotguard.events.regrouping import Group
    from spotguard.launch.base import Launcher, Offer
    from spotguard.shared.units import Clock
    from spotguard.storage.remote.bounded import BoundedStore

log = logging.getLogger(__name__)

_NEWS_EVERY_S = 0.2
_BEATS_EVERY_S = 0.5
_BUCKET_PACE = 10.0
"""Buckets are asked less often by this factor: each question costs money, 0.2 USD a day so."""
_SILENT_AFTER_S = 8.0
"""A job gives a sign of life every five seconds; a store that is read seldom adds to that."""
_PROGRESS_EVERY_S = 10.0


class Lookout:
    """Sees the current attempt. What it remembers itself, a new one soon sees again."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        launcher: Launcher,
        store: BoundedStore,
        clock: Clock,
        policy: Policy,
        markets: frozenset[Market],
        live_path: Path,
        sightings: Callable[[], tuple[Sighting, ...]] = tuple,
    ) -> None:
        self._ledger = ledger
        self._sightings = sightings
        self._launcher = launcher
        self._clock = clock
        self._policy = policy
        self._markets = markets
        self._live_path = live_path
        self._store = store
        self._pace = 1.0 if is_folder(store.url) else _BUCKET_PACE
        self._news = JobNews(store, ledger)
        self._watched = _Watched(0, clock.monotonic())
        self._no_offers: NoOffers | None = None
        self._told_effect = ""
        self._lived_at: dict[str, float] = {}
        self.alone = False
        """The store can't confirm that this machine still controls the run."""
        self._began_at = clock.monotonic()

    @property
    def step(self) -> int:
        """The most finished steps that were seen of the current attempt; 0 if none were."""
        return self._watched.step

    @property
    def beat_at(self) -> float | None:
        """When the current attempt last gave a sign of life, by its node's clock."""
        return self._watched.beat_at

    def look(self, *, unasked: str | None = None) -> Observation:
        """Look once, and write down which nodes ended and what the job reported.

        `unasked` is a cluster that nobody can have asked for yet: it is known not to be there.
        """
        leaving = tuple(
            (each.number, self._observe(each.cluster)) for each in self._ledger.record.leaving
        )
        attempt, ahead = self._ledger.record.current, self._look_ahead(unasked)
        if attempt is None:
            offers = tuple(self._offers())
            return Observation(
                offers=offers,
                no_offers=self._no_offers,
                ahead=ahead,
                leaving=leaving,
                looked_s=self._clock.monotonic() - self._began_at,
                market=(*self._sightings(), *self._say_free(offers)),
            )
        if attempt.number != self._watched.attempt:
            self._watched = _Watched(attempt.number, self._clock.monotonic())
        watched, now = self._watched, self._clock.monotonic()
        if attempt.cluster == unasked:
            cluster = ClusterView(state=ClusterState.ABSENT)
        else:
            cluster = self._observe(attempt.cluster, heard=self._is_heard(attempt))
        if cluster.state is not ClusterState.UNREACHABLE:
            watched.reached_at = now
        cluster = self._with_survivors(attempt, cluster)
        watched.step = max(watched.step, cluster.last_step or 0)
        # The cluster was looked at first: what its job wrote before its end is now in the store.
        over = cluster.job_over or cluster.state is ClusterState.ABSENT
        complete = self._read_store(attempt, over=over)
        self._note_node_ends(attempt, cluster)
        beat_at = watched.beat_seen_at
        offers = self._offers_ahead()
        free = self._cheaper_and_free(attempt)
        if free and not offers:
            offers = tuple(self._offers())
        return Observation(
            cluster=cluster,
            ahead=ahead,
            leaving=leaving,
            offers=offers,
            market=(*self._sightings(), *free) if offers else (),
            free_nodes=self._free_nodes(attempt),
            free_spot=self._free_spot(attempt),
            group=self._group(attempt),
            news_complete=complete,
            silence_s=None if beat_at is None else now - beat_at,
            unreachable_s=now - watched.reached_at,
            store_silent_s=self._silent_s(),
        )

    def _look_ahead(self, unasked: str | None) -> ClusterView | None:
        """Look at the nodes that were asked for ahead, if there are any."""
        ahead = self._ledger.record.ahead
        if ahead is None:
            return None
        if ahead.cluster == unasked:
            return ClusterView(state=ClusterState.ABSENT)
        return self._observe(ahead.cluster)

    def _observe(self, cluster: str, *, heard: bool = False) -> ClusterView:
        """Ask the launcher, and remember when a cluster was there: of one that is gone it matters.

        Not when it was asked for last: a machine may have slept since.
        """
        view = self._launcher.observe(cluster, heard=heard)
        if view.state in (ClusterState.STARTING, ClusterState.UP):
            self._lived_at[cluster] = self._clock.now()
        return replace(view, lived_at=self._lived_at.get(cluster))

    def _offers_ahead(self) -> tuple[Offer, ...]:
        """Return the places, if the next nodes are to be asked for while these still train."""
        asked = may_ask_ahead(self._ledger.record, self._clock.now())
        return tuple(self._offers()) if asked else ()

    def _with_survivors(self, attempt: AttemptRecord, cluster: ClusterView) -> ClusterView:
        """Take nodes for running that may be: nobody says which are lost, and the job is heard.

        Those that are left have a save to finish. Or SkyPilot is mistaken: a job that goes on to
        finish steps has lost no node. One that does not may hang for it, however alive it sounds.
        """
        watched, now = self._watched, self._clock.monotonic()
        if not (cluster.some_lost and self._is_heard(attempt)):
            watched.some_lost = None
            return cluster
        if watched.some_lost is None or watched.step > watched.some_lost[1]:
            watched.some_lost = now, watched.step
        if now - watched.some_lost[0] >= self._policy.survivor_patience_s:
            return cluster
        nodes = tuple(replace(node, end=NodeEnd.RUNNING) for node in cluster.nodes)
        return replace(cluster, nodes=nodes)

    def _is_heard(self, attempt: AttemptRecord) -> bool:
        """Tell whether the job lives, for all that is known, and is not about to end."""
        seen_at = self._watched.beat_seen_at
        if seen_at is None or attempt.job_end is not None or attempt.node_ends:
            return False
        silent_after_s = _SILENT_AFTER_S + self._pace * _BEATS_EVERY_S
        return self._clock.monotonic() - seen_at < silent_after_s

    def _free_nodes(self, attempt: AttemptRecord) -> int | None:
        """Ask who knows, where more nodes would be taken: those that it has are not given up."""
        if not may_regrow(self._ledger.record, attempt):
            return None
        launcher = self._launcher
        return launcher.free_nodes(attempt.offer) if isinstance(launcher, KnowsFreeNodes) else None

    def _free_spot(self, attempt: AttemptRecord) -> int | None:
        """Ask who knows in which place most spot nodes are free, once it is time to go back."""
        launcher, record = self._launcher, self._ledger.record
        if not may_go_back_to_spot(record, attempt, self._clock.now(), self._policy):
            return None
        if not isinstance(launcher, KnowsFreeNodes):
            return None
        spot = [offer for offer in self._offers() if offer.market is Market.SPOT]
        told = [launcher.free_nodes(offer) for offer in spot]
        most = max((count for count in told if count is not None), default=0)
        return None if None in told and most < record.limits.nodes_min else most

    def _cheaper_and_free(self, attempt: AttemptRecord) -> list[Sighting]:
        """Ask cheaper places whether they have nodes, where it is time to think of a move."""
        watched, now = self._watched, self._clock.monotonic()
        thought_lately = now - watched.thought_at < self._policy.think_of_moves_s
        record = self._ledger.record
        if thought_lately or not may_move(record, attempt, self._clock.now(), self._policy):
            return []
        free = self._say_free(cheaper_places(attempt, self._offers()))
        if any(each.nodes >= attempt.nodes for each in free):
            watched.thought_at = now
        return free

    def _say_free(self, offers: Iterable[Offer]) -> list[Sighting]:
        """Return which spot places say that they have nodes; only where the policy chooses."""
        launcher = self._launcher
        if not (self._policy.on_demand_for_deadline and isinstance(launcher, KnowsFreeNodes)):
            return []
        told = [
            (offer, launcher.free_nodes(offer)) for offer in offers if offer.market is Market.SPOT
        ]
        now = self._clock.now()
        return [
            Sighting(at=now, kind=FREE, place=place_name(offer), nodes=count)
            for offer, count in told
            if count
        ]

    def note_progress(self, attempt: AttemptRecord) -> None:
        """Write the newest progress down, unless the record has it."""
        progress = self._watched.progress
        if progress is not None and (
            attempt.progress is None or _told(progress) != _told(attempt.progress)
        ):
            self._ledger.write(Kind.PROGRESS, _told(progress), attempt=attempt.number)

    def _offers(self) -> list[Offer]:
        """Return the places of the markets that the user allows, unless it is no time to ask."""
        self._no_offers, retry_at = None, self._ledger.record.retry_at
        if retry_at is not None and self._clock.now() < retry_at:
            return []
        try:
            offers = self._launcher.offers()
        except SpotguardError as problem:
            log.warning("no offers: %s", problem)
            # Files that are being saved, or a package that is renewed, are there a moment later.
            stands = self._ledger.record.offers_problem == problem.message
            lasting = stands and isinstance(problem, (UsageError, MissingExtra))
            self._no_offers = NoOffers(problem=problem.message, lasting=lasting)
            return []
        wanted = [offer for offer in offers if offer.market in self._markets]
        record = self._ledger.record
        if record.spec.get("prefer") != GREEN:
            return wanted
        return greener_first(wanted, lambda offer: machine_of(record, offer))

    def _note_node_ends(self, attempt: AttemptRecord, cluster: ClusterView) -> None:
        """Write down which nodes ended by something else than our own order."""
        if attempt.down is not None or not attempt.launched:
            return
        current = self._ledger.record.current  # with what the nodes themselves wrote
        known = {node.node for node in current.node_ends} if current else set[int]()
        for node in cluster.nodes:
            mine = node.index in attempt.cluster_nodes
            if mine and node.end is not NodeEnd.RUNNING and node.index not in known:
                self._ledger.write(
                    Kind.NODE_ENDED,
                    {
                        "node": node.index,
                        "end": node.end.value,
                        "exit_code": node.exit_code,
                        "detail": node.detail,
                        "in_doubt": cluster.some_lost and node.end is NodeEnd.LOST,
                        "in_vain": cluster.in_vain and node.end is NodeEnd.LOST,
                    },
                    attempt=attempt.number,
                )

    # ------------------------------------------------------------ the run store

    def _group(self, attempt: AttemptRecord) -> Group | None:
        """Return who began the next attempt in place, once this one's job has ended."""
        current = self._ledger.record.current  # it may have ended by what was read just now
        if current is None or current.job_end is None:
            return None
        try:
            group = read_group(self._store, attempt.number + 1)
        except StoreError:
            return None  # it is read again, and the lost store is noted where events are read
        is_ours = group is not None and set(group.nodes) <= set(attempt.cluster_nodes)
        return group if is_ours else None

    def _read_store(self, attempt: AttemptRecord, *, over: bool) -> bool:
        """Copy what the job wrote into the journal; return whether all of it could be read."""
        watched, now = self._watched, self._clock.monotonic()
        try:
            if over or now - watched.news_at >= self._pace * _NEWS_EVERY_S:
                for key, event in self._news.events(attempt.number, all_of_them=over):
                    self._ledger.copy(key, event)
                watched.news_at = now
            if over or now - watched.beats_at >= self._pace * _BEATS_EVERY_S:
                beats = self._news.beats(attempt.number, attempt.cluster_nodes)
                self._note_beats(attempt, beats)
                watched.beats_at = now
        except StoreError as problem:
            self.note_store_lost(problem.message)
            return False
        self.note_store_back()
        return True

    def store_answers(self) -> bool:
        """Return whether the store answers, asking one that was silent: nothing begins without."""
        if self._store.silence is None:
            return True
        try:
            self._store.head(keys.LEASE)
        except StoreError as problem:
            self.note_store_lost(problem.message)
            return False
        self.note_store_back()
        return True

    def note_store_lost(self, problem: str) -> None:
        """Write down that the store does not answer, and what happens to the run meanwhile.

        Not before it has been silent for a while, unless the user waits for something.
        """
        record, silent_s = self._ledger.record, self._silent_s()
        patient = record.wish is None and record.may_cost
        if patient and silent_s <= self._policy.contact_patience_s:
            return
        effect = without_store(record, self._policy.stop_patience_s)
        if record.store_problem is None or (not patient and effect != self._told_effect):
            self._told_effect = effect
            since_at = self._clock.now() - silent_s
            data = {"problem": problem, "since_at": since_at, "effect": effect}
            self._ledger.write(Kind.STORE_LOST, data)

    def note_store_back(self) -> None:
        """Write down that the store answers again, if it was said that it does not."""
        self._told_effect = ""
        if self._ledger.record.store_problem is not None and not self.alone:
            self._ledger.write(Kind.STORE_BACK)

    def _silent_s(self) -> float:
        """Return for how long the store has not answered."""
        silence = self._store.silence
        return 0.0 if silence is None else self._clock.monotonic() - silence.since

    def _note_beats(self, attempt: AttemptRecord, beats: list[Heartbeat]) -> None:
        if not beats:
            return
        watched = self._watched
        signs = {beat.node: beat.at for beat in beats}
        if signs != watched.signs:  # of any node: one whose clock is ahead must not hide the others
            watched.signs, watched.beat_seen_at = signs, self._clock.monotonic()
            watched.beat_at = min(max(signs.values()), self._clock.now())
        newest_at = watched.beat_at or self._clock.now()
        furthest = max(beats, key=lambda beat: (beat.step, beat.at))
        watched.step = max(watched.step, furthest.step)
        metrics = {name: value for beat in beats for name, value in beat.metrics.items()}
        told = {**furthest.__dict__, "step": watched.step, "metrics": metrics}
        before, watched.progress = watched.progress, progress_of(told, newest_at)
        if watched.progress is None:
            return
        if watched.progress != before:
            self._write_live(attempt, watched.progress)
        known = attempt.progress
        if known is None or self._clock.now() - known.at >= _PROGRESS_EVERY_S:
            self.note_progress(attempt)

    def _write_live(self, attempt: AttemptRecord, progress: StepProgress) -> None:
        body = {"attempt": attempt.number, **vars(progress)}
        fresh = self._live_path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(body))
            fresh.replace(self._live_path)
        except OSError as problem:
            log.warning("no live file: %s", problem)


class _Watched:
    """What is seen of the current attempt and changes too often, or matters too little, to keep.

    Instants are of the monotonic clock, so that a jump of the wall clock loses no contact.
    """

    def __init__(self, attempt: int, now: float) -> None:
        self.attempt = attempt
        self.reached_at = now
        self.news_at = float("-inf")
        self.beats_at = float("-inf")
        self.signs: dict[int, float] = {}
        """Each node's last sign of life, by its own clock."""
        self.beat_at: float | None = None
        self.beat_seen_at: float | None = None
        self.some_lost: tuple[float, int] | None = None
        """Since when some node is said to be lost, and at which step the job was then."""
        self.thought_at = float("-inf")
        """When it was last thought about moving it to a cheaper place."""
        self.step = 0
        self.progress: StepProgress | None = None


def _told(progress: StepProgress) -> dict[str, Any]:
    body = dict(vars(progress))
    del body["at"]
    return body
