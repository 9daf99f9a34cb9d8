"""The recovery benchmark's own arithmetic, and what its contestants train; it needs no lab."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.recovery.table import Line, Sample, gap, lines_of, main, to_markdown

JOB = Path(__file__).parents[2] / "benchmarks" / "recovery" / "job.py"


def line(at: float, step: int, life: str = "first") -> Line:
    """Return a finished step."""
    return Line(at=at, step=step, life=life, node="spot1")


def test_a_gap_is_between_two_lives() -> None:
    """Steps that are trained again are no progress: that is told apart."""
    before = [line(10.0, 1), line(11.0, 2), line(12.0, 3)]
    after = [line(at, step, "second") for at, step in ((40.0, 2), (41.0, 3), (42.0, 4), (43.0, 5))]

    assert gap(before, after) == {"gap_s": 28.0, "ahead_s": 30.0, "repeated": 2}
    assert gap(before, after[:2])["ahead_s"] is None
    assert gap(before, [line(20.0, 4, "second")]) == {"gap_s": 8.0, "ahead_s": 8.0, "repeated": 0}


def test_the_table_tells_who_gave_up() -> None:
    """A blow that nobody survived is no short recovery; ratios are of the medians."""
    parts = {"detect_s": 2.0, "release_s": None}
    samples = [
        Sample(contestant="spotguard", blow="vanished", gap_s=gap_s, parts=parts)
        for gap_s in (40.0, 50.0, 90.0)
    ]
    samples += [
        Sample(contestant="managed job", blow="vanished", gap_s=100.0),
        Sample(contestant="managed job", blow="vanished", problem="FAILED: so"),
    ]
    table = to_markdown(samples, ["here: a machine"])

    assert (
        "| vanished | spotguard | 3/3 | 50.0 [40.0..90.0] | - | - | 2.0 [2.0..2.0] | - |" in table
    )
    assert "| vanished | managed job | 1/2 | 100.0 [100.0..100.0] |" in table
    assert "the managed job takes 2.00 times as long" in table
    assert "- managed job, vanished: FAILED: so" in table
    assert "- here: a machine" in table


def test_earlier_samples_are_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks of a measurement become one table, in any number of goes."""
    earlier = tmp_path / "earlier.json"
    one = Sample(contestant="spotguard", blow="preempted", gap_s=30.0, repeated=0)
    earlier.write_text(json.dumps({"samples": [asdict(one)]}))
    everything = tmp_path / "all.json"
    main(["--rounds", "0", "--earlier", str(earlier), str(earlier), "--json", str(everything)])
    main(["--rounds", "0", "--earlier", str(everything)])

    assert capsys.readouterr().out.count("| preempted | spotguard | 2/2 | 30.0 [30.0..30.0]") == 2


@pytest.mark.e2e
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "ours"])
def test_each_contestants_job_goes_on_where_it_was_saved(tmp_path: Path, *, plain: bool) -> None:
    """The plain one is a fair rival: it resumes from its own file, on any start."""
    trace = tmp_path / "trace.jsonl"
    words: list[str | Path] = [sys.executable, JOB, trace, "--pause", "0", "--save-every", "4"]
    words += ["--plain", tmp_path / "state.pt"] if plain else []
    for steps in (10, 13):
        subprocess.run(
            [*words, "--steps", str(steps)],
            cwd=tmp_path,
            env={"SPOTGUARD_RUN_ID": "job", "PATH": "", "PYTHONPATH": str(JOB.parents[1])},
            check=True,
            capture_output=True,
        )
    lines = lines_of(trace)
    second = [each.step for each in lines if each.life != lines[0].life]

    assert [each.step for each in lines[:10]] == list(range(1, 11))
    assert second == ([9, 10, 11, 12, 13] if plain else [11, 12, 13])
