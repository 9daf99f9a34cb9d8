"""From an interruption to the next step on the EC2 lab, by `status`: with a notice and without.

    python -m benchmarks.recovery.on_ec2 --rounds 5

Two runs of one node each train side by side. One is told of its end two minutes before, again and
again, as AWS does; the other one's node loses its power. The lab is brought up and taken down.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import describe_machine
from tests.e2e.ec2.ec2_lab import EAST, WEST, Beside, Ec2Lab
from tests.e2e.lab.lab_jobs import JOBS, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTICE_S = 120
_PARTS = ("detect_s", "release_s", "provision_s", "setup_s", "restore_s", "first_step_s", "total_s")
_LIMIT_S = 600.0


class Struck:
    """A run that meets the same blow in each round."""

    def __init__(self, lab: Ec2Lab, folder: Path, region: str, *blow: str) -> None:
        """`blow` is a verb of the lab's; what follows it comes after the instance's id."""
        self.name = blow[0]
        self.recoveries: list[dict[str, Any]] = []
        self.loads: list[float] = []
        self._lab = lab
        self._blow = blow
        self._region = region
        self._beside = Beside(folder / blow[0], lab)

    def strike(self, rounds: int, until: float) -> None:
        """Train, and strike so often, or as long as a round begins before `until` (monotonic)."""
        beside = self._beside
        forever = ("--epochs", "9999", "--pause", "0.3")
        flags = ("--nodes", "1", "--budget", "5")
        run = beside.begin(JOBS / "exact.py", *flags, args=forever, region=self._region)
        try:
            for number in range(1, rounds + 1):
                beside.trains(run, attempt=number)
                if time.monotonic() > until:
                    return
                (living,) = (each for each in self._lab.living(run) if each.state == "running")
                self._lab.verb(self._blow[0], living.id, *self._blow[1:])
                went_on = partial(self._has_recovered, run, number)
                wait_until(went_on, "it trains", timeout_s=_LIMIT_S)
                self.loads.append(os.getloadavg()[0])
                print(self.name, number, self.recoveries[-1], flush=True)
        finally:
            beside.spotguard("down", run, "--yes")
            beside.clean_up()

    def _has_recovered(self, run: str, number: int) -> bool:
        told = self._beside.status(run)["recoveries"]
        self.recoveries = [each for each in told if each["first_step_s"] is not None]
        return len(self.recoveries) >= number

    def line(self) -> str:
        """Return its line of the table."""
        parts = [_spread([each[part] for each in self.recoveries]) for part in _PARTS]
        return _row([self.name, str(len(self.recoveries)), *parts, _spread(self.loads)])


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.1f} [{min(known):.1f}..{max(known):.1f}]"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery.on_ec2", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no blow later")
    given = parser.parse_args(arguments)
    until = time.monotonic() + given.limit_s
    with tempfile.TemporaryDirectory(prefix="recovery-ec2-") as name:
        lab = Ec2Lab(Path(name) / "lab", os.getpid())
        try:
            lab.up()
            struck = [
                Struck(lab, Path(name), EAST, "interrupt", str(NOTICE_S)),
                Struck(lab, Path(name), WEST, "crash"),
            ]
            side_by_side = [
                threading.Thread(target=each.strike, args=(given.rounds, until)) for each in struck
            ]
            for thread in side_by_side:
                thread.start()
            for thread in side_by_side:
                thread.join()
        finally:
            lab.down()
    print(_row(["blow", "rounds", *_PARTS, "load"]))
    print(_row(["---"] * (len(_PARTS) + 3)))
    for each in struck:
        print(each.line())
    for key, value in describe_machine("cpu").items():
        print(f"- {key}: {value}")


if __name__ == "__main__":
    main()
