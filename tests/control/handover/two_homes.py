"""A laptop and a node, each with a home of its own, on one store; no process is started."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spotguard.control.controller.one_run import run_store
from spotguard.control.handover.adopt import adopt_run
from spotguard.control.handover.move import Mover
from spotguard.control.handover.node import NodeState
from spotguard.control.handover.serve import Service
from spotguard.control.home_name import machine_id
from spotguard.control.journal.fold import limits_to_json, read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.run_folder import RunFolder
from spotguard.control.supervisor.lease import Lease
from spotguard.events import keys
from spotguard.events.checksummed import with_checksum
from spotguard.events.states import Market
from spotguard.launch.base import Offer
from spotguard.shared.units import SystemClock, to_iso
from spotguard.spec.model import JobSpec
from spotguard.storage import open_store
from spotguard.testing.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

    from spotguard.control.handover.not_in_store import Private
    from spotguard.control.journal.nodes.controller_node import ControllerNode
    from spotguard.control.journal.record import RunRecord
    from spotguard.spec.nodes import NodeRange

RUN = "job-260101-000000-abcd"
PRICE_USD_PER_H = 0.1
NODE_OFFER = Offer(
    infra="aws",
    region="us-east-1",
    zone=None,
    instance_type="m6i.large",
    gpus=None,
    market=Market.ON_DEMAND,
    price_usd_per_h=PRICE_USD_PER_H,
    on_demand_usd_per_h=PRICE_USD_PER_H,
)


class NodeClock(FakeClock):
    """While somebody waits by it, something else happens."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.on_sleep: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        """Advance, and let it happen."""
        super().sleep(seconds)
        self.on_sleep()


class Steering:
    """What a node does to its run; a controller is no process here, but takes the lease as one."""

    def __init__(self, homes: Homes) -> None:
        self._homes = homes
        self.asked: list[str] = []

    def adopt(self, url: str, *, private: Private | None = None) -> str:
        """Adopt it."""
        return adopt_run(url, private=private).run_id

    def ensure_controlled(self, run_id: str) -> bool:
        """Take the lease."""
        return self._homes.controls("node")

    def request_stop(self, run_id: str) -> bool:
        """Note it."""
        self.asked.append("stop")
        return True

    def request_down(self, run_id: str) -> bool:
        """Note it."""
        self.asked.append("down")
        return True

    def resume(
        self,
        run_id: str,
        *,
        budget_usd: float | None = None,
        deadline_s: float | None = None,
        nodes: NodeRange | str | int | None = None,
        same_code: bool = False,
    ) -> None:
        """Note it, and the budget in the journal as well."""
        self.asked.append(f"resume {budget_usd} {nodes}")
        if budget_usd is not None:
            self._homes.allows("node", Limits(budget_usd=budget_usd))


class Homes:
    """Both of them, and the SkyPilot that has the node; each look at that lets the node do one."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self._patch = root, patch
        self.clock = NodeClock(time.time())
        self.steering = Steering(self)
        self.service: Service | None = None
        self.submitted: list[dict[str, Any]] = []
        self.ended: list[str] = []
        """Clusters whose end was asked for, each as often as it was."""
        self.goes_in_s = 0.0
        """How long a node takes to be gone once it was told to."""
        self._gone_at = 0.0
        self.begun_again: list[str] = []
        """Runs whose controller was begun on the laptop."""
        self.problem = ""
        self.mute = False
        """The node never comes."""
        self.script = root / "job.py"
        self.script.write_text("import spotguard.runtime\n")
        self.store_root = open_store(str(root / "store")).url
        self.store = run_store(self.store_root, RUN)
        self.place = f"{self.store_root.rstrip('/')}/{RUN}"
        self._make_run()

    @contextmanager
    def at(self, home: str) -> Iterator[None]:
        """Be on that machine inside the block."""
        with self._patch.context() as patch:
            patch.setenv("SPOTGUARD_HOME", str(self._root / home))
            yield

    def folder(self, home: str) -> RunFolder:
        """Return the run's folder there."""
        return RunFolder(self._root / home / "runs" / RUN)

    def record(self, home: str) -> RunRecord:
        """Return what is known of the run there."""
        with self.folder(home).journal() as journal:
            return read_record(journal)

    def allows(self, home: str, limits: Limits) -> None:
        """Have the journal there say what the run may use from now on."""
        with self.folder(home).journal() as journal:
            data = {"limits": limits_to_json(limits)}
            journal.append(Kind.RESUMED.value, at=self.clock.now(), data=data)

    def controls(self, home: str) -> bool:
        """Take the lease as a controller of that home would; return whether it may act."""
        with self.at(home):
            lease = Lease(self.store, SystemClock(), machine_id(self._root / home))
            lease.take()
            return not lease.lost_to

    def begins_again(self, folder: RunFolder) -> None:
        """Note that a controller was begun on the laptop."""
        self.begun_again.append(folder.run_id)

    def mover(self) -> Mover:
        """Return what moves the controller away from the laptop."""
        return Mover(
            self.folder("laptop"), self, lambda _: None, clock=self.clock, find=lambda _: NODE_OFFER
        )

    def serves(self) -> bool:
        """Let the node look once; False once it has nothing more to do."""
        if self.service is None:
            return False
        with self.at("node"):
            return self.service.look()

    def age_lease(self, by_s: float) -> None:
        """Let the lease be so much older than it is."""
        body = json.loads(self.store.get(keys.LEASE))
        del body["checksum"]
        body["renewed_at"] = to_iso(time.time() - by_s)
        self.store.put(keys.LEASE, with_checksum(json.dumps(body, sort_keys=True).encode()))
        os.utime(self._root / "store" / RUN / keys.LEASE, (time.time() - by_s,) * 2)

    # ------------------------------------------------------------ SkyPilot's part

    def submit(self, task: dict[str, Any], cluster: str) -> None:
        """Give the node; one that is there stays."""
        self.submitted.append(task)
        if self.service is None:
            number = int(task["envs"]["CONTROLLER_NUMBER"])
            with self.at("node"):
                self.service = Service(
                    self.place, self.steering, number=number, clock=self.clock, rest_s=60.0
                )

    def state(self, cluster: str) -> NodeState:
        """Let it look once, and say how it is."""
        if not self.mute:
            self.serves()
        return NodeState(there=True, problem=self.problem)

    def down(self, node: ControllerNode) -> None:
        """Take it away."""
        if node.cluster not in self.ended:
            self._gone_at = self.clock.monotonic() + self.goes_in_s
        self.ended.append(node.cluster)
        self.service = None

    def is_gone(self, node: ControllerNode) -> bool:
        """Tell whether it was told to go long enough ago."""
        return node.cluster in self.ended and self.clock.monotonic() >= self._gone_at

    # ------------------------------------------------------------ parts

    def _make_run(self) -> None:
        spec = JobSpec(
            script=str(self.script), workdir=str(self._root), name="job", store=self.store_root
        )
        folder = self.folder("laptop")
        folder.path.mkdir(parents=True, mode=0o700)
        created = {
            "run_id": RUN,
            "name": "job",
            "store_root": self.store_root,
            "limits": limits_to_json(Limits(budget_usd=5.0)),
            "spec": spec.to_json(),
            "job": None,
        }
        with Journal.create(folder.journal_path) as journal:
            journal.append(Kind.CREATED.value, at=time.time(), data=created)
        public = {**created, "spec": spec.public_json(), "created_at": to_iso(time.time())}
        del public["job"]
        self.store.put(keys.RUN, json.dumps({"schema": 1, **public}).encode(), if_absent=True)
