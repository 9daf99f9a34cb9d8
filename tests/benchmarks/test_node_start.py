from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.recovery import node_start

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_both_ways_start_the_script_and_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Each round has both, and a ratio; how long they take is nobody's promise here."""
    node_start.main(["--rounds", "1", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert {way: len(each) for way, each in told["seconds"].items()} == {
        node_start.OURS: 1,
        node_start.TORCHRUN: 1,
    }
    assert len(told["ratios"]) == 1


def test_the_ways_differ_in_what_starts_the_script_alone(tmp_path: Path) -> None:
    """The rival is torch's own module, with the very same flags."""
    ways = node_start.commands(tmp_path / "job.py", 2)
    ours, theirs = ways[node_start.OURS], ways[node_start.TORCHRUN]
    differ = [(mine, other) for mine, other in zip(ours, theirs, strict=True) if mine != other]
    assert differ == [("spotguard.launch.ranks", "torch.distributed.run")]
