"""What `spotguard logs` tells of ranks, beside what they wrote where nothing is lost.

A rank's file is `ATTEMPT-RANK`; each of its lines is what it printed, and when.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.e2e.lab.lab_jobs import Lab

TAIL = 20
LATE_S = 8.0
"""A killed node loses five seconds of its log, and more while the machine is late with all."""
OWN_WORDS = "attempt {attempt} of rank {rank}: "
"""How each line of a script of these tests begins."""

Told = dict[tuple[int, int], list[str]]


def told(lab: Lab, run: str, ranks: Iterable[tuple[int, int]]) -> Told:
    """Return, by (attempt, rank), what of the last lines the script itself has printed."""

    def last(of: tuple[int, int]) -> list[str]:
        attempt, rank = of
        chosen = ("--attempt", str(attempt), "--rank", str(rank), "--tail", str(TAIL))
        said = lab.spotguard("logs", run, *chosen)
        assert said.code == 0, said.err
        lines = [line.partition(" | ")[2] for line in said.out.splitlines()]
        assert 0 < len(lines) <= TAIL
        return [
            line for line in lines if line.startswith(OWN_WORDS.format(attempt=attempt, rank=rank))
        ]

    ranks = sorted(ranks)
    with ThreadPoolExecutor(2) as crew:
        return dict(zip(ranks, crew.map(last, ranks), strict=True))


def check_told(found: Told, truth: Path, *, killed: Iterable[int]) -> None:
    """Each rank's last lines are told, in order; of `killed` attempts all but some seconds."""
    for (attempt, rank), lines in found.items():
        printed, at = _written(truth, attempt, rank)
        assert len(lines) >= TAIL // 2, (attempt, rank, lines)
        last = printed.index(lines[-1])
        assert lines == printed[last + 1 - len(lines) : last + 1]
        lost_s = at[-1] - at[last]
        allowed_s = LATE_S if attempt in killed else 0.0
        assert lost_s <= allowed_s, f"attempt {attempt}, rank {rank}: {lost_s:.1f} s are lost"


def told_elsewhere(lab: Lab, place: str, ranks: Iterable[tuple[int, int]]) -> tuple[Told, Told]:
    """Return what a home is told that never saw the run: by its store alone, and once adopted.

    The home before is taken away.
    """
    ranks = list(ranks)
    shutil.rmtree(lab.home)
    lab.home = lab.home.with_name("another")
    alone = told(lab, place, ranks)
    adopted = lab.spotguard("adopt", place)
    assert adopted.code == 0, adopted.err
    return alone, told(lab, place.rpartition("/")[2], ranks)


def _written(truth: Path, attempt: int, rank: int) -> tuple[list[str], list[float]]:
    lines = (truth / f"{attempt}-{rank}").read_text().splitlines()
    words, at = zip(*(line.rsplit(" ", 1) for line in lines), strict=True)
    return list(words), [float(instant) for instant in at]
