from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.market_log import note_market, read_market
from spotguard.control.journal.nodes.offer import place_key
from spotguard.control.journal.record import Limits
from spotguard.control.supervisor.actions import NoteRefused
from spotguard.control.supervisor.market_notes import MarketNotes
from spotguard.control.supervisor.placement.advice import advised
from spotguard.control.supervisor.placement.seen_places import (
    hazard_of,
    place_name,
    seen_of,
    was_taken,
)
from spotguard.control.supervisor.policy import Policy
from spotguard.control.supervisor.request import launch_request
from spotguard.events.states import EndReason, Market
from spotguard.policy.market.hazard import pooled
from spotguard.policy.market.sightings import Sighting
from spotguard.shared.hazard import HazardByAge
from spotguard.spec.model import JobSpec
from spotguard.testing.job import JobFate
from spotguard.testing.launcher import FAKE_OFFER
from tests.control.made import ended, intended, launched, made, node_ended, training
from tests.control.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.launch.base import ClusterView

PLACE = place_name(FAKE_OFFER)
DEAR = replace(FAKE_OFFER, market=Market.ON_DEMAND, price_usd_per_h=3.0)
OTHER = replace(FAKE_OFFER, zone="here-b")
DEADLINE = Policy(market=Market.SPOT, on_demand_for_deadline=True)


def _told(path: Path) -> list[tuple[str, int | None, float | None]]:
    return [(each.kind, each.attempt, each.age_s) for each in read_market(path)]


def test_each_thing_is_noted_once_over_any_number_of_controllers(tmp_path: Path) -> None:
    """Granted and lost stand there once, with the age at which the nodes were lost."""
    path = tmp_path / "market.jsonl"
    lived = made(*launched(100.0), training(160.0))
    lost = made(*launched(100.0), training(160.0), ended(760.0, "preempted"))
    for record in (lived, lived, lost, lost):
        MarketNotes(path, record).update(record)
    assert _told(path) == [("granted", 1, None), ("lost", 1, 600.0)]
    assert {each.place for each in read_market(path)} == {PLACE}


def test_nodes_that_were_given_back_were_not_lost(tmp_path: Path) -> None:
    """An end that no market brings is told as such; a launch that came to nothing not at all."""
    path = tmp_path / "market.jsonl"
    record = made(
        *launched(100.0), training(160.0), ended(760.0, "finished"),
        intended(800.0, 2), ended(801.0, "launch_failed", 2),
    )  # fmt: skip
    MarketNotes(path, record).update(record)
    assert _told(path) == [("granted", 1, None), ("left", 1, 600.0)]


def test_nodes_of_a_launch_that_came_to_nothing_were_not_lost(tmp_path: Path) -> None:
    """Other runs do not avoid a place for one instance too many."""
    path = tmp_path / "market.jsonl"
    up = ("cluster_up", 130.0, 1, {"at": 130.0})
    in_vain = node_ended(190.0, end="lost", in_doubt=True, in_vain=True)
    record = made(*launched(100.0), up, in_vain, ended(230.0, "node_lost"))
    MarketNotes(path, record).update(record)
    assert _told(path) == [("granted", 1, None), ("left", 1, 100.0)]


def test_of_several_accelerators_the_one_that_came_is_noted(tmp_path: Path) -> None:
    """Under `gpus = "A100:8,H100:4"` nodes with H100s are no sighting of A100s."""
    path = tmp_path / "market.jsonl"
    record = made(*launched(100.0), training(160.0))
    offer = replace(FAKE_OFFER, gpus="H100:4")
    record = replace(
        record,
        spec={**record.spec, "gpus": "A100:8,H100:4"},
        attempts=(replace(record.attempts[0], offer=offer),),
    )
    MarketNotes(path, record).update(record)
    assert [(each.accelerator, each.gpus) for each in read_market(path)] == [("H100", 4)]


def test_nothing_is_kept_without_a_path(tmp_path: Path) -> None:
    """Who opted out leaves no trace, and learns nothing."""
    record = made(*launched(100.0), training(160.0))
    notes = MarketNotes(None, record)
    notes.update(record)
    notes.asked(record.attempts[0])
    notes.refused(record.attempts[0], 5.0)
    assert notes.sightings() == ()
    assert list(tmp_path.iterdir()) == []


def test_a_whole_run_notes_what_it_saw(tmp_path: Path) -> None:
    """A controller at work tells of asking, refusals, coming and losing, by its own clock."""
    path = tmp_path / "market.jsonl"
    world = World(tmp_path, total_steps=40, fates={1: JobFate(how="lose", at_s=6)})
    begun = world.clock.now()
    world.launcher.capacity = lambda now: 0 if now < begun + 0.4 else 1024
    with world.journal() as journal:
        world.supervisor(journal, market_path=path).run()
    kinds = [each.kind for each in read_market(path)]
    assert kinds.count("asked") == 3
    assert kinds.count("refused") == 1
    assert kinds.count("granted") == 2
    assert kinds.count("lost") == 1
    assert kinds.count("left") == 1


@pytest.mark.parametrize("in_vain", [False, True])
def test_a_controller_tells_a_launch_in_vain_from_a_loss(tmp_path: Path, in_vain: bool) -> None:
    """It keeps what the launcher says of it; the next attempt follows as after a loss."""
    path = tmp_path / "market.jsonl"
    world = World(tmp_path, total_steps=30)
    world.launcher.lose_in_set_up("one instance too many")
    inner = world.launcher.observe

    def observe(name: str, *, heard: bool = False) -> ClusterView:
        seen = inner(name, heard=heard)
        up_at = world.clock.now() if seen.some_lost else None
        return replace(seen, in_vain=seen.some_lost and in_vain, up_at=up_at)

    world.launcher.observe = observe  # type: ignore[assignment,method-assign]
    with world.journal() as journal:
        record = world.supervisor(journal, market_path=path).run()
    first = record.attempts[0]
    assert first.end is not None
    assert first.end.reason is EndReason.NODE_LOST
    assert [node.in_vain for node in first.node_ends] == [in_vain]
    assert was_taken(first) is not in_vain
    assert [a.end.reason for a in record.attempts[1:] if a.end] == [EndReason.FINISHED]


def test_what_other_runs_saw_counts(tmp_path: Path) -> None:
    """A place that refused another run a moment ago is known to be down; long ago is forgotten."""
    record = made(limits=Limits(nodes_min=2, nodes_max=2, deadline_at=200_000.0))
    hazard = pooled("", 2)
    refused = Sighting(at=50.0, kind="refused", place=PLACE, nodes=1, run="other")
    seen = seen_of(record, FAKE_OFFER, 2, 100.0, hazard, [refused])
    assert (seen.up, seen.unseen_s) == (False, 50.0)
    own = replace(refused, run=record.run_id)
    assert seen_of(record, FAKE_OFFER, 2, 100.0, hazard, [own]).unseen_s == float("inf")


def test_decisions_rest_on_other_runs(tmp_path: Path) -> None:
    """Of two places that cost the same, one that has just refused others is not asked first."""
    limits = Limits(nodes_min=2, nodes_max=2, deadline_at=200_000.0)
    record = made(limits=limits)
    offers = (FAKE_OFFER, OTHER, DEAR)
    plain = advised(record, offers, 2, 100.0, DEADLINE).offers[0]
    first, second = (plain, OTHER if plain == FAKE_OFFER else FAKE_OFFER)
    saw = [
        Sighting(at=90.0, kind="refused", place=place_name(first), nodes=2, run="other"),
        Sighting(at=90.0, kind="granted", place=place_name(second), nodes=2, run="other"),
    ]
    told = advised(record, offers, 2, 100.0, DEADLINE, market=saw)
    assert place_key(told.offers[0]) == place_key(second)


@pytest.mark.parametrize("market", list(Market))
def test_the_job_hears_how_often_its_nodes_are_taken(market: Market) -> None:
    """The environment of an attempt holds its place's hazard, which grows by what was seen."""
    cloud = replace(FAKE_OFFER, infra="aws", market=market)
    record = made(*launched(100.0, infra="aws"))
    attempt = replace(record.attempts[0], offer=cloud)
    spec = JobSpec(script="/job.py", workdir="/", name="job", store="/store")
    hazard = hazard_of(record, attempt, 100.0)
    assert hazard is not None
    request = launch_request(record, attempt, spec, now=100.0, hazard=hazard)
    read = HazardByAge.parse(request.env["SPOTGUARD_HAZARD"])
    assert read.per_h(0.0) == pytest.approx(hazard.per_h(0.0), rel=1e-3)
    if market is Market.ON_DEMAND:
        assert read.per_h(0.0) < 0.05
        return
    assert read.per_h(0.0) > read.per_h(40_000.0)
    saw = [
        Sighting(at=at, kind=kind, place=place_name(cloud), nodes=2, run="other")
        for hour in range(24)
        for kind, at in (("granted", 600.0 * hour), ("lost", 600.0 * hour + 300))
    ]
    often = hazard_of(record, attempt, 20_000.0, saw)
    assert often is not None
    assert often.per_h(0.0) > 1.1 * hazard.per_h(0.0)


def test_nodes_of_this_machine_have_no_hazard() -> None:
    """Nothing is told of what no market takes."""
    record = made(*launched(100.0, infra="local"))
    assert hazard_of(record, record.attempts[0], 100.0) is None


def test_notes_of_two_controllers_are_read_anew(tmp_path: Path) -> None:
    """What another controller wrote is seen at the next look."""
    path = tmp_path / "market.jsonl"
    notes = MarketNotes(path, made())
    assert notes.sightings() == ()
    saw = Sighting(at=1.0, kind="refused", place="a", run="other")
    note_market(path, [saw])
    assert notes.sightings() == (saw,)
    note_market(path, [saw])
    assert notes.sightings() == (saw, saw)


def test_a_busy_cloud_says_nothing_of_its_nodes(tmp_path: Path) -> None:
    """A refusal for another reason than a want of nodes is no sighting of a full place."""
    path = tmp_path / "market.jsonl"
    world = World(tmp_path)
    with world.journal() as journal:
        supervisor = world.supervisor(journal, market_path=path)
        supervisor.tick()
        [attempt] = supervisor.record.attempts
        for refusal in (
            NoteRefused("too many calls", busy=True),
            NoteRefused("no right", lasting=True),
        ):
            supervisor._note_refusal(attempt, refusal, late=True)
    assert [each.kind for each in read_market(path)] == ["asked"]
