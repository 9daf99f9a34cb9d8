from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import STEADY, Lab, reasons

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_exception_is_shown_and_not_retried(lab: Lab) -> None:
    """The script's own error ends the run at once, exit 10, with its traceback in `status`."""
    status = lab.up(STEADY, "--nodes", "2", args=("--crash-at", "20"), code=10)

    assert status["state"] == "failed"
    assert reasons(status) == ["failed"]
    assert "RuntimeError: the learning rate is on fire" in status["traceback"]
    assert "steady.py" in status["traceback"]
    assert status["attempts"][0]["last_step"] == 20
    shown = lab.spotguard("status").out
    assert "the learning rate is on fire" in shown
    assert "on fire" in lab.spotguard("logs").out


TRAINS = """import time, torch
if False: import spotguard.runtime
w = torch.nn.Parameter(torch.ones(1))
o = torch.optim.SGD([w], lr=0.1)
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import spotguard.runtime\nimport no_such_package\n", "no_such_package"),
        (
            "import spotguard.runtime as s\nrun = s.init()\n",
            "without ever beginning a loop of spotguard",
        ),
        (f"{TRAINS}for _ in range(10**6): o.step(); time.sleep(0.1)\n", "in no loop of spotguard"),
    ],
    ids=["dies at import", "never trains", "trains without us"],
)
def test_script_that_never_trains(lab: Lab, tmp_path: Path, body: str, words: str) -> None:
    """A script that dies before its loop, or has none, is its own failure, said in words."""
    script = tmp_path / "job.py"
    script.write_text(body)

    status = lab.up(script, "--nodes", "1", code=10)

    assert status["state"] == "failed"
    assert reasons(status) == ["failed" if "no_such" in words else "unprotected"]
    told = f"{status['state_detail']} {status['traceback']}"
    assert words in told, told
