from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

MOST_MS = 60.0
FOREIGN = {
    "sky",
    "typer",
    "pydantic",
    "boto3",
    "botocore",
    "requests",
    "rich",
    "yaml",
    "psutil",
    "tenacity",
}
HEAVY = {
    "torch.utils.data",
    "torch.distributed.tensor",
    "torch._dynamo",
    "spotguard.control",
    "spotguard.cli",
    "spotguard.spec",
    "spotguard.launch",
    "spotguard.plan",
}

MEASURE = """
import json, sys, time
import torch
before = set(sys.modules)
started = time.process_time()
import spotguard.runtime
spent_ms = 1000 * (time.process_time() - started)
print(json.dumps([spent_ms, sorted(set(sys.modules) - before), sorted(sys.modules)]))
"""


def measure(compiled: Path) -> tuple[float, set[str], set[str]]:
    """Return what the import costs beside torch's: CPU milliseconds, new modules, all modules.

    The first call leaves the byte code in `compiled`, as installing the wheel does: compiling it
    each time, where Python is told to write none, would be two thirds of the cost.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        check=True,
        timeout=120,
        env=environment | {"PYTHONPYCACHEPREFIX": str(compiled)},
    )
    spent_ms, new, loaded = json.loads(done.stdout)
    return spent_ms, set(new), set(loaded)


@pytest.mark.timeout(300)
def test_importing_the_runtime_is_cheap_and_pulls_nothing_in(tmp_path: Path) -> None:
    """On a bare machine with torch alone it works, and costs at most 60 ms beside torch.

    CPU time, best of several: other processes' noise is not ours.
    """
    best_ms, new, loaded = measure(tmp_path)
    assert not {name.split(".")[0] for name in loaded} & FOREIGN
    assert not new & HEAVY
    for _ in range(8):
        if best_ms <= MOST_MS:
            break
        best_ms = min(best_ms, measure(tmp_path)[0])

    assert best_ms <= MOST_MS
