"""On the path of a controller: its market goes faster than the clock, and its decisions are kept.

Python imports a module of this name when it starts. `MARKET_SPEED_UP` says how much faster; the
policy is told all durations as they are in the market. `MARKET_DECISIONS` is a file to which what
it was told and what it answered is added, a line each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotguard.policy.decide import Decided, Model
    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.view import Seen, View

_START_S = 45.0
_ASK_S = 30.0
"""What a start, and asking in vain, take in the lab. They are not the market's: nobody hastens
them."""


def _main(speed_up: float, decisions: Path) -> None:
    placement: Any = import_module("spotguard.control.supervisor.placement.seen_places")
    policy: Any = import_module("spotguard.control.supervisor.policy")
    deciding: Any = import_module("spotguard.policy.decide")
    policy.SKY_POLICY = replace(
        policy.SKY_POLICY,
        start_s=_START_S,
        ask_s=_ASK_S,
        save_s=policy.SKY_POLICY.save_s / speed_up,  # slower ones count once they were seen
        teardown_s=policy.SKY_POLICY.teardown_s / speed_up,
        capacity_backoff_max_s=policy.SKY_POLICY.capacity_backoff_max_s / speed_up,
        think_of_moves_s=policy.SKY_POLICY.think_of_moves_s / speed_up,
        back_to_spot_after_s=policy.SKY_POLICY.back_to_spot_after_s / speed_up,
    )
    really_seen, really_decide = placement.seen_by, deciding.decide

    def seen_by(told: list[tuple[float, bool]], now: float, hazard: Hazard) -> Seen:
        seen: Seen = really_seen([(at * speed_up, up) for at, up in told], now * speed_up, hazard)
        return seen

    def decide(view: View, model: Model, seed: int, **more: Any) -> Decided:
        told = in_market_time(view, speed_up)
        decided: Decided = really_decide(told, model, seed, **more)
        line = {
            "at": time.time(),
            "view": asdict(told),
            "model": [model.accelerator, model.gang],
            "seed": seed,
            "action": [type(decided.action).__name__, asdict(decided.action)],
        }
        with decisions.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return decided

    placement.seen_by = seen_by
    deciding.decide = decide


def in_market_time(view: View, speed_up: float) -> View:
    """Return the view with the job's durations in the market's time; places have theirs."""
    job = view.job
    assert job.left_s is not None
    told = replace(
        job,
        work_left_s=job.work_left_s * speed_up,
        left_s=job.left_s * speed_up,
        start_s=job.start_s * speed_up,
        reserve_s=job.reserve_s * speed_up,
    )
    running = view.running
    if running is not None:
        running = replace(running, starting_s=running.starting_s * speed_up)
    return replace(view, job=told, running=running, tick_s=view.tick_s * speed_up)


if "MARKET_SPEED_UP" in os.environ and "spotguard.control" in sys.orig_argv:
    _main(float(os.environ["MARKET_SPEED_UP"]), Path(os.environ["MARKET_DECISIONS"]))
