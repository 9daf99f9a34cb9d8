"""Which clusters have lost an instance, by EC2's own word.

SkyPilot's look at a cluster takes seconds of a core, so it is taken seldom while the job is heard.
EC2's list of instances that have ended takes milliseconds, for all clusters of a region together.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from spotguard.launch.skypilot.ec2.calls import can_ask, client_of, instances_of, unanswered
from spotguard.launch.taskyaml import CLUSTER_TAG
from spotguard.shared.units import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

ASK_EVERY_S = 4.0
_ASK_WITHIN_S = 4.0
_AFTER_PROBLEM_S = 60.0
"""EC2 that refuses or does not answer is left alone for so long: SkyPilot's looks go on."""
_WANTED_S = 60.0
_AT_ONCE = 100
"""Clusters in one question; EC2 takes 200 values of a filter."""
_ENDING = ("shutting-down", "terminated", "stopping", "stopped")


@dataclass
class _Region:
    wanted: dict[str, float] = field(default_factory=dict)
    """When somebody last asked for each cluster."""
    lost: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    """Those of them that EC2 itself has ended, not somebody's order."""
    ask_at: float = float("-inf")
    client: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Ec2Ends:
    """Asks EC2 every four seconds at most, whoever wants to know. Thread-safe."""

    def __init__(
        self, clock: Clock | None = None, client: Callable[[str], Any] | None = None
    ) -> None:
        """`client` makes boto3's client for a region."""
        self._clock = clock or SystemClock()
        self._client = client or partial(client_of, within_s=_ASK_WITHIN_S, tries=1)
        self._regions: dict[str, _Region] = {}

    def why(self, region: str, cluster: str, *, taken: bool = False) -> str:
        """Return how EC2 says that an instance of a cluster ended; empty while none is known to.

        `taken`: ended by EC2 itself. SkyPilot ends instances as it goes on to the next place.
        Blocks for some seconds at most, where EC2 does not answer.
        """
        mine = self._regions.setdefault(region, _Region())
        with mine.lock:
            now = self._clock.monotonic()
            mine.wanted[cluster] = now
            if now >= mine.ask_at:
                mine.ask_at = now + ASK_EVERY_S
                self._ask(region, mine, now)
            return (mine.taken if taken else mine.lost).get(cluster, "")

    def _ask(self, region: str, mine: _Region, now: float) -> None:
        mine.wanted = {each: at for each, at in mine.wanted.items() if now - at < _WANTED_S}
        if not can_ask():
            mine.ask_at = float("inf")
            return
        try:
            mine.client = mine.client or self._client(region)
            mine.lost, mine.taken = _lost(mine.client, list(mine.wanted))
        except unanswered() as problem:
            log.info("EC2 does not say which instances of %s ended: %s", region, problem)
            mine.ask_at = now + _AFTER_PROBLEM_S
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            log.warning("EC2 describes instances in another form than expected: %r", problem)
            mine.ask_at = now + _AFTER_PROBLEM_S


def _lost(client: Any, clusters: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return, for each cluster of which an instance has ended, the first such instance's story.

    And the same of those that EC2 itself has ended.
    """
    lost: dict[str, str] = {}
    taken: dict[str, str] = {}
    for begin in range(0, len(clusters), _AT_ONCE):
        asked = clusters[begin : begin + _AT_ONCE]
        for each in instances_of(client, asked, states=_ENDING):
            tags = {tag["Key"]: tag["Value"] for tag in each["Tags"]}
            lost.setdefault(tags[CLUSTER_TAG], _story(each))
            if (each.get("StateReason") or {}).get("Code", "").startswith("Server."):
                taken.setdefault(tags[CLUSTER_TAG], _story(each))
    return lost, taken


def _story(instance: Any) -> str:
    reason = (instance.get("StateReason") or {}).get("Message", "")
    reason = reason or instance.get("StateTransitionReason") or ""
    told = f"EC2 says that {instance['InstanceId']} is {instance['State']['Name']}"
    return f"{told}: {reason}" if reason else told
