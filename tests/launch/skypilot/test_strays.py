from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import EndpointConnectionError

from spotguard.launch.base import ClusterState, ClusterView, NodeEnd, Unreachable
from spotguard.launch.skypilot.launcher import SkyPilotLauncher
from spotguard.launch.skypilot.sdk import ClusterPhase, LaunchFacts
from spotguard.launch.skypilot.strays import Ec2Strays, regions_of
from spotguard.launch.taskyaml import CLUSTER_TAG
from spotguard.testing.clock import FakeClock
from spotguard.testing.launcher import FAKE_OFFER
from tests.launch.skypilot.fake_sdk import FakeSdk

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "job-1-1"


@dataclass
class Region:
    """EC2 in one region, as far as it is asked."""

    states: list[str] = field(default_factory=list)
    """Of the instances of the cluster NAME, oldest first."""
    ended: list[str] = field(default_factory=list)
    ordered: set[int] = field(default_factory=set)
    """Those that ended by somebody's order."""
    known: set[int] = field(default_factory=set)
    """Those that SkyPilot knows."""
    away: bool = False

    def get_paginator(self, _: str) -> Region:
        """Return what pages."""
        return self

    def paginate(self, *, Filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Give each instance a page of its own, the newest first."""
        if self.away:
            raise EndpointConnectionError(endpoint_url="https://ec2")
        if Filters != [{"Name": f"tag:{CLUSTER_TAG}", "Values": [NAME]}]:
            return
        for index, state in reversed(list(enumerate(self.states))):
            at = datetime.fromtimestamp(1000.0 + index, tz=timezone.utc)
            why = "Client.UserInitiatedShutdown" if index in self.ordered else "Server.Ended"
            tags = [{"Key": "skypilot-head-node", "Value": "0"}] if index in self.known else []
            instance = {
                **{"InstanceId": f"i-{index}", "LaunchTime": at, "State": {"Name": state}},
                **{"StateReason": {"Code": why}, "Tags": tags},
            }
            yield {"Reservations": [{"Instances": [instance]}]}

    def terminate_instances(self, *, InstanceIds: list[str]) -> None:
        """Take the order."""
        self.ended += InstanceIds


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Region]:
    """Two regions of an EC2."""
    made = {"east": Region(), "west": Region()}

    class Session:
        def client(self, _: str, *, region_name: str, config: object) -> Region:
            return made[region_name]

    monkeypatch.setattr("boto3.session.Session", Session)
    return made


def seen(regions: dict[str, Region], sdk: FakeSdk | None = None) -> ClusterView:
    """Return what a launcher says that did not launch the cluster."""
    return launcher(regions, sdk or FakeSdk()).observe(NAME)


def launcher(regions: dict[str, Region], sdk: FakeSdk) -> SkyPilotLauncher:
    """Return a launcher of a machine that may have adopted the run."""
    return SkyPilotLauncher(
        sdk,
        offers=lambda: [FAKE_OFFER],
        task=lambda _: {},
        strays=Ec2Strays(lambda: regions),
        clock=FakeClock(),
        in_background=False,
    )


def test_nodes_that_another_machine_launched_are_seen_and_ended(
    regions: dict[str, Region],
) -> None:
    """SkyPilot here has no word of them: without this they would be taken for gone, and cost."""
    regions["west"].states = ["running", "pending"]
    view = seen(regions)
    assert view.state is ClusterState.UP
    assert view.up_at == 1000.0
    assert [node.end for node in view.nodes] == [NodeEnd.RUNNING] * 2
    launcher(regions, FakeSdk()).down(NAME)
    assert regions["west"].ended == ["i-0", "i-1"]
    assert regions["east"].ended == []


def test_one_that_was_taken_is_lost_until_all_are_gone(regions: dict[str, Region]) -> None:
    """Nodes keep their numbers: the oldest is the first."""
    regions["east"].states = ["shutting-down", "running"]
    assert [node.end for node in seen(regions).nodes] == [NodeEnd.LOST, NodeEnd.RUNNING]
    regions["east"].states = ["terminated", "terminated"]
    assert seen(regions).state is ClusterState.GONE
    regions["east"].states = []
    assert seen(regions).state is ClusterState.ABSENT


def test_one_that_skypilot_did_not_know_and_that_was_ended_for_that_was_no_node(
    regions: dict[str, Region],
) -> None:
    """EC2 launched it, and SkyPilot was not told; one that it knew, and ended, was a node."""
    east = regions["east"]
    east.states, east.ordered, east.known = ["terminated", "running", "running"], {0}, {1, 2}
    view = seen(regions)
    assert [node.end for node in view.nodes] == [NodeEnd.RUNNING] * 2
    assert view.up_at == 1001.0
    east.known = {0, 1, 2}
    assert seen(regions).nodes[0].end is NodeEnd.LOST


def test_an_ec2_that_does_not_answer_proves_nothing(regions: dict[str, Region]) -> None:
    """The one region that is away may be the one that has it."""
    regions["west"].away = True
    assert seen(regions).state is ClusterState.UNREACHABLE
    with pytest.raises(Unreachable):
        launcher(regions, FakeSdk()).down(NAME)


def test_where_no_region_is_known_nothing_is_said_of_a_cluster() -> None:
    """Nobody was asked: taken for absent, it would be launched a second time."""
    assert seen({}).state is ClusterState.UNREACHABLE


def test_what_skypilot_knows_is_asked_of_nobody_else(regions: dict[str, Region]) -> None:
    """Its own launches and ends are its to tell, and to carry out."""
    regions["east"].away = regions["west"].away = True
    sdk = FakeSdk(launches={NAME: LaunchFacts(phase=ClusterPhase.UNDER_WAY)})
    assert seen(regions, sdk).state is ClusterState.STARTING
    launcher(regions, sdk).down(NAME)
    assert sdk.downed == [NAME]


def test_only_regions_of_aws_are_asked() -> None:
    """Each once."""
    offers = [
        FAKE_OFFER.__class__(**{**FAKE_OFFER.__dict__, "infra": infra, "region": region})
        for infra, region in (("aws", "a"), ("gcp", "b"), ("aws", "a"), ("aws", None))
    ]
    assert regions_of("aws", offers) == ["a"]
