"""Nodes of earlier attempts, of which the lost journal alone knew whether they are gone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.handover.adopt import Rebuild, settle
from spotguard.control.journal import cost
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.status.history_words import history_lines
from spotguard.control.status.make_view import run_view
from spotguard.control.supervisor.actions import Gone, NoteReleased
from spotguard.control.supervisor.decide import Observation, decide
from spotguard.control.supervisor.policy import Policy
from spotguard.events import keys
from spotguard.events.states import RunState
from spotguard.launch.base import ClusterState, ClusterView
from spotguard.testing.job import JobFate
from spotguard.testing.launcher import FAKE_OFFER
from tests.control.made import down_asked, ended, launched, made
from tests.control.world import RUN_ID, World

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord


WORDS = "adopted; resume it"


def with_nodes_that_go(folder: Path) -> World:
    """Return a run on AWS, of which the second attempt trains while the first one's nodes go."""
    world = World(
        folder,
        limits=Limits(nodes_min=2, nodes_max=2),
        policy=Policy(capacity_patience_s=60.0, teardown_s=45.0),
        launcher={"teardown_s": 400.0, "offers": (replace(FAKE_OFFER, infra="aws"),)},
        fates={1: JobFate(how="notice", at_s=9)},
        total_steps=200,
    )
    record = world.run_until(5.0)
    while not (record.leaving and record.current and record.current.started_at):
        record = world.run_until(0.5)
    return world


def adopted(world: World, *, by_word_alone: bool = False) -> RunRecord:
    """Lose the journal; return what one says that is written from the store alone."""
    (world.folder / "journal.db").rename(world.folder / "lost.db")
    with (
        Journal.open(world.folder / "lost.db") as lost,
        Journal.create(world.folder / "journal.db") as journal,
    ):
        created = next(iter(lost.read()))
        journal.append(Kind.CREATED.value, at=created.at, data=created.data)
        rebuild = Rebuild(journal, world.launcher, RUN_ID, by_word_alone=by_word_alone)
        rebuild.attempts(world.store)
        journal.append(Kind.ADOPTED.value, at=world.clock.now(), data={"rests": WORDS})
        settle(journal, WORDS, at=world.clock.now())
        return read_record(journal)


@pytest.mark.parametrize("silent_s", [0.0, 90.0])
def test_nodes_of_an_earlier_attempt_are_taken_down_by_who_adopts_the_run(
    tmp_path: Path, silent_s: float
) -> None:
    """Also where the launcher cannot be asked in this moment: that is no evidence of an end."""
    world = with_nodes_that_go(tmp_path)
    world.launcher.outage_until = world.clock.now() + silent_s
    record = adopted(world)
    assert [attempt.number for attempt in record.leaving] == [1]
    assert record.attempts[0].down is not None
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert world.launcher.living() == []
    assert world.spent_usd() == pytest.approx(world.launcher.billed_usd(), rel=0.01)


def test_who_only_reads_a_store_takes_no_word_for_nodes_that_live(tmp_path: Path) -> None:
    """Where no launcher may be asked, an attempt that another one followed is told as over."""
    world = with_nodes_that_go(tmp_path)
    world.launcher.outage_until = world.clock.now() + 90.0
    record = adopted(world, by_word_alone=True)
    assert record.leaving == ()
    assert record.attempts[0].down is None


def test_an_adopted_run_is_not_at_rest_while_earlier_nodes_may_live(tmp_path: Path) -> None:
    """A run at rest has no controller: nobody would take them down."""
    world = with_nodes_that_go(tmp_path)
    world.launcher.down(world.launcher.started[-1])
    end = b'{"reason": "preempted", "detail": "", "gone_at": %d}' % world.clock.now()
    world.store.put(keys.end(2), end)
    world.launcher.outage_until = world.clock.now() + 90.0
    record = adopted(world)
    assert record.current is None
    assert [attempt.number for attempt in record.leaving] == [1]
    assert record.settled is None


@pytest.mark.parametrize("silent_s", [0.0, 90.0])
def test_who_adopts_a_run_without_an_attempt_that_lives_buys_no_nodes(
    tmp_path: Path, silent_s: float
) -> None:
    """A controller sees to the end of the earlier nodes, and the user decides about new ones."""
    world = with_nodes_that_go(tmp_path)
    world.launcher.down(world.launcher.started[-1])
    end = b'{"reason": "preempted", "detail": "", "gone_at": %d}' % world.clock.now()
    world.store.put(keys.end(2), end)
    world.launcher.outage_until = world.clock.now() + silent_s
    waits = adopted(world)
    assert waits.settled is None
    now, url = world.clock.now(), world.store.url
    view = run_view(waits, live=None, now=now, controller_alive=True, store_url=url)
    assert view.state_detail.endswith("then the run rests")
    before = len(world.launcher.started)
    record = world.run()
    assert len(world.launcher.started) == before
    assert world.launcher.started[0] not in world.launcher.living()
    assert record.settled is not None
    assert (record.settled.state, record.settled.detail) == (RunState.PAUSED, WORDS)


def test_a_run_that_is_over_rests_where_nobody_can_ever_be_asked_for_earlier_nodes(
    tmp_path: Path,
) -> None:
    """They cost what they did when something was last heard of them, and the user is told."""
    world = with_nodes_that_go(tmp_path)
    world.launcher.down(world.launcher.started[-1])
    end = b'{"reason": "finished", "detail": "", "gone_at": %d}' % world.clock.now()
    world.store.put(keys.end(2), end)
    world.launcher.outage_until = float("inf")
    record = adopted(world)
    spent_usd = world.spent_usd()
    world.clock.sleep(86_400.0)
    assert world.spent_usd() == spent_usd
    assert cost.rate_usd_per_h(record) == 0.0
    begun_at = world.clock.now()
    record = world.run()
    assert world.clock.now() - begun_at == pytest.approx(world.policy.answer_patience_s, abs=2.0)
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert world.spent_usd() == spent_usd
    assert [each for each in record.warnings if "attempt 1: nobody could be asked" in each]
    with world.journal() as journal:
        texts = [line.text for line in history_lines(journal.read())]
    assert not any(text == "the nodes of attempt 1 are gone" for text in texts)
    assert any(text.startswith("nobody could be asked whether the nodes") for text in texts)


@pytest.mark.parametrize("state", ["down_sent", "down_failed"])
def test_nodes_that_were_seen_and_told_to_go_are_paid_at_least_until_then(state: str) -> None:
    """Where a cluster is gone its launcher may know it no more: a pod, a job that was purged."""
    end = ended(50.0, "preempted")
    end[3]["leaving"] = True
    ordered = (state, 60.0, 1, {"problem": ""})
    record = made(*launched(infra="aws"), down_asked(49.0, "preempted"), end, ordered)
    absent = ClusterView(state=ClusterState.ABSENT)
    action = decide(record, Observation(leaving=((1, absent),)), 300.0, Policy())
    assert action == NoteReleased(attempt=1, gone=Gone(60.0, 300.0)), "nobody saw when they went"


def test_nodes_that_nobody_ever_knew_are_paid_until_they_were_last_heard_of() -> None:
    """It may be days after that the launcher can be asked again, and has no cluster of the name."""
    end = ended(50.0, "preempted")
    end[3]["leaving"] = True
    asked = down_asked(49.0, "preempted")
    asked[3]["in_doubt"] = True
    record = made(*launched(infra="aws"), asked, end)
    absent = ClusterView(state=ClusterState.ABSENT)
    action = decide(record, Observation(leaving=((1, absent),)), 90_000.0, Policy())
    assert action == NoteReleased(attempt=1, gone=Gone(50.0))
