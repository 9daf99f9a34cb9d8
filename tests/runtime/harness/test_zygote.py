from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.harness.processes import Jobs, Zygote

LOOK = Path(__file__).with_name("surroundings.py")
DICE = ("random", "numpy", "torch's dice", "torch drew")
"""Differ between any two processes, as nobody has seeded them."""


@pytest.mark.e2e
def test_a_warm_rank_is_as_a_fresh_one(tmp_path: Path) -> None:
    """A script finds the same around it in a fork of the server as in a new Python.

    Named differences: modules are loaded already (none of the script's own), strings hash alike in
    all forks of a server, and SIGUSR1 prints stacks.
    """
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SPOTGUARD_", "PYTEST"))},
        "OMP_NUM_THREADS": "1",
        "SPOTGUARD_RUN_ID": "a-run",
        "WORD": "of the test's own",
    }
    with (tmp_path / "fresh").open("wb") as output:
        subprocess.run(
            [sys.executable, str(LOOK), "--an", "argument"],
            cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, check=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
    fresh = _found(tmp_path / "fresh")
    zygote = Zygote()
    try:
        jobs = Jobs(zygote, tmp_path)
        every = [jobs.start(LOOK, "--an", "argument", WORD=env["WORD"]) for _ in range(3)]
        assert [job.wait() for job in every] == [0, 0, 0], every[0].said
        warm = [_found(job.output) for job in every]
    finally:
        zygote.close()

    unlike = {*DICE, "hash"}
    for each in warm:
        assert {k: v for k, v in each.items() if k not in unlike} == {
            k: v for k, v in fresh.items() if k not in unlike
        }
    for name in DICE:
        assert len({json.dumps(each[name]) for each in [fresh, *warm]}) == 4, name


def _found(path: Path) -> dict[str, Any]:
    [line] = [line for line in path.read_text().splitlines() if line.startswith("found ")]
    return dict(json.loads(line.removeprefix("found ")))
