from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import FAST_CLOUD, Lab, reasons, store_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENISES = """
import os, pathlib, torch
import spotguard.runtime as spotguard

words = pathlib.Path.home() / ".cache/words/tokens.bin"
print("already there:", words.exists(), flush=True)
if not words.exists():
    words.parent.mkdir(parents=True, exist_ok=True)
    words.write_bytes(bytes(range(256)) * 50_000)
    (words.parent / "token").write_text("my own login")
assert len(words.read_bytes()) == 12_800_000
run = spotguard.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(model=model, optimizer=optimizer)
samples = torch.utils.data.TensorDataset(torch.randn(64, 8))
for step in run.steps(run.loader(samples, global_batch_size=8, micro_batch_size=4), total=24):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


def test_a_cached_folder_is_back_before_the_script_begins(lab: Lab, tmp_path: Path) -> None:
    """Both nodes of the second attempt have it on their new disks; the login stays where it was."""
    script = tmp_path / "job.py"
    script.write_text(TOKENISES)
    status = lab.up(
        script,
        *("--nodes", "2", "--cache", "~/.cache/words"),
        *("--interrupt", "node=1@step=6:notice"),
        *FAST_CLOUD,
        env={"SPOTGUARD_HOLD": "6:30"},
    )
    assert reasons(status) == ["preempted", "finished"]
    run = status["run_id"]
    printed = lab.spotguard("logs", run).out.splitlines()
    found = [(line[:2], line[-5:].strip()) for line in printed if "already there" in line]
    assert sorted(found) == [("#1", "False"), ("#1", "False"), ("#2", "True"), ("#2", "True")]
    kept = [path for path in store_of(status).rglob("*") if path.is_file()]
    assert not any(b"my own login" in path.read_bytes() for path in kept)
    told = lab.spotguard("history", run, "--all").out
    assert told.count("1 cached file (12.8 MB) is back on node") == 2
    key = (lab.home / "runs" / run / "cache.key").read_text()
    assert not any(key.encode() in path.read_bytes() for path in kept)


def test_a_folder_that_may_hold_logins_is_refused(lab: Lab, tmp_path: Path) -> None:
    """In one sentence that names the setting, before anything is launched."""
    script = tmp_path / "job.py"
    script.write_text(TOKENISES)
    said = lab.spotguard("up", script, "--yes", "--infra", "local", "--cache", "~/.ssh")
    assert said.code == 2
    assert said.err.startswith("error: cache: given ['~/.ssh'] (flag --cache); allowed: folders")
    assert len(said.err.strip().splitlines()) == 1
    assert not (lab.home / "runs").exists()
