"""Instances that EC2 launched and SkyPilot does not know: ended once its own ones are known."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import boto3
import moto
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from spotguard.launch.skypilot.ec2.ends import Ec2Ends
from spotguard.launch.skypilot.ec2.extras import (
    LISTED_WITHIN_S,
    Ec2Extras,
    Ec2Forgotten,
    Living,
    extras,
)
from spotguard.launch.skypilot.ec2.poll import ASK_EVERY_S
from spotguard.testing.clock import FakeClock
from tests.launch.skypilot.ec2.test_ends import REGION, launched, mark

AT = datetime(2026, 1, 1, tzinfo=timezone.utc)


def lives(name: str, *, known: bool = False, after_s: float = 0.0) -> Living:
    """Return an instance."""
    return Living(name, AT + timedelta(seconds=after_s), known)


@pytest.mark.parametrize(
    ("living", "nodes", "too_many"),
    [
        ([], 1, []),
        ([lives("mine", known=True)], 1, []),
        ([lives("lost"), lives("mine", known=True)], 1, ["lost"]),
        ([lives("lost"), lives("mine", known=True, after_s=3.0)], 1, ["lost"]),
        ([lives("mine", known=True), lives("next zone", after_s=3.0)], 1, []),
        ([lives("new"), lives("newer")], 1, []),
        ([lives("head", known=True), lives("unmarked yet")], 2, []),
        ([lives("head", known=True), lives("unmarked yet"), lives("lost")], 2, []),
        (
            [lives("a"), lives("b"), lives("head", known=True), lives("worker", known=True)],
            2,
            ["a", "b"],
        ),
        ([lives("a"), lives("b"), lives("c"), lives("mine", known=True)], 1, ["a", "b", "c"]),
    ],
)
def test_which_are_too_many(living: list[Living], nodes: int, too_many: list[str]) -> None:
    """Never one that SkyPilot is about to mark, or that belongs to its next try."""
    assert [each.id for each in extras(living, nodes)] == too_many


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a client of moto's EC2."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with moto.mock_aws():
        yield boto3.client("ec2", region_name=REGION)


def pend(*instances: str) -> None:
    """Let them be `pending`: moto's run at once."""
    for each in instances:
        backend = moto.backends.get_backend("ec2")["123456789012"][REGION]
        backend.get_instance(each)._state.name = "pending"


def living(ec2: Any) -> set[str]:
    """Return the ids of all instances that live."""
    return {
        each["InstanceId"]
        for reservation in ec2.describe_instances()["Reservations"]
        for each in reservation["Instances"]
        if each["State"]["Name"] in ("pending", "running")
    }


def test_ec2_ends_them_and_leaves_all_others_alone(ec2: Any) -> None:
    """Of three of a cluster of two, and of another cluster that is not marked yet."""
    clock = FakeClock()
    subject, ends = Ec2Extras(clock, lambda region: ec2), Ec2Ends(clock, lambda region: ec2)
    [extra] = launched(ec2, "mine", 1)
    pend(extra)
    mine, other = launched(ec2, "mine", 2), launched(ec2, "other", 3)
    assert subject.end(REGION, "other", 3) == ""
    assert subject.end(REGION, "mine", 2) == ""
    assert len(living(ec2)) == 6, "SkyPilot has marked none"

    mark(ec2, *mine)
    clock.advance(ASK_EVERY_S)
    assert subject.end(REGION, "mine", 2) == ""
    assert living(ec2) == {*mine, *other}
    assert ends.why(REGION, "mine") == "", "none of its nodes is lost by that"
    assert ends.why(REGION, "mine", taken=True) == ""


def test_one_that_runs_is_told_of_and_not_ended(ec2: Any) -> None:
    """SkyPilot may have it among its nodes, and would wait ten minutes for it."""
    subject = Ec2Extras(FakeClock(), lambda region: ec2)
    [extra], [mine] = launched(ec2, "mine"), launched(ec2, "mine")
    mark(ec2, mine)
    assert extra in subject.end(REGION, "mine", 1)
    assert living(ec2) == {extra, mine}


def test_all_is_ended_of_what_skypilot_has_forgotten(ec2: Any) -> None:
    """Marked or not, and of no other cluster."""
    subject = Ec2Extras(FakeClock(), lambda region: ec2)
    marked, _ = launched(ec2, "mine", 2)
    mark(ec2, marked)
    other = launched(ec2, "other")
    subject.end_all(REGION, "mine")
    assert living(ec2) == {*other}
    subject.end_all("eu-west-1", "mine")


def test_what_is_forgotten_is_looked_for_until_ec2_would_list_it(
    ec2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance that it lists after a minute is ended; then the thread ends."""
    clock, at = FakeClock(), list[float]()

    def rest(seconds: float) -> None:
        at.append(clock.monotonic())
        clock.advance(seconds)
        if len(at) == 15:
            launched(ec2, "late")

    subject = Ec2Forgotten(Ec2Extras(clock, lambda region: ec2), clock, rest)
    other = launched(ec2, "other")
    begun = list[str]()
    monkeypatch.setattr("threading.Thread.start", lambda thread: begun.append(thread.name))
    subject.add(REGION, "late")
    subject.add(REGION, "late")
    subject.look_on()
    assert living(ec2) == {*other}
    assert at[-1] - at[0] == pytest.approx(LISTED_WITHIN_S, abs=2 * ASK_EVERY_S)
    subject.add(REGION, "other")
    subject.look_on()
    assert living(ec2) == set()
    assert len(begun) == 2, "a thread as long as there is something to look for"


def test_nothing_is_ended_by_an_old_list(ec2: Any) -> None:
    """While EC2 does not answer, what was pending may run, and be one of SkyPilot's nodes."""
    client, clock = Refusing(ec2), FakeClock()
    subject = Ec2Extras(clock, lambda region: client)
    [extra], [mine] = launched(ec2, "mine"), launched(ec2, "mine")
    pend(extra)
    mark(ec2, mine)
    subject.end(REGION, "mine", 1)
    client.refuses, client.is_away = False, True
    clock.advance(ASK_EVERY_S)
    subject.end(REGION, "mine", 1)
    assert client.orders == 1
    assert len(living(ec2)) == 2


class Refusing:
    """EC2 that refuses to end instances, for a while."""

    def __init__(self, ec2: Any) -> None:
        self._ec2 = ec2
        self.orders = 0
        self.refuses = True
        self.is_away = False

    def get_paginator(self, call: str) -> Any:
        """Ask moto."""
        if self.is_away:
            raise EndpointConnectionError(endpoint_url="https://ec2")
        return self._ec2.get_paginator(call)

    def terminate_instances(self, *, InstanceIds: list[str]) -> None:
        """Refuse, or ask moto."""
        self.orders += 1
        if self.refuses:
            raise ClientError({"Error": {"Code": "Throttled"}}, "TerminateInstances")
        self._ec2.terminate_instances(InstanceIds=InstanceIds)


def test_what_ec2_refuses_to_end_is_tried_again_and_ended_once(ec2: Any) -> None:
    """As where it is asked too often; what it told of instances is older for some seconds."""
    client = Refusing(ec2)
    subject = Ec2Extras(FakeClock(), lambda region: client)
    [extra], [mine] = launched(ec2, "mine"), launched(ec2, "mine")
    pend(extra)
    mark(ec2, mine)
    subject.end(REGION, "mine", 1)
    assert len(living(ec2)) == 2
    client.refuses = False
    subject.end(REGION, "mine", 1)
    assert living(ec2) == {mine}
    subject.end(REGION, "mine", 1)
    assert client.orders == 2
