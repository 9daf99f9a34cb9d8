"""Which clusters EC2 says have lost an instance: asked seldom, together, and never raising."""

from __future__ import annotations

from typing import Any

import boto3
import moto
import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.parsers import ResponseParserError

from spotguard.launch.skypilot.ec2.ends import Ec2Ends
from spotguard.launch.skypilot.ec2.poll import ASK_EVERY_S
from spotguard.launch.taskyaml import CLUSTER_TAG
from spotguard.testing.clock import FakeClock

REGION = "us-east-1"


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


class Counted:
    """A client whose pages of instances are counted, and may fail."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.asked: list[list[str]] = []
        self.problem: Exception | None = None

    def get_paginator(self, call: str) -> Any:
        """Return itself."""
        assert call == "describe_instances"
        return self

    def paginate(self, *, Filters: list[dict[str, Any]]) -> Any:
        """Ask moto."""
        self.asked.append(Filters[0]["Values"])
        if self.problem is not None:
            raise self.problem
        return self.client.get_paginator("describe_instances").paginate(Filters=Filters)


def launched(client: Any, cluster: str, count: int = 1) -> list[str]:
    """Return the ids of a cluster's instances."""
    tags = [{"Key": CLUSTER_TAG, "Value": cluster}]
    made = client.run_instances(
        ImageId="ami-12c6146b",
        MinCount=count,
        MaxCount=count,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    return [each["InstanceId"] for each in made["Instances"]]


def mark(client: Any, *instances: str) -> None:
    """Tag them as SkyPilot tags its workers, once it knows them."""
    client.create_tags(
        Resources=list(instances), Tags=[{"Key": "skypilot-head-node", "Value": "0"}]
    )


@moto.mock_aws
def test_one_of_two_nodes_ends_and_its_cluster_alone_is_told_of() -> None:
    """The other cluster lives; EC2 is asked once for both, and not again within four seconds."""
    ec2, clock = boto3.client("ec2", region_name=REGION), FakeClock()
    counted = Counted(ec2)
    subject = Ec2Ends(clock, lambda region: counted)
    first, second = launched(ec2, "mine", 2)
    mark(ec2, first, second)
    launched(ec2, "other")
    assert subject.why(REGION, "mine") == ""
    assert subject.why(REGION, "other") == ""

    ec2.terminate_instances(InstanceIds=[second])
    assert subject.why(REGION, "mine") == "", "not asked so soon"
    clock.advance(ASK_EVERY_S)
    told = subject.why(REGION, "mine")
    assert told.startswith(f"EC2 says that {second} is terminated: ")
    assert subject.why(REGION, "other") == ""
    assert counted.asked == [["mine"], ["mine", "other"]]


@moto.mock_aws
@pytest.mark.parametrize(
    "code",
    [
        *("Server.SpotInstanceTermination", "Server.InternalError", "Client.InternalError"),
        *("Client.VolumeLimitExceeded", "Client.InvalidSnapshot.NotFound"),
        "Client.InstanceInitiatedShutdown",
    ],
)
def test_what_somebody_ordered_is_told_from_what_ec2_took(code: str) -> None:
    """SkyPilot ends what it got in one place before it goes on to the next: it is no loss."""
    ec2, clock = boto3.client("ec2", region_name=REGION), FakeClock()
    subject = Ec2Ends(clock, lambda region: ec2)
    [ordered], [taken] = launched(ec2, "ordered"), launched(ec2, "taken")
    mark(ec2, ordered)
    ec2.terminate_instances(InstanceIds=[ordered, taken])
    backend = moto.backends.get_backend("ec2")["123456789012"][REGION]
    backend.get_instance(taken).state_reason.code = code
    assert subject.why(REGION, "ordered") != ""
    clock.advance(ASK_EVERY_S)
    assert subject.why(REGION, "taken").startswith(f"EC2 says that {taken} is terminated")
    assert subject.why(REGION, "taken", taken=True) == subject.why(REGION, "taken")
    assert subject.why(REGION, "ordered", taken=True) == ""


@moto.mock_aws
def test_who_asks_no_more_is_not_asked_for() -> None:
    """A question does not grow with all the clusters that ever were."""
    counted, clock = Counted(boto3.client("ec2", region_name=REGION)), FakeClock()
    subject = Ec2Ends(clock, lambda region: counted)
    subject.why(REGION, "old")
    clock.advance(120.0)
    subject.why(REGION, "new")
    assert counted.asked[-1] == ["new"]


@pytest.mark.slow
@moto.mock_aws
@pytest.mark.parametrize(
    "problem",
    [
        ResponseParserError("a proxy's page is no XML"),
        EndpointConnectionError(endpoint_url="https://ec2"),
        KeyError("Tags"),
        OSError("no such file"),
    ],
    ids=repr,
)
def test_a_cloud_that_does_not_answer_says_nothing_and_is_left_alone(problem: Exception) -> None:
    """SkyPilot's own looks go on; what was told before is still true."""
    ec2, clock = boto3.client("ec2", region_name=REGION), FakeClock()
    counted = Counted(ec2)
    subject = Ec2Ends(clock, lambda region: counted)
    [gone] = launched(ec2, "gone")
    mark(ec2, gone)
    ec2.terminate_instances(InstanceIds=[gone])
    told = subject.why(REGION, "gone")
    assert told

    counted.problem = problem
    clock.advance(ASK_EVERY_S)
    assert subject.why(REGION, "gone") == told
    clock.advance(ASK_EVERY_S)
    assert subject.why(REGION, "gone") == told
    assert len(counted.asked) == 2, "not asked again so soon"

    counted.problem = None
    clock.advance(60.0)
    assert subject.why(REGION, "gone") == told
    assert len(counted.asked) == 3


@moto.mock_aws
def test_a_hundred_clusters_fit_into_a_question() -> None:
    """More are asked for in several: EC2 takes 200 values."""
    counted, clock = Counted(boto3.client("ec2", region_name=REGION)), FakeClock()
    subject = Ec2Ends(clock, lambda region: counted)
    for number in range(150):
        subject.why(REGION, f"run-{number}")
    clock.advance(ASK_EVERY_S)
    subject.why(REGION, "run-0")
    assert [len(names) for names in counted.asked[-2:]] == [100, 50]
