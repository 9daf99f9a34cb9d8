"""A recorded market on real nodes: the run goes where the policy says, and costs what it did there.

Each zone is a partition with its own price, whose node is taken and comes back as it was recorded,
announced and not. An hour of the market is two minutes here, for the job and its deadline, too; a
start is what it is.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal import cost
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import RunFolder
from spotguard.events.states import EndReason
from spotguard.policy.decide import Model
from spotguard.policy.decide import decide as decided_by_policy
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View
from tests.e2e.lab.lab_jobs import JOBS
from tests.e2e.lab.recorded_market import Market, Weather

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord
    from tests.e2e.lab.slurm_lab import Beside, SlurmLab

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(3600)]

EXACT = JOBS / "exact.py"
NODES = ("spot1", "spot2")
PLACES = tuple(f"slurm/spotlab/{node}" for node in NODES)
ON_DEMAND = "slurm/spotlab/spot3"
MARKET = Market(
    dataset="gcp_h100x16_2025-10",
    zones=("us-east4-b", "asia-southeast1-b"),
    begins=726,
    deadline_h=9.0,
    speed_up=30.0,
)
"""The cheap zone is gone from 2 h 20 min to 3 h 10 min. Whatever a start takes, the other one is
worth its price then, and a move back is not."""
EPOCHS, PAUSE_S, WORK = 44, 0.5, "360s"
"""Three hours of the market: 16 steps an epoch."""
_LATEST_S = 300.0
"""Until it is told that the deadline was missed."""
_BEGINS_AFTER_S = 75.0
"""By then a controller looks, also on a busy machine: its first minute is none of the market's."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a controller told the policy, in the market's time, and what it answered."""

    at: float
    view: View
    model: Model
    seed: int
    action: str
    said: dict[str, Any]

    @property
    def places(self) -> list[str]:
        """Where it may be asked for nodes, in this order."""
        return [self.said["place"], *self.said["then"]] if self.action == "Buy" else []


def test_it_goes_where_the_policy_says_in_time_and_costs_what_the_simulator_says(
    beside: Beside, slurm: SlurmLab, tmp_path: Path
) -> None:
    """Two zones come and go; every launch was chosen, by what was seen."""
    kept = tmp_path / "decisions.jsonl"
    beside.hastened = (MARKET.speed_up, kept)
    deadline_s = MARKET.deadline_h * 3600 / MARKET.speed_up
    with Weather(slurm, MARKET, NODES) as weather:
        begins_at = time.time() + _BEGINS_AFTER_S
        run = beside.start(
            beside.copy(EXACT),
            *("--infra", ",".join(PLACES), "--on-demand-infra", ON_DEMAND),
            *("--on-demand", "deadline", "--deadline", f"{deadline_s:.0f}s", "--work", WORK),
            *("--start-at", datetime.fromtimestamp(begins_at, timezone.utc).isoformat()),
            *("--nodes", "1", "--save-every", "5 steps"),
            args=("--epochs", str(EPOCHS), "--pause", str(PAUSE_S)),
        )
        weather.begin(begins_at)
        status = beside.settled(run, within_s=_BEGINS_AFTER_S + deadline_s + _LATEST_S)

    assert status["state"] == "finished", status["state_detail"]
    record = record_of(beside, run)
    assert record.settled is not None
    assert record.settled.at - begins_at <= deadline_s
    places = [place_of(attempt) for attempt in status["attempts"]]
    prices = {place_of(each): each["price_usd_per_h"] for each in status["attempts"]}
    for zone, place in zip(MARKET.recorded(), PLACES, strict=True):
        if place in prices:
            assert prices[place] == pytest.approx(zone.spot_usd_per_h[MARKET.begins], rel=1e-4)

    decisions = decisions_of(kept)
    check_decisions(decisions)
    check_launches(beside, run, decisions)
    starts_s, step_s = measured(record)
    simulated = MARKET.simulated(
        work_s=status["total_steps"] * step_s * MARKET.speed_up,
        start_s=mean(starts_s) * MARKET.speed_up,
    )
    spent_usd = status["spent_usd"] * MARKET.speed_up
    told = (
        f"ours ${spent_usd:.2f}, simulated ${float(simulated.usd[0]):.2f}; a step {step_s:.3f} s, "
        f"starts {[round(each) for each in starts_s]} s, places {places}, "
        f"ends {[each['end_reason'] for each in status['attempts']]}; "
        f"simulated {simulated.places[0].tolist()}"
    )
    print(told)  # noqa: T201
    assert not simulated.late[0], told
    assert len(set(places)) == len(PLACES), "it was in both zones"
    assert spent_usd == pytest.approx(float(simulated.usd[0]), rel=0.1), told


def record_of(beside: Beside, run: str) -> RunRecord:
    """Return what a run's journal says."""
    with RunFolder(beside.home / "runs" / run).journal() as journal:
        return read_record(journal)


def place_of(attempt: dict[str, Any]) -> str:
    """Return where an attempt was."""
    return f"{attempt['infra']}/{attempt['region']}/{attempt['zone']}"


def decisions_of(kept: Path) -> list[Decision]:
    """Return what was decided, in the order of time."""
    return [_decision(json.loads(line)) for line in kept.read_text().splitlines()]


def _decision(line: dict[str, Any]) -> Decision:
    view = line["view"]
    places = tuple(
        MarketPlace(**{**place, "seen": Seen(**place["seen"])}) for place in view["places"]
    )
    running = None if view["running"] is None else Running(**view["running"])
    accelerator, gang = line["model"]
    return Decision(
        at=line["at"],
        view=View(
            job=JobState(**view["job"]), places=places, running=running, tick_s=view["tick_s"]
        ),
        model=Model.of(accelerator, gang),
        seed=line["seed"],
        action=line["action"][0],
        said=line["action"][1],
    )


def check_decisions(decisions: list[Decision]) -> None:
    """Whoever tells the policy the same, is told the same."""
    assert decisions
    for each in decisions:
        action = decided_by_policy(each.view, each.model, each.seed).action
        assert (type(action).__name__, action.why) == (each.action, each.said["why"])


def check_launches(beside: Beside, run: str, decisions: list[Decision]) -> None:
    """Nothing was asked for where the policy had not said so last, for the reason that it gave."""
    with RunFolder(beside.home / "runs" / run).journal() as journal:
        asked = [entry for entry in journal.read() if entry.kind == Kind.INTENDED.value]
    assert asked
    for entry in asked:
        last = [each for each in decisions if each.at <= entry.at][-1]
        offer = entry.data["offer"]
        place = "/".join((offer["infra"], offer["region"], offer["zone"]))
        assert entry.data["why"] == last.said["why"]
        assert place in last.places[:1], "what refused was told to the policy, and it chose anew"


def measured(record: RunRecord) -> tuple[list[float], float]:
    """Return what each start took until its first step, in paid seconds, and what a step takes."""
    begun = [each for each in record.attempts if each.started_at is not None]
    starts_s = [each.started_at - each.billed_from for each in begun if each.started_at is not None]
    finished = [each for each in begun if each.end and each.end.reason is EndReason.FINISHED]
    train_s = sum(cost.counted_train_s(record)[each.number] for each in begun)
    assert len(finished) == 1
    assert record.total_steps
    return starts_s, train_s / record.total_steps
