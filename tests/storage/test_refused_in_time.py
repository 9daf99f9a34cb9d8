"""What is far too large, has no end, or takes quadratic time is refused within a second."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.checkpoint.manifest import load_manifest
from spotguard.errors import DamagedCheckpoint, NotFound, SpecError
from spotguard.events import keys
from spotguard.spec.layers import file_layer
from spotguard.spec.setting import duration, number, usd, whole
from spotguard.storage import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PREFIX = keys.checkpoint(1, 1)


def in_time(act: Callable[[], object]) -> None:
    """Do something that takes less than a second of the processor."""
    started = time.process_time()
    act()
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("parse", [duration, number, usd, whole(1)])
@pytest.mark.parametrize("text", ["1" * 200_000, "1h" * 100_000, "1." * 100_000, "1" * 4999 + "s"])
def test_no_value_takes_quadratic_time(parse: Callable[[str], object], text: str) -> None:
    """A duration, an amount of money and a number have an end."""

    def act() -> None:
        with pytest.raises(ValueError, match="not a"):
            parse(text)

    in_time(act)


@pytest.mark.parametrize(
    "toml",
    [
        "nodes = " + "7" * 4301,
        "nodes = " + "7" * 200_000,
        "a" + ".a" * 500_000 + " = 1",
        "x = " + "[" * 100_000,
        "# " + "x" * 5_000_000,
    ],
)
def test_a_file_of_settings_that_makes_no_sense_is_told_in_time(toml: str, tmp_path: Path) -> None:
    """One sentence, no traceback."""
    (tmp_path / "spotguard.toml").write_text(toml)

    def act() -> None:
        with pytest.raises(SpecError):
            file_layer(tmp_path / "spotguard.toml", "spotguard.toml")

    in_time(act)


def test_a_pipe_is_no_file_of_settings(tmp_path: Path) -> None:
    """Nobody waits for who would write into it."""
    os.mkfifo(tmp_path / "spotguard.toml")
    with pytest.raises(SpecError, match="no file"):
        file_layer(tmp_path / "spotguard.toml", "spotguard.toml")


def test_a_pipe_is_no_object(tmp_path: Path) -> None:
    """Whatever reads it finds nothing there, and does not wait."""
    store = FileStore(tmp_path)
    (tmp_path / "attempts").mkdir()
    os.mkfifo(tmp_path / "attempts" / "x")
    with pytest.raises(NotFound):
        store.get("attempts/x")
    with pytest.raises(NotFound):
        store.get_into("attempts/x", 0, memoryview(bytearray(1)))
    store.best_reads("attempts/x")
    assert store.head("attempts/x") is None
    assert list(store.list()) == []


def sparse(path: Path, size_bytes: int) -> None:
    """Make a file that is long and takes no room."""
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)


def test_a_manifest_of_500_megabytes_is_refused_in_time(tmp_path: Path) -> None:
    """It is not even read."""
    sparse(tmp_path / keys.manifest(PREFIX), 500_000_000)

    def act() -> None:
        with pytest.raises(DamagedCheckpoint, match="too large"):
            load_manifest(FileStore(tmp_path), PREFIX)

    in_time(act)
