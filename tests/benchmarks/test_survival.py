"""The survival matrix runs, judges and reports; how often a job survives is not judged here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.survival import contestant, matrix, model
from benchmarks.survival.hf import HuggingFace
from benchmarks.survival.lightning_trainer import Lightning
from benchmarks.survival.matrix import CONTESTANTS, Row, to_markdown
from benchmarks.survival.one_try import CELLS, Outcome
from benchmarks.survival.ours import Spotguard
from tests.benchmarks.test_checkpoint_benchmark import run_module

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.survival.contestant import Contestant


def outcome(step: int | None, *, finished: int = 9, left_s: float | None = 1.0) -> Outcome:
    """Return a try that left a checkpoint of `step`, or none."""
    return Outcome(
        contestant="ours",
        cell="both",
        saved=step == finished,
        loadable=step is not None,
        finished=finished,
        step=step,
        last_word_s=None if step is None else 0.5,
        left_s=left_s,
        detail="" if step == finished else "late",
    )


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_command_runs_a_cell(tmp_path: Path) -> None:
    """A real job is started, told to stop, judged and resumed; the JSON holds each try."""
    out = tmp_path / "out.json"
    printed = run_module(
        "benchmarks.survival",
        *("--tries", "1", "--cells", "both", "--contestants", "spotguard", "--json", str(out)),
    )
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]

    assert "| spotguard | both | " in printed
    assert (row["contestant"], row["cell"], len(row["outcomes"])) == ("spotguard", "both", 1)
    assert row["outcomes"][0]["finished"] >= 3


def test_a_checkpoint_of_an_earlier_step_is_loadable_and_not_saved() -> None:
    """The table tells a lost step from a lost run, and counts who had to be killed."""
    row = Row(
        contestant="ours",
        cell="both",
        outcomes=[outcome(9), outcome(8), outcome(None, left_s=None)],
        load=1.0,
    )

    assert row.cells()[2:5] == ["1/3", "2/3", "0..1"]
    assert row.cells()[6] == "1.00 [1.00..15.00], 1 killed"
    assert "- ours, both: 2 x late" in to_markdown([row], [])
    assert [one["steps_lost"] for one in row.to_json()["outcomes"]] == [0, 1, None]


def test_nothing_saved_is_all_steps_lost() -> None:
    """Without a checkpoint there is no time of one."""
    row = Row(contestant="ours", cell="both", outcomes=[outcome(None)], load=1.0)

    assert row.cells()[2:6] == ["0/1", "0/1", "all", "-"]


class Absent(Spotguard):
    """A contestant that is not installed."""

    name = "absent"
    package = "spotguard_no_such_package"


def test_a_missing_rival_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report says who did not take part, and why."""
    monkeypatch.setattr(matrix, "CONTESTANTS", (Absent(),))
    matrix.main(["--contestants", "absent"])

    assert "absent: left out: `spotguard_no_such_package`" in capsys.readouterr().out


def test_an_unknown_cell_is_refused() -> None:
    """A misspelt name does not silently measure nothing."""
    with pytest.raises(SystemExit):
        matrix.main(["--cells", "bth"])


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda one: one.name)
def test_an_empty_folder_holds_no_checkpoint(contestant: Contestant, tmp_path: Path) -> None:
    """Nobody is credited with a save that was never made."""
    found = contestant.find(tmp_path)

    assert found.step is None
    assert found.problem
    assert contestant.resume(tmp_path, tmp_path / "progress", found)


def test_the_trainers_unfinished_checkpoint_does_not_count(tmp_path: Path) -> None:
    """Its mark of an unfinished save is believed."""
    for step in (7, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-12" / "checkpoint-is-incomplete.txt").touch()

    assert HuggingFace().find(tmp_path).step == 7


def test_lightnings_newest_checkpoint_is_by_step(tmp_path: Path) -> None:
    """Names are compared as numbers, also where a version was appended."""
    for name in ("step=9.ckpt", "step=10.ckpt", "step=10-v1.ckpt"):
        (tmp_path / name).touch()

    assert Lightning().find(tmp_path).step == 10


def test_progress_outlives_its_process_and_tells_first_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume is proved by the first step that it trained."""
    monkeypatch.setenv(model.PROGRESS, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    progress = model.Progress()
    assert model.read_progress(tmp_path) == {}
    for finished in (5, 6, 7):
        progress.note(finished)

    assert model.read_progress(tmp_path) == {1: (5, 7)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "stage"), [(0, "before its first step"), (1, "after its first step")]
)
def test_a_resume_that_hangs_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: int, stage: str
) -> None:
    """How far it came, and where in its code it was: imports that take long are no hang."""
    (tmp_path / "hangs.py").write_text(
        "import os, pathlib, struct, time\n"
        "def wait_for_ever():\n"
        "    time.sleep(1000)\n"
        "place = pathlib.Path(os.environ['SURVIVAL_PROGRESS'], '0')\n"
        f"place.write_bytes(struct.pack('<qq', {trained}, {trained}))\n"
        "wait_for_ever()\n"
    )
    monkeypatch.setattr(contestant, "ROOT", tmp_path)
    monkeypatch.setattr(contestant, "_IMPORTS_S", 3.0 if not trained else 60.0)
    monkeypatch.setattr(contestant, "_RESUME_S", 0.5)
    monkeypatch.setattr(Spotguard, "job", "hangs")
    found = contestant.Found(step=4, where="")
    problem = Spotguard().resume(tmp_path, tmp_path / "resumed", found)

    assert problem.startswith(f"the resume hung {stage}, at File ")
    assert problem.endswith("in wait_for_ever")


def test_every_contestant_and_cell_has_a_name_of_its_own() -> None:
    """Names are how the options and the report address them."""
    for names in ([one.name for one in CONTESTANTS], [cell.name for cell in CELLS]):
        assert len(set(names)) == len(names)
    assert all(cell.note for cell in CELLS)
