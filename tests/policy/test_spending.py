"""A budget whose spending nobody tells: it is reckoned, or asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotguard.errors import UsageError
from spotguard.policy.protocol import answered

HOUR = 3600.0
HEADER: dict[str, Any] = {
    "job": {"work_h": 100, "tick_s": HOUR, "nodes": 4, "budget_usd": 50, "rule": "greedy"},
    "places": [{"name": "a", "spot_usd_per_h": 1}, {"name": "b", "spot_usd_per_h": 2}],
}


def _actions(ticks: list[dict[str, Any]], **header: Any) -> list[str]:
    lines = [{**HEADER, **header}, *ticks]
    told = [json.loads(line) for line in answered([json.dumps(line) for line in lines])]
    return [each["action"] for each in told]


def _ran(**more: Any) -> list[dict[str, Any]]:
    """Return ticks of an hour at which the four nodes in a, for $4 an hour, run on and on."""
    first = {"work_left_h": 100, "places": {"a": True}}
    later = {"running": "a", "places": {"a": True}}
    return [first, *({**later, "work_left_h": 100 - n, **more} for n in range(1, 15))]


@pytest.mark.parametrize("more", [{}, {"spent_usd": None}, {"spend_usd": 0}])
def test_what_nobody_tells_is_reckoned(more: dict[str, Any]) -> None:
    """Twelve hours cost $48 of $50: the thirteenth is not bought. Unknown is not zero."""
    actions = _actions(_ran(**more))
    assert actions == ["buy", *["stay"] * 11, *["leave"] * 3]


def test_what_is_told_counts() -> None:
    """Who says that less was spent is believed, also from then on."""
    ticks = _ran()
    ticks[10]["spent_usd"] = 20.0
    assert _actions(ticks) == ["buy", *["stay"] * 14]


def test_the_place_that_gave_the_nodes_is_paid() -> None:
    """b gave the nodes that a refused, at twice the price; a refusal costs nothing."""
    first = {"work_left_h": 100, "places": {"a": None, "b": None}}
    later = {"work_left_h": 100, "running": "b", "places": {"a": False}}
    actions = _actions([first, first, first, *[later] * 6])
    assert actions == [*["buy"] * 3, *["stay"] * 5, "leave"]  # at $48 of $50


@pytest.mark.parametrize(
    ("ticks", "words"),
    [
        ([{"t_s": 600, "work_left_h": 1, "places": {"a": True}}], "before the first tick"),
        (
            [
                {"work_left_h": 1, "running": "c", "places": {"c": True}},
                {"work_left_h": 1, "running": "c", "places": {"c": True}},
            ],
            "the price of the spot nodes that ran in c",
        ),
    ],
)
def test_what_cannot_be_known_is_asked_for(ticks: list[dict[str, Any]], words: str) -> None:
    """In one sentence that names the field."""
    with pytest.raises(UsageError, match=rf"spent_usd is needed with a budget: .*{words}"):
        _actions(ticks)
