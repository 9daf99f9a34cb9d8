"""What runs on the controller's own node: it adopts the run, keeps it controlled, hears wishes.

It keeps nothing in memory that matters. Killed anywhere, it begins anew and goes on: a run that
is another machine's it waits for, its own it controls.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from spotguard.control.controller.one_run import run_store
from spotguard.control.controller.start import control_alone
from spotguard.control.handover import stored_wishes
from spotguard.control.handover.adopt import ADOPTED_WORDS
from spotguard.control.handover.not_in_store import Private
from spotguard.control.handover.run_json import read_run_json
from spotguard.control.home_name import machine_id
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.record import Kind, RunRecord
from spotguard.control.journal.stored.controller_nodes import (
    GONE_WITHIN_S,
    host,
    node_data,
    tell_leaving,
    tell_limits,
    tell_ready,
)
from spotguard.control.run_folder import RunFolder, runs_folder, split_place
from spotguard.control.supervisor.lease import Lease, read_aged_holder
from spotguard.errors import (
    BudgetExhausted,
    DeadlineReached,
    EnvironmentFailure,
    SpotguardError,
    StoreError,
    UsageError,
)
from spotguard.shared.units import SystemClock
from spotguard.spec.home_folder import spotguard_home

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.shared.units import Clock
    from spotguard.spec.nodes import NodeRange
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

LOOK_EVERY_S = 5.0
REST_S = 300.0
"""How long it stays once the run is at rest, should the user want it to go on."""


class Steers(Protocol):
    """What it does to the run, as commands of this machine do."""

    def adopt(self, url: str, *, private: Private | None = None) -> str:
        """Take the run over; `UsageError` while another machine's controller is alive."""
        ...

    def ensure_controlled(self, run_id: str) -> bool:
        """Start a controller where there is none and the run goes on."""
        ...

    def request_stop(self, run_id: str) -> bool:
        """Ask the run to save and stop."""
        ...

    def request_down(self, run_id: str) -> bool:
        """Ask the run to release its nodes."""
        ...

    def resume(
        self,
        run_id: str,
        *,
        budget_usd: float | None = None,
        deadline_s: float | None = None,
        nodes: NodeRange | str | int | None = None,
        same_code: bool = False,
    ) -> None:
        """Let the run go on."""
        ...


@dataclass
class _Rest:
    since: float | None = None
    """When the run was first seen at rest; None while it goes on."""


class Service:
    """Looks after one run from a node of its own. Not thread-safe."""

    def __init__(
        self,
        place: str,
        steers: Steers,
        *,
        number: int | None = None,
        price_usd_per_h: float = 0.0,
        private: Private | None = None,
        clock: Clock | None = None,
        rest_s: float = REST_S,
    ) -> None:
        """Serve the run at `place` (`STORE/RUN_ID`).

        `number` is the node's, if it was asked for by a move. Else it is one of the user's own, for
        which the run is charged `price_usd_per_h`. `private` is what of the job is in no store;
        None: all variables of this machine, which its user gave to the run, are for the job.

        Raises:
            UsageError: there is no run at `place`.
            StoreError: the store cannot be read.
        """
        self.place = place
        root, self.run_id = split_place(place)
        self._store: ObjectStore = run_store(root, self.run_id)
        read_run_json(self._store, place)
        self._steers = steers
        self._number = number
        self._price_usd_per_h = price_usd_per_h
        self._private = private or Private(env=dict(os.environ))
        self._clock = clock or SystemClock()
        self._rest_s = rest_s
        self._rest = _Rest()
        self._told = ""
        self._is_own = False
        """Nobody else ends this machine once it serves no more."""
        self.folder = RunFolder(runs_folder() / self.run_id)

    def run(self) -> None:
        """Serve until the run is at rest for a while, is another machine's, or it is told to go."""
        while self.look():
            self._clock.sleep(LOOK_EVERY_S)

    def look(self) -> bool:
        """Do what is to be done now; return False once there is nothing more to do, for good."""
        try:
            if self._number is None:
                self._number = host(
                    self._store,
                    machine_id(spotguard_home()),
                    place=socket.gethostname(),
                    price_usd_per_h=self._price_usd_per_h,
                    at=self._clock.now(),
                )
                self._is_own = True
            return self._looked(self._number)
        except (StoreError, EnvironmentFailure) as problem:
            self._tell(f"tried again: {problem.message}")
            return True

    def _looked(self, number: int) -> bool:
        if not self.folder.journal_path.exists():
            return self._wait_for_run(number)
        record = self._record()
        if record.is_away:
            self._tell("another machine has the run")
            return self._leave(number, record)
        if self._going_on.exists():
            self._go_on(record)
        for wish in stored_wishes.unanswered(self._store):
            self._rest.since = None
            if wish.kind == stored_wishes.LEAVE:
                return self._hand_back(number, wish)
            self._carry_out(number, wish)
        self._steers.ensure_controlled(self.run_id)
        record = self._record()
        if record.settled is None:
            self._rest.since = None
            return True
        if self._rest.since is None:
            self._rest.since = self._clock.monotonic()
        if self._clock.monotonic() - self._rest.since < self._rest_s:
            return True
        return self._leave(number, record)

    def _record(self) -> RunRecord:
        with self.folder.journal() as journal:
            return read_record(journal)

    def _tell(self, words: str) -> None:
        if words != self._told:
            log.warning("%s: %s", self.run_id, words)
            self._told = words

    # ------------------------------------------------------------ coming

    def _wait_for_run(self, number: int) -> bool:
        """Say that this machine is ready, and take the run over once nobody else has it."""
        stored = tell_ready(self._store, number, machine_id(spotguard_home()))
        if stored.node.until is not None:
            self._tell("this node was told to go before it had the run")
            return False
        mine, now = machine_id(spotguard_home()), time.time()
        found = read_aged_holder(self._store, mine, now)
        if found is not None and found[0].is_foreign(mine) and found[0].lives(now):
            self._tell(f"waits for the run: it is in the hands of {found[0].host}")
            return True
        self._going_on.unlink(missing_ok=True)
        # Who came to rest released the run, and to nobody; who died, or handed it over, did not.
        if found is not None and (not found[0].released or found[0].machine == mine):
            self._going_on.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._going_on.touch(0o600)
        try:
            self._steers.adopt(self.place, private=self._private)
        except UsageError as problem:
            self._tell(f"waits for the run: {problem.message}")
            return True
        self._tell("has the run")
        return True

    @property
    def _going_on(self) -> Path:
        """Is there from before the run is adopted until it goes on."""
        return self.folder.path / "going-on"

    def _go_on(self, record: RunRecord) -> None:
        """Have a run go on that had no nodes when it was adopted, and so came to rest."""
        if record.settled is None and record.rests:
            return  # it does so once its earlier nodes are gone
        if record.settled is not None and record.settled.detail.startswith(ADOPTED_WORDS):
            self._tell("goes on")
            try:
                self._steers.resume(self.run_id, same_code=True)
            except (UsageError, BudgetExhausted, DeadlineReached) as problem:
                self._tell(problem.message)
        self._going_on.unlink()

    # ------------------------------------------------------------ wishes

    def _carry_out(self, number: int, wish: stored_wishes.AskedThere) -> None:
        self._tell(f"is asked for: {wish.kind}")
        try:
            if wish.kind == stored_wishes.STOP:
                self._steers.request_stop(self.run_id)
            elif wish.kind == stored_wishes.DOWN:
                self._steers.request_down(self.run_id)
            else:
                self._steers.resume(self.run_id, **_limits(wish.data))
        except StoreError:
            raise
        except SpotguardError as problem:
            stored_wishes.refuse(self._store, wish, problem.message)
        else:
            if wish.kind == stored_wishes.RESUME:
                self._tell_limits(number)
            stored_wishes.done(self._store, wish)

    def _tell_limits(self, number: int) -> None:
        """Have the store know what the run is allowed, for who adopts it from here."""
        tell_limits(self._store, number, self._record().limits, self._clock.now())

    # ------------------------------------------------------------ leaving

    def _hand_back(self, number: int, wish: stored_wishes.AskedThere) -> bool:
        """End the controller here and let the run go, for another machine to adopt it.

        Returns True, and keeps the run, if that was taken back meanwhile: nobody would adopt it.
        """
        with control_alone(self.folder):
            self._tell_limits(number)
            if not stored_wishes.stands(self._store, wish):
                return True
            lease = Lease(self._store, SystemClock(), machine_id(spotguard_home()))
            lease.take()
            lease.release()
            self._leave(number, self._record())
        stored_wishes.done(self._store, wish)
        self._tell("handed the run back")
        return False

    def _leave(self, number: int, record: RunRecord) -> bool:
        """Write down until when this node costs; return False."""
        until = self._clock.now() + (0.0 if self._is_own else GONE_WITHIN_S)
        stored = tell_leaving(self._store, number, until)
        if record.controller_node is not None:
            with self.folder.journal() as journal:
                data = node_data(stored.node)
                journal.append(Kind.CONTROLLER_NODE.value, at=self._clock.now(), data=data)
        return False


def _limits(data: dict[str, Any]) -> dict[str, Any]:
    """Return what a wish to go on says of limits; what it does not say stays as it was."""
    known: dict[str, Any] = {}
    for name in ("budget_usd", "deadline_s"):
        if isinstance(data.get(name), (int, float)) and not isinstance(data[name], bool):
            known[name] = float(data[name])
    if isinstance(data.get("nodes"), (str, int)) and not isinstance(data["nodes"], bool):
        known["nodes"] = data["nodes"]
    return known
