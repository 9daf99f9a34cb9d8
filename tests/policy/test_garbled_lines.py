"""Whatever the lines hold, the session answers, or refuses in one sentence: never otherwise."""

from __future__ import annotations

import copy
import io
import json
import random
import subprocess
import sys
from typing import Any

import pytest

from spotguard.errors import UsageError
from spotguard.policy.protocol import answered

HEADER: dict[str, Any] = {
    "job": {
        "work_s": 36_000,
        "deadline_s": 60_000,
        "start_s": 600,
        "tick_s": 600,
        "nodes": 8,
        "nodes_min": 2,
        "alpha": 0.9,
        "budget_usd": 500,
        "max_usd_per_h": 4,
        "checkpoint_gb": 10,
        "egress_usd_per_gb": 0.1,
        "rule": "rollout",
        "accelerator": "H100",
    },
    "places": [
        {"name": "a", "region": "r", "on_demand_usd_per_h": 10.0, "spot_usd_per_h": 2.0},
        {"name": "b", "on_demand_usd_per_h": 10.0, "spot_usd_per_h": 3.0},
    ],
    "seed": 1,
    "unit": "s",
    "price_per": "node",
}
TICK: dict[str, Any] = {
    "t_s": 0,
    "work_left_s": 30_000,
    "places": {"a": {"price": 2.0, "answers": 8}, "b": {"price": 3.0, "answers": None}},
    "running": {"place": "a", "market": "spot", "nodes": 8, "starting_s": 60},
    "spent_usd": 10,
}
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 0.0, -1, 1, 2, 2.5, 3, 100, 1000.0, 5e4, 1e-300, 1e9, 1e15, 1e308,
    10**400, 100_000, "", "a", "\ud800", "on_demand", "H100:8", [], [[]], ["a"], {},
    {"a": 1}, {"name": ["a"]}, {"": True}, 40_000, 4e9,
    "pacing", "greedy", "constants", "never", "gang", "ticks",
)  # fmt: skip


def _change(body: Any, chance: random.Random) -> None:
    """Put something strange somewhere."""
    keys = list(body) if isinstance(body, dict) else list(range(len(body)))
    if not keys:
        return
    key = chance.choice(keys)
    if isinstance(body[key], (dict, list)) and chance.random() < 0.8:
        _change(body[key], chance)
    elif chance.random() < 0.15:
        del body[key]
    else:
        body[key] = chance.choice(STRANGE)


def _lines(seed: int) -> list[str]:
    chance = random.Random(seed)
    bodies: list[dict[str, Any]] = [copy.deepcopy(HEADER)]
    bodies[0]["job"]["rule"] = chance.choice(["rollout", "pacing", "greedy", "constants"])
    bodies += [{**copy.deepcopy(TICK), "t_s": 600 * tick} for tick in range(3)]
    for body in chance.sample(bodies, chance.choice([1, 1, 2])):
        _change(body, chance)
    return [json.dumps(body) for body in bodies]


def _refusal(lines: list[str]) -> str | None:
    """Return the documented error; None if all lines were answered."""
    try:
        for line in answered(lines):
            json.loads(line)["why"].encode()
    except UsageError as problem:
        return problem.message
    return None


def test_mutated_lines_are_answered_or_refused() -> None:
    """Nothing but actions and the documented error comes out of garbled exchanges."""
    refusals = [_refusal(_lines(seed)) for seed in range(250)]
    told = [each for each in refusals if each is not None]
    assert all(each.startswith("line ") and len(each) < 300 for each in told)
    assert 50 < len(told) < 200


@pytest.mark.parametrize(
    ("header", "tick", "words"),
    [
        ({"nodes": float("1e308")}, {}, "nodes must be from 1 to 100000"),
        ({"work_s": 10**400}, {}, "work_s must be a number from 0"),
        ({"work_s": 1e308, "deadline_s": None}, {}, "work_s must be at most 100 years"),
        ({"start_s": 4e9}, {}, "start_s must be at most 100 years"),
        ({"alpha": 400}, {}, "alpha must be a number from 0 to 2"),
        ({"tick_s": 0.5}, {}, "tick_s must be from 1 s"),
        ({"max_usd_per_h": 1e12}, {}, r"max_usd_per_h must be a number from 0 to 1e\+09"),
        ({}, {"running": {"place": ["a"]}}, "running: place must be a text"),
        ({}, {"running": {"place": "a", "nodes": 1e9}}, "running: nodes must be from 0 to 100000"),
        ({}, {"work_left_s": 1e308}, "work_left_s must be at most 100 years"),
    ],
)
def test_what_is_out_of_bounds_is_named(
    header: dict[str, Any], tick: dict[str, Any], words: str
) -> None:
    """Each of these ended the process with a traceback, or filled the machine's memory."""
    first = {**HEADER, "job": {**HEADER["job"], **header}}
    with pytest.raises(UsageError, match=words):
        list(answered([json.dumps(first), json.dumps({**TICK, **tick})]))


def test_infinity_is_refused_by_its_field() -> None:
    """JSON has no infinity, but 1e999 is read as one."""
    line = json.dumps(HEADER).replace('"nodes": 8', '"nodes": 1e999')
    with pytest.raises(UsageError, match="nodes must be a number from 0"):
        list(answered([line]))


def test_a_start_that_takes_years_needs_no_memory() -> None:
    """One place, a deadline, and a start that no plan can hold: on demand at once."""
    job = {"work_s": 3600, "deadline_s": 3.1e9, "start_s": 1e9, "nodes": 1}
    place = {"name": "a", "spot_usd_per_h": 1.0, "on_demand_usd_per_h": 3.0}
    near = {**job, "deadline_s": 36_000}
    for each in (job, near):
        header = json.dumps({"job": each, "places": [place]})
        tick = json.dumps({"work_left_s": 3600, "places": {"a": True}})
        assert len(list(answered([header, tick]))) == 1


def test_a_name_that_cannot_be_written_is_escaped() -> None:
    """And bytes that are no UTF-8 are refused, by their line."""
    header = {"job": {"work_s": 3600}, "places": [{"name": "\ud800", "spot_usd_per_h": 1}]}
    tick = {"work_left_s": 3600, "places": {"\ud800": True}}
    text = f"{json.dumps(header)}\n{json.dumps(tick)}\n".encode() + b'{"\xff": 1}\n'
    ran = subprocess.run(
        [sys.executable, "-m", "spotguard.policy"],
        input=text,
        capture_output=True,
        check=False,
        timeout=60,
    )
    bought, refused = (json.loads(line) for line in io.BytesIO(ran.stdout))
    assert bought["place"] == "\ud800"
    assert refused["error"] == "line 3: a tick must be a JSON object (it is not UTF-8)"
    assert (ran.returncode, ran.stderr) == (2, b"")
