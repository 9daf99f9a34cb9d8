"""The grammar of `--sweep`: which points it gives, and one sentence on what makes no sense."""

from __future__ import annotations

import pytest

from spotguard.errors import SpecError
from spotguard.spec.model.sweep import MOST_POINTS, arguments_of, checked_points, points_of


def test_all_combinations_in_the_order_in_which_they_are_written() -> None:
    """The last name turns fastest, and each value is passed on as it was typed."""
    points = points_of("lr=1e-3,3e-4 seed=1..2")
    assert [tuple(each.values()) for each in points] == [
        ("1e-3", "1"), ("1e-3", "2"), ("3e-4", "1"), ("3e-4", "2"),
    ]  # fmt: skip
    assert arguments_of(points[0]) == ["--lr", "1e-3", "--seed", "1"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("n=-1..1", ["-1", "0", "1"]),
        ("n=1..2,7", ["1", "2", "7"]),
        ("n=8..64*2", ["8", "16", "32", "64"]),
        ("n=1e-4..0.1*10", ["0.0001", "0.001", "0.01", "0.1"]),
        ("n=10..99*3", ["10", "30", "90"]),
        ("n=1e-300..1e300*1e300", ["1e-300", "1", "1e+300"]),
        ("n=../a,b..c", ["../a", "b..c"]),
    ],
)
def test_ranges(text: str, values: list[str]) -> None:
    """Of whole numbers, and of multiples; what only has dots in it is a word."""
    assert [each["n"] for each in points_of(text)] == values


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it names no argument"),
        ("lr", "'lr' is no NAME=VALUES"),
        ("=3", "'=3' is no NAME=VALUES"),
        ("--lr=3", "'--lr=3' is no NAME=VALUES"),
        ("lr=1 lr=2", "lr is given twice"),
        ("lr=1,,2", "lr has an empty value"),
        ("lr=1..3,2", "lr has 2 twice"),
        ("n=3..1", "n=3..1 goes down"),
        ("lr=0.1..0.5", "lr=0.1..0.5 is no range"),
        ("lr=1..", "lr=1.. is no range"),
        ("lr=a..b*2", "lr=a..b*2 has what is no number"),
        ("lr=1..9*1", "does not grow"),
        ("lr=0..9*2", "does not grow"),
        ("lr=1..9*nan", "does not grow"),
        ("n=1..9 m=1..9", "these are 81 points"),
        ("n=1..999999999999", "points; a sweep has 1 to"),
        ("n=1e-300..1e300*10", "these are 601 points"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(text: str, says: str) -> None:
    """It names what is wrong, what is allowed, and an example."""
    with pytest.raises(SpecError) as problem:
        points_of(text)
    assert says in problem.value.message
    assert "allowed: NAME=VALUES" in problem.value.message
    assert "--sweep 'lr=" in problem.value.hint


def test_points_that_a_program_made() -> None:
    """Values become text; a name that is no argument, and too many points, are refused."""
    assert checked_points([{"lr": 0.1}, {"lr": 0.2}]) == [{"lr": "0.1"}, {"lr": "0.2"}]
    for bad in ([{"l r": 1}], [], [{"n": n} for n in range(MOST_POINTS + 1)]):
        with pytest.raises(SpecError):
            checked_points(bad)
