"""Whole runs through the real SkyPilot on AWS, as `infra/ec2-lab` plays it on this machine.

What happens is real (moto's API, nodes with their own network, a metadata service, a power button)
and takes its time, most of which is waiting: so each story holds several runs or several blows.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.ec2.ec2_lab import EAST, GUARDED, IRELAND, WEST, wait_until, zones
from tests.e2e.lab.lab_jobs import JOBS, reasons
from tests.e2e.lab.scripted_lab import INFRA

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.ec2.ec2_lab import Beside, Ec2Lab, Instance
    from tests.e2e.lab.lab_jobs import Status, Weights

pytestmark = [pytest.mark.e2e, pytest.mark.ec2, pytest.mark.timeout(3000)]
# The stories are told side by side, in regions of their own. Controllers die in one of them only:
# `doctor` sees the orphans of all.

EXACT = JOBS / "exact.py"
SELDOM = ("--save-every", "15 steps")
"""Each save is some requests to the lab's S3: more would take the cores from the launches."""
NOTICE_S = 75
"""AWS gives two minutes; other stories' launches may be in front of one's for half a minute."""
OVERLAP_S = 180
"""Longer than a dead controller's hold on a run lasts, and its nodes with it."""
KIND = "m6i.xlarge"
DEAR_USD, USUAL_USD = 0.5, 0.08
"""Spot prices of it; on demand it costs $0.192."""
IRELAND_USD = 0.0901
"""There a budget ends, after twice as long as a node of this machine needs to train."""


def test_interrupted_four_ways_two_nodes_end_with_the_undisturbed_weights(
    machine: Callable[[str], Beside], ec2: Ec2Lab, undisturbed: Callable[..., Weights]
) -> None:
    """Rebalance and a price's notice, a crash, no spot anywhere: the same weights, the right bill.

    Its nodes and its controller have the rights of `infra/iam` in S3, and no others.
    """
    beside = machine("four-ways")
    beside.bucket = GUARDED
    epochs = 30
    ec2.verb("policy", str(INFRA / "iam" / "aws-policy.json"), GUARDED, beside.prefix)
    run = beside.begin(
        EXACT,
        *("--nodes", "2", "--budget", "5", *SELDOM),
        args=("--epochs", str(epochs), "--pause", "0.7", "--until-attempt", "3"),
    )
    beside.trains(run, attempt=1)
    ec2.verb("rebalance", worker(ec2, run).id)
    time.sleep(8.0)  # the recommendation is told, and nobody leaves for it
    assert len(beside.status(run)["attempts"]) == 1
    dear = worker(ec2, run).zone
    ec2.verb("price", dear, str(DEAR_USD), KIND, str(NOTICE_S))  # nobody offered so much: a notice
    beside.ended(run, attempt=1)

    beside.trains(run, attempt=2)
    assert worker(ec2, run).zone != dear
    for zone in zones(EAST):
        ec2.verb("capacity", zone, "0")
    ec2.verb("crash", worker(ec2, run).id)
    beside.is_in(run, "waiting")
    ec2.verb("price", dear, str(USUAL_USD), KIND)
    for zone in zones(EAST):
        ec2.verb("capacity", zone, "any")
    status = beside.settled(run)

    ends = reasons(status)
    assert (ends[0], ends[2]) == ("preempted", "finished")
    assert ends[1] in ("vanished", "node_lost")
    assert [attempt["nodes"] for attempt in status["attempts"]] == [2] * 3
    lost = [attempt["steps_lost"] for attempt in status["attempts"]]
    assert lost[0] == 0
    assert lost[1] <= 30, "two intervals between saves"
    assert {"notice", "no_capacity"} <= set(beside.kinds(run))
    instances = ec2.instances(run)
    assert len(instances) == 6, "two for each attempt: nothing was launched twice"
    next_at = min(each.begin_at for each in of_attempt(instances, 2))  # asked for at the notice
    assert next_at < min(each.end_at or 0.0 for each in of_attempt(instances, 1))
    assert ec2.living(run) == []
    ec2.verb("policy", "off")
    assert beside.final_weights(status) == undisturbed(EXACT, "--epochs", str(epochs))
    check_money(status, instances)


def test_on_demand_by_rule_stopped_resumed_adopted_and_others_left_alone(
    machine: Callable[[str], Beside], ec2: Ec2Lab, undisturbed: Callable[..., Weights]
) -> None:
    """No spot anywhere: bought on demand by rule; stopped, resumed, adopted elsewhere.

    The calls that start and end nodes fail once by throttling as it is resumed. It is adopted while
    an attempt trains and the next one's nodes wait for its end. Meanwhile another run's controller
    is killed: its job stops when its money ends, and its nodes end themselves, by autostop and by
    nobody else's hand. A node that nobody can hear, of a run whose controller is dead, is an
    orphan: doctor tells of it and ends it. Without the right to launch, a run says which one is
    missing.
    """
    first, second = machine("first"), machine("second")
    poor, lost, denied = machine("poor"), machine("lost"), machine("denied")
    epochs, begin_at = 30, time.monotonic()
    for zone in zones(WEST):
        ec2.verb("capacity", zone, "0")
    run = first.begin(
        EXACT,
        *("--nodes", "1", "--budget", "5", "--on-demand", "fallback-after 20s", *SELDOM),
        args=("--epochs", str(epochs), "--pause", "2.0", "--until-attempt", "3"),
        region=WEST,
    )
    orphan = lost.begin(
        EXACT,
        *("--nodes", "1", "--budget", "5"),
        args=("--epochs", "999", "--pause", "2.0"),
        region=IRELAND,
        image="",
    )
    status = first.trains(run, attempt=1)
    budget_usd = round(IRELAND_USD * (2 * (time.monotonic() - begin_at) + 180) / 3600, 4)
    assert status["attempts"][-1]["market"] == "on_demand"
    (bought,) = ec2.living(run)
    assert bought.market == "on-demand"
    lost.trains(orphan, attempt=1)
    (cut_off,) = ec2.living(orphan)
    lost.kill_controller(orphan)
    ec2.verb("cut", cut_off.id)
    alone = poor.begin(
        EXACT,
        *("--nodes", "1", "--budget", str(budget_usd)),
        args=("--epochs", "999", "--pause", "1.0"),
        region=IRELAND,
    )
    assert first.spotguard("stop", run, timeout_s=400.0).code == 0
    first.is_in(run, "stopped")
    assert ec2.living(run) == []

    for zone in zones(WEST):
        ec2.verb("capacity", zone, "any")
    for action in ("RunInstances", "TerminateInstances"):
        ec2.verb("fault", f"ec2:{action}", "throttle", "1", "0", WEST)
    assert first.spotguard("resume", run, "--detach").code == 0
    poor.trains(alone, attempt=1)
    poor.kill_controller(alone)
    status = first.trains(run, attempt=2)
    assert status["attempts"][-1]["market"] == "spot"
    (living,) = ec2.living(run)
    ec2.verb("interrupt", living.id, str(OVERLAP_S))
    wait_until(lambda: len(ec2.living(run)) == 2, "the next nodes are asked for")
    first.kill_controller(run)
    adopt = ("adopt", f"{first.store}/{run}", "--yes")
    wait_until(
        lambda: second.spotguard(*adopt, timeout_s=400.0).code == 0,
        "the other home has the run",
        timeout_s=400.0,
    )
    ec2.verb("fault", "ec2:RunInstances", "deny", "all", "0", IRELAND)  # all of its runs are up
    refused = denied.begin(
        EXACT, *("--nodes", "1", "--budget", "5"), args=("--epochs", "1"), region=IRELAND
    )
    status = second.settled(run)
    assert status["state"] == "finished"
    assert reasons(status)[1:] == ["preempted", "finished"]
    assert status["attempts"][1]["steps_lost"] == 0
    assert len(ec2.instances(run)) == 3, "nothing was launched twice, and nothing was lost"
    assert ec2.living(run) == []
    check_money(status, ec2.instances(run))
    assert second.final_weights(status) == undisturbed(EXACT, "--epochs", str(epochs))

    status = denied.is_in(refused, "failed")
    assert "ec2:RunInstances" in status["state_detail"], status["state_detail"]
    assert ec2.instances(refused) == []

    wait_until(lambda: not ec2.living(alone), "the budget's node is gone", timeout_s=900.0)
    (node,) = ec2.instances(alone)
    assert node.usd <= budget_usd
    ends = [c for c in ec2.calls() if c["call"] in ("ec2:TerminateInstances", "ec2:StopInstances")]
    assert node.private_ip in {c["from"] for c in ends} or node.reason.startswith("Client."), ends
    assert poor.controller_pid(alone) is None
    status = poor.settled(alone)
    assert (status["state"], reasons(status)) == ("paused", ["budget"])
    assert status["attempts"][0]["steps_lost"] == 0
    assert status["spent_usd"] <= budget_usd
    check_money(status, [node])

    wait_until(lambda: _orphans(lost) == [orphan], "doctor sees the orphan", timeout_s=600.0)
    lost.spotguard("doctor", "--end-orphans", "--yes", timeout_s=600.0)
    wait_until(lambda: not ec2.living(orphan), "the orphan is gone", timeout_s=200.0)
    assert _orphans(lost) == []


def _orphans(beside: Beside) -> list[str]:
    told = beside.spotguard("doctor", "--json", timeout_s=600.0).json
    listed = told["clusters"]["leftovers"]
    return [each["run_id"] for each in listed if each["orphan"] and not each["ended"]]


def of_attempt(instances: list[Instance], number: int) -> list[Instance]:
    """Return those of one attempt's cluster."""
    return [each for each in instances if re.search(rf"-{number}(r\d+)?-[0-9a-f]+-", each.name)]


def worker(ec2: Ec2Lab, run: str) -> Instance:
    """Return the newest living node of a run, which is not the first of its cluster."""
    living = [each for each in ec2.living(run) if each.state == "running"][-2:]  # the old may go
    assert len(living) == 2, living
    return next(each for each in living if not each.name.endswith("-head"))


def check_money(status: Status, instances: list[Instance]) -> None:
    """Compare what `status` says that a run cost with EC2's own times and prices."""
    assert all(each.end_at is not None for each in instances), instances
    ec2_usd = sum(each.usd for each in instances)
    told = f"ours ${status['spent_usd']}, EC2 ${ec2_usd}: {instances}"
    assert status["spent_usd"] == pytest.approx(ec2_usd, rel=0.02), told
