"""What Prometheus reads, and the board and rules that are made of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spotguard.cli.main import main
from spotguard.control import api
from spotguard.control.journal.journal import Journal
from spotguard.pages.metrics import exposition
from tests.control.made import ended, launched, saved, training
from tests.control.run_folders import make_run

BEGAN = 1_790_000_000.0
DASHBOARDS = Path(__file__).parents[2] / "infra" / "dashboards"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a run that was preempted, and goes on at a price that nobody knows."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    make_run(tmp_path / "home", "job-1")
    lines = (
        *launched(BEGAN, price=1.0),
        training(BEGAN + 5.0),
        saved(BEGAN + 9.0, 20, size_bytes=4e6, duration_s=0.5, stall_s=0.1),
        saved(BEGAN + 12.0, 30, size_bytes=5e6, duration_s=0.7, stall_s=0.1),
        ended(BEGAN + 20.0, "preempted", last_step=30),
        *launched(BEGAN + 21.0, attempt=2, price=None),
    )
    with Journal.open(tmp_path / "home" / "runs" / "job-1" / "journal.db") as journal:
        for kind, at, attempt, *data in lines:
            told = data[0] if data else {}
            journal.append(kind, at=at, attempt=attempt, data=told)
    return tmp_path / "home"


def _samples() -> dict[tuple[str, str], float]:
    told = exposition(api.measures()).decode()
    return {
        (sample.name, ",".join(v for k, v in sorted(sample.labels.items()) if k != "run")): (
            sample.value
        )
        for family in text_string_to_metric_families(told)
        for sample in family.samples
    }


def test_each_number_is_told_and_what_is_unknown_is_not() -> None:
    """A price that nobody knows is no sample, so no sum takes it for zero."""
    told = _samples()
    assert told["spotguard_run_state", "launching"] == 1
    assert told["spotguard_preemptions_total", "preempted"] == 1
    assert told["spotguard_preemptions_total", "vanished"] == 0
    assert told["spotguard_saves_total", ""] == 2
    assert told["spotguard_save_bytes_total", ""] == 9e6
    assert told["spotguard_last_save_seconds", ""] == 0.7
    assert told["spotguard_attempts_total", ""] == 2
    assert told["spotguard_phase_seconds_total", "saving"] == pytest.approx(0.2)
    for unknown in ("spent_usd_total", "rate_usd_per_h", "budget_usd", "steps_total_planned"):
        assert (f"spotguard_{unknown}", "") not in told


def test_the_textfile_is_written_in_one_piece(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """node_exporter never reads half of it; without a file it is printed."""
    path = tmp_path / "spotguard.prom"
    assert main(["metrics", "--textfile", str(path)]) == 0
    assert [each.name for each in tmp_path.iterdir() if "prom" in each.name] == [path.name]
    assert capsys.readouterr().out == ""
    assert main(["metrics"]) == 0
    assert "spotguard_run_info" in capsys.readouterr().out
    assert main(["metrics", "--textfile", str(tmp_path / "no" / "x.prom")]) == 2


def _named(text: str) -> set[str]:
    return set(re.findall(r"\bspotguard_[a-z0-9_]+", text))


def test_the_board_asks_for_what_there_is() -> None:
    """Each panel has a place, a query, and names that are told; no two panels overlap."""
    board = json.loads((DASHBOARDS / "grafana.json").read_text())
    known = {name for name, _ in _samples()}
    known |= {"spotguard_spent_usd_total", "spotguard_rate_usd_per_h", "spotguard_budget_usd"}
    known |= {
        "spotguard_steps_total_planned",
        "spotguard_hazard_per_h",
        "spotguard_energy_kwh_total",
    }
    known |= {"spotguard_co2e_kg_total"}
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 10
    for panel in board["panels"]:
        where = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(where["x"], where["x"] + where["w"])
            for y in range(where["y"], where["y"] + where["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        for target in panel["targets"]:
            assert _named(target["expr"]) <= known, target["expr"]
            assert target["datasource"]["uid"] == "${datasource}"
    assert _named((DASHBOARDS / "alerts.yaml").read_text()) <= known


def test_the_rules_are_right_by_prometheus_own_tool() -> None:
    """They can be loaded, and fire when they should and not before."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is missing (Debian: prometheus)")
    for words in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")):
        done = subprocess.run(
            [tool, *words], cwd=DASHBOARDS, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
