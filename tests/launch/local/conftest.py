from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.launch.local import sweep
from spotguard.launch.local.processes import kill_all
from tests.launch.local.local_lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Return a laboratory, and leave no process of it behind."""
    lab = Lab(tmp_path)
    yield lab
    kill_all(lab.run_dir)
    sweep(lab.run_dir)
