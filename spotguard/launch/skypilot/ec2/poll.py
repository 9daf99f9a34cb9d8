"""EC2 asked about all clusters of a region together, and seldom, whoever wants to know.

SkyPilot's look at a cluster takes seconds of a core. EC2's list of instances takes milliseconds.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from spotguard.launch.skypilot.ec2.calls import can_ask, client_of, unanswered
from spotguard.shared.units import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

ASK_EVERY_S = 4.0
_ASK_WITHIN_S = 4.0
_AFTER_PROBLEM_S = 60.0
"""EC2 that refuses or does not answer is left alone for so long: SkyPilot's looks go on."""
_WANTED_S = 60.0
_AT_ONCE = 100
"""Clusters in one question; EC2 takes 200 values of a filter."""


@dataclass
class _Region(Generic[Answer]):
    wanted: dict[str, float] = field(default_factory=dict)
    """When somebody last asked for each cluster."""
    told: dict[str, Answer] = field(default_factory=dict)
    ask_at: float = float("-inf")
    client: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Ec2Poll(Generic[Answer]):
    """Asks EC2 every four seconds at most. Thread-safe."""

    def __init__(
        self,
        question: Callable[[Any, Sequence[str]], dict[str, Answer]],
        clock: Clock | None = None,
        client: Callable[[str], Any] | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        """`question` asks a client about clusters; `client` makes boto3's client for a region.

        What was told is kept while EC2 does not answer, if it `keeps` true.
        """
        self._question = question
        self._clock = clock or SystemClock()
        self._keeps = keeps
        self._client = client or partial(client_of, within_s=_ASK_WITHIN_S, tries=1)
        self._regions: dict[str, _Region[Answer]] = {}

    def about(self, region: str, cluster: str) -> Answer | None:
        """Return what EC2 last told of a cluster; None while it tells nothing.

        Blocks for some seconds at most, where EC2 does not answer.
        """
        mine = self._regions.setdefault(region, _Region())
        with mine.lock:
            now = self._clock.monotonic()
            mine.wanted[cluster] = now
            if now >= mine.ask_at:
                mine.ask_at = now + ASK_EVERY_S
                self._ask(region, mine, now)
            return mine.told.get(cluster)

    def client(self, region: str) -> Any:
        """Return the client that is asked about a region; None if nobody could be asked."""
        return self._regions[region].client if region in self._regions else None

    def _ask(self, region: str, mine: _Region[Answer], now: float) -> None:
        mine.wanted = {each: at for each, at in mine.wanted.items() if now - at < _WANTED_S}
        if not can_ask():
            mine.ask_at = float("inf")
            return
        try:
            mine.client = mine.client or self._client(region)
            mine.told = self._ask_all(mine.client, list(mine.wanted))
            return
        except unanswered() as problem:
            log.info("EC2 does not say how instances in %s are: %s", region, problem)
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            log.warning("EC2 describes instances in another form than expected: %r", problem)
        mine.ask_at = now + _AFTER_PROBLEM_S
        if not self._keeps:
            mine.told = {}

    def _ask_all(self, client: Any, clusters: Sequence[str]) -> dict[str, Answer]:
        told: dict[str, Answer] = {}
        for begin in range(0, len(clusters), _AT_ONCE):
            told |= self._question(client, clusters[begin : begin + _AT_ONCE])
        return told
