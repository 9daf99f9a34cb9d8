"""Moves a run's controller from this machine to a node of its own, and back.

A move is a chain of small steps, each of which may be the last one of a process that is killed:

    written down → asked for → ready → ended here → handed over → adopted there

At each point at most one machine's controller acts, for it needs the run's lease. Until the lease
is handed over, this machine's goes on, or is started again by any command that looks. Should this
machine be gone for good, the node that is ready adopts the run by itself once the lease is old.
Asked for again, a move goes on where it was.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.controller.one_run import run_store
from spotguard.control.controller.start import control_alone, start
from spotguard.control.handover import stored_wishes
from spotguard.control.handover.node import (
    Host,
    carried_folders,
    cheapest,
    check_phases,
    check_price,
    node_task,
    remove_private,
    where_for,
    write_private,
)
from spotguard.control.home_name import machine_id
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.nodes.controller_node import ControllerNode
from spotguard.control.journal.record import Kind, RunRecord
from spotguard.control.journal.stored.code import sources_of
from spotguard.control.journal.stored.controller_nodes import (
    GONE_WITHIN_S,
    StoredNode,
    node_data,
    place_in,
    publish_node,
    read_nodes,
    serving,
    tell_leaving,
    tell_limits,
)
from spotguard.control.run_folder import RunFolder, runs_folder
from spotguard.control.supervisor.decide import EXIT_UNFINISHED
from spotguard.control.supervisor.lease import Lease, check_ours, read_aged_holder, read_holder
from spotguard.errors import (
    AlreadyExists,
    EnvironmentFailure,
    LauncherFailure,
    SpotguardError,
    UsageError,
)
from spotguard.events.states import RunState
from spotguard.events.untrusted import Refused
from spotguard.launch.skypilot.cluster_list import controller_cluster
from spotguard.shared.units import SystemClock
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.model import JobSpec
from spotguard.storage import open_store
from spotguard.storage.urls import split_last

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.launch.base import Offer
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

    Tell = Callable[[str], None]

NODE_PATIENCE_S = 1800.0
"""How long a node may take to come and to be set up."""
ADOPT_PATIENCE_S = 300.0
_POLL_S = 2.0
_TRIES = 3
_RETRY_S = 15.0
_ORDER_AGAIN_S = 60.0
"""SkyPilot may have taken an order to end a node that it could not carry out."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a run's controller is."""

    place: str
    """STORE/RUN_ID."""
    holder: str
    """Who has the run, or had it last, in words."""
    machine: str
    """The name of that one's home; empty if there was nobody."""
    lives: bool
    """That one has shown itself a moment ago."""
    nodes: tuple[StoredNode, ...]
    """The nodes that controllers of the run had for themselves, oldest first."""

    @property
    def node(self) -> StoredNode | None:
        """The newest one, unless it was told to go."""
        return serving(self.nodes)


def standing(place: str, now: float, *, to_act: bool = False) -> Standing:
    """Return where the controller of the run at `place` is; reads its store alone.

    Who is `to_act` for a dead one has the store say how old its word is: `now` may be ahead.

    Raises:
        UsageError: what stands there makes no sense.
        StoreError: the store cannot be read.
    """
    store = store_of(place)
    mine = machine_id(spotguard_home())
    found = read_aged_holder(store, mine, now) if to_act else read_holder(store)
    return Standing(
        place=place,
        holder="nobody" if found is None else found[0].words(now),
        machine="" if found is None else found[0].machine,
        lives=found is not None and found[0].lives(now),
        nodes=tuple(nodes_of(store)),
    )


def store_of(place: str) -> ObjectStore:
    """Return the own store of the run at `place`."""
    root, run_id = split_last(place)
    return run_store(open_store(root).url, run_id)


def nodes_of(store: ObjectStore) -> list[StoredNode]:
    """Return the nodes that a run's controller had for itself.

    Raises:
        UsageError: what stands there of them makes no sense.
    """
    try:
        return read_nodes(store)
    except Refused as problem:
        raise UsageError(f"What {store.url} says of controllers makes no sense: {problem}.") from (
            problem
        )


class Mover:
    """Moves the controller of one run of this machine's to a node of its own."""

    def __init__(
        self,
        folder: RunFolder,
        host: Host,
        tell: Tell,
        *,
        clock: Clock | None = None,
        find: Callable[[JobSpec], Offer] = cheapest,
    ) -> None:
        """`find` says where the node is had; `tell` hears of each step."""
        self._folder = folder
        self._host = host
        self._tell = tell
        self._clock = clock or SystemClock()
        self._find = find
        self._record = self._read()
        self._store = run_store(self._record.store_root, self._record.run_id)
        self._where = where_for(JobSpec.from_json(self._record.spec))
        self.place = place_in(self._record)

    def move(self) -> str:
        """Move it; return the run's place once the node has the run. Blocks for minutes.

        Raises:
            UsageError: the run is at rest, or another machine's.
            SpecError: a node cannot have its controller; says why.
            EnvironmentFailure: the node does not come, or does not take over; says the way out.
        """
        stored = self._handed()
        if stored is None:
            stored = self._moved()
        elif not self._record.is_away:
            self._rest(stored)
        self._adopted(stored)
        remove_private(self._folder)
        return self.place

    def _moved(self) -> StoredNode:
        """Have a node that is ready, and give it the run."""
        if self._record.settled is not None:
            raise UsageError(
                f"{self._record.run_id} is at rest, so there is nothing to control.",
                hint=f"let it go on first: spotguard resume {self._record.run_id}",
            )
        if self._record.phases:
            check_phases(self._where)
        self._carried()  # before a node is written down: a template may be gone
        check_ours(self._store, machine_id(spotguard_home()), time.time())
        stored = self._ready(self._asked(JobSpec.from_json(self._record.spec)))
        self._hand_over(stored)
        return stored

    def _handed(self) -> StoredNode | None:
        """Return the node that has the run already; None: it is still to be handed over."""
        found = read_holder(self._store)
        machine = "" if found is None else found[0].machine
        ready = [x for x in nodes_of(self._store) if x.machine and x.node.until is None]
        return next((each for each in ready if each.machine == machine), None)

    # ------------------------------------------------------------ steps

    def _asked(self, spec: JobSpec) -> StoredNode:
        """Have a node asked for: the one that is written down, or else a new one."""
        nodes = nodes_of(self._store)
        stored, offer = serving(nodes), None
        if stored is None:
            offer, number = self._find(spec), len(nodes) + 1
            check_price(offer, self._record.limits)
            node = ControllerNode(
                number=number,
                cluster=controller_cluster(self._record.run_id, number),
                place="/".join(filter(None, (offer.infra, offer.region, offer.zone))),
                price_usd_per_h=offer.price_usd_per_h,
                since=self._clock.now(),
            )
            try:
                publish_node(self._store, node)
            except AlreadyExists:
                raise UsageError("Somebody else moves this controller at this moment.") from None
            stored = StoredNode(node=node)
        self._note(stored.node)
        if not stored.machine:
            self._tell(f"asking for a node for the controller: {stored.node.place}")
            self._ask(stored, offer)
        return stored

    def _carried(self) -> dict[str, str]:
        """Return what goes along with the run, for all of its phases."""
        job = JobSpec.from_json(self._record.job or self._record.spec)
        return carried_folders(JobSpec.from_json(self._record.spec), job.phases)

    def _ask(self, stored: StoredNode, offer: Offer | None = None) -> None:
        """`offer` is the one that was written down, if it was found just now."""
        spec, folders = JobSpec.from_json(self._record.spec), self._carried()
        task = node_task(
            spec,
            stored.node,
            offer or self._find(spec),
            run_id=self._record.run_id,
            place=self.place,
            folders=folders,
            private=write_private(self._folder, spec, folders),
            sources=sources_of(folders, spec.workdir, self._record.code),
        )
        try:
            self._host.submit(task, stored.node.cluster)
        except SpotguardError:
            remove_private(self._folder)
            raise

    def _ready(self, stored: StoredNode) -> StoredNode:
        """Return what the node says of itself once it waits for the run."""
        give_up_at = self._clock.monotonic() + NODE_PATIENCE_S
        tries = 1
        while not stored.machine:
            state = self._host.state(stored.node.cluster)
            if state.problem and not state.there and tries < _TRIES:
                # Two launches at once make the account's first network rules: one is refused.
                self._tell(f"asking again for the node: {state.problem}")
                self._clock.sleep(_RETRY_S)
                self._ask(stored)
                tries += 1
                continue
            if state.problem or self._clock.monotonic() >= give_up_at:
                why = state.problem or "it did not come in time"
                again = f"spotguard controller move {self._record.run_id} {self._where}"
                self.give_up(stored)
                raise EnvironmentFailure(
                    f"The controller stays here: its node does not serve: {why}.",
                    hint=f"try again: {again}",
                )
            self._clock.sleep(_POLL_S)
            stored = next(x for x in nodes_of(self._store) if x.node.number == stored.node.number)
        remove_private(self._folder)  # not earlier: SkyPilot reads it once the node is up
        self._tell("the node is ready: it gets the run")
        return stored

    def give_up(self, stored: StoredNode) -> None:
        """Have a node end that is not needed; it is paid until it is gone. May take minutes."""
        remove_private(self._folder)
        # Told first: should its end be refused, it goes by itself once it serves.
        tell_leaving(self._store, stored.node.number, self._clock.now() + GONE_WITHIN_S)
        self._tell(f"ending {stored.node.cluster}")
        self._note(_end(self._store, stored, self._host, self._clock).node)

    def _hand_over(self, stored: StoredNode) -> None:
        """End the controller here, and give the lease to the node's home.

        If that does not come about, for whatever reason, a controller begins here again: it goes
        on, or finds that another machine has the run and comes to rest.
        """
        is_given = False
        try:
            with control_alone(self._folder):
                is_given = self._gave(stored)
        finally:
            if not is_given:
                with suppress(SpotguardError, OSError):
                    start(self._folder)
        if not is_given:
            self.give_up(stored)
            raise UsageError(f"{self._record.run_id} comes to rest, so it was not handed over.")

    def _gave(self, stored: StoredNode) -> bool:
        """Give the lease to the node's home; return False if the run comes to rest instead."""
        lease = Lease(self._store, SystemClock(), machine_id(spotguard_home()))
        lease.take()
        if lease.lost_to:
            raise UsageError(f"Another machine has the run: {lease.lost_to}.")
        record = self._read()
        if record.wish is not None or record.settled is not None:
            return False
        tell_limits(self._store, stored.node.number, record.limits, self._clock.now())
        lease.hand_to(stored.machine)
        self._rest(stored)
        return True

    def _rest(self, stored: StoredNode) -> None:
        """Bring this machine's part of the run to rest."""
        to = f"its own node {stored.node.cluster}"
        settled = {
            "state": RunState.STOPPED.value,
            "detail": f"on this machine: its controller moved to {to}; it goes on there",
            "exit_code": EXIT_UNFINISHED,
        }
        with self._folder.journal() as journal, journal.all_or_nothing():
            now = self._folder.clock().now()
            journal.append(Kind.TAKEN_OVER.value, at=now, data={"by": to})
            journal.append(Kind.SETTLED.value, at=now, data=settled)

    def _adopted(self, stored: StoredNode) -> None:
        """Return once the node has the run."""
        give_up_at = self._clock.monotonic() + ADOPT_PATIENCE_S
        while self._clock.monotonic() < give_up_at:
            found = read_holder(self._store)
            if found is not None and found[0].machine == stored.machine and not found[0].released:
                self._tell("the node has the run")
                return
            self._clock.sleep(_POLL_S)
        raise EnvironmentFailure(
            "The run was handed to the node, which has not taken it up yet; its job goes on.",
            hint=f"look: spotguard controller status {self.place}; or bring it back here: "
            f"spotguard controller move {self.place} local",
        )

    # ------------------------------------------------------------ parts

    def _read(self) -> RunRecord:
        with self._folder.journal() as journal:
            return read_record(journal)

    def _note(self, node: ControllerNode) -> None:
        """Have the journal know what the store says."""
        note_node(self._folder, node)


def bring_back(place: str, clock: Clock, tell: Tell) -> None:
    """Have the node let the run go, if it lives; then any machine may adopt it.

    Raises:
        EnvironmentFailure: it holds the run and does not hear.
        StoreError: the store cannot be read or written.
    """
    now = standing(place, clock.now(), to_act=True)
    if now.node is None:
        return
    if not now.lives:  # it rests on its node, or that is gone: paid no longer than it may last
        tell_leaving(store_of(place), now.node.node.number, clock.now() + GONE_WITHIN_S)
        return
    tell("asking the node to let the run go")
    stored_wishes.ask(store_of(place), stored_wishes.LEAVE, clock)


def end_node(place: str, host: Host, clock: Clock, tell: Tell) -> None:
    """Have the newest node of the controller end.

    Raises:
        UsageError: it has the run, which goes on; or there is none.
        LauncherFailure: SkyPilot does not end it; it does so itself a while after the run's rest.
    """
    now = standing(place, clock.now(), to_act=True)
    stored = now.nodes[-1] if now.nodes else None
    if stored is None:
        raise UsageError("The controller of this run has no node of its own.")
    if now.lives and now.machine == stored.machine:
        raise UsageError(
            f"{stored.node.cluster} controls the run, which goes on.",
            hint=f"stop it first: spotguard stop {place}; or bring the controller here: "
            f"spotguard controller move {place} local",
        )
    tell(f"ending {stored.node.cluster}")
    try:
        told = _end(store_of(place), stored, host, clock)
    except LauncherFailure as problem:
        raise LauncherFailure(
            f"{stored.node.cluster} could not be ended from here: {problem.message}",
            hint="it ends by itself a few minutes after the run came to rest",
        ) from problem
    folder = RunFolder(runs_folder() / split_last(place)[1])
    if folder.journal_path.exists():
        note_node(folder, told.node)


def _end(store: ObjectStore, stored: StoredNode, host: Host, clock: Clock) -> StoredNode:
    """Have a node end; return what is told of it. It costs until it is seen gone, or as it may be.

    Blocks until then: SkyPilot takes an order at once, and an end takes minutes.

    Raises:
        LauncherFailure: the order is refused.
    """
    number, began_at = stored.node.number, clock.monotonic()
    asked_at = began_at
    host.down(stored.node)
    told = tell_leaving(store, number, clock.now() + GONE_WITHIN_S)
    while clock.monotonic() - began_at < GONE_WITHIN_S:
        if host.is_gone(stored.node):
            return tell_leaving(store, number, clock.now())
        clock.sleep(_POLL_S)
        if clock.monotonic() - asked_at >= _ORDER_AGAIN_S:
            asked_at = clock.monotonic()
            with suppress(LauncherFailure):
                host.down(stored.node)
    return told


def note_node(folder: RunFolder, node: ControllerNode) -> None:
    """Have the journal of this machine know what the store says of a node."""
    with folder.journal() as journal:
        known = {each.number: each for each in read_record(journal).controller_nodes}
        if known.get(node.number) != node:
            now = folder.clock().now()
            journal.append(Kind.CONTROLLER_NODE.value, at=now, data=node_data(node))
