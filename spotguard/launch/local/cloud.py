"""The cloud process of one cluster: starts its nodes, interrupts them, says what became of them.

    python -m spotguard.launch.local.cloud CLUSTER_FOLDER

returns 0 once the cluster is taken on, by this process or by another one before, and goes on in
the background until the last node is gone, whatever becomes of the terminal or the controller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard.launch.base import ClusterState, NodeEnd, NodeView
from spotguard.launch.local.cluster import ClusterFolder, ClusterOrder, Record, latest
from spotguard.launch.local.files import try_lock
from spotguard.launch.local.interrupter import Interrupter
from spotguard.launch.local.interruption_timing import Fate, leak_guard_fate, release_fate
from spotguard.launch.local.node import LocalNode, MeetingPoint
from spotguard.launch.local.processes import kill_all, signal_all
from spotguard.launch.local.simulation_state import World
from spotguard.shared.units import to_iso

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TICK_S = 0.01
_LOCK_PATIENCE_S = 5.0


class Cloud:
    """One cluster's life, from its order to its end."""

    def __init__(self, folder: ClusterFolder, order: ClusterOrder) -> None:
        self._clock = folder.clock()
        world = World(folder.run_folder, order.options, self._clock)
        world.begin()
        self._folder = folder
        self._order = order
        self._interrupter = Interrupter(world, order)
        self._nodes = [LocalNode(folder.node(i), order, i) for i in range(order.request.nodes)]
        self._released = False
        self._guarded = False
        self._told_to_end = threading.Event()

    def run(self) -> None:
        """Start the nodes and stay until none is left. Blocks; main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._told_to_end.set())
        detail = f"the local cloud failed; {self._folder.log} says why"
        try:
            if not self._folder.down_asked:
                with _free_port() as port:
                    self._start(port)
                    self._watch()
            detail = ""
        except OSError as problem:  # no disk, no memory, no such folder
            detail = f"the local cloud failed: {problem}"
        finally:
            self._end(detail)

    def _start(self, port: int) -> None:
        # Short, because sockets live in there: a path of one holds 107 bytes at most.
        scratch = Path(tempfile.mkdtemp(prefix="spotguard-"))
        self._folder.link_scratch(scratch)
        for node in self._nodes:
            node.start(MeetingPoint(port=port, scratch=scratch))
            _say(f"node {node.index} started")
        self._write(ClusterState.UP)

    def _watch(self) -> None:
        while any(node.running for node in self._nodes):
            now = time.monotonic()
            self._release_if_asked(now)
            self._guard(now)
            step = latest(node.folder for node in self._nodes)
            for decision in self._interrupter.decide(self._nodes, step=step, now=now):
                self._doom(decision.nodes, decision.fate, f"{decision.reason}, step {step}")
            ended = self._kill_together(now)
            ended += [node for node in self._nodes if node.tick(now)]
            for node in ended:
                _say(f"node {node.index} {node.view.end.value}: {node.view.detail}")
            if ended:
                self._write(ClusterState.UP)
            time.sleep(_TICK_S)

    def _release_if_asked(self, now: float) -> None:
        if not self._released and (self._told_to_end.is_set() or self._folder.down_asked):
            self._released = True
            self._doom(self._nodes, release_fate(now), "the end was asked for")

    def _guard(self, now: float) -> None:
        lifetime_s = self._order.request.max_lifetime_s
        if lifetime_s is None or self._guarded:
            return
        # From the order on: what it takes to start this process and the nodes is paid, too.
        late_s = self._clock.now() - self._order.ordered_at - lifetime_s
        if late_s < 0:
            return
        self._guarded = True
        self._doom(self._nodes, leak_guard_fate(now, lifetime_s, late_s=late_s), "leak guard")

    def _doom(self, nodes: Iterable[LocalNode], fate: Fate, reason: str) -> None:
        for node in nodes:
            if node.doom(fate):
                _say(f"node {node.index} doomed: {reason}")

    def _end(self, detail: str) -> None:
        """Leave nothing behind, and say so last of all."""
        kill_all(self._folder.path)
        for node in self._nodes:
            node.abandon(detail or "never started")
        self._folder.bury(self._record(ClusterState.GONE, detail), at=self._clock.now())
        _say("gone")

    def _kill_together(self, now: float) -> list[LocalNode]:
        """Kill all nodes in one sweep if all are due, so that none sees the others die first."""
        running = [node for node in self._nodes if node.running]
        if not all(node.is_due(now) for node in running):
            return []
        signal_all(self._folder.path, signal.SIGKILL)
        return [node for node in running if node.kill()]

    def _write(self, state: ClusterState) -> None:
        self._folder.write_record(self._record(state, ""))

    def _record(self, state: ClusterState, detail: str) -> Record:
        return Record(state=state, nodes=tuple(n.view for n in self._nodes), detail=detail)


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """Reserve a port inside the block: nobody else is given it, but who asks for it gets it."""
    with socket.socket() as reserved:
        # Two sockets may have one address if both say so and at most one listens (Linux).
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield int(reserved.getsockname()[1])


def take_on(folder: ClusterFolder) -> bool:
    """Become the cluster's cloud process; return False if there is or was one already.

    The lock is held from here to the end of the process (of its forked child, when that goes on).
    """
    give_up_at = time.monotonic() + _LOCK_PATIENCE_S
    while folder.read_record() is None and time.monotonic() < give_up_at:
        if try_lock(folder.lock) is None:
            time.sleep(_TICK_S)  # somebody looks whether it is held, or is about to take it on
            continue
        if folder.read_record() is not None:
            return False
        order = folder.read_order()
        assert order is not None, "ordered before this process is started"
        nodes = tuple(NodeView(index=i, end=NodeEnd.RUNNING) for i in range(order.request.nodes))
        folder.write_record(Record(state=ClusterState.STARTING, nodes=nodes))
        return True
    return False


def _say(words: str) -> None:
    sys.stderr.write(f"{to_iso(time.time())} {words}\n")


def main(path: str) -> None:
    """Take the cluster on and run it in the background; return at once if it is another's."""
    folder = ClusterFolder(Path(path))
    if not take_on(folder):
        return
    if os.fork():
        os._exit(0)  # the launcher waits for this one only, and so never for a zombie
    order = folder.read_order()
    assert order is not None
    Cloud(folder, order).run()


if __name__ == "__main__":
    main(sys.argv[1])
