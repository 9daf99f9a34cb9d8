"""The checkpoint benchmark runs and reports; what it measures is not for a test to judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.checkpoint.bars import Bar, bars
from benchmarks.checkpoint.contestants import METHODS
from benchmarks.checkpoint.flips import Flips, flip_bits
from benchmarks.checkpoint.floors import FLOORS, DirectWrite, Memcpy
from benchmarks.checkpoint.measure import Bench, Samples, run_rounds
from benchmarks.checkpoint.memory import measure_extra_memory
from benchmarks.checkpoint.method import Pending, saved
from benchmarks.checkpoint.ours import Emergency, Periodic
from benchmarks.checkpoint.report import Report, make_report, to_markdown
from benchmarks.checkpoint.rivals import DcpSave, Safetensors, TorchSave
from benchmarks.checkpoint.state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.checkpoint.method import Method

pytestmark = pytest.mark.same_everywhere

ROOT = Path(__file__).parents[2]


def run_module(name: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """Run a module of the repository; return what it prints. Its exit code is one of `codes`."""
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,  # seconds where nothing else runs; importing torch takes most of it
    )
    assert done.returncode in codes, done.stderr
    return done.stdout


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_command_reports_on_every_method(tmp_path: Path) -> None:
    """All floors and methods get a row, or the report says why one has none."""
    files = {"--json": tmp_path / "out.json", "--markdown": tmp_path / "out.md"}
    options = {"--mb": 2, "--rounds": 1, "--flips": 4, "--dir": tmp_path, **files}
    words = [str(word) for option in options.items() for word in option]
    run_module("benchmarks.checkpoint", "--no-memory", *words)
    body = json.loads(files["--json"].read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in body["rows"]}

    assert list(rows) == [kind.name for kind in (*FLOORS, *METHODS)]
    for kind in METHODS:
        check_row(kind, rows[kind.name])
    assert rows[Periodic.name]["flips_found"] == rows[Periodic.name]["flips_tried"] > 0
    check_table(files["--markdown"].read_text(encoding="utf-8"), list(rows.values()))


def check_row(kind: type[Method], row: dict[str, Any]) -> None:
    """Assert that a method was measured in full, or that an optional one is missing."""
    if row["problem"]:
        assert kind.name == "torchsnapshot async"
        assert row["problem"].startswith("skipped: No module named 'torchsnapshot'")
        return
    for column in ("stall_ms", "durable_ms", "warm_ms", "cold_ms", "bytes_over_state"):
        assert row[column] > 0, (kind.name, column)
    assert (row["slow_down_ms"] is not None) == kind.background
    assert (row["loss_ms"] is not None) == kind.background


def check_table(markdown: str, rows: list[dict[str, Any]]) -> None:
    """Assert that the Markdown is one even table, then what was left out, and the machine."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("| bar |"))]

    assert {line.count("|") for line in table} == {18}
    assert [line.split("|")[1].strip() for line in table[2:]] == [
        row["name"] for row in rows if row["problem"] is None
    ]
    assert all(row["problem"] in markdown for row in rows if row["problem"])
    assert "load average before" in markdown


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_memory_is_watched_in_a_process_of_its_own(tmp_path: Path) -> None:
    """A method's extra memory is that of a fresh process: here some copy of a part of the state."""
    found = measure_extra_memory(
        Safetensors.name, size_mb=8, tensors=None, device="cpu", folder=tmp_path
    )

    assert found is not None
    assert 0 <= found < 4


class Torn(TorchSave):
    """A method that copies only after it has let the state change."""

    name = "torn"

    def save(self, number: int) -> Pending:
        """Promise a save that happens when somebody waits for it."""
        return Pending(durable=Late(lambda: super(Torn, self).save(number)))


class Late(Future[float]):
    """A future whose work is done by whoever asks for its result."""

    def __init__(self, work: Callable[[], Pending]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> float:
        """Do the work and return when it was done."""
        return self._work().durable.result(timeout)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Return a bench with a tiny state."""
    return Bench(
        state=TrainingState(size_mb=0.2),
        target=TrainingState(size_mb=0.2, seed=1),
        folder=tmp_path,
    )


@pytest.mark.slow
def test_a_torn_checkpoint_gets_no_numbers(bench: Bench) -> None:
    """A method whose checkpoint holds values from after the save is reported as failed."""
    found = run_rounds(bench, [Torn, TorchSave], [], rounds=1, say=lambda _: None)

    assert "WrongBytes" in (found["torn"].problem or "")
    assert found["torn"].stall_s == []
    assert found[TorchSave.name].problem is None
    assert len(found[TorchSave.name].stall_s) == 1


class Absent(TorchSave):
    """A method whose library is missing."""

    name = "absent"

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        raise ModuleNotFoundError("No module named 'absent'")


@pytest.mark.slow
def test_a_missing_library_is_skipped_and_said_so(bench: Bench) -> None:
    """Whoever has not installed a rival still gets all others, and is told."""
    said: list[str] = []
    found = run_rounds(bench, [Absent, Safetensors], [], rounds=1, say=said.append)

    assert found["absent"].problem == "skipped: No module named 'absent'"
    assert "absent: skipped: No module named 'absent'" in said
    assert found[Safetensors.name].problem is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Periodic, Emergency])
def test_our_methods_keep_what_they_saved(bench: Bench, kind: type[Method]) -> None:
    """spotguard's own rows pass the check that the state was overwritten after the save."""
    found = run_rounds(bench, [kind], [], rounds=1, say=lambda _: None)

    assert found[kind.name].problem is None


def test_formats_without_checksums_miss_flips() -> None:
    """The count tells formats apart: safetensors gives wrong values for most flipped bits."""
    outcome = flip_bits([Safetensors], flips=20, seed=3)[Safetensors.format]

    assert outcome.found + outcome.missed + outcome.harmless == 20
    assert outcome.missed > 10


def test_ratios_are_to_the_floors_of_the_same_run() -> None:
    """Medians are divided by the medians of memcpy, direct write and DCP."""
    report = report_of(
        {
            Memcpy.name: Samples(stall_s=[0.1, 0.2, 0.3]),
            DirectWrite.name: Samples(durable_s=[0.5]),
            DcpSave.name: Samples(stall_s=[1.0], durable_s=[2.0], warm_s=[0.4], cold_s=[0.8]),
            Periodic.name: Samples(
                stall_s=[0.3, 0.1, 0.9],
                long_step_stall_s=[0.02],
                durable_s=[0.6],
                warm_s=[0.1],
                cold_s=[0.2],
                size_bytes=2_000_000,
            ),
        }
    )
    row = report.row(Periodic.name)

    assert row is not None
    assert row.stall_over_memcpy == pytest.approx(1.5)
    assert row.stall_spread_ms == pytest.approx((100, 900))
    assert row.long_step_stall_over_memcpy == pytest.approx(0.1)
    assert row.stall_us_per_tensor == pytest.approx(1e4)
    assert row.durable_over_direct == pytest.approx(1.2)
    assert row.warm_over_dcp == pytest.approx(0.25)
    assert row.bytes_over_state == pytest.approx(2.0)
    assert (row.flips_found, row.flips_tried) == (3, 3)
    assert "300 [100..900]" in to_markdown(report)


def report_of(samples: dict[str, Samples]) -> Report:
    """Return the report on made-up samples."""
    return make_report(
        samples,
        state_bytes=1_000_000,
        tensors=10,
        rounds=3,
        machine={},
        memory={Periodic.name: 1.04},
        flips={Periodic.format: Flips(found=3, harmless=1)},
    )


def test_bars_are_judged_only_where_something_was_measured() -> None:
    """A bar without its measurement is neither passed nor missed."""
    found = {bar.promise: bar for bar in bars(report_of({Periodic.name: Samples(stall_s=[1.0])}))}

    assert found["periodic: extra memory ÷ state"].verdict == "passed"
    assert found["flipped bits missed"].verdict == "passed"
    assert found["periodic: stall with a short step ÷ memcpy"].verdict == "not measured"
    assert Bar(promise="", value=1.3, most=1.2).verdict == "missed"


@pytest.mark.parametrize("tensors", [None, 400])
def test_the_state_has_the_size_asked_for(tensors: int | None) -> None:
    """Sizes come out near the wish, whatever the number of tensors; all tensors are overwritten."""
    state = TrainingState(size_mb=4, tensors=tensors)
    before = state.fingerprint()
    state.overwrite()

    assert state.size_bytes == pytest.approx(4e6, rel=0.15)
    assert tensors is None or len(state.flat()) == tensors
    assert all(a != b for a, b in zip(before, state.fingerprint(), strict=True))


def test_a_blocking_save_is_durable_on_return() -> None:
    """`saved` is what blocking methods return."""
    assert saved().durable.done()
