"""Where time and money went adds up to what was billed, whatever the record lacks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotguard.control.journal import cost
from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.nodes.lost_launch import LostLaunch
from spotguard.control.journal.record import Limits, Settled
from spotguard.control.report.document import spend_points
from spotguard.control.report.series import Point, series
from spotguard.control.report.time_use import Use, attempt_times, run_times
from spotguard.events.states import RunState
from spotguard.spec.infra import LOCAL
from tests.control.made import ended, launched, made, saved, training

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord


def _started(at: float, node_up: str, init: str, attempt: int = 1, step: int = 0) -> Any:
    source = f"checkpoints/{step:012d}-{attempt - 1:06d}/" if step else None
    data = {"resumed_step": step, "resumed_from": source, "node_up_at": node_up, "init_at": init}
    return ("job_started", at, attempt, data)


def test_each_second_of_an_attempt_has_one_use() -> None:
    """What is known is told by name, to the second; what is left over is `other`."""
    record = made(
        *launched(0.0, nodes=3, price=2.0),
        _started(40.0, "1970-01-01T00:00:10Z", "1970-01-01T00:00:30Z"),
        saved(100.0, 50, train_s=45.0, stall_s=3.0),
        ("progress", 110.0, 1, {"step": 60, "train_s": 55.0}),
        ended(130.0, "preempted", last_step=60),
        *launched(130.0, attempt=2, nodes=1, price=2.0),
        training(140.0, attempt=2, step=50, source="checkpoints/000000000050-000001/"),
        ("progress", 150.0, 2, {"step": 60, "train_s": 9.0}),
    )
    first, _ = attempt_times(record, 160.0)
    told = {share.use: share.seconds for share in first.shares}
    assert told == {
        Use.TRAINING: 45.0,
        Use.REPEATED: 10.0,
        Use.SAVING: 3.0,
        Use.PROVISIONING: 10.0,
        Use.SETUP: 20.0,
        Use.RESTORING: 10.0,
        Use.OTHER: 32.0,
    }
    usd = {share.use: share.usd for share in first.shares}
    assert usd[Use.REPEATED] == pytest.approx(3 * 2.0 * 10.0 / 3600)


def test_waiting_costs_nothing_and_comes_on_top() -> None:
    """A wait before an attempt, or one that goes on now, is time without a price."""
    refused = ("no_capacity", 5.0, 1, {"nodes": 2, "place": "p", "problem": "none"})
    record = made(("launch_intended", 5.0, 1, _intent()), refused)
    [now] = run_times(record, 65.0)
    assert (now.use, now.seconds, now.usd) == (Use.WAITING, 60.0, 0.0)
    later = made(("launch_intended", 5.0, 1, _intent()), refused, *launched(65.0))
    told = {share.use: (share.seconds, share.usd) for share in run_times(later, 75.0)}
    assert told[Use.WAITING] == (60.0, 0.0)
    assert told[Use.PROVISIONING][0] == 10.0


def test_a_wait_that_goes_on_adds_to_those_before() -> None:
    """What was told of a total once is never taken back: refused launches leave no attempt."""
    refused = ("no_capacity", 95.0, 2, {"nodes": 2, "place": "p", "problem": "none"})
    lines = [
        ("launch_intended", 5.0, 1, _intent()),
        ("no_capacity", 5.0, 1, refused[3]),
        *launched(65.0),
        ended(85.0, "preempted", last_step=4),
    ]
    during = made(*lines, ("launch_intended", 90.0, 2, _intent()))
    waits = [
        (made(*lines), 90.0, 60.0),
        (during, 94.0, 60.0),
        (made(*lines, ("launch_intended", 90.0, 2, _intent()), refused), 120.0, 90.0),
        (
            made(
                *lines,
                ("launch_intended", 90.0, 2, _intent()),
                refused,
                *launched(150.0, attempt=2),
            ),
            160.0,
            120.0,
        ),
    ]
    for record, now, waited_s in waits:
        told = {share.use: share.seconds for share in run_times(record, now)}
        assert told[Use.WAITING] == waited_s


def _waiting_s(*lines: Any, now: float) -> float:
    told = {share.use: share.seconds for share in run_times(made(*lines), now)}
    return told[Use.WAITING]


def test_a_wait_that_led_to_no_launch_is_not_taken_back() -> None:
    """`spotguard_phase_seconds_total` is a counter: neither the team's no, a resume, another
    phase nor a move takes an hour away that was waited. To be at rest is no wait."""
    refused = ("no_capacity", 5.0, 1, {"nodes": 2, "place": "p", "problem": "none"})
    hour = [("launch_intended", 5.0, 1, _intent()), refused]
    paused = ("settled", 3605.0, None, {"state": "paused", "detail": "", "exit_code": 11})
    resumed = ("resumed", 9000.0, None, {"limits": limits_to_json(Limits())})
    place = {"spec": {}, "job": {}, "phase": 0, "limits": limits_to_json(Limits())}
    poor = ("waiting", 3605.0, None, {"retry_at": 3620.0, "why": "no money", "team": True})
    assert _waiting_s(*hour, paused, now=9500.0) == 3600.0
    ways: dict[str, list[Any]] = {
        "the team's books say no": [poor],
        "it is resumed": [paused, resumed],
        "it moves": [paused, ("moved", 9000.0, None, place)],
        "a phase begins": [("phase_begun", 3605.0, None, place)],
    }
    for way, lines in ways.items():
        assert _waiting_s(*hour, *lines, now=9500.0) == 3600.0, way
        again = ("no_capacity", 9600.0, 1, refused[3])
        second = [*hour, *lines, ("launch_intended", 9600.0, 1, _intent()), again]
        assert _waiting_s(*second, now=9700.0) == 3700.0, way
        assert _waiting_s(*second, *launched(9700.0), now=9800.0) == 3700.0, way


def test_a_wait_before_a_launch_that_failed_counts_once() -> None:
    """Its attempt has it, also once the run is at rest and resumed."""
    refused = ("no_capacity", 5.0, 1, {"nodes": 2, "place": "p", "problem": "none"})
    lines = [
        ("launch_intended", 5.0, 1, _intent()),
        refused,
        ("launch_intended", 65.0, 1, _intent()),
        ("launch_failed", 66.0, 1, {"problem": "no right"}),
        ended(70.0, "launch_failed"),
        ("settled", 75.0, None, {"state": "failed", "detail": "", "exit_code": 3}),
    ]
    assert _waiting_s(*lines, now=80.0) == 60.0
    resumed = ("resumed", 90.0, None, {"limits": limits_to_json(Limits())})
    assert _waiting_s(*lines, resumed, now=95.0) == 60.0


def _of_every_kind() -> RunRecord:
    """A run that paid for a charged attempt, a lost launch, nodes ahead and the controller's."""
    first = ended(100.0, "preempted", last_step=4)
    first[3]["charged_node_s"] = 250.0
    [(kind, at, number, intent), up] = launched(150.0, attempt=3, nodes=1, price=5.0)
    node = {
        "number": 1,
        "cluster": "c",
        "place": "aws/us-east-1",
        "price_usd_per_h": 0.3,
        "since": 10.0,
        "until": None,
    }
    record = made(
        *launched(0.0, nodes=3, price=1.0),
        training(2.0),
        ("controller_node", 10.0, None, node),
        first,
        *launched(120.0, attempt=2, nodes=2, price=2.0),
        (kind, at, number, {**intent, "ahead": True}),
        up,
    )
    assert record.ahead is not None
    return replace(record, lost_launches=(LostLaunch(at=20.0, paid_s=30.0, usd=2.0),))


def test_all_uses_and_the_curve_add_up_to_what_was_spent() -> None:
    """With what the cloud charged, nodes that wait for their turn, and the controller's own."""
    record = _of_every_kind()
    rest = Settled(at=300.0, state=RunState.FAILED, detail="", exit_code=10)
    over = replace(record, settled=rest)
    for each, now in ((record, 200.0), (record, 260.0), (over, 300.0)):
        spent = cost.spent_usd(each, now)
        told = {share.use: share.usd for share in run_times(each, now)}
        assert sum(usd or 0.0 for usd in told.values()) == pytest.approx(spent)
        assert told[Use.CONTROLLER] == pytest.approx(0.3 * (now - 10.0) / 3600)
        points = spend_points(each, now)
        assert points[-1].spent_usd == pytest.approx(spent)
        sums = [point.spent_usd or 0.0 for point in points]
        assert sums == sorted(sums)
    last = spend_points(record, 260.0)[-1]
    assert (last.nodes, last.price_usd_per_h) == (3, 2.0)
    assert last.rate_usd_per_h == cost.rate_usd_per_h(record) == pytest.approx(2 * 2 + 5 + 0.3)


def test_launches_that_came_to_nothing_have_their_own_line() -> None:
    """The parts of the money add up to what was spent, also before there is an attempt."""
    data = {"nodes": 2, "place": "p", "problem": "tags", "late": True, "paid_s": 90.0}
    record = made(*launched(5.0), ("no_capacity", 95.0, 1, data))
    told = {share.use: (share.seconds, share.usd) for share in run_times(record, 100.0)}
    assert told[Use.LOST_LAUNCHES] == (90.0, cost.spent_usd(record, 100.0))
    assert told[Use.LOST_LAUNCHES][1] == cost.known_spent_usd(record, 100.0) > 0


def _intent() -> dict[str, Any]:
    [(_, _, _, data), _] = launched(0.0)
    return dict(data)


def test_an_unknown_price_is_no_money_at_all() -> None:
    """The time is known, the money is not: never zero."""
    record = made(*launched(0.0, price=None), training(4.0))
    shares = run_times(record, 60.0)
    assert sum(share.seconds for share in shares) == 60.0
    assert all(share.usd is None for share in shares)


@given(
    begins=st.lists(st.floats(0, 50), min_size=4, max_size=4),
    train_s=st.floats(0, 500),
    stall_s=st.floats(0, 100),
    lives_s=st.floats(1, 300),
)
def test_the_parts_never_exceed_what_was_billed(
    begins: list[float], train_s: float, stall_s: float, lives_s: float
) -> None:
    """Clocks that disagree, and totals that make no sense, invent no time and no money."""
    up, init, start, save = begins
    record = made(
        *launched(0.0, nodes=2),
        _started(start, _iso(up), _iso(init)),
        saved(save, 5, train_s=train_s, stall_s=stall_s),
        ended(lives_s, "node_lost", last_step=9),
    )
    shares = run_times(record, 1e4)
    assert abs(sum(share.seconds for share in shares) - lives_s) < 1e-6
    spent = cost.spent_usd(record, 1e4)
    assert spent is not None
    assert abs(sum(share.usd or 0.0 for share in shares) - spent) < 1e-9


def _iso(at: float) -> str:
    from spotguard.shared.units import to_iso

    return to_iso(at)


def test_spend_over_time_ends_at_what_was_spent() -> None:
    """Each change of the nodes is a point; between two, money grows at the rate that is told."""
    record = made(
        *launched(0.0, nodes=3, price=1.0),
        training(2.0),
        ended(100.0, "preempted", last_step=4),
        *launched(160.0, attempt=2, nodes=1, price=5.0),
    )
    points = spend_points(record, 260.0)
    assert [(point.at, point.nodes) for point in points] == [
        (0.0, 3),
        (100.0, 0),
        (160.0, 1),
        (260.0, 1),
    ]
    assert points[-1].spent_usd == cost.spent_usd(record, 260.0)
    assert points[1].spent_usd == points[2].spent_usd
    assert points[2].rate_usd_per_h == 5.0


def test_spend_over_time_adds_up_at_each_point() -> None:
    """Nodes that are asked for ahead overlap, and what is lost with a launch is paid at its end."""
    record = made(
        *launched(0.0, nodes=3, price=1.0),
        ended(100.0, "preempted", last_step=4),
        *launched(80.0, attempt=2, nodes=1, price=5.0),
        ended(200.0, "preempted", attempt=2, last_step=4),
    )
    lost = (LostLaunch(at=20.0, paid_s=30.0, usd=2.0), LostLaunch(at=120.0, paid_s=0.0, usd=0.5))
    points = spend_points(replace(record, lost_launches=lost), 260.0)
    assert [(point.at, point.nodes, point.rate_usd_per_h) for point in points] == [
        *((0.0, 3, 3.0), (50.0, 3, 3.0), (80.0, 4, 8.0)),
        *((100.0, 1, 5.0), (120.0, 1, 5.0), (200.0, 0, 0.0), (260.0, 0, 0.0)),
    ]
    first, second = 3 / 3600, 5 / 3600
    assert [point.spent_usd for point in points] == pytest.approx(
        [
            *(0.0, 50 * first + 2, 80 * first + 2, 100 * first + 20 * second + 2),
            *(100 * first + 40 * second + 2.5, *[100 * first + 120 * second + 2.5] * 2),
        ]
    )
    unknown = replace(record, lost_launches=(replace(lost[0], usd=None),))
    assert [point.spent_usd for point in spend_points(unknown, 260.0)][1:] == [None] * 5


def test_a_run_of_many_attempts_is_told_in_a_moment() -> None:
    """At demo prices, too: what is asked of the whole run is asked once."""
    lines = [
        line
        for attempt in range(1, 601)
        for line in (
            *launched(60.0 * attempt, attempt=attempt, infra=LOCAL),
            ended(60.0 * attempt + 50.0, "preempted", attempt=attempt, last_step=4),
        )
    ]
    record = made(*lines)
    record = replace(
        record,
        spec={"infra": LOCAL},
        attempts=tuple(replace(each, demo_price=True) for each in record.attempts),
    )
    assert cost.demo_prices(record)
    begun_s = time.process_time()
    points, times = spend_points(record, 4e4), run_times(record, 4e4)
    assert time.process_time() - begun_s < 1.0, "0.02 s; 5 s if it grows with the cube"
    assert len(points) == 1201
    assert points[-1].spent_usd == pytest.approx(sum(each.usd or 0.0 for each in times))


def test_what_is_done_again_is_marked() -> None:
    """Of a step that two attempts did, the later value counts."""
    record = made(
        *launched(0.0),
        training(1.0),
        ended(9.0, "node_lost", last_step=30),
        *launched(10.0, attempt=2),
        training(11.0, attempt=2, step=20, source="checkpoints/000000000020-000001/"),
    )
    points = [Point(10, 3.0, 1), Point(30, 2.0, 1), Point(30, 2.1, 2)]
    told = series("loss", points, record)
    assert list(zip(told.attempts, told.steps, told.counts, strict=True)) == [
        (1, 10, True),
        (1, 30, False),
        (2, 30, True),
    ]
