"""The controller on a node of its own, in the EC2 lab: the laptop is gone, and the run finishes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.stored.controller_nodes import GONE_WITHIN_S
from tests.e2e.ec2.ec2_lab import OHIO, wait_until
from tests.e2e.lab.lab_jobs import JOBS, reasons

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.ec2.ec2_lab import Beside, Ec2Lab, Instance
    from tests.e2e.lab.lab_jobs import Weights

pytestmark = [pytest.mark.e2e, pytest.mark.ec2, pytest.mark.long, pytest.mark.timeout(5400)]

EXACT = JOBS / "exact.py"
SERVES = "cli controller serve|-m spotguard.control "
NODE_USD_PER_H = 0.192
"""Of the one kind of machine that the lab has there, on demand."""


def test_moved_away_mid_run_the_laptop_deleted_killed_and_rebooted_it_finishes(
    machine: Callable[[str], Beside], ec2: Ec2Lab, undisturbed: Callable[..., Weights]
) -> None:
    """The node adopts the attempt that the laptop launched, and launches the ones after it.

    Its service and its controller are killed, and the node is rebooted: each time it goes on. The
    bill has the node, which ends itself after the run's rest.
    """
    laptop = machine("laptop")
    args = ("--epochs", "60", "--pause", "3.0", "--until-attempt", "3")
    run = laptop.begin(EXACT, "--nodes", "1", "--budget", "5", args=args, region=OHIO)
    laptop.trains(run, attempt=1)
    said = laptop.spotguard("controller", "move", run, "vm", "--yes", timeout_s=2400.0)
    assert said.code == 0, said.err
    shutil.rmtree(laptop.home)
    place = f"{laptop.store}/{run}"
    node = controllers_node(ec2, run)
    wait_until(lambda: serving(ec2, node) == 2, "a controller acts there", timeout_s=900.0)

    ec2.verb("interrupt", worker(ec2, run).id, "40")
    laptop.trains(place, attempt=2)
    ec2.verb("exec", node.id, "pkill", "-9", "-f", SERVES)
    wait_until(lambda: serving(ec2, node) == 2, "both are begun anew", timeout_s=300.0)

    for verb, state in (("stop-instances", "stopped"), ("start-instances", "running")):
        ec2.aws("ec2", verb, "--region", OHIO, "--instance-ids", node.id)
        wait_until(lambda: state_of(ec2, node) == state, state, timeout_s=200.0)  # noqa: B023
    wait_until(lambda: serving(ec2, node) == 2, "begun at boot", timeout_s=600.0)
    ec2.verb("interrupt", worker(ec2, run).id, "40")
    status = laptop.is_in(place, "finished", within_s=1800.0)

    assert reasons(status) == ["preempted", "preempted", "finished"]
    assert laptop.final_weights(status) == undisturbed(EXACT, "--epochs", "60")
    wait_until(lambda: not ec2.living(run), "the node ends itself", timeout_s=1500.0)
    ec2_usd = sum(each.usd for each in ec2.instances(run))
    late_usd = laptop.status(place)["spent_usd"] - ec2_usd
    assert -0.02 * ec2_usd <= late_usd <= 0.02 * ec2_usd + NODE_USD_PER_H * GONE_WITHIN_S / 3600


def controllers_node(ec2: Ec2Lab, run: str) -> Instance:
    """Return the node that the run's controller has for itself."""
    return next(each for each in ec2.living(run) if f"{run}-c" in each.name)


def worker(ec2: Ec2Lab, run: str) -> Instance:
    """Return a node of the job."""
    return next(each for each in reversed(ec2.living(run)) if f"{run}-c" not in each.name)


def state_of(ec2: Ec2Lab, node: Instance) -> str:
    """Return what EC2 says of it now."""
    return next(each.state for each in ec2.instances() if each.id == node.id)


def serving(ec2: Ec2Lab, node: Instance) -> int:
    """Return how many processes look after the run there: the service, and the controller."""
    command = f"pgrep -f '{SERVES}' | grep -cvw $$ || true"
    return int(ec2.verb("exec", node.id, "bash", "-c", command).strip())
