"""What `spotguard runs STORE` costs: a thousand runs in a folder, and as far away as a bucket.

python -m benchmarks.scale.team_runs

A store that is far away is the same folder with a wait before each answer; runs are read side by
side. Beside it, the only way without the controllers' words: each run rebuilt from what it left.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import describe_machine
from spotguard.control.report import stored
from spotguard.control.status.view import RunSummary
from spotguard.control.supervisor.lease import Lease
from spotguard.events.states import RunState
from spotguard.shared.json_documents import document
from spotguard.shared.units import SystemClock
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore

LIMIT_S = 1.0


class FarAway:
    """A store that answers after a while."""

    def __init__(self, store: ObjectStore, answer_s: float) -> None:
        self._store = store
        self._answer_s = answer_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if callable(found):
            time.sleep(self._answer_s)
        return found


def make_runs(root: Path, count: int) -> None:
    """Put the words of so many controllers there."""
    for number in range(count):
        run_id = f"job-260101-{number:06d}-abcd"
        line = RunSummary(
            run_id=run_id,
            name="job",
            state=RunState.RUNNING if number % 2 else RunState.FINISHED,
            created_at=time.time() - number,
            spent_usd=number / 7,
            budget_usd=500.0,
            step=number,
        )

        def tell(line: RunSummary = line) -> dict[str, Any]:
            return document(line)

        store = PrefixedStore(open_store(str(root)), run_id)
        Lease(store, SystemClock(), "a machine", tell=tell).take()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    print(describe_machine("cpu")["machine"])
    with tempfile.TemporaryDirectory() as made:
        make_runs(Path(made), given.runs)
        for answer_ms in (0.0, 20.0, 50.0):
            store = FarAway(open_store(made), answer_ms / 1000)
            vars(stored)["open_store"] = lambda _, store=store: store
            took_s = []
            for _ in range(given.rounds):
                began_at = time.perf_counter()
                runs, unreadable = stored.list_stored(made)
                took_s.append(time.perf_counter() - began_at)
                assert (len(runs), len(unreadable)) == (given.runs, 0)
            middle, worst = statistics.median(took_s), max(took_s)
            verdict = "holds" if middle <= LIMIT_S else "misses"
            print(
                f"{given.runs} runs, answers after {answer_ms:.0f} ms: median {middle:.2f} s, "
                f"slowest {worst:.2f} s of {given.rounds}; {verdict} {LIMIT_S:.0f} s"
            )


if __name__ == "__main__":
    main()
