"""Where the time of a recovery went, from the run's journal alone."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.status.history_words import history_lines
from spotguard.control.status.make_view import run_view
from spotguard.control.status.recovery import Recovery, recoveries
from spotguard.events.states import EndReason
from spotguard.launch.base import NodeEnd
from spotguard.shared.units import to_iso
from spotguard.testing.job import JobFate
from tests.control.made import (
    down_asked,
    ended,
    intended,
    launched,
    made,
    node_ended,
    said,
    training,
)
from tests.control.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from tests.control.made import Line

PARTS = [field.name for field in fields(Recovery) if field.name.endswith("_s")]


def began(at: float, attempt: int, *, up_at: float | None, init_at: float) -> Line:
    """The job had restored its state."""
    kind, _, _, data = training(at, attempt, step=10)
    node_up_at = None if up_at is None else to_iso(up_at)
    return (kind, at, attempt, {**data, "node_up_at": node_up_at, "init_at": to_iso(init_at)})


def first_step(at: float, attempt: int) -> Line:
    """The job finished its first step."""
    return ("job_first_step", at, attempt, {"step": 11})


def parts(recovery: Recovery) -> dict[str, float | None]:
    """Return the parts, without those that took no time."""
    found = {name: getattr(recovery, name) for name in PARTS}
    return {name: value for name, value in found.items() if value != 0.0}


FIRST: tuple[Line, ...] = (*launched(0.0), began(20.0, 1, up_at=10.0, init_at=15.0))
PREEMPTED: tuple[Line, ...] = (
    *FIRST,
    said(100.0, "preempted", seen_at=102.0),
    down_asked(110.0, "preempted"),
    ended(130.0, "preempted"),
)
SECOND: tuple[Line, ...] = (
    began(190.0, 2, up_at=160.0, init_at=180.0),
    first_step(191.0, 2),
)


def test_every_second_of_a_recovery_has_its_part() -> None:
    """From the job's last word to the next attempt's first step; the parts add up."""
    (recovery,) = recoveries(made(*PREEMPTED, *launched(131.0, 2), *SECOND))

    assert (recovery.ended, recovery.attempt, recovery.reason) == (1, 2, EndReason.PREEMPTED)
    assert (recovery.ended_at, recovery.in_place) == (100.0, False)
    assert parts(recovery) == {
        "detect_s": 2.0,
        "release_s": 28.0,
        "provision_s": 30.0,
        "setup_s": 20.0,
        "restore_s": 10.0,
        "first_step_s": 1.0,
        "total_s": 91.0,
    }


def test_waiting_for_capacity_is_told_apart() -> None:
    """From the first launch that was refused, over all rounds, to the one that was not."""
    refusal = {"nodes": 2, "place": "here", "problem": "no"}
    searched: tuple[Line, ...] = (
        intended(131.0, 2),
        ("no_capacity", 133.0, 2, refusal),
        ("waiting", 133.0, None, {"retry_at": 140.0}),
        intended(140.0, 2),
        ("launched", 140.0, 2),
        ("no_capacity", 143.0, 2, {**refusal, "late": True}),
        *launched(150.0, 2),
    )
    (recovery,) = recoveries(made(*PREEMPTED, *searched, *SECOND))

    assert recovery.waiting_s == 19.0
    assert recovery.provision_s == 11.0
    assert recovery.total_s == 91.0
    assert sum(getattr(recovery, name) for name in PARTS) == 2 * recovery.total_s


def test_a_node_that_vanished_ended_at_its_last_sign_of_life() -> None:
    """Nobody said that it ends, so the heartbeat that the controller saw last counts."""
    kind, at, attempt, verdict = ended(150.0, "vanished")
    vanished: tuple[Line, ...] = (
        *FIRST,
        node_ended(140.0, end=NodeEnd.LOST.value),
        (kind, at, attempt, {**verdict, "last_beat_at": 100.0}),
        *launched(151.0, 2),
        *SECOND,
    )
    (recovery,) = recoveries(made(*vanished))

    assert (recovery.ended_at, recovery.detect_s, recovery.release_s) == (100.0, 40.0, 10.0)


def test_the_controller_keeps_the_last_sign_of_life(tmp_path: Path) -> None:
    """All nodes vanish at once: the time counts from the last heartbeat that anybody saw."""
    record = World(tmp_path, fates={1: JobFate(how="lose", at_s=6)}).run()
    first, _ = record.attempts
    (recovery,) = recoveries(record)

    assert first.end is not None
    assert recovery.ended_at is not None
    assert first.started_at is not None
    assert first.started_at < recovery.ended_at <= first.end.gone_at
    assert recovery.ended_at == first.end.last_beat_at
    assert recovery.detect_s is not None


def test_what_the_others_save_after_a_loss_is_not_detection() -> None:
    """The controller knew of the lost node before the survivors had left: no negative time."""
    lost: tuple[Line, ...] = (
        *FIRST,
        node_ended(95.0, end=NodeEnd.LOST.value),
        said(100.0, "node_lost", seen_at=101.0),
        ended(130.0, "node_lost"),
        *launched(131.0, 2),
        *SECOND,
    )
    (recovery,) = recoveries(made(*lost))

    assert (recovery.detect_s, recovery.release_s) == (0.0, 30.0)


def test_going_on_in_place_takes_no_release_and_no_provision() -> None:
    """It is detected when the nodes that stay agreed, whenever the controller heard of it."""
    kind, _, _, verdict = ended(104.0, "preempted")
    *_, intent = intended(0.0, 2, nodes=1)
    went_on = {**intent, "after": 1, "ended": verdict, "at": 104.0, "members": [0]}
    story: tuple[Line, ...] = (
        *FIRST,
        said(100.0, "preempted", seen_at=150.0),
        ("went_on_in_place", 151.0, 2, went_on),
        began(110.0, 2, up_at=None, init_at=109.0),
        first_step(112.0, 2),
    )
    assert kind == "attempt_ended"
    (recovery,) = recoveries(made(*story))

    assert recovery.in_place
    assert parts(recovery) == {
        "detect_s": 4.0,
        "setup_s": 5.0,
        "restore_s": 1.0,
        "first_step_s": 2.0,
        "total_s": 12.0,
    }


def test_clocks_that_disagree_make_no_negative_time() -> None:
    """The node's clock is 40 s behind the controller's."""
    behind: tuple[Line, ...] = (
        began(150.0, 2, up_at=120.0, init_at=140.0),
        first_step(151.0, 2),
    )
    (recovery,) = recoveries(made(*PREEMPTED, *launched(131.0, 2), *behind))

    assert recovery.provision_s == 0.0
    assert all(getattr(recovery, name) >= 0 for name in PARTS)


@pytest.mark.parametrize("junk", [None, "yesterday", 17, {"a": 1}])
def test_instants_that_make_no_sense_are_unknown(junk: Any) -> None:
    """A job's data is not trusted; an older job does not report them at all."""
    kind, at, attempt, data = training(190.0, 2, step=10)
    line = (kind, at, attempt, {**data, "node_up_at": junk, "init_at": junk})
    (recovery,) = recoveries(made(*PREEMPTED, *launched(131.0, 2), line))

    unknown = [name for name in PARTS if getattr(recovery, name) is None]
    assert unknown == ["provision_s", "setup_s", "restore_s", "first_step_s", "total_s"]


def test_what_the_user_let_rest_is_no_recovery() -> None:
    """The time between a pause and `resume` is the user's; later attempts count again."""
    paused = {"state": "paused", "detail": "so", "exit_code": 11}
    limits = made().limits.__dict__
    story: tuple[Line, ...] = (
        *PREEMPTED,
        ("settled", 700.0, None, paused),
        ("resumed", 9000.0, None, {"limits": limits}),
        *launched(9001.0, 2),
        ended(9100.0, "vanished", 2),
        *launched(9101.0, 3),
        ended(9200.0, "vanished", 3),
        ("settled", 9300.0, None, paused),
        ("resumed", 9900.0, None, {"limits": limits}),
        *launched(9901.0, 4),
    )
    assert [(each.ended, each.attempt) for each in recoveries(made(*story))] == [(2, 3)]


def test_history_tells_how_long_it_took(tmp_path: Path) -> None:
    """One line when it trains again; the first attempt has nothing to recover from."""
    story: tuple[Line, ...] = (*PREEMPTED, *launched(131.0, 2), *SECOND)
    with World(tmp_path).journal() as journal:
        for kind, at, attempt, *data in (*FIRST, first_step(21.0, 1), *story[len(FIRST) :]):
            journal.append(kind, at=at, attempt=attempt, data=data[0] if data else None)
        told = [line.text for line in history_lines(journal.events()) if line.kind == "first_step"]

    assert told == ["the first step is done", "trains again, 1 min 31 s after attempt 1 had ended"]


def test_status_tells_them_as_json() -> None:
    """`status --json` has each one, with its instant in ISO 8601 and its reason by name."""
    record = made(*PREEMPTED, *launched(131.0, 2), *SECOND)
    view = run_view(record, live=None, now=500.0, controller_alive=True, store_url="s/job-1")
    (told,) = json.loads(json.dumps(view.to_json()))["recoveries"]

    assert set(told) == {field.name for field in fields(Recovery)}
    assert (told["ended_at"], told["reason"]) == (to_iso(100.0), "preempted")
    assert told["total_s"] == 91.0
