from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import STEADY, Lab, Status, Weights, final_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A machine of its own, on which nothing may be left running."""
    lab = Lab(tmp_path)
    yield lab
    check_clean(lab)


@pytest.fixture
def labs(tmp_path: Path) -> Iterator[Callable[[], Lab]]:
    """Return a function that makes another such machine: what mostly waits may wait together."""
    made: list[Lab] = []

    def another() -> Lab:
        made.append(Lab(tmp_path / f"machine-{len(made)}"))
        return made[-1]

    yield another
    check_clean(*made)


def check_clean(*labs: Lab) -> None:
    """Kill what still runs on machines whose test is over; fail if there was anything."""
    left = [words for lab in labs for words in lab.clean_up()]
    assert not left, f"processes outlived their run: {left}"


@dataclass(frozen=True)
class Calm:
    """An undisturbed run, to compare with."""

    status: Status
    weights: Weights
    trace: Path


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Calm]:
    """Return a function: the undisturbed run of the steady job on so many nodes, made once."""
    known: dict[int, Calm] = {}

    def run(nodes: int) -> Calm:
        if nodes not in known:
            folder = tmp_path_factory.mktemp(f"calm-{nodes}-")
            lab, trace = Lab(folder), folder / "samples.jsonl"
            status = lab.up(
                STEADY,
                *("--nodes", str(nodes)),
                args=("--pause", "0"),
                env={"SPOTGUARD_TRACE_SAMPLES": str(trace)},
            )
            known[nodes] = Calm(status, final_weights(status), trace)
        return known[nodes]

    return run
