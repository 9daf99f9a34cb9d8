from __future__ import annotations

import subprocess
import sys

from tests.guards.test_architecture import HEAVY


def test_runtime_import_pulls_in_nothing_heavy() -> None:
    """`import spotguard.runtime` in a fresh process loads no heavy package, by no detour either."""
    program = (
        "import sys, spotguard.runtime\n"
        "ours = {n.split('.')[1] for n in sys.modules if n.startswith('spotguard.')}\n"
        "print(*sorted({n.split('.')[0] for n in sys.modules} | {'spotguard.' + n for n in ours}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & HEAVY
    assert not loaded & {"spotguard.control", "spotguard.cli", "spotguard.spec", "spotguard.launch"}
