from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from spotguard.errors import UsageError
from spotguard.policy.protocol import HELP, answered, driver_of

HEADER: dict[str, Any] = {
    "job": {
        "work_s": 36_000,
        "deadline_s": 60_000,
        "start_s": 600,
        "tick_s": 600,
        "nodes": 8,
        "accelerator": "H100",
    },
    "places": [
        {"name": "a", "on_demand_usd_per_h": 10.0, "spot_usd_per_h": 2.0},
        {"name": "b", "on_demand_usd_per_h": 10.0, "spot_usd_per_h": 3.0},
    ],
    "seed": 1,
}


def _run(*lines: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answered([json.dumps(line) for line in lines])]


def test_one_action_a_tick_with_its_reason() -> None:
    """Each tick is answered by one action that says why; the help's own example works."""
    first = {
        "t_s": 0,
        "places": {"a": {"answers": True}, "b": {"answers": False}},
        "work_left_s": 36_000,
        "running": None,
        "spent_usd": 0,
    }
    second = {**first, "t_s": 600, "running": "a"}
    actions = _run(HEADER, first, second)
    assert [action["action"] for action in actions] == ["buy", "stay"]
    assert actions[0]["place"] == "a"
    assert actions[0]["market"] == "spot"
    assert actions[0]["nodes"] == 8
    assert all(action["why"] for action in actions)


def test_help_shows_an_exchange_that_works() -> None:
    """The header and the tick that `--help` prints are understood as they stand there."""
    header = json.loads(HELP[HELP.index("header  ") + 8 : HELP.index("\ntick  ")])
    tick = json.loads(HELP[HELP.index("\ntick  ") + 9 : HELP.index("\naction  ")])
    assert _run(header, tick)[0]["action"] == "buy"


@pytest.mark.parametrize(
    ("job", "tick"),
    [
        (
            {"work_h": 10, "deadline_h": 16, "start_min": 10, "gap_seconds": 600},
            {"elapsed_h": 0, "remaining_h": 10},
        ),
        (
            {"work": 60, "deadline": 100, "start": 1, "unit": "ticks", "tick_s": 600},
            {"tick": 0, "work_left": 60},
        ),
        (
            {"work": 10, "deadline": 16, "restart_overhead": 0.2, "unit": "h"},
            {"time": 0, "work_remaining": 10},
        ),
    ],
)
def test_names_and_units_may_vary(job: dict[str, object], tick: dict[str, object]) -> None:
    """Durations say their unit by their name, or have the header's."""
    header = {"job": {**job, "accelerator": "H100:8"}, "places": HEADER["places"]}
    body = {**tick, "places": [{"zone": "a", "price": 2.0, "available": 8}], "running": "none"}
    assert _run(header, body)[0] == _run(header, body)[0]
    assert _run(header, body)[0]["place"] == "a"


def test_late_in_time_it_buys_on_demand() -> None:
    """Where waiting would miss the deadline, on-demand nodes are bought at once."""
    line = {
        "t_s": 22_900,
        "places": {"a": False, "b": False},
        "work_left_s": 36_000,
        "running": None,
    }
    action = _run(HEADER, line)[0]
    assert (action["action"], action["market"]) == ("buy", "on_demand")


def test_a_slow_job_is_helped_in_time() -> None:
    """Work that goes more slowly than the clock is measured, and the guard acts earlier."""
    driver = driver_of(json.dumps({**HEADER, "job": {**HEADER["job"], "deadline_s": 56_000}}))
    left = 36_000.0
    for tick in range(12):
        taken = tick in (0, 11)
        line = {
            "tick": tick,
            "places": {"a": tick < 11, "b": tick < 11},
            "work_left_s": left,
            "running": None if taken else {"place": "a", "market": "spot"},
        }
        action = json.loads(driver.tick(json.dumps(line)))
        left -= 400.0 if tick >= 1 else 0.0
    assert (action["action"], action["market"]) == ("buy", "on_demand")


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (["nonsense"], "header"),
        ([{"job": {}, "places": []}], "work_s"),
        ([{**HEADER, "seed": -1}], "seed"),
        ([{**HEADER, "job": {**HEADER["job"], "rule": "best"}}], "rule"),
        ([{**HEADER, "job": {**HEADER["job"], "work_s": float("nan")}}], "NaN"),
        ([{**HEADER, "job": {**HEADER["job"], "nodes_min": 9}}], "nodes_min must be at most the 8"),
        ([HEADER, {"t_s": 0, "places": {}}], "work_left_s"),
        ([HEADER, {"t_s": 0, "places": {"a": {"price": "low"}}, "work_left_s": 1}], "price"),
        ([HEADER, {"t_s": 0, "places": {}, "work_left_s": 1, "running": "elsewhere"}], "elsewhere"),
        ([HEADER, [1]], "JSON object"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused(lines: list[object], word: str) -> None:
    """The error is one sentence that names the line and the field."""
    with pytest.raises(UsageError, match=word) as caught:
        _run(*lines)
    assert caught.value.message.startswith(f"line {len(lines)}: ")


@pytest.mark.parametrize(("nodes", "action"), [(4, "wait"), (8, "buy")])
def test_a_gang_is_bought_where_all_of_it_answers(nodes: int, action: str) -> None:
    """The fewest of elastic nodes are those of pacing; any other rule buys all of them."""
    header = {**HEADER, "job": {**HEADER["job"], "nodes_min": 4, "rule": "greedy"}}
    line = {"places": {"a": {"answers": nodes}, "b": False}, "work_left_s": 36_000}
    assert _run(header, line)[0]["action"] == action


def test_the_process_answers_line_by_line() -> None:
    """`python -m spotguard.policy` reads stdin only, and ends with 2 after a bad line."""
    good = {"t_s": 0, "places": {"a": True}, "work_left_s": 36_000, "running": None}
    text = "\n".join([json.dumps(HEADER), json.dumps(good), "{"])
    ran = subprocess.run(
        [sys.executable, "-m", "spotguard.policy"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 2
    assert lines[0]["action"] == "buy"
    assert list(lines[-1]) == ["error"]
    assert not ran.stderr
