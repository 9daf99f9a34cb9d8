"""Webhooks hear of money and of ends: each thing once, and no secret gets out."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.journal import Journal
from spotguard.control.journal.ledger import Ledger
from spotguard.control.journal.record import Kind
from spotguard.control.supervisor.notify import Notifier, body_of, post_json
from spotguard.errors import SpecError
from spotguard.events.states import RunState
from spotguard.spec.model import JobSpec, build_spec
from spotguard.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOOK = "https://hooks.example.com/services/hush"
OTHER = "https://other.example.com/hush"


class Hooks:
    """Receivers that fail as scripted."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.asked: list[str] = []
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, url: str, body: dict[str, Any]) -> str | None:
        """Hear, or fail."""
        self.asked.append(url)
        if self.fails:
            self.fails -= 1
            return "HTTP 500"
        self.heard.append((url, body))
        return None


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """A run that was created."""
    with Journal.create(tmp_path / "journal.db") as made:
        data = {
            "run_id": "r-1",
            "name": "r",
            "store_root": "file:///s",
            "limits": {"budget_usd": 10.0, "deadline_at": None, "nodes_min": 1, "nodes_max": 1},
            "spec": {},
        }
        made.append(Kind.CREATED.value, at=0.0, data=data)
        yield made


def alerted(journal: Journal, *percents: int) -> None:
    """Write alerts down."""
    for percent in percents:
        journal.append(Kind.ALERT.value, at=1.0, data={"percent": percent})


def test_each_alert_is_told_once_to_every_hook(journal: Journal) -> None:
    """Also a controller that comes after does not tell again what was told."""
    clock, hooks = FakeClock(), Hooks()
    alerted(journal, 50, 80)
    notifier = Notifier([HOOK, OTHER], Ledger(journal, clock), clock, post=hooks)
    notifier.tell()
    notifier.tell()
    assert [(url, body["text"].count("50 %")) for url, body in hooks.heard] == [
        (HOOK, 1),
        (OTHER, 1),
        (HOOK, 0),
        (OTHER, 0),
    ]

    Notifier([HOOK, OTHER], Ledger(journal, clock), clock, post=hooks).tell()
    assert len(hooks.heard) == 4


def test_a_hook_that_fails_is_tried_again_later_and_then_given_up(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is told twice because another hook failed; four tries, half a minute apart."""
    clock, hooks = FakeClock(), Hooks(fails=2)
    alerted(journal, 50)
    notifier = Notifier([HOOK], Ledger(journal, clock), clock, post=hooks)
    with caplog.at_level(logging.DEBUG):
        for _ in range(100):
            notifier.tell()
            clock.advance(1.0)
    assert len(hooks.asked) == 3
    assert len(hooks.heard) == 1
    assert "hooks.example.com" in caplog.text
    assert "hush" not in caplog.text

    dead = Hooks(fails=1000)
    alerted(journal, 80)
    notifier = Notifier([HOOK], Ledger(journal, clock), clock, post=dead)
    for _ in range(1000):
        notifier.tell()
        clock.advance(1.0)
    assert len(dead.asked) == 4


def test_a_run_that_comes_to_rest_is_told_before_the_controller_leaves(journal: Journal) -> None:
    """The last word is tried once, and does not hold the controller up."""
    clock, hooks = FakeClock(), Hooks(fails=1)
    data = {"state": RunState.FINISHED.value, "detail": "all steps done", "exit_code": 0}
    journal.append(Kind.SETTLED.value, at=2.0, data=data)
    ledger = Ledger(journal, clock)
    Notifier([HOOK], ledger, clock, post=hooks).tell(last=True)
    assert len(hooks.asked) == 1
    assert ledger.record.untold == ()


def test_a_body_tells_people_and_machines(journal: Journal) -> None:
    """It names the run, the event and the money, and an id by which a repeat can be told."""
    clock = FakeClock()
    alerted(journal, 95)
    record = Ledger(journal, clock).record
    body = body_of(record, record.untold[0], 2.0)
    assert record.run_id in body["text"]
    assert "95 %" in body["text"]
    assert body["event"] == "budget_alert"
    assert body["id"].startswith(record.run_id)
    assert json.dumps(body)


def test_a_refused_connection_is_a_word_without_the_url() -> None:
    """What goes wrong in the network is told without the hook's path, which is its secret."""
    problem = post_json("http://127.0.0.1:9/services/hush", {})
    assert problem
    assert "hush" not in problem


def test_hooks_are_kept_as_secrets(tmp_path: Path) -> None:
    """They are in the private journal, but not in the run store, nor in a complaint."""
    script = tmp_path / "job.py"
    script.write_text("")
    given = {"name": "n", "script": str(script), "workdir": str(tmp_path), "store": str(tmp_path)}
    spec = build_spec({**given, "notify": [HOOK]})
    assert "hush" not in json.dumps(spec.public_json())
    assert JobSpec.from_json(spec.to_json()).notify == (HOOK,)
    assert JobSpec.from_json(spec.public_json()).notify == ()
    with pytest.raises(SpecError) as caught:
        build_spec({**given, "notify": ["hooks.example.com/hush"]})
    assert "hush" not in str(caught.value)
    assert "notify" in str(caught.value)
