"""Flipped bits: how many of them does a restore notice?"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.checkpoint.method import FAILURES
from benchmarks.checkpoint.state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.checkpoint.method import Method

_SIZE_MB = 2.0
"""A small state will do: what is found does not depend on the size."""


@dataclass(frozen=True, kw_only=True)
class Flips:
    """What became of single flipped bits at random places of a checkpoint."""

    found: int = 0
    """The restore refused the checkpoint."""
    missed: int = 0
    """The restore went through and gave wrong values."""
    harmless: int = 0
    """The restore gave the right values: the bit was in padding."""


def flip_bits(methods: Sequence[type[Method]], *, flips: int, seed: int) -> dict[str, Flips]:
    """Return the outcome for each format, by its name; formats that cannot be used are left out."""
    outcomes: dict[str, Flips] = {}
    for kind in methods:
        if kind.format in outcomes:
            continue
        with tempfile.TemporaryDirectory() as folder:
            state = TrainingState(size_mb=_SIZE_MB)
            try:
                method = kind(Path(folder), state)
            except ImportError:
                continue
            try:
                outcomes[kind.format] = _flip(method, flips, random.Random(seed))
            finally:
                method.close()
    return outcomes


def _flip(method: Method, flips: int, chance: random.Random) -> Flips:
    number = 1
    method.save(number).durable.result()
    expected = method.state.fingerprint()
    target = TrainingState(size_mb=_SIZE_MB)
    files = [path for path in method.files() if path.name not in method.unsafe_to_damage]
    sizes = [path.stat().st_size for path in files]
    counts = {"found": 0, "missed": 0, "harmless": 0}
    for _ in range(flips):
        (path,) = chance.choices(files, weights=sizes)
        offset, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        _flip_bit(path, offset, bit)
        target.overwrite()
        counts[_outcome(method, number, target, expected)] += 1
        _flip_bit(path, offset, bit)
    return Flips(**counts)


def _outcome(method: Method, number: int, target: TrainingState, expected: list[int]) -> str:
    try:
        method.load(number, target)
    except FAILURES:  # whatever a rival raises, it did notice
        return "found"
    return "harmless" if target.fingerprint() == expected else "missed"


def _flip_bit(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))
