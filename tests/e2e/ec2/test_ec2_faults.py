"""Each AWS call that a run makes fails once: throttled, by an internal error, by a missing right.

And what else can go wrong before a job trains.

A run of one node for each pair of call and fault, two at a time in regions of their own: an hour or
more, so they are for a nightly run (`make ec2-faults`). `test_ec2_runs` has three of them.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from tests.e2e.ec2.ec2_lab import EAST, IRELAND, WEST, wait_until
from tests.e2e.lab.lab_jobs import JOBS, reasons
from tests.e2e.lab.sky_api import start_api

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.ec2.ec2_lab import Beside, Ec2Lab
    from tests.e2e.lab.lab_jobs import Weights

pytestmark = [pytest.mark.e2e, pytest.mark.ec2, pytest.mark.long, pytest.mark.timeout(3000)]

EXACT = JOBS / "exact.py"
EPOCHS = "4"
FLAGS = ("--nodes", "1", "--budget", "5")
CALLS = (
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:CreateSecurityGroup",
    "ec2:CreateTags",
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeImages",
    "ec2:DescribeInstances",
    "ec2:DescribeRegions",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotInstanceRequests",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
    "ec2:RunInstances",
    "ec2:TerminateInstances",
)
CALLS_OF_NO_REGION = ("iam:GetInstanceProfile", "sts:GetCallerIdentity")
"""What a run asks AWS for, by SkyPilot or itself, by the lab's own journal; the last test holds
them to be all. Tags and spot requests are asked for only after some faults and interruptions. The
calls of no region fail for whoever comes first."""
_ALONE = [pytest.param(each, marks=pytest.mark.alone) for each in CALLS_OF_NO_REGION]
_OVER = ("finished", "failed", "paused")


@pytest.fixture
def region() -> str:
    """Return the region that this worker of pytest has for itself."""
    return WEST if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else EAST


@pytest.mark.parametrize("kind", ["throttle", "error", "lost", "deny"])
@pytest.mark.parametrize("action", [*CALLS, *_ALONE])
def test_a_call_fails_once(
    action: str,
    kind: str,
    region: str,
    machine: Callable[[str], Beside],
    ec2: Ec2Lab,
    undisturbed: Callable[..., Weights],
) -> None:
    """The run ends right, or says which right is missing; nothing is left, nothing comes twice."""
    beside = machine("user")
    where = "*" if action in CALLS_OF_NO_REGION else region
    ec2.verb("fault", action, kind, "1", "0", where)
    run = beside.begin(EXACT, *FLAGS, args=("--epochs", EPOCHS), region=region)
    status = beside.is_in(run, *_OVER)
    wait_until(lambda: not ec2.living(run), "its node is gone", timeout_s=300.0)

    trained = [each for each in status["attempts"] if each["last_step"]]
    assert len(trained) <= 1, status
    at_once = [(each.begin_at, each.end_at or 0.0) for each in ec2.instances(run)]
    assert all(ended <= begun for (_, ended), (begun, _) in pairwise(at_once))
    if status["state"] == "finished":
        assert beside.final_weights(status) == undisturbed(EXACT, "--epochs", EPOCHS)
    else:
        assert kind == "deny", status["state_detail"]
        assert action.partition(":")[2] in status["state_detail"], status["state_detail"]


@pytest.mark.parametrize("after_s", [2.0, 20.0])
def test_a_spot_machine_goes_while_it_is_set_up(
    after_s: float,
    region: str,
    machine: Callable[[str], Beside],
    ec2: Ec2Lab,
    undisturbed: Callable[..., Weights],
) -> None:
    """While SkyPilot waits for its SSH, and later: EC2's word ends the wait, others follow."""
    beside = machine("user")
    run = beside.begin(EXACT, *FLAGS, args=("--epochs", EPOCHS), region=region)
    wait_until(lambda: [i for i in ec2.living(run) if i.state == "running"], "a node runs")
    time.sleep(after_s)
    ec2.verb("crash", ec2.living(run)[0].id)
    status = beside.is_in(run, *_OVER)
    assert status["state"] == "finished", status["state_detail"]
    assert reasons(status) == ["node_lost", "finished"]
    assert status["attempts"][0]["last_step"] is None
    assert beside.final_weights(status) == undisturbed(EXACT, "--epochs", EPOCHS)
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


def test_no_call_is_left_out(region: str, machine: Callable[[str], Beside], ec2: Ec2Lab) -> None:
    """What a run from its start to its end asks AWS for, S3 aside, is tried above."""
    beside = machine("user")
    before = len(ec2.calls())
    run = beside.begin(EXACT, *FLAGS, args=("--epochs", EPOCHS), region=region)
    beside.is_in(run, "finished")
    wait_until(lambda: not ec2.living(run), "its node is gone", timeout_s=300.0)
    asked = {call["call"] for call in ec2.calls()[before:] if not call["call"].startswith("s3:")}
    assert asked <= {*CALLS, *CALLS_OF_NO_REGION}
