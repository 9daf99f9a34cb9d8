from __future__ import annotations

import pytest

from spotguard.errors import SpecError
from spotguard.launch.local.interruptions import How, Interruption, parse_interruptions


def wanted(
    how: How,
    *,
    node: int | None = None,
    at_step: int | None = None,
    at_s: float | None = None,
    capacity: int | None = None,
) -> Interruption:
    """Return an interruption."""
    return Interruption(node=node, at_step=at_step, at_s=at_s, how=how, capacity=capacity)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("node=1@step=40:notice", wanted(How.NOTICE, node=1, at_step=40)),
        ("node=0@step=90:term", wanted(How.TERM, node=0, at_step=90)),
        ("node=1@t=12s:kill", wanted(How.KILL, node=1, at_s=12.0)),
        ("node=1@t=1m30s:kill", wanted(How.KILL, node=1, at_s=90.0)),
        ("all@step=50:reclaim-all", wanted(How.RECLAIM_ALL, at_step=50)),
        ("@step=50:reclaim-all", wanted(How.RECLAIM_ALL, at_step=50)),
        ("node=1@step=40:reclaim-all", wanted(How.RECLAIM_ALL, at_step=40)),
        ("all@t=3:kill", wanted(How.KILL, at_s=3.0)),
        ("capacity=1@step=60", wanted(How.NOTICE, at_step=60, capacity=1)),
        (" capacity = 0 @ t = 30s ", wanted(How.NOTICE, at_s=30.0, capacity=0)),
    ],
)
def test_every_form_is_understood(text: str, meaning: Interruption) -> None:
    """Each documented form means what the documentation says."""
    assert parse_interruptions([text]) == (meaning,)


def test_what_is_printed_can_be_read() -> None:
    """An interruption prints as text that means the same."""
    text = "node=1@step=40:notice,all@t=12s:kill,capacity=2@t=0.5s,@step=5:reclaim-all"
    script = parse_interruptions([text])

    assert parse_interruptions([str(one) for one in script]) == script


def test_a_list_may_stand_in_one_text() -> None:
    """Several texts and commas inside one give the same, in order; empty ones are nothing."""
    together = parse_interruptions(["node=0@step=1:kill, node=1@step=2:term,", ""])

    assert together == parse_interruptions(["node=0@step=1:kill", "node=1@step=2:term"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node=1@step=40:notcie", "did you mean 'notice'?"),
        ("nod=1@step=40:kill", "did you mean 'node'?"),
        ("node=1@stpe=40:kill", "did you mean 'step'?"),
        ("capactiy=1@step=4:kill", "did you mean 'capacity'?"),
        ("node=1@step=40:reclaim", "did you mean 'reclaim-all'?"),
        ("node=1@step=40", "says not how"),
        ("node=1@step=-4:kill", "step must be a whole number from 0, not '-4'"),
        ("node=x@step=4:kill", "node must be a whole number from 0, not 'x'"),
        ("node@step=4:kill", "node must be a whole number from 0, not 'nothing'"),
        ("node=1@t=soon:kill", "t must be a duration such as 12s or 5m, not 'soon'"),
        ("node=1@t:kill", "t must be a duration"),
        ("@step=4:kill", "says not which node"),
        ("capacity=1@step=4:kill", "drop the ':'"),
        ("capacity@step=4", "capacity must be a whole number"),
        ("all=3@step=4:kill", "TARGET is node=N, all or capacity=N"),
        ("node=1", "is not TARGET@WHEN:HOW"),
        ("node=1@step=4:kill:kill", "is not TARGET@WHEN:HOW"),
        ("node=²@step=4:kill", "node must be a whole number"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(text: str, words: str) -> None:
    """A mistake names the setting, the entry, what is allowed and the nearest word."""
    with pytest.raises(SpecError) as caught:
        parse_interruptions(["node=0@step=1:kill", text])

    assert caught.value.message.startswith("interrupt: ")
    assert repr(text) in caught.value.message
    assert words in caught.value.message
    assert "TARGET@WHEN:HOW" in caught.value.hint


def test_moments_come_and_stay() -> None:
    """A moment is due from its step or second on, not before, and steps alone do not pass time."""
    by_step, by_time = parse_interruptions(["all@step=5:kill", "all@t=5s:kill"])

    assert [by_step.is_due(step=step, elapsed_s=99) for step in (4, 5, 6)] == [False, True, True]
    assert [by_time.is_due(step=99, elapsed_s=at) for at in (4.9, 5.0)] == [False, True]
