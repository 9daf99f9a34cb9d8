"""Each AWS call that a run makes fails once: throttled, by an internal error, by a missing right.

And what else can go wrong before a job trains.

A run of one node, or some, for each call, and one for each right, two at a time in regions of their
own: an hour or so, so they are for a nightly run (`make ec2-faults`). `test_ec2_runs` has some.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.ec2.ec2_lab import EAST, IRELAND, WEST, wait_until
from tests.e2e.lab.lab_jobs import JOBS, reasons
from tests.e2e.lab.sky_api import start_api

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.ec2.ec2_lab import Beside, Ec2Lab
    from tests.e2e.lab.lab_jobs import Status, Weights

pytestmark = [pytest.mark.e2e, pytest.mark.ec2, pytest.mark.long, pytest.mark.timeout(3000)]

EXACT = JOBS / "exact.py"
EPOCHS = "4"
FLAGS = ("--nodes", "1", "--budget", "5")
CALLS = (
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:CreateSecurityGroup",
    "ec2:CreateTags",
    "ec2:DescribeInstances",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotInstanceRequests",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
    "ec2:RunInstances",
    "ec2:TerminateInstances",
)
ASKED_ONCE = (
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeImages",
    "ec2:DescribeRegions",
)
"""By a SkyPilot that has never been at AWS, or whose server is new. `sky check`, which comes before
the first run, asks `sts:GetCallerIdentity` besides, and no run does."""
CALLS_OF_NO_REGION = ("iam:GetInstanceProfile", *ASKED_ONCE)
"""What a run asks AWS for, by SkyPilot or itself, by the lab's own journal; the last test holds
them to be all. These fail for whoever comes first, in any region."""
SELDOM_ASKED = ("ec2:CreateTags", "ec2:DescribeSpotInstanceRequests")
"""Only after some faults and interruptions."""
TWICE_S = 60.0
"""How long an instance may live that EC2 launched twice, as it did not say that it had."""
PASSING = {"throttle": "meets throttle", "error": "meets error", "lost": "was done, but"}
"""Faults that pass by themselves, and how the lab tells of each."""
_ALONE = pytest.param("iam:GetInstanceProfile", marks=pytest.mark.alone)
_OVER = ("finished", "failed", "paused")


@dataclass(frozen=True)
class Trial:
    """Runs of one node each, from a user's machine."""

    beside: Beside
    ec2: Ec2Lab
    region: str
    """The one that this worker of pytest has for itself."""
    undisturbed: Weights

    def fails_once(self, action: str, kind: str, *, seconds: int = 0) -> None:
        """Let the next such call fail."""
        where = "*" if action in CALLS_OF_NO_REGION else self.region
        self.ec2.verb("fault", action, kind, "1", str(seconds), where)

    def begin_anew(self) -> None:
        """Let SkyPilot forget what it has asked AWS for; its server is a new one."""
        self.ec2.verb("end-api")
        for found in Path(self.ec2.environ["HOME"], ".sky").rglob("az_mappings-*"):
            found.unlink()

    def forget_groups(self) -> None:
        """Remove SkyPilot's security group: else only the first run of a region asks for one."""
        words = ("--region", self.region, "--output", "text")
        query = "SecurityGroups[?GroupName!='default'].GroupId"
        found = self.ec2.aws("ec2", "describe-security-groups", "--query", query, *words)
        for group in found.split():
            self.ec2.aws("ec2", "delete-security-group", "--group-id", group, *words)

    def begin(self) -> str:
        """Start a run and return its id."""
        return self.beside.begin(EXACT, *FLAGS, args=("--epochs", EPOCHS), region=self.region)

    def begin_in_the_end(self, *words: str) -> str:
        """Start a run, which may be refused with one of these words before there is one."""
        for _ in ASKED_ONCE:
            try:
                return self.begin()
            except AssertionError as refused:
                told = str(refused)
            assert any(word in told for word in words), told
            assert "a bug" not in told
        return self.begin()

    def over(self, run: str) -> Status:
        """Return how a run ended, with the right weights if it finished."""
        status = self.beside.is_in(run, *_OVER)
        if status["state"] == "finished":
            assert self.beside.final_weights(status) == self.undisturbed
        return status

    def ended(self, run: str, *, twice_s: float = 0.0) -> Status:
        """Return how a run ended, of which nothing is left, and nothing came twice.

        Unless for `twice_s` at most: where EC2 does not answer an order that it has carried out,
        SkyPilot orders once more.
        """
        status = self.over(run)
        wait_until(lambda: not self.ec2.living(run), "its node is gone", timeout_s=300.0)
        trained = [each for each in status["attempts"] if each["last_step"]]
        assert len(trained) <= 1, status
        for one, next_one in pairwise(self.ec2.instances(run)):
            ended_at = min(one.end_at or 0.0, next_one.end_at or 0.0)
            assert ended_at - next_one.begin_at <= twice_s, self.ec2.instances(run)
        return status


@pytest.fixture
def trial(
    machine: Callable[[str], Beside], ec2: Ec2Lab, undisturbed: Callable[..., Weights]
) -> Trial:
    """Return one of a user's machine, and of a region that no other worker uses."""
    region = WEST if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else EAST
    return Trial(machine("user"), ec2, region, undisturbed(EXACT, "--epochs", EPOCHS))


@pytest.mark.parametrize("action", [*CALLS, _ALONE])
def test_a_call_fails_in_each_way_that_passes(action: str, trial: Trial) -> None:
    """Throttled, by an internal error, done and not answered: one after the other, a call each.

    A run may make the call less often: then more runs follow, until each of them was met.
    """
    before = len(trial.ec2.events())
    for kind in PASSING:
        trial.fails_once(action, kind)
    for _ in PASSING:
        trial.forget_groups()
        status = trial.ended(
            trial.begin(), twice_s=TWICE_S if action == "ec2:RunInstances" else 0.0
        )
        assert status["state"] == "finished", status["state_detail"]
        met = [line for line in trial.ec2.events()[before:] if f" {action} " in line]
        if action in SELDOM_ASKED or all(any(x in line for line in met) for x in PASSING.values()):
            return
    raise AssertionError(f"{action} met only {met}")


@pytest.mark.parametrize("action", [*CALLS, _ALONE])
def test_a_right_is_missing_once(action: str, trial: Trial) -> None:
    """The run ends right, or says which one."""
    trial.forget_groups()
    trial.fails_once(action, "deny")
    status = trial.ended(trial.begin())
    if status["state"] != "finished":
        assert action.partition(":")[2] in status["state_detail"], status["state_detail"]


@pytest.mark.alone
@pytest.mark.parametrize("kind", PASSING)
def test_what_is_asked_once_fails_in_a_way_that_passes(kind: str, trial: Trial) -> None:
    """Each of these calls, in one run of a SkyPilot that begins anew."""
    before = len(trial.ec2.events())
    trial.begin_anew()
    for action in ASKED_ONCE:
        trial.fails_once(action, kind)
    start_api(trial.ec2)
    run = trial.begin_in_the_end(
        "RequestLimitExceeded", "Throttling", "InternalError", "InternalFailure"
    )
    status = trial.ended(run)
    assert status["state"] == "finished", status["state_detail"]
    told = [line for line in trial.ec2.events()[before:] if PASSING[kind] in line]
    met = {action for action in ASKED_ONCE if any(f" {action} " in line for line in told)}
    assert met >= {*ASKED_ONCE} - {"ec2:DescribeImages"}, told  # of images not each server asks


@pytest.mark.alone
@pytest.mark.parametrize("action", ASKED_ONCE)
def test_a_right_for_what_is_asked_once_is_missing(action: str, trial: Trial) -> None:
    """The run ends right, or says which one."""
    trial.begin_anew()
    trial.fails_once(action, "deny")
    start_api(trial.ec2)
    status = trial.ended(trial.begin_in_the_end(action.partition(":")[2]))
    if status["state"] != "finished":
        assert action.partition(":")[2] in status["state_detail"], status["state_detail"]


def test_instances_of_an_order_without_an_answer_are_ended_while_they_are_pending(
    trial: Trial,
) -> None:
    """SkyPilot orders once more; what it does not know is ended before it takes it for its own."""
    trial.fails_once("ec2:RunInstances", "lost", seconds=20)
    run = trial.begin()
    status = trial.ended(run, twice_s=TWICE_S)
    assert status["state"] == "finished", status["state_detail"]
    assert reasons(status) == ["finished"], "the other node is not spoilt by it"
    assert len(trial.ec2.instances(run)) == 2


def test_instances_that_ec2_lists_late_are_ended_though_their_launch_was_given_up(
    trial: Trial,
) -> None:
    """SkyPilot may not mark them, gives the launch up, and finds nothing to end."""
    trial.fails_once("ec2:RunInstances", "unseen", seconds=45)
    run = trial.begin()
    status = trial.ended(run, twice_s=2 * TWICE_S)
    assert status["state"] == "finished", status["state_detail"]
    assert len(trial.ec2.instances(run)) == 2


def test_a_node_falls_silent_that_ec2_calls_running(
    machine: Callable[[str], Beside], ec2: Ec2Lab, undisturbed: Callable[..., Weights]
) -> None:
    """A host that fails may be in EC2's list for minutes: nobody but its silence tells of it."""
    beside = machine("silent")
    run = beside.begin(
        EXACT,
        *("--nodes", "2", "--budget", "5"),
        args=("--epochs", "12", "--pause", "0.7", "--until-attempt", "2"),
        region=IRELAND,
    )
    beside.trains(run, attempt=1)
    silent = next(each for each in ec2.living(run) if not each.name.endswith("-head"))
    ec2.verb("cut", silent.id)
    status = beside.settled(run)
    assert status["state"] == "finished", status["state_detail"]
    assert reasons(status) in (["vanished", "finished"], ["node_lost", "finished"])
    assert beside.final_weights(status) == undisturbed(EXACT, "--epochs", "12")
    assert ec2.living(run) == []


@pytest.mark.parametrize("after_s", [2.0, 20.0])
def test_a_spot_machine_goes_while_it_is_set_up(after_s: float, trial: Trial) -> None:
    """While SkyPilot waits for its SSH, and later: EC2's word ends the wait, others follow."""
    ec2, run = trial.ec2, trial.begin()
    wait_until(lambda: [i for i in ec2.living(run) if i.state == "running"], "a node runs")
    time.sleep(after_s)
    ec2.verb("crash", ec2.living(run)[0].id)
    status = trial.over(run)
    assert status["state"] == "finished", status["state_detail"]
    # As EC2 tells of it, or as SkyPilot does, which may be about to hand the job over.
    assert reasons(status) in (["node_lost", "finished"], ["vanished", "finished"])
    assert status["attempts"][0]["last_step"] is None
    assert len(ec2.instances(run)) == 2


@pytest.mark.alone
def test_the_users_machine_dies_while_nodes_are_set_up(
    machine: Callable[[str], Beside], ec2: Ec2Lab
) -> None:
    """Its controller and SkyPilot's server are gone for good: the node knows when its money ends.

    SkyPilot has set no guard by then.
    """
    beside, budget_usd = machine("user"), 0.0125  # eight minutes there, of which four are kept back
    flags = ("--nodes", "1", "--budget", str(budget_usd), "--setup", "sleep 3600")
    run = beside.begin(EXACT, *flags, args=("--epochs", EPOCHS), region=IRELAND)
    wait_until(lambda: _is_set_up(ec2, run), "its set-up is under way", timeout_s=300.0)
    beside.kill_controller(run)
    ec2.verb("end-api")
    try:
        wait_until(lambda: not ec2.living(run), "its node is gone", timeout_s=900.0)
    finally:
        start_api(ec2)
    (node,) = ec2.instances(run)
    assert node.usd <= budget_usd
    status = beside.is_in(run, "paused")
    assert reasons(status)[0] in ("budget", "vanished"), "who looks late sees less"
    assert status["spent_usd"] == pytest.approx(node.usd, rel=0.02)


def _is_set_up(ec2: Ec2Lab, run: str) -> bool:
    nodes = [each for each in ec2.living(run) if each.state == "running"]
    look = "pgrep -xf 'sleep 3600' || true"
    return any(ec2.verb("exec", each.id, "bash", "-c", look).strip() for each in nodes)


def test_no_call_is_left_out(trial: Trial) -> None:
    """What a run from its start to its end asks AWS for, S3 aside, is tried above."""
    before = len(trial.ec2.calls())
    assert trial.ended(trial.begin())["state"] == "finished"
    calls = trial.ec2.calls()[before:]
    asked = {call["call"] for call in calls if not call["call"].startswith("s3:")}
    assert asked <= {*CALLS, *CALLS_OF_NO_REGION}
