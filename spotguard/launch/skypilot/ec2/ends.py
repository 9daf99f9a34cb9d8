"""Which clusters have lost an instance, by EC2's own word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.launch.skypilot.ec2.calls import cluster_of, instances_of, is_known, was_ordered
from spotguard.launch.skypilot.ec2.poll import Ec2Poll

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.shared.units import Clock

_ENDING = ("shutting-down", "terminated", "stopping", "stopped")


@dataclass
class _Lost:
    """The story of the first instance that ended, and of the first whose end nobody ordered."""

    any: str
    taken: str = ""


class Ec2Ends:
    """Tells of instances that have ended. Thread-safe."""

    def __init__(
        self, clock: Clock | None = None, client: Callable[[str], Any] | None = None
    ) -> None:
        """`client` makes boto3's client for a region."""
        self._poll = Ec2Poll(_lost, clock, client)

    def why(self, region: str, cluster: str, *, taken: bool = False) -> str:
        """Return how EC2 says that an instance of a cluster ended; empty while none is known to.

        `taken`: nobody ordered it. SkyPilot ends instances as it goes on to the next place.
        Blocks for some seconds at most, where EC2 does not answer.
        """
        lost = self._poll.about(region, cluster)
        if lost is None:
            return ""
        return lost.taken if taken else lost.any


def _lost(client: Any, clusters: Sequence[str]) -> dict[str, _Lost]:
    """Return those clusters of which an instance has ended.

    One that SkyPilot did not know, and that was ended for that, is no loss.
    """
    lost: dict[str, _Lost] = {}
    for each in instances_of(client, clusters, states=_ENDING):
        if was_ordered(each) and not is_known(each):
            continue
        mine = lost.setdefault(cluster_of(each), _Lost(any=_story(each)))
        if not was_ordered(each):
            mine.taken = mine.taken or _story(each)
    return lost


def _story(instance: Any) -> str:
    reason = (instance.get("StateReason") or {}).get("Message", "")
    reason = reason or instance.get("StateTransitionReason") or ""
    told = f"EC2 says that {instance['InstanceId']} is {instance['State']['Name']}"
    return f"{told}: {reason}" if reason else told
