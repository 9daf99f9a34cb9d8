"""Rebuilds a run's journal from its store alone.

For a machine that never saw the run, and for a journal that was damaged. The store has the job,
what was launched, when it was gone, and all that the job reported. What only the journal knew is
lost: waiting for capacity, your wishes, and limits that a `resume` changed (give them again).
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from spotguard.checkpoint.lineage import attempt_numbers, read_claim
from spotguard.control.controller.one_run import launcher_for, run_store
from spotguard.control.handover.run_json import read_run_json
from spotguard.control.handover.stored_job import admitted
from spotguard.control.home_name import machine_id
from spotguard.control.journal.fold import allotment_to_json, read_record
from spotguard.control.journal.job_events import journal_data, read_beats, recall
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import JOB_PREFIX, Kind, Limits
from spotguard.control.journal.snapshot import keep_snapshot
from spotguard.control.journal.stored.code import code_here
from spotguard.control.journal.stored.controller_nodes import (
    node_data,
    tell_others_leaving,
)
from spotguard.control.journal.stored.places import (
    StoredPlace,
    place_data,
)
from spotguard.control.journal.stored.published_launch import (
    Over,
    allotment_of,
    came_to_nothing,
    is_unheard_of,
    newest_regions,
    over,
    read_launch,
    read_published,
)
from spotguard.control.journal.team.gate import release_at_rest
from spotguard.control.run_folder import RunFolder, runs_folder, split_place
from spotguard.control.supervisor.actions import Alert, Settle
from spotguard.control.supervisor.decide import EXIT_UNFINISHED, Observation, decide
from spotguard.control.supervisor.end_reason import judge
from spotguard.control.supervisor.lease import Lease, check_dead, read_aged_holder
from spotguard.control.supervisor.policy import Policy
from spotguard.control.supervisor.request import cluster_name
from spotguard.errors import DamagedCheckpoint, JournalDamaged, UsageError
from spotguard.events import keys
from spotguard.events.states import EndReason, Market, RunState
from spotguard.events.untrusted import (
    amount,
    integer,
    objects,
    seconds,
    text,
)
from spotguard.launch.base import NOTHING_LEFT, ClusterState, charged_node_s
from spotguard.launch.membership import read_group
from spotguard.shared.units import SystemClock
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.model import JobSpec
from spotguard.spec.nodes import NodeRange
from spotguard.storage import check_conditions, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from spotguard.checkpoint.lineage import Claim
    from spotguard.control.handover.not_in_store import Private
    from spotguard.control.handover.stored_job import Ask
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.journal.stored.controller_nodes import StoredNode
    from spotguard.events.event import Event, Heartbeat
    from spotguard.events.regrouping import Group
    from spotguard.launch.base import ClusterView
    from spotguard.storage.base import ObjectStore

ADOPTED_WORDS = "adopted from its store"
"""How the reason begins for which a run without living nodes rests once it was adopted."""
_READS = 16
"""Attempts that are read side by side."""
_MOST_NODES = 99_999
_REASONS = [reason.value for reason in EndReason]
_MARKETS = [market.value for market in Market]
_PLACE_WORDS = ("region", "zone", "instance_type")
_PRICES = ("price_usd_per_h", "on_demand_usd_per_h")


Tell: TypeAlias = "Callable[[str], None]"


def _silent(_: str) -> None:
    """Tell nobody."""


def adopt_run(
    url: str,
    tell: Tell = _silent,
    *,
    private: Private | None = None,
    given: Mapping[str, str] | None = None,
    ask: Ask | None = None,
) -> RunFolder:
    """Rebuild the journal of the run at `url` (`STORE/RUN_ID`) and return its folder.

    A journal that is damaged, or older than what another machine did, is moved aside. A run that
    trains on no node is settled, once none of its earlier ones may live. `tell` hears what is being
    waited for. `private` is what of the job is in no store, if a controller handed it over; else it
    is found out by `given` and `ask`, as `admitted` does.

    Raises:
        UsageError: there is no run at `url`, another machine's controller is alive, nobody else had
            the run and its journal is whole, or it was not made here and is not confirmed.
    """
    store_url, run_id = split_place(url)
    store_root = open_store(store_url).url
    store = run_store(store_root, run_id)
    body = read_run_json(store, url)
    check_conditions(store_root)  # before a journal is moved
    folder = RunFolder(runs_folder() / run_id)
    if private is None:
        jobs = [body["spec"], *(place.job for place in body["places"])]
        private = admitted(folder, url, jobs, given=given or {}, ask=ask)
    job = private.job(body["spec"])
    moves = [_place_data(place, private.job(place.job)) for place in body["places"]]
    machine = machine_id(spotguard_home())
    found = read_aged_holder(store, machine, time.time())
    was_elsewhere = check_dead(found, machine, time.time()) is not None
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with folder.control(patience_s=1.0) as alone:
        if not alone:
            raise UsageError(
                f"Run {run_id} has a living controller, so there is nothing to adopt.",
                hint=f"look: spotguard status {run_id}",
            )
        _move_aside(folder, outdated=was_elsewhere)
        lease = Lease(store, SystemClock(), machine)
        lease.adopt()  # not earlier: who has the lease and an old journal would go on from that
        known = tell_others_leaving(store, body["controller_nodes"], machine, time.time())
        body["controller_nodes"] = known
        with lease.kept():  # SkyPilot may take minutes to say which nodes live
            record = _rebuild(folder, store_root, store, _Known(body, job, moves), tell)
            unpaid = release_at_rest(record, open_store(store_root), SystemClock())
            if unpaid:
                tell(unpaid)
        lease.release()
    return folder


def _place_data(place: StoredPlace, job: JobSpec) -> dict[str, Any]:
    nodes = NodeRange(place.limits["nodes_min"], place.limits["nodes_max"])
    return place_data(job, place.phase, Limits(**place.limits), nodes)


@dataclass(frozen=True)
class _Known:
    """What a run was asked for."""

    body: dict[str, Any]
    """As `read_run_json` gave it."""
    job: JobSpec
    moves: list[dict[str, Any]]
    """The journal's data of each move, and of each phase after the first."""


def _rebuild(
    folder: RunFolder, store_root: str, store: ObjectStore, known: _Known, tell: Tell
) -> RunRecord:
    """Write a journal of what the store says, and put it in its place once it is whole.

    Returns what is known of the run then.
    """
    body, job = known.body, known.job
    begun = place_data(job, 0, Limits(**body["limits"]))
    spec = JobSpec.from_json((known.moves or [begun])[-1]["spec"])
    draft = folder.path / "journal.new"
    draft.unlink(missing_ok=True)
    with Journal.create(draft) as journal:
        told = {name: body[name] for name in ("name", "limits", "sweep")}
        created = {**told, "run_id": folder.run_id, "store_root": store_root}
        created |= {"spec": begun["spec"], "job": begun["job"]}
        created["code"] = code_here(folder.path, spec, body["code"], tell)
        with journal.all_or_nothing():  # a thousand events are not a thousand waits for disk
            journal.append(Kind.CREATED.value, at=body["created_at"], data=created)
            launcher = launcher_for(spec, folder.path, regions=newest_regions(store))
            rebuild = Rebuild(journal, launcher, folder.run_id, tell)
            rebuild.places = list(zip(body["places"], known.moves, strict=True))
            rebuild.controller_nodes = body["controller_nodes"]
            rebuild.attempts(store)
            rests = f"{ADOPTED_WORDS}; `spotguard resume` goes on"
            told = {
                "store": store_root,
                "chunks_left": rebuild.chunks_left,
                "lost_launches": rebuild.lost_launches,
                "rests": rests,
            }
            journal.append(Kind.ADOPTED.value, at=time.time(), data=told)
            keep_snapshot(journal, read_record(journal), None, now=time.time())
            settle(journal, rests)
        record = read_record(journal)
    draft.rename(folder.journal_path)
    return record


def _move_aside(folder: RunFolder, *, outdated: bool) -> None:
    """Move a useless journal, with SQLite's helper files, out of the way; refuse a good one."""
    if not folder.journal_path.exists():
        return
    damaged = _is_damaged(folder)
    if not (damaged or outdated):
        raise UsageError(
            f"The journal of {folder.run_id} on this machine is whole; there is nothing to adopt.",
            hint=f"go on with it: spotguard resume {folder.run_id}",
        )
    why = "damaged" if damaged else "outdated"
    suffix = f".{why}-{time.strftime('%y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    for helper in ("", "-wal", "-shm"):
        path = folder.path / f"journal.db{helper}"
        if path.exists():
            path.rename(folder.path / f"journal.db{helper}{suffix}")


def _is_damaged(folder: RunFolder) -> bool:
    try:
        with folder.journal() as journal:
            read_record(journal)
    except JournalDamaged:
        return True
    return False


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What the store has of one attempt."""

    number: int
    claim: Claim | None
    group: Group | None
    following: Group | None
    """Who began the next attempt in place; not asked for if `end` is known."""
    launch: dict[str, Any]
    end: dict[str, Any] | None
    events: list[tuple[str, Event]]
    chunks: list[str]
    chunks_left: int
    """How many of them were not read."""
    beats: list[Heartbeat]
    nothing: bool
    """Its launch came to nothing."""
    damage: str
    """Why its claim cannot be read; empty if it can, or there is none."""

    @classmethod
    def of(cls, store: ObjectStore, number: int) -> _Found:
        claim, damage = _claim(store, number)
        past = recall(store, number)
        end = _end_in(read_published(store, keys.end(number)))
        launch = read_launch(store, number)
        return cls(
            number=number,
            claim=claim,
            group=read_group(store, number),
            following=None if end else read_group(store, number + 1),
            launch=launch or (dict(claim.extra) if claim else {}),
            end=end,
            events=past.events,
            chunks=past.chunks,
            chunks_left=past.left,
            beats=read_beats(store, number),
            nothing=_came_to_nothing(store, number, launch),
            damage=damage,
        )

    @property
    def signs(self) -> list[float]:
        """When something was heard of it."""
        signs = [event.at for _, event in self.events] + [beat.at for beat in self.beats]
        return [*signs, self.claim.claimed_at] if self.claim else signs


class Observes(Protocol):
    """What a rebuild asks of a launcher."""

    def observe(self, cluster: str, *, heard: bool = False) -> ClusterView:
        """Return what is known of a cluster now."""
        ...


class Rebuild:
    """Writes each attempt of a run into a new journal."""

    def __init__(
        self,
        journal: Journal,
        launcher: Observes,
        run_id: str,
        tell: Tell = _silent,
        *,
        by_word_alone: bool = False,
    ) -> None:
        """`by_word_alone`: no launcher can be asked, so a launch that nobody tells of is none."""
        self._by_word_alone = by_word_alone
        self._tell = tell
        self._journal = journal
        self._launcher = launcher
        self._run_id = run_id
        self._last_at = read_record(journal).created_at
        """When something was heard of the attempts that are written down."""
        self.chunks_left = 0
        """How many chunks of old events were not copied."""
        self.lost_launches: list[dict[str, Any]] = []
        """What the newest launch says that launches before it cost and came to nothing."""
        self.places: list[tuple[StoredPlace, dict[str, Any]]] = []
        """Where the run went on, oldest first, and what the journal is to hold of each."""
        self.controller_nodes: list[StoredNode] = []
        """Nodes that the run's controller had for itself, oldest first."""

    def attempts(self, store: ObjectStore) -> None:
        """Rebuild all attempts, oldest first; only the newest that had its turn may still live.

        One whose nodes were asked for ahead, and that waits for its turn, may live beside it.
        """
        for stored in self.controller_nodes:  # first: whatever follows tells what was spent by then
            node = stored.node
            self._journal.append(Kind.CONTROLLER_NODE.value, at=node.since, data=node_data(node))
        numbers = attempt_numbers(store)
        self._tell(f"reading what the store says of {len(numbers)} attempt(s)")
        last = self._last_launched(store, numbers)
        waits = last is not None and last != numbers[0] and waits_for_its_turn(store, last)
        ahead = last if waits else None
        newest = last
        if ahead is not None:
            newest = self._last_launched(store, [each for each in numbers if each < ahead])
        with ThreadPoolExecutor(_READS, thread_name_prefix="spotguard-adopt") as crew:
            for found in crew.map(partial(_Found.of, store), numbers):
                self._move(before=found.number)
                if found.nothing and found.number not in (newest, ahead):
                    self._tell_nothing(found)
                    continue
                cluster, last_at = self._launch(found, ahead=found.number == ahead)
                if found.number == ahead:
                    self._look_at_ahead(found, cluster, last_at)
                else:
                    self._end(found, cluster, last_at, newest=found.number == newest)
        if not numbers or read_record(self._journal).current is None:
            self._move(before=keys.MAX_ATTEMPT + 1)

    def _move(self, *, before: int) -> None:
        """Write down the moves after which an attempt was launched."""
        while self.places and self.places[0][0].after < before:
            place, data = self.places.pop(0)
            self._journal.append(place.kind.value, at=place.at, data=data)

    def _last_launched(self, store: ObjectStore, numbers: Sequence[int]) -> int | None:
        """Return the newest of these attempts whose launch has not come to nothing.

        One that nobody has said was launched has, unless its nodes are there, or may be.
        """
        for number in reversed(numbers):
            launch = read_launch(store, number)
            if not _came_to_nothing(store, number, launch):
                return number
            if launch or self._by_word_alone:
                continue
            view = self._launcher.observe(cluster_name(self._run_id, number))
            if view.state not in (ClusterState.GONE, ClusterState.ABSENT):
                return number
        return None

    def _tell_nothing(self, found: _Found) -> None:
        """Write down a launch that came to nothing; its number is not used again.

        What it cost is among the lost launches that are told with it, and with each later one.
        """
        if over(found.launch) is Over.REFUSED:  # its number is
            told = list(objects(found.launch, "lost_launches"))
            self.lost_launches = told or self.lost_launches
            return
        _, last_at = self._launch(found, ahead=True)
        data = {"why": text(found.launch, "why") or "nobody knows of its launch"}
        self._journal.append(Kind.GIVEN_UP.value, at=last_at, attempt=found.number, data=data)

    def _look_at_ahead(self, found: _Found, cluster: str, last_at: float) -> None:
        """Give up nodes asked for ahead that are gone: they are paid, and never trained."""
        view = self._launcher.observe(cluster)
        if view.state not in (ClusterState.GONE, ClusterState.ABSENT):
            return
        ahead = read_record(self._journal).ahead
        assert ahead is not None, "it was written down just before"
        gone_at = last_at if view.gone_at is None else view.gone_at
        charged_s = charged_node_s(self._launcher, cluster, ahead.offer, ahead.nodes)
        seen_s = max(0.0, gone_at - ahead.intended_at)
        paid_s = seen_s if charged_s is None else charged_s / ahead.nodes
        data = {"why": "they are gone", "paid_s": paid_s}
        self._journal.append(Kind.GIVEN_UP.value, at=gone_at, attempt=found.number, data=data)

    def _launch(self, found: _Found, *, ahead: bool) -> tuple[str, float]:
        """Write down what was launched and what its job reported; return (cluster, last sign)."""
        known, number = found.launch, found.number
        self.lost_launches = list(objects(known, "lost_launches")) or self.lost_launches
        unknown_at = self._last_at if found.nothing else time.time()
        at = seconds(known, "intended_at") or min(found.signs, default=unknown_at)
        intent = {
            "cluster": text(known, "cluster") or cluster_name(self._run_id, number),
            "nodes": integer(known, "nodes", low=1, high=_MOST_NODES) or 1,
            "members": list(found.group.nodes) if found.group else None,
            "offer": {
                **{name: text(known, name) for name in _PLACE_WORDS},
                **{name: amount(known, name) for name in _PRICES},
                "infra": text(known, "infra") or "unknown",
                "gpus": text(known, "gpus"),
                "market": _market(known),
            },
            "allotment": allotment_to_json(allotment_of(known)),
            "ahead": ahead,
        }
        self._journal.append(Kind.INTENDED.value, at=at, attempt=number, data=intent)
        self._journal.append(Kind.LAUNCHED.value, at=at, attempt=number)
        self._copy(found)
        self._last_at = max(found.signs, default=at)
        if found.damage:  # what it restores from is unknown; how it stands is not
            data = {"key": keys.claim(number), "problem": found.damage}
            self._journal.append(Kind.SET_ASIDE.value, at=self._last_at, attempt=number, data=data)
        return str(intent["cluster"]), self._last_at

    def _copy(self, found: _Found) -> None:
        number = found.number
        for key, event in found.events:
            data = journal_data(key, event, seen_at=event.at)
            self._journal.append(JOB_PREFIX + event.kind, at=event.at, attempt=number, data=data)
        unfinished = found.chunks if found.end is None else []
        for key in unfinished:  # also those left: a controller need not read them either
            data = {"key": key}
            self._journal.append(Kind.CHUNK_READ.value, at=time.time(), attempt=number, data=data)
        self.chunks_left += found.chunks_left
        for beat in found.beats:
            self._journal.append(Kind.PROGRESS.value, at=beat.at, attempt=number, data=asdict(beat))

    def _end(self, found: _Found, cluster: str, last_at: float, *, newest: bool) -> None:
        """Give the verdict, unless the launcher still knows living nodes of the newest attempt."""
        end = found.end
        if end is None:
            self._tell(f"asking for nodes of attempt {found.number}; a cloud may take minutes")
            view = self._launcher.observe(cluster)
            if newest and view.state not in (ClusterState.GONE, ClusterState.ABSENT):
                return
            attempt = read_record(self._journal).attempts[-1]
            verdict = judge(attempt)
            gone_at = found.following.at if found.following else view.gone_at
            # Who cannot be asked says nothing of their death: they are asked for until it is known.
            there = not (view.state in NOTHING_LEFT or self._by_word_alone)
            charged_s = None
            if not there:
                charged_s = charged_node_s(self._launcher, cluster, attempt.offer, attempt.nodes)
            end = {
                **asdict(verdict),
                "reason": verdict.reason.value,
                "gone_at": last_at if gone_at is None else gone_at,
                "last_step": attempt.last_step,
                "saved": attempt.saved,
                "training_ended_at": attempt.job_end.at if attempt.job_end else last_at,
                # The controller before went on while these nodes went, or should have.
                "leaving": there and not found.following,
                "charged_node_s": None if found.following else charged_s,
            }
        if end.get("leaving"):  # nobody knows whether they were told to go
            words = "another attempt was launched after it"
            why = {"reason": end["reason"], "detail": words, "in_doubt": True}
            asked, number = Kind.DOWN_ASKED.value, found.number
            self._journal.append(asked, at=time.time(), attempt=number, data=why)
        self._journal.append(
            Kind.ATTEMPT_ENDED.value, at=float(end["gone_at"]), attempt=found.number, data=end
        )


def waits_for_its_turn(store: ObjectStore, number: int) -> bool:
    """Return whether an attempt was asked for ahead, and its turn has not come yet.

    Neither the controller has said so, nor has its job, which may see the end of the one before by
    itself. `store` is the run's own.
    """
    launch = read_launch(store, number) or {}
    if integer(launch, "after", low=1) is None or over(launch) is not None:
        return False
    return store.head(keys.go(number)) is None and store.head(keys.claim(number)) is None


def _claim(store: ObjectStore, number: int) -> tuple[Claim | None, str]:
    """Return an attempt's claim, or else why it cannot be read."""
    try:
        return read_claim(store, number), ""
    except DamagedCheckpoint as problem:
        return None, problem.message


def _came_to_nothing(store: ObjectStore, number: int, launch: dict[str, Any] | None) -> bool:
    return came_to_nothing(store, number, launch) if launch else is_unheard_of(store, number)


def _end_in(body: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a controller's verdict as the journal keeps it, or None if there is none."""
    gone_at = None if body is None else seconds(body, "gone_at")
    if body is None or gone_at is None or body.get("reason") not in _REASONS:
        return None
    return {
        "reason": body["reason"],
        "detail": text(body, "detail") or "",
        "gone_at": gone_at,
        "last_step": integer(body, "last_step", low=0),
        "training_ended_at": seconds(body, "training_ended_at"),
        "traceback": text(body, "traceback"),
        "last_beat_at": seconds(body, "last_beat_at"),
        "charged_node_s": amount(body, "charged_node_s"),
    }


def _market(known: dict[str, Any]) -> str:
    told = text(known, "market") or ""
    return told if told in _MARKETS else Market.SPOT.value


def settle(journal: Journal, detail: str, *, at: float | None = None) -> None:
    """Bring a run to rest that has no living nodes: the user decides whether it goes on.

    It came to rest now, unless `at` says when.
    """
    record, now = read_record(journal), time.time() if at is None else at
    if record.may_cost:
        return
    action = decide(record, Observation(), now, Policy())
    while isinstance(action, Alert):
        journal.append(Kind.ALERT.value, at=now, data={"percent": action.percent})
        action = decide(read_record(journal), Observation(), now, Policy())
    if not isinstance(action, Settle):
        action = Settle(
            state=RunState.PAUSED,
            detail=detail,
            exit_code=EXIT_UNFINISHED,
        )
    data = {**asdict(action), "state": action.state.value}
    journal.append(Kind.SETTLED.value, at=now, data=data)
