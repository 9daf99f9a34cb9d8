"""Hand-made pictures of a run, for the tests of what is printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spotguard.control.status.footprint import Footprint, RunFootprint
from spotguard.control.status.recovery import Recovery
from spotguard.control.status.view import AttemptView, HistoryLine, RunView
from spotguard.events.states import EndReason, RunState

NOW = 1_763_719_500.0
RUN = "train-gpt-251121-101500-a1b2"


def attempt(number: int = 1, **changes: Any) -> AttemptView:
    """Return an attempt that was preempted with a notice, with `changes`."""
    plain = AttemptView(
        attempt=number,
        infra="local",
        region="us-east-2",
        zone="us-east-2a",
        instance_type="p3.2xlarge",
        market="spot",
        in_place=False,
        nodes=2,
        price_usd_per_h=0.918,
        on_demand_usd_per_h=3.06,
        started_at=NOW - 200,
        ended_at=NOW - 100,
        end_reason=EndReason.PREEMPTED,
        end_detail="node 1 was taken by the cloud 6.0 s after its notice",
        saved=True,
        notice_s=6.0,
        saved_before_end_s=0.4,
        steps_lost=0,
        first_step=0,
        last_step=140,
        cost_usd=0.0312,
        train_s=61.0,
        carbon=Footprint(energy_kwh=0.012, co2e_kg=0.0058, measured=False),
    )
    return replace(plain, **changes)


def recovery(number: int = 1, **changes: Any) -> Recovery:
    """Return the recovery of attempt `number`, with `changes`."""
    plain = Recovery(
        ended=number,
        attempt=number + 1,
        reason=EndReason.PREEMPTED,
        in_place=False,
        ended_at=NOW - 100,
        detect_s=1.2,
        release_s=9.0,
        waiting_s=0.0,
        provision_s=31.0,
        setup_s=7.4,
        restore_s=0.3,
        first_step_s=0.1,
        total_s=49.0,
    )
    return replace(plain, **changes)


def run(**changes: Any) -> RunView:
    """Return a running run on its fourth attempt, with `changes`."""
    plain = RunView(
        run_id=RUN,
        name="train-gpt",
        state=RunState.RUNNING,
        state_detail="attempt 4 trains on 2 nodes",
        step=412,
        total_steps=600,
        loss=2.4137,
        step_s=0.32,
        eta_s=62.0,
        store=f"/home/ada/.spotguard/store/{RUN}",
        created_at=NOW - 400,
        finished_at=None,
        spent_usd=0.1123,
        budget_usd=200.0,
        on_demand_usd=0.3871,
        saved_pct=71.0,
        goodput=0.83,
        saved_step=400,
        saved_at=NOW - 3,
        warnings=(),
        traceback=None,
        carbon=RunFootprint(energy_kwh=0.041, co2e_kg=0.0197, measured=False, factors=()),
        rate_usd_per_h=1.836,
        controller_alive=True,
        attempts=(
            attempt(1),
            attempt(
                2,
                end_reason=EndReason.TERMINATED,
                notice_s=None,
                saved_before_end_s=0.2,
                first_step=140,
                last_step=260,
            ),
            attempt(
                3,
                end_reason=EndReason.NODE_LOST,
                notice_s=None,
                saved_before_end_s=2.7,
                steps_lost=8,
                first_step=260,
                last_step=348,
            ),
            attempt(
                4,
                end_reason=None,
                ended_at=None,
                notice_s=None,
                saved_before_end_s=None,
                steps_lost=None,
                first_step=340,
                last_step=412,
                cost_usd=0.0187,
            ),
        ),
    )
    return replace(plain, **changes)


def finished(**changes: Any) -> RunView:
    """Return the same run at its end, with `changes`."""
    done = run()
    last = replace(
        done.attempts[-1], end_reason=EndReason.FINISHED, ended_at=NOW - 10, last_step=600
    )
    plain = replace(
        done,
        state=RunState.FINISHED,
        state_detail="all 600 steps are done",
        step=600,
        eta_s=None,
        finished_at=NOW - 10,
        saved_step=600,
        saved_at=NOW - 12,
        attempts=(*done.attempts[:-1], last),
    )
    return replace(plain, **changes)


def line(text: str = "attempt 1 starts on 2 nodes", **changes: Any) -> HistoryLine:
    """Return one happening, with `changes`."""
    plain = HistoryLine(at=NOW - 300, attempt=1, kind="launched", text=text, cost_usd=0.01)
    return replace(plain, **changes)


def history() -> list[HistoryLine]:
    """Return a short story of a run."""
    return [
        line("attempt 1 starts on 2 nodes at $0.918/h each (local us-east-2a, spot)", cost_usd=0.0),
        line("node 1 got a notice: it goes in 6.0 s", kind="notice", colour="yellow", at=NOW - 220),
        line("saved at step 140 (emergency, 12.4 MB in 0.2 s)", kind="saved", at=NOW - 216),
        line(
            "attempt 1 ended: preempted with notice, saved in time", colour="yellow", at=NOW - 210
        ),
        line("attempt 2 starts on 2 nodes", attempt=2, at=NOW - 208),
    ]
