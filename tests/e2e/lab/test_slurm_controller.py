"""The controller in an allocation of its own: the laptop is gone, and the run finishes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.stored.controller_nodes import GONE_WITHIN_S
from tests.e2e.lab.lab_jobs import JOBS, final_weights, reasons
from tests.e2e.lab.slurm_lab import Books, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.lab.lab_jobs import Status, Weights
    from tests.e2e.lab.slurm_lab import Beside, SlurmLab

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(3600)]

EXACT = JOBS / "exact.py"
SERVES = "cli controller serve|-m spotguard.control "
JOBS_USD_PER_H, NODES_USD_PER_H = 1.0, 6.0
"""Of one CPU in the partition that is preempted, and of two in the other one."""
_LATE_S = 60.0
"""Both are paid from their request on, before Slurm begins them, and until their end is seen."""


def test_moved_into_an_allocation_the_laptop_deleted_killed_it_goes_on_and_finishes(
    beside: Beside, slurm: SlurmLab, undisturbed: Callable[..., Weights]
) -> None:
    """The node adopts the attempt that the laptop launched, and launches the ones after it.

    Its service and its controller are killed there, and it goes on. The bill has the allocation,
    which cancels itself after the run's rest.
    """
    args = ("--epochs", "60", "--pause", "1.5", "--until-attempt", "3")
    with Books(slurm) as books:
        on_demand = ("--on-demand-infra", "slurm/spotlab/ondemand")
        run = beside.begin(EXACT, "--nodes", "1", "--budget", "50", *on_demand, args=args)
        beside.trains(run, attempt=1)
        said = beside.spotguard("controller", "move", run, "slurm", "--yes", timeout_s=1200.0)
        assert said.code == 0, said.err
        shutil.rmtree(beside.home)
        place = f"{beside.store}/{run}"
        node = node_of(slurm, f"{run}-c1")
        wait_until(lambda: serving(slurm, node) == 2, "a controller acts there", timeout_s=300.0)

        slurm.verb("preempt", node_of(slurm, f"{run}-1"), grace_s=15.0)
        beside.trains(place, attempt=2)
        slurm.verb("release")
        slurm.verb("exec", node, "pkill", "-9", "-f", SERVES)
        wait_until(lambda: serving(slurm, node) == 2, "both are begun anew", timeout_s=300.0)

        slurm.verb("preempt", node_of(slurm, f"{run}-2"), grace_s=15.0)
        status = finished(beside, place)
        slurm.verb("release")
        wait_until(lambda: not slurm.clusters(), "the node ends itself", timeout_s=600.0)

    *before, last = reasons(status)
    assert set(before) <= {"terminated", "node_lost"}, "nobody announces it"
    assert (len(before), last) == (2, "finished")
    assert final_weights(status) == undisturbed(EXACT, "--epochs", "60")
    check_money(beside.status(place)["spent_usd"], books, f"{run}-c1")


def finished(beside: Beside, place: str) -> Status:
    """Return the status of a run that has finished."""
    found: list[Status] = []

    def over() -> bool:
        found[:] = [beside.status(place)]
        return bool(found[0]["state"] == "finished")

    wait_until(over, "it has finished", timeout_s=900.0)
    return found[0]


def node_of(slurm: SlurmLab, cluster: str) -> str:
    """Return the node of a cluster that has one."""
    lines = slurm.slurm("squeue", "-h", "-o", "%j %N").splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{cluster}-"))


def serving(slurm: SlurmLab, node: str) -> int:
    """Return how many processes look after the run there: the service, and the controller."""
    command = f"pgrep -f '{SERVES}' | grep -cvw $$ || true"
    return int(slurm.verb("exec", node, "bash", "-c", command).strip())


def check_money(spent_usd: float, books: Books, controllers: str) -> None:
    """Compare what the run says that it cost with Slurm's own list.

    A node of the controller's is charged for as long as nobody may have seen it gone.
    """
    held = list(books.entries.values())
    usd_per_h = [NODES_USD_PER_H if x.cluster == controllers else JOBS_USD_PER_H for x in held]
    assert NODES_USD_PER_H in usd_per_h
    slurm_usd = sum(x.node_s * usd for x, usd in zip(held, usd_per_h, strict=True)) / 3600.0
    late_usd = (sum(usd_per_h) * _LATE_S + NODES_USD_PER_H * GONE_WITHIN_S) / 3600.0
    told = f"ours {spent_usd}, Slurm {slurm_usd}: {held}"
    print(told)  # noqa: T201
    assert 0.98 * slurm_usd <= spent_usd <= slurm_usd + late_usd, told
