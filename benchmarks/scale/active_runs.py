"""Many runs at once on nodes of this machine: does each end as it should, what does control take?

python -m benchmarks.scale.active_runs [--runs 20]

Each run trains on a node of its own; each second one is told in the middle that its node will be
taken, saves, and goes on upon the next. All must finish, at the last step, in as many attempts as
that takes; and one process must have controlled them all.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.machine import describe_machine
from spotguard.control import api
from spotguard.control.run_folder import folder_of
from spotguard.events.states import RunState
from spotguard.spec.model import build_spec

STEPS = 40
_JOB = f"""
import time

import torch

import spotguard.runtime as spotguard

run = spotguard.init(seed=1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.randn({STEPS * 4}, 4), torch.randn({STEPS * 4}, 1))
for step in run.steps(run.loader(data, global_batch_size=4), epochs=1):
    for inputs, targets in step:
        step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.5)
"""


def make_run(folder: Path, number: int) -> str:
    """Create a run; each second one is interrupted in the middle."""
    given = {"script": str(folder / "job.py"), "workdir": str(folder), "name": f"active-{number}"}
    told = {"interrupt": [f"node=0@step={STEPS // 2}:notice"], "speed_up": 80.0}
    taken = told if number % 2 else {}
    spec = build_spec({**given, "store": str(folder / "home" / "store"), "local": taken})
    return api.create_run(spec)


def check(run_id: str, number: int) -> str:
    """Return what is wrong with a run's end; empty if nothing is."""
    view = api.view(run_id)
    kinds = [line.kind for line in api.history(run_id).lines]
    attempts = 1 + number % 2
    wrong = {
        "state": view.state is not RunState.FINISHED,
        "steps": view.step != STEPS or view.saved_step != STEPS,
        "attempts": len(view.attempts) != attempts or kinds.count("launched") != attempts,
        "controllers": kinds.count("controller_started") != 1 or "controller_repaired" in kinds,
    }
    found = ", ".join(name for name, is_wrong in wrong.items() if is_wrong)
    return f"{found}: {view.state_detail} {view.traceback or ''}" if found else ""


def main() -> None:
    """Run them, and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    given = parser.parse_args()
    print(describe_machine("cpu")["machine"])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["SPOTGUARD_HOME"] = str(folder / "home")
        (folder / "job.py").write_text(_JOB)
        began_at = time.monotonic()
        runs = [make_run(folder, number) for number in range(given.runs)]
        for run_id in runs:
            api.start_controller(run_id)
        pids = {folder_of(run_id).controller_pid() for run_id in runs}
        [pid] = {pid for pid in pids if pid}
        process = psutil.Process(pid)
        peak_mb = cpu_s = 0.0
        while not all(api.settled(api.view(run_id)) for run_id in runs):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                peak_mb = max(peak_mb, process.memory_info().rss / 2**20)
                cpu_s = sum(process.cpu_times()[:2])
            time.sleep(0.5)
        took_s = time.monotonic() - began_at
        wrong = {run: why for number, run in enumerate(runs) if (why := check(run, number))}
        for run_id, why in wrong.items():
            print(f"{run_id}: {why}")
        print(
            f"{given.runs} runs ended after {took_s:.0f} s, {len(wrong)} of them wrong; their one "
            f"controller took {peak_mb:.0f} MB and {100 * cpu_s / took_s:.0f} % of a core; load "
            f"{os.getloadavg()[0]:.0f}"
        )


if __name__ == "__main__":
    main()
