from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import SpecError
from spotguard.shared.spot_traces import Trace, read_trace

if TYPE_CHECKING:
    from pathlib import Path


def body(**changes: Any) -> dict[str, Any]:
    """Return a good trace, with some parts changed."""
    metadata = {
        "cloud": "aws",
        "zone": "us-east-2a",
        "instance": "p3.2xlarge",
        "gap_seconds": 100,
        "on_demand_price": 3.06,
    }
    metadata.update(changes.pop("metadata", {}))
    good = {"metadata": metadata, "capacity": [2, 1, 0], "spot_price": [0.9, 1.0, None]}
    return {**good, **changes}


def written(folder: Path, **changes: Any) -> Trace:
    """Write a trace and read it."""
    path = folder / "trace.json"
    path.write_text(json.dumps(body(**changes)))
    return read_trace(path)


def test_ticks_follow_time_and_the_last_one_holds(tmp_path: Path) -> None:
    """Each tick holds for its gap; after the end the last values hold for ever."""
    trace = written(tmp_path)

    assert [trace.capacity_at(at) for at in (-5, 0, 99.9, 100, 250, 1e9)] == [2, 2, 2, 1, 0, 0]
    assert [trace.price_at(at) for at in (0, 100, 200)] == [0.9, 1.0, None]
    assert trace.duration_s == 300


def test_speed_up_makes_ticks_shorter(tmp_path: Path) -> None:
    """With a speed-up of 50, a tick of 100 s takes 2 s."""
    trace = written(tmp_path)

    assert [trace.capacity_at(at, 50.0) for at in (1.9, 2.0, 4.0)] == [2, 1, 0]


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    """A gzipped trace is read whatever its name."""
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(json.dumps(body()).encode()))

    assert read_trace(path).instance_type == "p3.2xlarge"


def test_a_price_that_was_not_recorded_is_unknown(tmp_path: Path) -> None:
    """No list of prices: the constant one holds, and without that the price is None, never 0."""
    constant = written(tmp_path, spot_price=None, metadata={"spot_price_const": 2.4})
    nothing = written(tmp_path, spot_price=None, metadata={"on_demand_price": None})

    assert constant.price_at(0) == 2.4
    assert nothing.price_at(0) is None
    assert nothing.on_demand_usd_per_h is None


@pytest.mark.parametrize(
    ("zone", "region"),
    [
        ("us-east-2a", "us-east-2"),
        ("us-west1-a", "us-west1"),
        ("asia-southeast1-b", "asia-southeast1"),
    ],
)
def test_a_zone_has_a_region(tmp_path: Path, zone: str, region: str) -> None:
    """The region is the zone's name without the zone's letter, as AWS and Google write it."""
    assert written(tmp_path, metadata={"zone": zone}).region == region


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metadata": {"gap_seconds": 0}}, "'gap_seconds' must be a number above 0"),
        ({"metadata": {"gap_seconds": "x"}}, "'gap_seconds' must be a number from 0, not 'x'"),
        ({"metadata": {"cloud": None}}, "'cloud' must be a text, not None"),
        ({"metadata": {"on_demand_price": -1}}, "'on_demand_price' must be a number from 0"),
        ({"capacity": []}, "'capacity' must be a list with at least one tick"),
        ({"capacity": None}, "'capacity' must be a list with at least one tick"),
        ({"capacity": [1, -1, 0]}, "'capacity' at tick 1 must be a count of nodes, not -1"),
        ({"capacity": [1, True, 0]}, "'capacity' at tick 1"),
        ({"spot_price": [1.0]}, "'spot_price' must be null or a list of 3 ticks"),
        ({"spot_price": [1.0, "a", 1.0]}, "'spot_price' at tick 1 must be a price, not 'a'"),
        ({"spot_price": [1.0, float("nan"), 1.0]}, "'spot_price' at tick 1"),
    ],
)
def test_a_bad_trace_is_named_with_its_fault(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """A file that is no trace says which part is wrong, what it is and what it should be."""
    with pytest.raises(SpecError, match="is not a trace") as caught:
        written(tmp_path, **changes)

    assert caught.value.field == "trace"
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1, 2]", "not a JSON object"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b'{"metadata": 3}', "'metadata' must be an object"),
        (b"[" * 100_000, "not JSON"),
        (gzip.compress(b"{}", mtime=0)[:-4], "not JSON"),
        (b"\x1f\x8bnonsense", ""),
    ],
)
def test_garbage_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """Whatever the file holds, the answer is one SpecError that names the file."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)

    with pytest.raises(SpecError) as caught:
        read_trace(path)

    assert str(path) in caught.value.message
    assert words in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A path without a file says so."""
    with pytest.raises(SpecError, match=r"nowhere\.json cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.json")
