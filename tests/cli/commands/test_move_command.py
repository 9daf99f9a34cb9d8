"""`resume` with a word on where: what is shown and asked before, and what is refused."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.events.states import RunState
from spotguard.spec.model import JobSpec
from tests.cli import pictures
from tests.cli.fake_control import FakeControl

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


class Keyboard(io.StringIO):
    """A terminal on which somebody has typed."""

    def isatty(self) -> bool:
        """Say that it is one."""
        return True


@pytest.fixture
def movable(control: FakeControl, home: Path, script: str) -> FakeControl:
    """A run of which it is known what it would be elsewhere; it goes on."""
    spec = JobSpec(script=script, workdir=str(home.parent), name="train", store=str(home))
    control.views = [pictures.run()]
    control.moved_to = spec.replace(nodes=3, price_usd_per_h=0.5, budget_usd=20)
    return control


def rest(control: FakeControl) -> None:
    """Let the run come to rest."""
    control.views = [replace(view, state=RunState.STOPPED) for view in control.views]


def test_the_plan_is_shown_and_asked_for(
    movable: FakeControl, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the step it goes on from, what was spent, and the new place's price."""
    rest(movable)
    monkeypatch.setattr(sys, "stdin", Keyboard("y\n"))
    said = cli("resume", "--infra", "local", "--nodes", "3", "--price", "0.5", "--detach")
    assert "goes on" in said.out
    assert "spent so far" in said.out
    assert "$20.00" in said.out
    assert [each[0] for each in movable.asked][:2] == ["move_plan", "move"]
    assert movable.asked[1][2]["price_usd_per_h"] == 0.5


def test_without_a_yes_nothing_is_changed(
    movable: FakeControl, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a living run stopped."""
    monkeypatch.setattr(sys, "stdin", Keyboard("n\n"))
    said = cli("resume", "--infra", "local", "--stop")
    assert "nothing was changed" in said.out + said.err
    assert [each[0] for each in movable.asked] == ["move_plan"]


def test_a_living_run_is_refused_in_a_sentence(movable: FakeControl, cli: Cli) -> None:
    """With both ways out."""
    said = cli("resume", "--infra", "local", "--yes")
    assert said.code == 2
    assert "still goes on, so it cannot be moved" in said.err
    assert "spotguard stop" in said.err
    assert "--stop" in said.err
    assert [each[0] for each in movable.asked] == ["move_plan"]


def test_with_stop_it_is_stopped_first(movable: FakeControl, cli: Cli) -> None:
    """Then moved."""
    said = cli("resume", "--infra", "local", "--stop", "--yes", "--detach")
    assert said.code == 0, said.err
    assert [each[0] for each in movable.asked] == ["move_plan", "stop", "move_plan", "move"]


def test_with_json_a_stop_before_prints_the_document_alone(movable: FakeControl, cli: Cli) -> None:
    """What happens while it stops is no part of it."""
    movable.lines = [replace(line, at=time.time() + 60) for line in movable.lines]
    said = cli("resume", "--stop", "--json", "--detach")
    assert said.code == 0, said.err
    assert json.loads(said.out)["run_id"] == pictures.RUN
    assert "asked to save and stop" in said.err


def test_a_move_that_is_no_more_what_was_shown_is_refused(
    movable: FakeControl, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended its phase while it was stopped: what goes on now has another price."""
    stop = FakeControl.request_stop

    def stop_at_the_end_of_a_phase(self: FakeControl, *given: Any, **more: Any) -> Any:
        assert self.moved_to is not None
        self.moved_to = self.moved_to.replace(nodes=7)
        return stop(self, *given, **more)

    monkeypatch.setattr(FakeControl, "request_stop", stop_at_the_end_of_a_phase)
    said = cli("resume", "--infra", "local", "--stop", "--yes", "--detach")
    assert said.code == 2
    assert "another phase" in said.err
    assert "repeat the command" in said.err
    assert "move" not in [each[0] for each in movable.asked]


def test_json_leaves_no_room_for_a_question(movable: FakeControl, cli: Cli) -> None:
    """As with `up`."""
    rest(movable)
    said = cli("resume", "--infra", "local", "--json")
    assert said.code == 2
    assert "--yes" in said.err
    assert "move" not in [each[0] for each in movable.asked]


def test_a_place_that_makes_no_sense_is_refused(movable: FakeControl, cli: Cli) -> None:
    """By the setting's own sentence, before anything is looked up."""
    said = cli("resume", "--infra", "moon")
    assert said.code == 2
    assert "infra: given 'moon'" in said.err
    assert movable.asked == []
