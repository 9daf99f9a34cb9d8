"""The program that kills sees each way in which a log can be wrong."""

from __future__ import annotations

import pytest

from tests.launch.logs.killing import RANKS, Kill, _judged

KILL = Kill(seed=1, victim="node", after_s=1.0, pause_s=0.1, longest=1)
WHOLE: list[tuple[int | None, str]] = [
    (rank, f"{number} {100.0 + number}") for number in range(9) for rank in RANKS
]
WITHOUT_1 = [line for line in WHOLE if line[0] != 1]


def test_a_whole_log_is_right() -> None:
    """What was printed within the last seconds may be missing."""
    loss = _judged(KILL, WHOLE, WHOLE, killed_at=112.0)
    assert (loss.wrong, loss.lost_s) == ((), 4.0)


@pytest.mark.parametrize(
    ("stored", "followed", "killed_at", "words"),
    [
        (WHOLE[:4] + WHOLE[5:], WHOLE, 109.0, "missing"),
        (WHOLE[:4] + WHOLE[2:], WHOLE, 109.0, "told twice"),
        (WHOLE[::-1], WHOLE[::-1], 109.0, "out of its order"),
        (WHOLE, WHOLE, 117.0, "9.0 s are lost"),
        (WITHOUT_1, WITHOUT_1, 109.0, "nothing is stored of rank 1"),
        (WHOLE, WHOLE + WHOLE[-2:], 109.0, "who followed"),
        (WHOLE, WHOLE[:-2], 109.0, "who followed"),
    ],
)
def test_what_is_wrong_is_named(
    stored: list[tuple[int | None, str]],
    followed: list[tuple[int | None, str]],
    killed_at: float,
    words: str,
) -> None:
    """A gap, a line twice, an order turned round, a loss that is too long, another story live."""
    assert any(words in what for what in _judged(KILL, stored, followed, killed_at).wrong)


def test_a_seed_says_it_all() -> None:
    """A failure can be repeated by its seed alone."""
    assert Kill.drawn(7) == Kill.drawn(7)
    assert len({Kill.drawn(seed) for seed in range(50)}) == 50
