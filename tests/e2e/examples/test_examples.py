from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import EXAMPLES, TORCHRUN, Lab, checkpoints

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SMALL = ("--steps", "12", "--width", "32", "--layers", "1", "--length", "32")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A machine with nothing on it."""
    return Lab(tmp_path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short_and_explain_themselves(path: Path) -> None:
    """Whole scripts of fewer than 120 lines, that say how they are run."""
    text = path.read_text()
    assert len(text.splitlines()) < 120
    told = ast.get_docstring(ast.parse(text)) or ""
    assert f"spotguard up examples/{path.name}" in told


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_train_gpt(lab: Lab, launcher: str) -> None:
    """The small GPT trains as one process and as two, with and without loader workers."""
    command = {
        "python": (sys.executable, EXAMPLES / "train_gpt.py", *SMALL, "--workers", "1"),
        "torchrun": (*TORCHRUN, "--nproc-per-node", "2", EXAMPLES / "train_gpt.py", *SMALL),
    }[launcher]

    said = lab.run(*command, env={"SPOTGUARD_RUN_ID": "gpt"})

    assert said.code == 0, said.err
    assert checkpoints(lab.work / "spotguard-runs" / "gpt")[-1] == (12, 1)


def test_train_digits_learns(lab: Lab) -> None:
    """A quarter of the digits' training gets 8 in 10 right, and more."""
    env = {"SPOTGUARD_RUN_ID": "digits", "SPOTGUARD_MAX_STEPS": "150"}
    said = lab.run(sys.executable, EXAMPLES / "train_digits.py", env=env)

    assert said.code == 0, said.err
    assert float(said.out.split("best accuracy ")[1]) >= 0.8
    assert checkpoints(lab.work / "spotguard-runs" / "digits")[-1] == (150, 1)


def test_train_fsdp_shrinks_to_one_process(lab: Lab) -> None:
    """Parts saved by three processes are restored by one, which finishes the run.

    The three have 3, 3 and 2 micro-batches in a step, and meet in each forward pass.
    """
    script = EXAMPLES / "train_fsdp.py"
    env = {"SPOTGUARD_RUN_ID": "f", "SPOTGUARD_SAVE_EVERY": "5 steps"}

    half = {**env, "SPOTGUARD_MAX_STEPS": "15"}
    three = lab.run(*TORCHRUN, "--nproc-per-node", "3", script, "--steps", "30", env=half)
    assert three.code == 0, three.err
    one = lab.run(*TORCHRUN, "--nproc-per-node", "1", script, "--steps", "30", env=env)

    assert one.code == 0, one.err
    assert "resumed at step 15" in one.err
    assert checkpoints(lab.work / "spotguard-runs" / "f")[-1] == (30, 2)
