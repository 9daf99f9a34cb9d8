"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with its `~` resolved; `~nobody` is an ordinary name, as it is for a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises RuntimeError there
