"""`spotguard simulate`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pytest

from spotguard.policy.market.recorded import RecordedZone, recorded
from spotguard.policy.simulation.report import _coarse, simulate, wilson

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli

QUICK = ("--work", "2h", "--deadline", "4h", "--runs", "6", "--infra", "aws")


def test_the_same_seed_prints_the_same_bytes(cli: Cli, script: str) -> None:
    """Two runs with one seed agree to the byte, another seed gives other windows."""
    line = ("simulate", script, *QUICK, "--gpus", "V100", "--json")
    first, again = cli(*line), cli(*line)
    assert first.code == 0
    assert first.out == again.out
    assert cli(*line, "--seed", "5").out != first.out
    told = json.loads(first.out)
    assert [row["policy"] for row in told["policies"]] == ["rollout", "constants"]
    assert all(row["late_share"] == 0 for row in told["policies"])
    assert all(row["omniscient_ratio"] >= 1 - 1e-9 for row in told["policies"])


def test_the_table_names_what_it_rests_on_and_the_picture_is_svg(
    cli: Cli, script: str, tmp_path: Path
) -> None:
    """The screen says which record, how long and from when; the plot is well-formed."""
    plot = tmp_path / "out.svg"
    said = cli("simulate", script, *QUICK, "--market", "h100", "--plot", str(plot))
    assert said.code == 0
    for words in ("H100", "6.6 days", "2025-10-03", "rollout", "constants", "on demand"):
        assert words in said.out
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_traces_of_ones_own_can_be_played(cli: Cli, script: str, tmp_path: Path) -> None:
    """A folder of traces takes the place of the records."""
    trace = {
        "metadata": {
            "cloud": "aws", "zone": "here-1a", "instance": "p9", "gap_seconds": 300,
            "on_demand_price": 4.0, "spot_price_const": 1.0,
        },
        "capacity": [1] * 500,
        "spot_price": None,
    }  # fmt: skip
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "a.json").write_text(json.dumps(trace))
    said = cli("simulate", script, *QUICK, "--trace", str(tmp_path / "traces"), "--json")
    told = json.loads(said.out)
    assert told["places"] == ["here-1a"]
    assert told["policies"][0]["cost_usd"]["median"] == pytest.approx(1.0 * (2 + 1 / 6))


def _traced(folder: Path, capacity: list[int], **metadata: float) -> str:
    """Write a trace, and return its folder."""
    told = {"cloud": "aws", "zone": "here-1a", "instance": "p9", "gap_seconds": 600}
    prices = {"on_demand_price": 4.0, "spot_price_const": 1.0}
    trace = {"metadata": {**told, **prices, **metadata}, "capacity": capacity, "spot_price": None}
    (folder / "traces").mkdir()
    (folder / "traces" / "a.json").write_text(json.dumps(trace))
    return str(folder / "traces")


@pytest.mark.parametrize("gap_s", [900, 1200, 3600])
def test_rows_of_an_hour_last_an_hour(cli: Cli, script: str, tmp_path: Path, gap_s: int) -> None:
    """Spot that comes and goes every eight hours is gone for eight hours, whatever the rows."""
    rows = 8 * 3600 // gap_s
    folder = _traced(tmp_path, ([1] * rows + [0] * rows) * 15, gap_seconds=gap_s)
    line = ("--work", "6h", "--deadline", "72h", "--runs", "9", "--infra", "aws")
    said = cli("simulate", script, *line, "--policy", "never", "--trace", folder, "--json")
    told = json.loads(said.out)
    assert told["recorded_days"] == 10.0
    finish_s = told["policies"][0]["finish_s"]
    assert finish_s["median"] > 6.5 * 3600
    assert finish_s["p90"] <= (6 + 8 + 1) * 3600


def test_ticks_of_rows_that_are_longer_have_their_prices() -> None:
    """A tick in two rows is up if both are, and costs their mean by time."""
    zone = RecordedZone(
        cloud="", accelerator="", zone="", start="", gap_s=900.0, nodes_max=2, spot_recorded=True,
        on_demand_usd_per_h=4.0, capacity=np.array([2, 0, 2]),
        spot_usd_per_h=np.array([1.0, 2.0, 4.0]),
    )  # fmt: skip
    up, price = _coarse(zone, 1)
    assert up.tolist() == [True, False, False, True]
    assert price.tolist() == pytest.approx([1.0, 1.5, 2.0, 4.0])


def test_short_work_is_compared_with_what_it_costs(cli: Cli, script: str, tmp_path: Path) -> None:
    """A minute of work is not rounded to nothing; a capacity without end is one."""
    folder = _traced(tmp_path, [10**30] * 100)
    line = ("--work", "60s", "--deadline", "1h", "--runs", "2", "--infra", "aws")
    told = json.loads(cli("simulate", script, *line, "--trace", folder, "--json").out)
    assert told["policies"][0]["omniscient_ratio"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"on_demand_price": 0}, "an 'on_demand_price' of 0"),
        ({"spot_price_const": 0}, "would pay nothing"),
        ({"gap_seconds": 1e300}, "more than 100 years"),
    ],
)
def test_traces_that_cannot_be_compared_are_refused(
    cli: Cli, script: str, tmp_path: Path, metadata: dict[str, float], words: str
) -> None:
    """In one sentence, and no division by zero."""
    folder = _traced(tmp_path, [1] * 500, **metadata)
    said = cli("simulate", script, *QUICK, "--trace", folder)
    assert said.code == 2
    assert words in said.err + said.out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--gpus", "B300"), "nothing is recorded for B300"),
        ((), "no GPU is named"),
        (("--gpus", "V100", "--policy", "best"), "'best' is not known"),
        (("--gpus", "V100", "--nodes", "64"), "64 GPUs at once were never recorded"),
        (("--gpus", "V100", "--trace", "."), "holds no trace"),
        (("--market", "V100", "--trace", "."), "cannot both"),
        (("--gpus", "V100", "--work", "239m"), "no time for the work"),
        (("--gpus", "V100", "--deadline", "40d"), "too short"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    cli: Cli, script: str, more: tuple[str, ...], words: str
) -> None:
    """One sentence and code 2, rather than a guess."""
    said = cli("simulate", script, *QUICK, *more)
    assert said.code == 2
    assert words in said.err + said.out


def test_never_is_late_where_spot_is_scarce() -> None:
    """The policy that never buys on demand is the one that may be late, and says so."""
    made = simulate(
        recorded("gcp_h100x16_2025-10"), market="H100", gang=16, work_s=43_200, deadline_s=50_400,
        policies=("never", "greedy"), runs=12, seed=1,
    )  # fmt: skip
    never, greedy = made.policies
    assert never.late_share > 0
    assert greedy.late_share == 0
    assert never.late_low < never.late_share < never.late_high


def test_a_share_of_none_has_an_upper_bound() -> None:
    """No late run of 200 does not prove that there is never one."""
    low, high = wilson(0, 200)
    assert low == 0
    assert 0.01 < high < 0.03
