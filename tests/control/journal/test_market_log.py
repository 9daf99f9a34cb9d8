from __future__ import annotations

import json
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotguard.control.journal import market_log
from spotguard.control.journal.market_log import note_market, read_market
from spotguard.policy.market.sightings import Sighting

if TYPE_CHECKING:
    from pathlib import Path

SEEN = Sighting(
    at=1000.0, kind="lost", place="aws/us-east-1/p3", accelerator="V100", gpus=8, nodes=2,
    usd_per_h=0.9, age_s=500.0, run="job-1", attempt=3,
)  # fmt: skip


def test_what_was_noted_is_read_by_time(tmp_path: Path) -> None:
    """Sightings come back whole, the oldest first, from a file that nobody else can read."""
    path = tmp_path / "home" / "market.jsonl"
    earlier = Sighting(at=5.0, kind="price", place="b", usd_per_h=2.0)
    note_market(path, [SEEN])
    note_market(path, [earlier])
    assert read_market(path) == (earlier, SEEN)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_missing_file_is_an_empty_market(tmp_path: Path) -> None:
    """Nothing is read, and nothing is made by noting nothing."""
    path = tmp_path / "market.jsonl"
    note_market(path, [])
    assert read_market(path) == ()
    assert not path.exists()


def test_a_home_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    """A run does not end because a note could not be kept."""
    (tmp_path / "file").write_text("")
    note_market(tmp_path / "file" / "market.jsonl", [SEEN])


def test_prices_go_before_what_runs_have_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prices can be had again. However many are noted at once, the file keeps its size."""
    monkeypatch.setattr(market_log, "MOST_BYTES", 8000)
    path = tmp_path / "market.jsonl"
    note_market(path, [replace(SEEN, at=float(at)) for at in range(5)])
    prices = [Sighting(at=100.0 + at, kind="price", place="b", usd_per_h=2.0) for at in range(900)]
    note_market(path, prices)
    assert path.stat().st_size <= 8000
    note_market(path, [replace(SEEN, at=2000.0)])
    found = read_market(path)
    assert [each.at for each in found if each.kind == "lost"] == [0.0, 1.0, 2.0, 3.0, 4.0, 2000.0]
    kept = [each.at for each in found if each.kind == "price"]
    assert kept
    assert kept == [each.at for each in prices][-len(kept) :]


def test_the_newest_price_of_each_place_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much runs have seen; and where old prices are enough to drop, nothing else goes."""
    monkeypatch.setattr(market_log, "MOST_BYTES", 20_000)
    path = tmp_path / "market.jsonl"
    note_market(path, [replace(SEEN, at=float(at)) for at in range(80)])
    names = [f"aws/us-east-1/us-east-1{zone}/p3.2xlarge" for zone in "abcdef"]
    prices = [
        Sighting(at=1000.0 + at, kind="price", place=name, usd_per_h=2.0)
        for at in range(20)
        for name in names
    ]
    note_market(path, prices)
    found = read_market(path)
    assert {each.place: each.at for each in found if each.kind == "price"} == dict.fromkeys(
        names, 1019.0
    )
    assert sum(each.kind == "lost" for each in found) == 80
    for at in range(80, 400):
        note_market(path, [replace(SEEN, at=float(at))])
        assert path.stat().st_size <= 20_000
    found = read_market(path)
    assert {each.place for each in found if each.kind == "price"} == set(names)
    assert found[-1].at == 1019.0
    assert max(each.at for each in found if each.kind == "lost") == 399.0


def test_the_file_stays_small_and_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is full the older half goes, in whole lines; the newest stay."""
    monkeypatch.setattr(market_log, "MOST_BYTES", 4000)
    path = tmp_path / "market.jsonl"
    for at in range(200):
        note_market(path, [replace(SEEN, at=float(at))])
        assert path.stat().st_size <= 4000
    found = read_market(path)
    assert found[-1].at == 199
    assert [each.at for each in found] == list(range(200 - len(found), 200))
    assert 8 < len(found) < 40


@pytest.mark.parametrize(
    "line",
    [
        "",
        "rubbish",
        "[1]",
        '{"v":1}',
        '{"v":2,"at":1,"kind":"lost","place":"a"}',
        '{"v":1,"at":-1,"kind":"lost","place":"a"}',
        '{"v":1,"at":1,"kind":"eaten","place":"a"}',
        '{"v":1,"at":1,"kind":["lost"],"place":"a"}',
        '{"v":1,"at":1,"kind":"lost","place":""}',
        '{"v":1,"at":1,"kind":"lost","place":"a","run":"' + "x" * 3000 + '"}',
        "\udcff",
    ],
)
def test_lines_that_make_no_sense_are_passed_over(tmp_path: Path, line: str) -> None:
    """Good lines around a bad one are still read."""
    path = tmp_path / "market.jsonl"
    note_market(path, [SEEN])
    with path.open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    note_market(path, [SEEN])
    assert read_market(path) == (SEEN, SEEN)


@pytest.mark.same_everywhere
@given(
    body=st.dictionaries(
        st.sampled_from(["at", "nodes", "gpus", "market", "usd_per_h", "age_s", "attempt", "run"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    )
)
def test_no_value_breaks_the_reader(
    body: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever stands in a field, there is a sighting that can be reckoned with, or none."""
    path = tmp_path_factory.mktemp("market") / "market.jsonl"
    path.write_text(json.dumps({"v": 1, "at": 1.0, "kind": "lost", "place": "a", **body}) + "\n")
    for each in read_market(path):
        assert each.nodes >= 1
        assert each.gpus >= 1
        assert each.usd_per_h is None or each.usd_per_h >= 0
