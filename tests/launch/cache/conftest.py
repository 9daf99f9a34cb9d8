from __future__ import annotations

import pytest

from tests.launch.cache.nodes import PIECE_BYTES


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files of many pieces that are quick to write."""
    for module in ("listing", "keeping", "restoring"):
        monkeypatch.setattr(f"spotguard.launch.cache.{module}.PIECE_BYTES", PIECE_BYTES)
