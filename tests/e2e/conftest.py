from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import STEADY, Lab, Status, Weights, final_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    """Return a function: the undisturbed run of the steady job on so many nodes.

    It is made once, also where several processes test: the first one that asks makes it for all.
    """
    known: dict[int, Calm] = {}
    own = tmp_path_factory.getbasetemp()
    of_all = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def run(nodes: int) -> Calm:
        if nodes not in known:
            done = of_all / f"calm-{nodes}.json"
            with done.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not done.exists():
                    folder = tmp_path_factory.mktemp(f"calm-{nodes}-")
                    done.write_text(json.dumps(_undisturbed(nodes, folder)))
            status, trace = json.loads(done.read_text())
            known[nodes] = Calm(status, final_weights(status), Path(trace))
        return known[nodes]

    return run


def _undisturbed(nodes: int, folder: Path) -> tuple[Status, str]:
    trace = str(folder / "samples.jsonl")
    status = Lab(folder).up(
        STEADY,
        *("--nodes", str(nodes)),
        args=("--pause", "0"),
        env={"SPOTGUARD_TRACE_SAMPLES": trace},
    )
    return status, trace
