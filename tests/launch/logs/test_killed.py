"""What is killed loses at most five seconds of its log, and never tells a line twice.

`python -m tests.programs.log_kills` does the same many times, at later moments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.launch.logs.killing import LATE_S, LOST_S, VICTIMS, Kill, play

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_loses_at_most_five_seconds(tmp_path: Path, victim: str, seed: int) -> None:
    """Of a node, of its agent alone, of a rank: whenever it comes; who follows is told the same."""
    assert play(Kill.drawn(seed, victim=victim, within_s=4.0), tmp_path).wrong == ()


def test_a_late_kill_loses_no_more(tmp_path: Path) -> None:
    """A node that has printed for longer than it may lose."""
    kill = replace(Kill.drawn(2, victim="node"), after_s=LOST_S + 2 * LATE_S)
    assert play(kill, tmp_path).wrong == ()
