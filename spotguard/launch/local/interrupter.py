"""Decides whom the cloud interrupts: by the script, at random, and by lack of capacity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.events.states import Market
from spotguard.launch.local.interruption_timing import Fate, fate_of
from spotguard.launch.local.interruptions import How

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.launch.local.cluster import ClusterOrder
    from spotguard.launch.local.node import LocalNode
    from spotguard.launch.local.simulation_state import Scripted, World

_CAPACITY_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A fate for some nodes, and why."""

    nodes: tuple[LocalNode, ...]
    fate: Fate
    reason: str


class Interrupter:
    """The cloud's will towards one cluster. Used by one thread."""

    def __init__(self, world: World, order: ClusterOrder) -> None:
        self._world = world
        self._options = order.options
        self._spot = order.request.offer.market is Market.SPOT
        self._pending = world.pending()
        self._arrivals = world.arrivals_from(world.elapsed_s)
        self._arrival = next(self._arrivals, None)
        self._look_at_capacity_at = 0.0

    def decide(self, nodes: list[LocalNode], *, step: int | None, now: float) -> Iterator[Decision]:
        """Yield what is to be done at `now` (monotonic) to the running ones of `nodes`."""
        elapsed_s = self._world.elapsed_s
        running = tuple(node for node in nodes if node.running)
        for scripted in list(self._pending):
            if scripted.interruption.is_due(step=step or 0, elapsed_s=elapsed_s):
                yield from self._play(scripted, running, now)
        if self._spot:
            yield from self._play_random(running, elapsed_s, now)
            yield from self._take_surplus(running, now)

    def _play(
        self, scripted: Scripted, running: tuple[LocalNode, ...], now: float
    ) -> Iterator[Decision]:
        wanted = scripted.interruption
        targets = tuple(n for n in running if wanted.node is None or n.index == wanted.node)
        if not targets:
            return  # it waits for a cluster that has this node
        self._pending.remove(scripted)
        if self._world.claim(scripted) and wanted.capacity is None:
            fate = self._fate(wanted.how, now)
            yield Decision(nodes=targets, fate=fate, reason=f"scripted {wanted}")

    def _play_random(
        self, running: tuple[LocalNode, ...], elapsed_s: float, now: float
    ) -> Iterator[Decision]:
        while self._arrival is not None and self._arrival.at_s <= elapsed_s:
            arrival, self._arrival = self._arrival, next(self._arrivals, None)
            free = [node for node in running if node.fate is None]
            if free:
                victim = free[int(arrival.pick * len(free))]
                fate = self._fate(arrival.how, now)
                reason = f"random {arrival.how.value} at {arrival.at_s:.1f} s"
                yield Decision(nodes=(victim,), fate=fate, reason=reason)

    def _take_surplus(self, running: tuple[LocalNode, ...], now: float) -> Iterator[Decision]:
        if now < self._look_at_capacity_at:
            return
        self._look_at_capacity_at = now + _CAPACITY_EVERY_S
        capacity = self._world.capacity()
        staying = [node for node in running if node.fate is None]
        if capacity is not None and len(staying) > capacity:
            fate = self._fate(How.NOTICE, now)
            reason = f"{capacity} nodes can be had"
            yield Decision(nodes=tuple(staying[capacity:]), fate=fate, reason=reason)

    def _fate(self, how: How, now: float) -> Fate:
        return fate_of(how, self._options.metadata, self._options.speed_up, now)
