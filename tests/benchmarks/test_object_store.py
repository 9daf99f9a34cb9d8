"""The benchmark of object stores runs and reports; its timings are not judged here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.object_store import WAYS, Mover, Place, Row, check, to_markdown
from tests.benchmarks.test_checkpoint_benchmark import run_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_command_moves_the_bytes_by_every_way_that_is_there(tmp_path: Path) -> None:
    """Ours, boto3's and rclone's move them up and down in each round, and ours tells its memory."""
    pytest.importorskip("boto3")
    files = {"json": tmp_path / "out.json", "markdown": tmp_path / "out.md"}
    run_module(
        "benchmarks.object_store",
        *("--mb", "20", "--rounds", "2"),
        *("--json", str(files["json"]), "--markdown", str(files["markdown"])),
    )
    body = json.loads(files["json"].read_text(encoding="utf-8"))
    found = {row["way"].split(" ")[0]: row for row in body["results"]}

    assert {"spotguard", "boto3", "rclone"} <= set(found)
    assert all(len(row["up_s"]) == len(row["down_s"]) == 2 for row in found.values())
    assert found["spotguard"]["extra_mb"] >= 0
    assert "| spotguard |" in files["markdown"].read_text(encoding="utf-8")


def test_a_ratio_is_that_of_one_round() -> None:
    """So noise that hits both cancels out."""
    ours = Row(
        way="spotguard", up_s=[1.0, 2.0], down_s=[1.0, 1.0], up_cpu_s=[0.1], down_cpu_s=[0.1]
    )
    other = replace(ours, way="other", up_s=[2.0, 4.0])
    text = to_markdown([ours, other], ["x: left out"], {"machine": "a fast one"}, mb=5)

    assert "| other | 3.00 (2.00..4.00) | 2.00 (2.00..2.00) |" in text
    assert "- x: left out" in text
    assert "- machine: a fast one" in text


@pytest.mark.parametrize("in_file", [False, True])
def test_other_bytes_are_no_result(tmp_path: Path, in_file: bool) -> None:
    """A way that brings back other bytes than it took ends the benchmark."""
    place = Place(
        data=bytearray(b"good"), back=bytearray(b"good"), folder=tmp_path, endpoint="http://x"
    )
    place.file("back").write_bytes(b"good")
    mover = Mover(up=list, down=list, in_file=in_file)
    check(place, mover)

    place.file("back").write_bytes(b"evil")
    place.back[:] = b"evil"
    with pytest.raises(AssertionError, match="others"):
        check(place, mover)


def test_what_is_not_installed_is_named() -> None:
    """One sentence says who is missing, and why."""
    assert "left out" in replace(WAYS[0], program="no-such-program").missing()
    assert "left out" in replace(WAYS[0], package="no_such_package").missing()
    assert not WAYS[0].missing()
