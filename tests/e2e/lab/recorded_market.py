"""A window of a recorded market, played on the lab's nodes: each zone is the partition of one."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy.market.hazard import pooled
from spotguard.policy.market.recorded import recorded
from spotguard.policy.simulation.policy_players import Rollout, play
from spotguard.policy.simulation.windows import cut

if TYPE_CHECKING:
    from spotguard.policy.market.recorded import RecordedZone
    from spotguard.policy.simulation.policy_players import Outcome
    from spotguard.policy.simulation.windows import Windows
    from tests.e2e.lab.slurm_lab import SlurmLab

NOTICE_S = 6.0
"""A cloud's two minutes are shorter than this in a market that is so fast; a save is not."""
_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Market:
    """Two zones of a record from one of its ticks on, in which a node is a gang of one."""

    dataset: str
    zones: tuple[str, str]
    begins: int
    deadline_h: float
    speed_up: float

    def recorded(self) -> tuple[RecordedZone, ...]:
        """Return the zones as they were recorded."""
        known = {zone.zone: zone for zone in recorded(self.dataset)}
        return tuple(known[name] for name in self.zones)

    def windows(self, *, work_s: float, start_s: float) -> Windows:
        """Return it as the simulator knows it; the times are the market's.

        The job names no accelerator, so all records together speak for it.
        """
        told = cut(
            self.recorded(),
            gang=1,
            work_h=work_s / 3600,
            deadline_h=self.deadline_h,
            start_s=start_s,
            begins=[self.begins],
        )
        return replace(told, accelerator="")

    def simulated(self, *, work_s: float, start_s: float, seed: int = 0) -> Outcome:
        """Return how the policy fares here if it sees all that happens at once."""
        player = Rollout(seed=seed, hazard=pooled("", 1))
        return play(self.windows(work_s=work_s, start_s=start_s), player)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A zone's node is taken, or is back, so many seconds of the clock after the beginning."""

    at_s: float
    node: str
    up: bool
    announced: bool = False


def changes(market: Market, nodes: tuple[str, str]) -> list[Change]:
    """Return what happens to the nodes, in the order of time; every other loss is announced."""
    told = market.windows(work_s=3600.0, start_s=0.0)
    tick_s = told.tick_s / market.speed_up
    found: list[Change] = []
    for zone, node in enumerate(nodes):
        up = told.up[0, :, zone]
        found += [
            Change(at_s=float(tick * tick_s), node=node, up=bool(up[tick]))
            for tick in np.flatnonzero(np.diff(up, prepend=True))
        ]
    found.sort(key=lambda change: change.at_s)
    losses = [change for change in found if not change.up and change.at_s > 0]
    return [replace(each, announced=each in losses[::2]) for each in found]


class Weather(threading.Thread):
    """Takes the lab's nodes and brings them back, by the record."""

    def __init__(self, slurm: SlurmLab, market: Market, nodes: tuple[str, str]) -> None:
        super().__init__(daemon=True)
        self._slurm = slurm
        self._changes = changes(market, nodes)
        self._dead: set[str] = set()
        self._over = threading.Event()
        self._begins_at = time.time()

    def __enter__(self) -> Weather:
        """Take what is not there in the beginning; the rest follows from `begin` on."""
        for change in self._changes:
            if change.at_s == 0.0:
                self._play(change)
        return self

    def begin(self, begins_at: float) -> None:
        """Let the market's time go on from then (epoch seconds)."""
        self._begins_at = begins_at
        self.start()

    def __exit__(self, *_: object) -> None:
        """Let it be fair again."""
        self._over.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Play what is left to happen until told to stop."""
        for change in self._changes:
            if change.at_s > 0.0 and not self._waited(change.at_s - NOTICE_S * change.announced):
                self._play(change)

    def _waited(self, until_s: float) -> bool:
        """Wait; return whether it is over meanwhile."""
        return self._over.wait(max(0.0, self._begins_at + until_s - time.time()))

    def _play(self, change: Change) -> None:
        node = change.node
        if change.up:
            self._slurm.verb(*(("heal", node) if node in self._dead else ("release", node)))
            self._slurm.verb("imds", node, "aws")  # it is another machine
            self._dead.discard(node)
        elif change.announced:
            self._slurm.verb("notice", node, "aws", f"{NOTICE_S:.0f}")
            self._waited(change.at_s)
            self._slurm.verb("preempt", node, grace_s=_GRACE_S)
        elif change.at_s == 0.0:
            self._slurm.verb("preempt", node, grace_s=0.0)
        else:
            self._slurm.verb("kill", node, "crash")
            self._dead.add(node)
