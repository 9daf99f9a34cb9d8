from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
    "spotguard.policy.plan",
}

MEASURE = """
import json, sys
import torch
before = set(sys.modules)
import spotguard.runtime
print(json.dumps([sorted(set(sys.modules) - before), sorted(sys.modules)]))
"""


@pytest.mark.timeout(300)
def test_importing_the_runtime_pulls_nothing_in() -> None:
    """On a bare machine with torch alone it works, and beside torch it costs only itself."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, check=True, timeout=120
    )
    new, loaded = map(set, json.loads(done.stdout))
    assert not {name.split(".")[0] for name in loaded} & FOREIGN
    assert not new & HEAVY
    added = {name.split(".")[0] for name in new} - sys.stdlib_module_names
    assert {name for name in added if not name.startswith("_sysconfigdata")} == {
        "spotguard",
        "xxhash",
    }
