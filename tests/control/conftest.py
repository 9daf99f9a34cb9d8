from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty spotguard home."""
    path = tmp_path / "home"
    monkeypatch.setenv("SPOTGUARD_HOME", str(path))
    return path
