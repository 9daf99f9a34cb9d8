from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import FAST_CLOUD, OFTEN, STEADY, Lab, final_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

KILLS = 8


def test_controller_killed_again_and_again(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """kill -9 of the controller at any moment: repaired by `status`; nothing happens twice."""
    run = lab.start(
        STEADY,
        *("--nodes", "1", "--interrupt", "node=0@step=12:notice"),
        *("--interrupt", "all@step=36:kill"),
        *FAST_CLOUD,
        *OFTEN,
        args=("--pause", "0.2"),
    )
    dice = random.Random(20)
    kills = 0
    status = lab.status(run)
    while status["state"] not in ("finished", "failed", "paused", "stopped"):
        pid = lab.controller_pid(run)
        if pid is not None and kills < KILLS:
            os.kill(pid, signal.SIGKILL)
            kills += 1
        time.sleep(dice.uniform(0.0, 4.0))
        said = lab.spotguard("status", run, "--json")
        assert said.code == 0, said.err
        status = said.json

    assert kills >= 4
    assert status["state"] == "finished"
    assert [a["attempt"] for a in status["attempts"]] == [1, 2, 3]
    assert [a["end_reason"] for a in status["attempts"]] == ["preempted", "vanished", "finished"]
    clusters = lab.home / "runs" / run / "local" / "clusters"
    assert len(list(clusters.iterdir())) == 3
    for cluster in clusters.iterdir():
        starts = re.findall(r"node \d+ started", (cluster / "cloud.log").read_text())
        assert starts == ["node 0 started"]
    history = [line["kind"] for line in lab.history(run)]
    told = [kind for kind in history if kind in ("controller_started", "controller_repaired")]
    assert told[:2] == ["controller_started", "controller_repaired"]
    # One that is killed before it has begun its work is not told of a second time.
    assert all(a != b for a, b in itertools.pairwise(told)), told
    assert history.count("controller_repaired") <= kills
    assert history.count("settled") == 1
    costs = [attempt["cost_usd"] for attempt in status["attempts"]]
    assert status["spent_usd"] == pytest.approx(sum(costs))
    assert final_weights(status) == calm(1).weights
