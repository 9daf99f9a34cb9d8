from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits
from spotguard.events import keys
from spotguard.events.states import EndReason, RunState
from spotguard.testing.job import JobFate
from spotguard.testing.stores import SimulatedCrash
from tests.control.world import World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord


@dataclass
class Saboteur:
    """Counts the controller's acts and kills it before or after one of them."""

    nth: int | None = None
    """Which act; None only counts."""
    after: bool = False
    acts: int = 0

    def around(self, act: Callable[[], Any]) -> Any:
        """Do the act, unless it is time to die."""
        self.acts += 1
        mine = self.acts == self.nth
        if mine and not self.after:
            raise SimulatedCrash
        try:
            return act()
        finally:
            if mine:  # also where the act failed: the answer is lost
                raise SimulatedCrash


class Sabotaged:
    """Another object whose named methods are acts of the controller."""

    def __init__(self, inner: Any, saboteur: Saboteur, *methods: str) -> None:
        self._inner = inner
        self._saboteur = saboteur
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        """Return the inner attribute; a named method is watched."""
        value = getattr(self._inner, name)
        if name not in self._methods:
            return value
        return lambda *args, **kwargs: self._saboteur.around(lambda: value(*args, **kwargs))


def run_with(world: World, saboteur: Saboteur) -> bool:
    """Run a controller whose every act is watched; False if it was killed."""
    with world.journal() as real:
        journal: Any = Sabotaged(real, saboteur, "append")
        parts = {
            "launcher": Sabotaged(world.launcher, saboteur, "launch", "down"),
            "store": Sabotaged(world.store, saboteur, "put", "delete"),
        }
        try:
            record = world.supervisor(journal, **parts).run()
            while record.settled is None:  # the next phase is for a supervisor of its own
                record = world.supervisor(journal, **parts).run(goes_on=True)
        except SimulatedCrash:
            return False
    return True


def eventful(folder: Path) -> World:
    """Return a run in which everything happens that a controller has to act upon."""
    fates = {
        1: JobFate(how="notice", at_s=4),
        2: JobFate(how="lose", at_s=5),
        3: JobFate(how="stuck", at_s=5),
    }
    return World(
        folder,
        limits=Limits(budget_usd=0.05, nodes_min=2, nodes_max=3),
        launcher={"capacity": lambda now: 0 if now < 1_700_000_000 + 2 else 2},
        tick_s=1.0,
        total_steps=12,
        save_every=4,
        fates=fates,
    )


def in_place(folder: Path) -> World:
    """Return a run that goes on in place twice, then on a new cluster."""
    fates = {
        1: JobFate(how="notice", at_s=4, regroup_s=1.0),
        2: JobFate(how="lose_and_tell", at_s=5, regroup_s=1.0),
        3: JobFate(how="notice", at_s=4),
    }
    return World(
        folder,
        limits=Limits(nodes_min=1, nodes_max=3),
        tick_s=1.0,
        total_steps=20,
        save_every=4,
        fates=fates,
    )


def repaired(
    make: Callable[[Path], World], folder: Path, saboteur: Saboteur
) -> tuple[World, RunRecord]:
    """Kill the controller of a new run, let the next one carry on; return the world it leaves."""
    folder.mkdir()
    world = make(folder)
    assert not run_with(world, saboteur)
    world.clock.advance(1.0)
    return world, world.run()


def count_acts(folder: Path) -> int:
    """Return how many acts the undisturbed controller does."""
    saboteur = Saboteur()
    assert run_with(eventful(folder), saboteur)
    return saboteur.acts


ACTS = range(1, 89)
"""As many as the eventful run has; `test_all_acts_are_covered` keeps it true."""


def test_all_acts_are_covered(tmp_path: Path) -> None:
    """The list of acts to be killed at is whole."""
    assert count_acts(tmp_path) == ACTS[-1]


@pytest.mark.e2e
@pytest.mark.same_everywhere
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("start", range(8))
def test_a_controller_killed_anywhere_is_repaired(tmp_path: Path, start: int, after: bool) -> None:
    """Killed before or after each of its acts, the next controller carries on.

    Acts are what changes anything outside of the process: journal appends, launches, downs, and
    writes to the store. Between two of them a kill anywhere is the same as before the second.
    """
    for nth in ACTS[start::8]:
        world, record = repaired(eventful, tmp_path / str(nth), Saboteur(nth=nth, after=after))

        assert record.settled is not None, nth
        assert record.settled.state is RunState.PAUSED, nth
        assert record.settled.exit_code == 20, nth
        ends = [attempt.end.reason for attempt in record.attempts if attempt.end]
        assert ends == [EndReason.PREEMPTED, EndReason.NODE_LOST, EndReason.BUDGET], nth
        started = world.launcher.started
        assert len(set(started)) == len(started) == len(record.attempts), nth
        assert world.launcher.living() == [], nth
        billed = world.launcher.billed_usd()
        assert billed <= 0.05, nth
        # The time between the written intent and the launch is billed to be safe: at most that.
        assert billed <= world.spent_usd() + 1e-9 <= billed + 6 * 2.0 / 3600, nth


def test_a_controller_killed_again_and_again_gets_there(tmp_path: Path) -> None:
    """Every controller dies after three acts; the run still ends right."""
    world = eventful(tmp_path)
    while not run_with(world, Saboteur(nth=4, after=True)):
        world.clock.advance(0.2)
    record = world.record()
    assert record.settled is not None
    assert record.settled.exit_code == 20
    assert len(set(world.launcher.started)) == len(world.launcher.started)
    assert world.launcher.living() == []
    assert world.launcher.billed_usd() <= 0.05


def test_an_intent_nobody_followed_for_long_is_dropped(tmp_path: Path) -> None:
    """A controller dead for an hour between intent and launch does not launch on old terms."""
    world = World(tmp_path, limits=Limits(budget_usd=0.05))
    # acts: controller_started, launch_intended; then it dies before it launches
    assert not run_with(world, Saboteur(nth=2, after=True))
    world.clock.advance(3600.0)
    record = world.run()
    assert Kind.DROPPED.value in world.kinds()
    assert [attempt.number for attempt in record.attempts] == [2]
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert world.spent_usd() == pytest.approx(world.launcher.billed_usd())


def test_two_journals_open_at_once_agree(tmp_path: Path) -> None:
    """A wish written while the controller acts is in the record at its next look."""
    world = World(tmp_path, total_steps=100)
    with world.journal() as journal, Journal.open(tmp_path / "journal.db") as command:
        supervisor = world.supervisor(journal)
        supervisor.tick()
        command.append(Kind.USER_STOP.value, at=world.clock.now())
        supervisor.tick()
        assert supervisor.record.wish is Kind.USER_STOP


@pytest.mark.e2e
@pytest.mark.same_everywhere
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_controller_killed_anywhere_sees_who_went_on(tmp_path: Path, after: bool) -> None:
    """The attempts in place are neither lost nor begun a second time on another cluster."""
    (tmp_path / "count").mkdir()
    counting = Saboteur()
    assert run_with(in_place(tmp_path / "count"), counting)
    for nth in range(1, counting.acts + 1):
        world, record = repaired(in_place, tmp_path / str(nth), Saboteur(nth=nth, after=after))

        assert record.settled is not None, nth
        assert record.settled.state is RunState.FINISHED, nth
        assert [attempt.nodes for attempt in record.attempts] == [3, 2, 1, 3], nth
        assert world.launcher.started == ["job-1-1", "job-1-4"], nth
        assert world.launcher.living() == [], nth
        assert {step for _, step in world.job.trained} == set(range(1, 21)), nth


def phased(folder: Path) -> World:
    """Return a run of three phases on 2, 3 and 1 nodes, interrupted in the first two of them."""
    fates = {1: JobFate(how="notice", at_s=4), 3: JobFate(how="lose", at_s=4)}
    phases = [{"until_step": 6, "nodes": 2}, {"until_step": 14, "nodes": 3}, {"nodes": 1}]
    return World(
        folder,
        limits=Limits(budget_usd=5.0, nodes_min=2, nodes_max=2),
        spec={"phases": phases},
        tick_s=1.0,
        total_steps=18,
        save_every=4,
        fates=fates,
    )


@pytest.mark.e2e
@pytest.mark.same_everywhere
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("start", range(4))
def test_a_controller_killed_anywhere_keeps_to_the_phases(
    tmp_path: Path, start: int, after: bool
) -> None:
    """Each phase has its steps on its nodes, none is begun twice, and no step is left out."""
    (tmp_path / "count").mkdir()
    counting = Saboteur()
    assert run_with(phased(tmp_path / "count"), counting)
    assert counting.acts > 60
    for nth in range(1 + start, counting.acts + 1, 4):
        world, record = repaired(phased, tmp_path / str(nth), Saboteur(nth=nth, after=after))

        assert record.settled is not None, nth
        assert record.settled.state is RunState.FINISHED, nth
        assert [attempt.nodes for attempt in record.attempts] == [2, 2, 3, 3, 1], nth
        ends = [attempt.end.reason.value for attempt in record.attempts if attempt.end]
        assert ends == ["preempted", "phase_done", "node_lost", "phase_done", "finished"], nth
        assert world.kinds().count(Kind.PHASE_BEGUN.value) == 2, nth
        assert {step for _, step in world.job.trained} == set(range(1, 19)), nth
        assert len(set(world.launcher.started)) == len(world.launcher.started) == 5, nth
        assert world.launcher.living() == [], nth
        places = [json.loads(world.store.get(keys.place(n)))["phase"] for n in (1, 2)]
        assert places == [1, 2], nth


def test_nothing_is_launched_in_a_place_that_the_store_does_not_know(tmp_path: Path) -> None:
    """Who rebuilds a lost journal asks the launcher of the store's newest place: it comes first."""
    (tmp_path / "count").mkdir()
    acts: list[str] = []

    world = phased(tmp_path / "count")
    put, launch = world.store.put, world.launcher.launch

    def noted_put(key: str, *args: Any, **kwargs: Any) -> Any:
        if key.startswith(keys.PLACES):
            acts.append(key)
        return put(key, *args, **kwargs)

    def noted_launch(request: Any) -> None:
        acts.append(request.cluster)
        launch(request)

    world.store.put = noted_put  # type: ignore[method-assign]
    world.launcher.launch = noted_launch  # type: ignore[method-assign]
    world.run()
    assert acts == [
        *("job-1-1", "job-1-2"),
        *("places/000001.json", "job-1-3", "job-1-4"),
        *("places/000002.json", "job-1-5"),
    ]
