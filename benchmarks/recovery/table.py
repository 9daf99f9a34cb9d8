"""From a preemption to the first new step: a run of ours beside SkyPilot's own managed job.

    SPOTLAB_DIR=/tmp/spotlab python -m benchmarks.recovery --rounds 5 --markdown recovery.md
    python -m benchmarks.recovery --on ec2 --warm --rounds 5 --markdown recovery.md

Both train the same small model, on the Slurm lab that is up (`infra/lab`) or on an EC2 lab that
comes up for it (`infra/ec2-lab`), each on a node of its own, both all the time; or, with `--alone`,
one after the other. In each round each of them meets each blow once, in random order; the other one
trains on meanwhile. Nothing is measured by what the contestants say: each step leaves a line with
its time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import describe_machine
from benchmarks.recovery.contestants import Contestant, Failed, Managed, Ours
from benchmarks.recovery.places import BLOWS, SAVE_EVERY, OnEc2, OnSlurm, managed_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchmarks.recovery.places import Place

_CHECK_EVERY_S = 15.0
_TRAINS_STEPS = 2 * SAVE_EVERY + 2
_PARTS = ("detect_s", "release_s", "provision_s", "setup_s", "restore_s", "first_step_s")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One finished step, as the job itself wrote it down."""

    at: float
    step: int
    life: str
    """Of the process."""
    node: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One blow to one contestant."""

    contestant: str
    blow: str
    problem: str = ""
    """Why it did not go on."""
    gap_s: float | None = None
    """From the last step before to the first one after."""
    ahead_s: float | None = None
    """From the last step before to the first one that had not been done before."""
    repeated: int | None = None
    """Steps that were trained again."""
    parts: dict[str, float | None] = field(default_factory=dict)
    load: float = 0.0


def lines_of(trace: Path) -> list[Line]:
    """Return what the job wrote so far; a line that is being written does not count."""
    if not trace.exists():
        return []
    whole = trace.read_text().rpartition("\n")[0].splitlines()
    return [Line(**json.loads(line)) for line in whole]


def gap(before: Sequence[Line], after: Sequence[Line]) -> dict[str, Any]:
    """Return what lies between two lives of a job, as fields of a `Sample`."""
    last, first = before[-1], after[0]
    furthest = max(line.step for line in before)
    ahead = next((line for line in after if line.step > furthest), None)
    return {
        "gap_s": first.at - last.at,
        "ahead_s": None if ahead is None else ahead.at - last.at,
        "repeated": furthest - first.step + 1,
    }


class Round:
    """Blows to the contestants of one lab."""

    def __init__(self, place: Place, contestants: Sequence[Contestant]) -> None:
        self._place = place
        self._contestants = contestants

    def start(self) -> None:
        """Launch everybody, and return when all train."""
        for contestant in self._contestants:
            contestant.start()
        for contestant in self._contestants:
            self._wait(contestant, lambda lines: len(lines) >= _TRAINS_STEPS)

    def blow(self, contestant: Contestant, blow: str) -> Sample:
        """Strike one of them, wait until it trains again, and mend the lab."""
        known = len(lines_of(contestant.trace))
        self._wait(contestant, lambda lines: len(lines) > known)
        struck = lines_of(contestant.trace)[-1]
        found: dict[str, Any] = {}
        try:
            self._place.strike(struck.node, blow)
            lines = self._wait(contestant, lambda lines: self._is_ahead(lines, struck.life))
            before = [line for line in lines if line.life == struck.life]
            after = [line for line in lines if line.life != struck.life and line.at > struck.at]
            found = gap(before, after)
            found["parts"] = contestant.parts(before[-1].at, after[0].at)
        except Failed as problem:
            found = {"problem": str(problem)}
        finally:
            self._place.mend(struck.node, blow)
        load = os.getloadavg()[0]
        return Sample(contestant=contestant.name, blow=blow, load=load, **found)

    @staticmethod
    def _is_ahead(lines: Sequence[Line], life: str) -> bool:
        """True once the new life has done what had not been done, and has saved."""
        furthest = max(line.step for line in lines if line.life == life)
        return lines[-1].life != life and lines[-1].step >= furthest + _TRAINS_STEPS

    def _wait(self, contestant: Contestant, enough: Callable[[list[Line]], bool]) -> list[Line]:
        began = checked = time.monotonic()
        while not enough(lines := lines_of(contestant.trace)):
            now = time.monotonic()
            if now - began > self._place.limit_s:
                raise Failed(f"it did not train on within {self._place.limit_s:g} s")
            if now - checked > _CHECK_EVERY_S:
                contestant.check()
                checked = time.monotonic()
            time.sleep(0.2)
        return lines


def measure(
    place: Place, rounds: int, until: float, chance: random.Random, *, alone: bool = False
) -> list[Sample]:
    """Return the samples of so many rounds, or of those begun before `until` (monotonic)."""
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as name, managed_jobs(place):
        folder = Path(name)
        contestants: tuple[Contestant, ...] = (Ours(place, folder), Managed(place, folder))
        for together in [[one] for one in contestants] if alone else [contestants]:
            try:
                for sample in _rounds(place, together, rounds, until, chance):
                    samples.append(sample)
                    print(json.dumps(asdict(sample)), flush=True)
            finally:
                for contestant in together:
                    contestant.end()
            if samples and samples[-1].problem:
                break
    return samples


def _rounds(
    place: Place,
    contestants: Sequence[Contestant],
    rounds: int,
    until: float,
    chance: random.Random,
) -> Iterator[Sample]:
    """Yield the samples of contestants that train at the same time; the first problem ends it."""
    lab = Round(place, contestants)
    lab.start()
    for _ in range(rounds):
        turns = [(one, blow) for one in contestants for blow in place.blows]
        chance.shuffle(turns)
        for contestant, blow in turns:
            if time.monotonic() > until:
                return
            yield (sample := lab.blow(contestant, blow))
            if sample.problem:
                return


# ---------------------------------------------------------------- the table


def to_markdown(samples: Sequence[Sample], notes: Iterable[str]) -> str:
    """Return the table: medians and ranges of each contestant and blow, and their ratios."""
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.blow, sample.contestant].append(sample)
    header = (
        *("blow", "contestant", "went on", "to the next step s", "to a new step s"),
        *(
            "steps repeated",
            *(part.removesuffix("_s").replace("_", " ") for part in _PARTS),
            "load",
        ),
    )
    lines = [_line(header), _line(["---"] * len(header))]
    lines += [_line(_cells(blow, name, groups[blow, name])) for blow, name in sorted(groups)]
    lines += ["", *_told(samples), *_ratios(groups)]
    lines += [
        f"- {sample.contestant}, {sample.blow}: {sample.problem}"
        for sample in samples
        if sample.problem
    ]
    return "\n".join([*lines, *(f"- {note}" for note in notes)]) + "\n"


def _told(samples: Sequence[Sample]) -> list[str]:
    met = {sample.blow for sample in samples}
    return [f"- {blow}: {words}" for blow, words in BLOWS.items() if blow in met]


def _cells(blow: str, name: str, samples: Sequence[Sample]) -> list[str]:
    good = [sample for sample in samples if not sample.problem]
    return [
        blow,
        name,
        f"{len(good)}/{len(samples)}",
        spread([sample.gap_s for sample in good]),
        spread([sample.ahead_s for sample in good]),
        spread([sample.repeated for sample in good], digits=0),
        *(spread([sample.parts.get(part) for sample in good]) for part in _PARTS),
        spread([sample.load for sample in samples]),
    ]


def _ratios(groups: dict[tuple[str, str], list[Sample]]) -> list[str]:
    lines = []
    for blow in BLOWS:
        medians = [_median([s.gap_s for s in groups[blow, one.name]]) for one in (Managed, Ours)]
        theirs, ours = medians
        if theirs is not None and ours:
            lines.append(f"- {blow}: the managed job takes {theirs / ours:.2f} times as long")
    return lines


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def spread(values: Iterable[float | None], digits: int = 1) -> str:
    """Return the median and the range of what is known."""
    known = _known(values)
    if not known:
        return "-"
    middle, least, most = statistics.median(known), min(known), max(known)
    return f"{middle:.{digits}f} [{least:.{digits}f}..{most:.{digits}f}]"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


@contextlib.contextmanager
def _lab(on: str, *, warm: bool) -> Iterator[Place]:
    if on == "slurm":
        yield OnSlurm()
        return
    with tempfile.TemporaryDirectory(prefix="recovery-ec2-") as name:
        place = OnEc2(Path(name), warm=warm)
        try:
            yield place
        finally:
            place.down()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the lab that is up, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--on", choices=("slurm", "ec2"), default="slurm")
    parser.add_argument("--warm", action="store_true", help="an image of infra/warm-image, on EC2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="one contestant after the other")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no blow later")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="JSON files to add")
    parser.add_argument("--seed", type=int, help="of the order of blows")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args(arguments)
    samples = [
        Sample(**each) for path in given.earlier for each in json.loads(path.read_text())["samples"]
    ]
    until = time.monotonic() + given.limit_s
    if given.rounds:
        with _lab(given.on, warm=given.warm) as place:
            chance = random.Random(given.seed)
            samples += measure(place, given.rounds, until, chance, alone=given.alone)
    notes = [
        f"one node each, a save every {SAVE_EVERY} steps, SkyPilot {version('skypilot')}",
        *(f"{key}: {value}" for key, value in describe_machine("cpu").items()),
    ]
    text = to_markdown(samples, notes)
    print(text)
    if given.json:
        body = {"schema": 1, "samples": [asdict(sample) for sample in samples]}
        given.json.write_text(json.dumps(body, indent=1))
    if given.markdown:
        given.markdown.write_text(text)
