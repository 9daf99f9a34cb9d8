"""What people want to hear of is told once each, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.alert_rules import due, rules_of
from spotguard.control.journal.record import Limits
from spotguard.control.supervisor.actions import Alert
from spotguard.control.supervisor.decide import Observation, alert_percents, decide
from spotguard.control.supervisor.policy import Policy
from spotguard.errors import SpecError
from spotguard.spec.model import build_spec
from spotguard.spec.setting import alert_topics
from tests.control.made import ended, launched, made, saved, training

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord

ALL = ["budget 50,80,95", "burn-rate 3", "preempted", "waiting 60s", "no-save 100s"]
ALL += ["contact-lost", "ended"]
_REFUSED = ("no_capacity", 5.0, 1, {"nodes": 2, "place": "p", "problem": "none left"})


def _run(*lines: Any, topics: list[str] = ALL, limits: Limits | None = None) -> RunRecord:
    record = made(*lines, limits=limits)
    record.spec["notify_on"] = topics
    return record


def _noted(record: RunRecord, *lines: Any, now: float) -> list[str]:
    """Return the kinds of what is due, and nothing once it is noted."""
    found = due(record, now)
    told = [("noted", now, None, {"key": each.key, "text": each.text}) for each in found]
    assert due(_run(*lines, *told), now) == ()
    return [each.key.split()[0] for each in found]


def test_nothing_is_told_that_was_not_chosen() -> None:
    """By default people hear of money and of the end, as before there was a choice."""
    lines = (*launched(0.0, price=90.0), training(1.0), ("contact_lost", 2.0, 1, {"detail": ""}))
    assert due(_run(*lines, topics=["ended"]), 1e6) == ()
    assert rules_of({}) == rules_of({"notify_on": ["budget 50,80,95", "ended"]})


@pytest.mark.parametrize(
    ("lines", "now", "kinds"),
    [
        ((*launched(0.0, nodes=3, price=1.5), training(1.0)), 50.0, ["burn-rate"]),
        ((*launched(0.0, nodes=3, price=1.0), training(1.0)), 50.0, []),
        (
            (*launched(0.0), training(1.0), ended(9.0, "preempted", last_step=3)),
            50.0,
            ["preempted"],
        ),
        ((*launched(0.0), training(1.0), ended(9.0, "resized", last_step=3)), 50.0, ["preempted"]),
        ((launched(0.0)[0], _REFUSED), 59.0, []),
        ((launched(0.0)[0], _REFUSED), 66.0, ["waiting"]),
        ((*launched(0.0), training(1.0), saved(40.0, 9)), 139.0, []),
        ((*launched(0.0), training(1.0), saved(40.0, 9)), 141.0, ["no-save"]),
        ((*launched(0.0), training(1.0)), 102.0, ["no-save"]),
        (
            (*launched(0.0), training(1.0), ("contact_lost", 30.0, 1, {"detail": ""})),
            50.0,
            ["contact-lost"],
        ),
    ],
)
def test_each_thing_is_told_once(lines: tuple[Any, ...], now: float, kinds: list[str]) -> None:
    """When it is so, and not again, also by a controller that comes after."""
    assert _noted(_run(*lines), *lines, now=now) == kinds


def test_the_next_of_its_kind_is_told_again() -> None:
    """A save ends one stretch without; the next one that is too long is another one."""
    lines: tuple[Any, ...] = (*launched(0.0), training(1.0))
    first = due(_run(*lines), 150.0)
    lines = (*lines, ("noted", 150.0, None, {"key": first[0].key, "text": ""}), saved(160.0, 5))
    assert due(_run(*lines), 200.0) == ()
    assert [each.key.split()[0] for each in due(_run(*lines), 300.0)] == ["no-save"]


def test_a_share_of_the_users_own_is_told_and_others_stay_in_the_history() -> None:
    """The budget's own alerts go on, and only those chosen are sent."""
    limits = Limits(budget_usd=10.0)
    lines = (*launched(0.0, nodes=1, price=10.0), training(1.0))
    record = _run(*lines, topics=["budget 20"], limits=limits)
    assert alert_percents(record) == [20, 50, 80, 95]
    assert decide(record, Observation(), 730.0, Policy()) == Alert(20)
    told = made(*lines, ("budget_alert", 5.0, None, {"percent": 50}), limits=limits)
    assert len(told.untold) == 1
    from dataclasses import replace

    from spotguard.control.journal.fold import apply
    from spotguard.control.journal.journal import Entry

    alert = Entry(seq=99, at=5.0, kind="budget_alert", attempt=None, data={"percent": 50})
    chosen = apply(replace(record, untold=()), alert)
    assert (chosen.alerted, chosen.untold) == ((50,), ())


def test_topics_have_one_spelling_each() -> None:
    """And what is none is refused by a sentence that says what is."""
    given = ["Budget 80%, 50", "burn_rate $20/h", "waiting 30m", "ended"]
    assert alert_topics(given) == ("budget 50,80", "burn-rate 20", "waiting 1800s", "ended")
    assert alert_topics("preempted") == ("preempted",)
    for wrong in (["budget 0"], ["burn-rate"], ["waiting"], ["ended now"], ["ended", "ended"], 3):
        with pytest.raises(ValueError, match=r"not|out of range|twice"):
            alert_topics(wrong)
    base = {"script": "/j.py", "workdir": "/", "name": "j", "store": "/s"}
    with pytest.raises(SpecError, match=r"notify_on: .*allowed: a list of"):
        build_spec({**base, "notify_on": ["sometimes"]})
