from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.control.controller import start
from spotguard.spec.model import JobSpec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def started(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs whose controllers were started; they do nothing."""
    runs: list[str] = []
    monkeypatch.setattr(start, "start", lambda folder: runs.append(folder.run_id))
    return runs


@pytest.fixture
def job(home: Path, tmp_path: Path) -> JobSpec:
    """A job of this machine's nodes that may cost six dollars."""
    script = tmp_path / "train.py"
    script.write_text("import spotguard.runtime\n")
    return JobSpec(
        script=str(script),
        workdir=str(tmp_path),
        name="train",
        store=str(home / "store"),
        args=("--steps", "9"),
        budget_usd=6.0,
        env={"TOKEN": "secret-word"},
    )
