"""One cluster's folder: the only thing that the launcher and the cloud process share.

request.json     what to start; create-if-absent, so of two launches one is heard
state.json       what became of it; once it is there, nothing is ever started here again
lock             held by the cloud process for as long as it lives
down             its appearing asks for the end
cloud.log        what the cloud did and when
node-0/          home/, tmp/ (removed at the end), log, progress, notice, leaving
"""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.events.states import Market
from spotguard.launch.base import ClusterState, LaunchRequest, NodeEnd, NodeView, Offer
from spotguard.launch.local.files import create_json, is_locked, read_json, write_json
from spotguard.launch.local.options import LocalOptions
from spotguard.shared.steady_clock import CLOCK_FILE, clock_kept_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from spotguard.shared.steady_clock import SteadyClock

SCHEMA = 1
_STEP_AND_TOTAL = struct.Struct("<qq")
PROGRESS_BYTES = _STEP_AND_TOTAL.size


@dataclass(frozen=True, kw_only=True)
class ClusterOrder:
    """What `request.json` holds."""

    request: LaunchRequest
    options: LocalOptions
    ordered_at: float
    """By the run's clock."""
    folder: str = ""
    """Where the cluster was ordered: its processes go on there when the home is moved or copied."""

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        request = asdict(self.request)
        request["offer"]["market"] = str(self.request.offer.market)
        return {
            "schema": SCHEMA,
            "request": request,
            "options": self.options.to_json(),
            "ordered_at": self.ordered_at,
            "folder": self.folder,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ClusterOrder:
        """Return the order that `to_json` wrote."""
        request = dict(body["request"])
        offer = {**request["offer"], "market": Market(request["offer"]["market"])}
        request.update(offer=Offer(**offer), args=tuple(request["args"]))
        return cls(
            request=LaunchRequest(**request),
            options=LocalOptions.from_json(body["options"]),
            ordered_at=float(body["ordered_at"]),
            folder=str(body.get("folder", "")),
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """What `state.json` holds."""

    state: ClusterState
    nodes: tuple[NodeView, ...]
    gone_at: float | None = None
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        nodes = [{**asdict(node), "end": node.end.value} for node in self.nodes]
        return {**asdict(self), "state": self.state.value, "nodes": nodes}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Record:
        """Return the record that `to_json` wrote."""
        nodes = tuple(NodeView(**{**node, "end": NodeEnd(node["end"])}) for node in body["nodes"])
        return cls(**{**body, "state": ClusterState(body["state"]), "nodes": nodes})


@dataclass(frozen=True)
class NodeFolder:
    """Where one node keeps what is its own."""

    path: Path

    @property
    def home(self) -> Path:
        """The node's HOME: a disk that goes away with the node."""
        return self.path / "home"

    @property
    def log(self) -> Path:
        """What the node printed."""
        return self.path / "log"

    @property
    def progress(self) -> Path:
        """Steps finished and total, written by the job's first process on this node."""
        return self.path / "progress"

    @property
    def notice(self) -> Path:
        """Its appearing is a notice, where there is no metadata service."""
        return self.path / "notice"

    @property
    def leaving(self) -> Path:
        """Its appearing says that the job knows that this node will be taken."""
        return self.path / "leaving"

    def create(self) -> None:
        """Make the folder as a fresh node has it."""
        self.home.mkdir(parents=True, mode=0o700)
        self.progress.write_bytes(bytes(PROGRESS_BYTES))

    def read_step(self) -> int | None:
        """Return the steps finished, or None before the job has told any."""
        try:
            step, total = _STEP_AND_TOTAL.unpack(self.progress.read_bytes()[:PROGRESS_BYTES])
        except (OSError, struct.error):
            return None
        return int(step) if step or total else None


def latest(nodes: Iterable[NodeFolder]) -> int | None:
    """Return the most steps that any of the nodes has told; None before any has."""
    steps = (node.read_step() for node in nodes)
    return max((step for step in steps if step is not None), default=None)


class ClusterFolder:
    """The folder of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.run_folder = path.parents[1]
        """What all clusters of the run share."""
        self.lock = path / "lock"
        self.log = path / "cloud.log"
        self._down = path / "down"
        self._request = path / "request.json"
        self.state_path = path / "state.json"
        self._scratch = path / "scratch"

    def clock(self) -> SteadyClock:
        """Return the clock by which the controller keeps the run, too."""
        return clock_kept_at(self.run_folder.parent / CLOCK_FILE)

    def node(self, index: int) -> NodeFolder:
        """Return the folder of one node."""
        return NodeFolder(self.path / f"node-{index}")

    def create(self) -> None:
        """Make the folder, unless it is there."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def order(self, order: ClusterOrder) -> bool:
        """Write the request, unless there is one; return whether it was written."""
        return create_json(self._request, order.to_json())

    def read_order(self) -> ClusterOrder | None:
        """Return what was ordered, or None if nothing was."""
        body = read_json(self._request)
        return None if body is None else ClusterOrder.from_json(body)

    def ordered_elsewhere(self) -> Path | None:
        """Return where the cluster was ordered, if this folder was moved or copied since."""
        order = self.read_order()
        if order is None or order.folder in ("", str(self.path)):
            return None
        return Path(order.folder)

    def write_record(self, record: Record) -> None:
        """Replace the record."""
        write_json(self.state_path, record.to_json())

    def read_record(self) -> Record | None:
        """Return the record, or None if no cloud process ever took this cluster on."""
        body = read_json(self.state_path)
        return None if body is None else Record.from_json(body)

    def has_cloud(self) -> bool:
        """Return whether the cloud process lives."""
        return is_locked(self.lock)

    def ask_down(self) -> None:
        """Ask the cloud process, if there is or will be one, for the end."""
        self._down.touch()

    @property
    def down_asked(self) -> bool:
        """True once the end was asked for."""
        return self._down.exists()

    def last_step(self) -> int | None:
        """Return the most steps that any node has told; None before any has."""
        try:
            names = os.listdir(self.path)  # noqa: PTH208 - at each look, and a glob takes its time
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        return latest(NodeFolder(self.path / name) for name in names if name.startswith("node-"))

    def link_scratch(self, scratch: Path) -> None:
        """Remember the nodes' temporary folder, so that whoever ends the cluster removes it."""
        self._scratch.symlink_to(scratch)

    def bury(self, record: Record, *, at: float) -> Record:
        """Record that the cluster is gone, and remove what would be gone with its nodes.

        Only for who knows that no process of it is left. Logs and progress stay.
        """
        gone = replace(record, state=ClusterState.GONE, gone_at=at)
        for home in self.path.glob("node-*/home"):
            shutil.rmtree(home, ignore_errors=True)
        if self._scratch.is_symlink():
            shutil.rmtree(self._scratch.readlink(), ignore_errors=True)
            self._scratch.unlink(missing_ok=True)
        self.write_record(gone)
        return gone
