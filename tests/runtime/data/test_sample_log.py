from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from spotguard.testing import read_sample_trace

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, *lines: tuple[int, int, int, int]) -> Path:
    """Write a log of (attempt, ranks, rank, step); return its path."""
    names = ("attempt", "world_size", "rank", "step")
    path = folder / "trace"
    path.write_text(
        "".join(
            json.dumps(
                {**dict(zip(names, line, strict=True)), "epoch": 0, "samples": [], "loss": 0}
            )
            + "\n"
            for line in lines
        )
    )
    return path


def test_what_was_lost_does_not_count(tmp_path: Path) -> None:
    """From the step that a later attempt began with: also steps that it had no need to repeat."""
    lost = [(1, 1, 0, step) for step in range(6)]
    path = written(tmp_path, *lost, (2, 2, 1, 3), (2, 2, 0, 3))
    assert [(step.step, step.attempt) for step in read_sample_trace(path)] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
    ]


def test_a_rank_without_a_line_is_found(tmp_path: Path) -> None:
    """Then the log does not tell what the step trained on."""
    with pytest.raises(ValueError, match="step 0 of attempt 1 misses ranks"):
        read_sample_trace(written(tmp_path, (1, 2, 1, 0)))
