"""Whole runs on a user's own cloud account, for a few cents: opt-in: docs/reference/cloud-tests.md.

`SPOTGUARD_CLOUD=local` plays all that does not need SkyPilot on this machine, for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spotguard.spec.infra import CLOUDS
from tests.e2e.cloud.account import BUDGET_USD, STEPS_AN_EPOCH, wait_long_until
from tests.e2e.lab.lab_jobs import reasons

if TYPE_CHECKING:
    from tests.e2e.cloud.account import Account
    from tests.e2e.lab.lab_jobs import Status

pytestmark = [pytest.mark.cloud, pytest.mark.timeout(5400)]

EPOCHS = 4
TAKEN = {"preempted", "terminated", "node_lost", "vanished"}


@pytest.fixture(scope="session")
def finished(account: Account) -> Status:
    """One undisturbed run to its end; several tests look at it, so that it is paid once."""
    return account.settled(account.begin(epochs=EPOCHS))


def test_a_run_finishes_within_its_budget(account: Account, finished: Status) -> None:
    """Its price was known, and so is what it cost; a real preemption on the way is no failure."""
    assert finished["state"] == "finished", finished
    assert finished["step"] == finished["total_steps"] == EPOCHS * STEPS_AN_EPOCH
    assert set(reasons(finished)) <= TAKEN | {"finished"}
    assert 0 < finished["spent_usd"] <= BUDGET_USD
    if account.cloud in CLOUDS:
        assert finished["on_demand_usd"] > 0


def test_the_bill_agrees_with_skypilots(account: Account, finished: Status) -> None:
    """Within a tenth: both go by the catalogue and by the clock. Alone, it is price times time."""
    sky_usd = account.sky_usd(finished["run_id"])
    if sky_usd is None:
        costs = [attempt["cost_usd"] for attempt in finished["attempts"]]
        assert finished["spent_usd"] == pytest.approx(sum(costs))
    else:
        assert finished["spent_usd"] == pytest.approx(sky_usd, rel=0.1, abs=0.003)


def test_the_node_hears_its_own_cloud(account: Account, finished: Status) -> None:
    """The watcher's own question, asked on the node: answered, without a notice."""
    heard = account.heard(finished["run_id"])
    if account.cloud in CLOUDS:
        assert heard == {"told": account.cloud, "answer": "no notice", "detected": account.cloud}
    elif account.cloud == "kubernetes":
        assert (heard["told"], heard["answer"]) == ("none", "no notice")
    else:  # a Slurm cluster may stand anywhere, and the local one plays a cloud
        assert (heard["told"], heard["answer"]) == (heard["detected"], "no notice")


def test_nothing_is_left_of_a_run(account: Account, finished: Status) -> None:
    """Neither in SkyPilot's books, asked anew, nor by the doctor's word."""
    assert account.left(finished["run_id"]) == []


def test_a_run_whose_node_is_taken_goes_on(account: Account) -> None:
    """Behind the controller's back; the next attempt goes on from the last save."""
    epochs = 30 if account.is_local else 150  # some minutes: a cloud's notice may come first
    run = account.begin(epochs=epochs, interrupt_at=60)
    account.trains(run, step=60)
    account.interrupt(run)
    status = account.settled(run)
    assert status["state"] == "finished", status
    assert status["step"] == epochs * STEPS_AN_EPOCH
    assert len(status["attempts"]) >= 2
    assert reasons(status)[0] in TAKEN
    assert status["attempts"][1]["first_step"] >= 20, "it began anew"
    assert status["spent_usd"] <= BUDGET_USD
    assert account.left(run) == []


def test_a_cluster_without_controller_is_found_priced_and_ended_by_its_name(
    account: Account,
) -> None:
    """With its controller dead for a minute and a half: its job trains, so it is no orphan."""
    if account.is_local:
        pytest.skip("the local machine has no clusters at SkyPilot")
    run = account.begin(epochs=500)
    account.trains(run, step=5)
    assert account.left(run) == [*account.clusters(run)], "wanted, while its controller lives"
    account.kill_controller(run)

    def leftovers(*more: str) -> list[dict[str, Any]]:
        told = account.doctor(*more)["clusters"]["leftovers"]
        return [each for each in told if each["run_id"] == run]

    wait_long_until(lambda: leftovers() != [], "the lease runs out", timeout_s=300.0, every_s=10.0)
    (trains,) = leftovers("--end-orphans", "--yes")
    assert not trains["orphan"], trains
    assert not trains["ended"], trains
    ended = leftovers("--end", trains["cluster"])
    (found,) = ended
    assert found["ended"], found
    assert found["usd_per_h"] > 0
    assert 0 < found["cost_usd"] <= BUDGET_USD
    assert found["training_at_step"] >= 5
    assert account.settled(run)["state"] == "stopped"
    assert account.left(run) == []
