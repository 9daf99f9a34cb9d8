"""A run goes on elsewhere: by the user's word, or as a phase begins."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control import api, create_run
from spotguard.control.create_run import admit_move
from spotguard.control.journal import cost
from spotguard.control.journal.fold import apply, limits_to_json, read_record
from spotguard.control.journal.journal import Entry
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.run_folder import folder_of
from spotguard.control.supervisor.actions import BeginPhase, Wait
from spotguard.control.supervisor.decide import Observation, decide
from spotguard.control.supervisor.next_nodes import _rounds_of_doubt
from spotguard.control.supervisor.policy import Policy
from spotguard.control.supervisor.supervisor import Supervisor
from spotguard.errors import BudgetExhausted, SpecError, StoreUnavailable, UsageError
from spotguard.events import keys
from spotguard.events.states import EndReason, RunState
from spotguard.spec.model import JobSpec, build_spec
from spotguard.spec.nodes import NodeRange
from spotguard.storage import PrefixedStore, open_store
from spotguard.testing.clock import FakeClock
from spotguard.testing.job import FakeJob
from spotguard.testing.launcher import FakeLauncher
from tests.control.made import ended, launched, made, saved, training
from tests.control.world import World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord

THREE = {"nodes": NodeRange(3, 3)}


class Played:
    """A run whose cloud and job are fakes; its journal, home and store are real."""

    def __init__(self, home: Path, **fields: Any) -> None:
        fields.setdefault("price_usd_per_h", 1.0)
        path = home.parent / "job.py"
        path.write_text("pass")
        given = {"script": str(path), "workdir": str(home.parent), "name": "job"}
        store = str(home.parent / "store")
        self.run_id = api.create_run(build_spec({**given, "store": store, **fields}))
        self.place = f"{store}/{self.run_id}"
        self.clock = FakeClock(time.time())
        self.store = PrefixedStore(open_store(store), self.run_id)
        self.job = FakeJob(store=self.store, total_steps=30)
        self.launcher = FakeLauncher(self.clock, self.job, teardown_s=1.0)

    def control(self, *, until_step: int | None = None) -> RunRecord:
        """Control it until it settles; from `until_step` on, as the user asks to stop."""
        folder = folder_of(self.run_id)
        with folder.journal() as journal:
            record = read_record(journal)
            while record.settled is None:
                supervisor = Supervisor(
                    journal=journal,
                    launcher=self.launcher,
                    store=self.store,
                    clock=self.clock,
                    policy=Policy(survivor_patience_s=2.0),
                    live_path=folder.live_path,
                    tick_s=0.5,
                )
                while until_step is not None and not self._reached(until_step):
                    supervisor.tick()
                    self.clock.sleep(0.5)
                if until_step is not None:
                    journal.append(Kind.USER_STOP.value, at=self.clock.now())
                    until_step = None
                record = supervisor.run()
            return record

    def _reached(self, step: int) -> bool:
        return any(trained >= step for _, trained in self.job.trained)


def test_a_run_moves_with_its_steps_its_money_and_its_history(home: Path) -> None:
    """One event says it; no step is lost; each attempt has its own place; adopting knows it."""
    run = Played(home, nodes=2, budget_usd=5, env={"TOKEN": "hush-hush"})
    assert run.control(until_step=7).settled is not None
    before = api.view(run.run_id)
    assert before.saved_step is not None
    admit_move(run.run_id, {**THREE, "price_usd_per_h": 2.0})
    record = run.control()

    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert [attempt.nodes for attempt in record.attempts] == [2, 3]
    assert record.attempts[1].resumed_step == before.saved_step
    assert (record.spec["price_usd_per_h"], record.limits.budget_usd) == (2.0, 5.0)
    told = [line for line in api.history(run.run_id).lines if line.kind == "moved"]
    assert [line.text for line in told] == [
        "moved by you: goes on in local on 3 nodes, with a budget of $5.00 over all places"
    ]
    assert "hush-hush" not in json.dumps(told[0].data)
    stored = run.store.get(keys.place(1))
    assert b"hush-hush" not in stored
    assert b'"TOKEN"' in stored

    view = api.view(run.run_id)
    shutil.rmtree(home)
    given = {"TOKEN": "hush-hush"}
    assert api.adopt(run.place, given=given, ask=lambda job: True) == run.run_id
    after = api.view(run.run_id)
    with folder_of(run.run_id).journal() as journal:
        rebuilt = read_record(journal)
        kinds = [entry.kind for entry in journal.events()]
    assert (rebuilt.spec, rebuilt.limits) == (record.spec, record.limits)
    assert kinds.index("moved") > kinds.index("attempt_ended")
    assert rebuilt.placing is not None
    assert rebuilt.placing.after == 1
    assert after.spent_usd == pytest.approx(view.spent_usd)
    assert [each.nodes for each in after.attempts] == [2, 3]


def test_who_adopts_before_the_next_launch_knows_the_move(home: Path) -> None:
    """The controller dies between the two: the store's newest place is the moved-to one."""
    run = Played(home, nodes=2)
    run.control(until_step=3)
    admit_move(run.run_id, THREE)
    run.launcher.launch = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        run.control()
    shutil.rmtree(home)
    api.adopt(run.place, ask=lambda job: True)
    with folder_of(run.run_id).journal() as journal:
        record = read_record(journal)
    assert record.limits.nodes_max == 3
    assert record.spec["nodes"] == {"min": 3, "max": 3}


def test_a_store_that_cannot_be_written_holds_the_launch_back(tmp_path: Path) -> None:
    """Nothing is launched in a place that the store does not know; the user hears why."""
    phases = [{"until_step": 4, "nodes": 1}, {"nodes": 2}]
    world = World(tmp_path, spec={"phases": phases}, total_steps=8)
    put, full = world.store.put, [True]

    def refusing(key: str, *args: Any, **kwargs: Any) -> Any:
        if key.startswith(keys.PLACES) and full[0]:
            full[0] = world.clock.now() < 1_700_000_000 + 60
            raise StoreUnavailable("the store is full")
        return put(key, *args, **kwargs)

    world.store.put = refusing  # type: ignore[method-assign]
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    kinds = world.kinds()
    assert kinds.index("store_lost") < kinds.index("store_back")
    assert kinds.index("store_back") < len(kinds) - kinds[::-1].index("launch_intended") - 1
    assert record.attempts[1].intended_at >= 1_700_000_000 + 60


@pytest.mark.parametrize("state", [None, RunState.FINISHED])
def test_what_lives_or_has_finished_does_not_move(home: Path, state: RunState | None) -> None:
    """One sentence, with the way out; nothing is written."""
    run = Played(home)
    if state is not None:
        with folder_of(run.run_id).journal() as journal:
            data = {"state": state.value, "detail": "so", "exit_code": 0}
            journal.append(Kind.SETTLED.value, at=time.time(), data=data)
    with pytest.raises(UsageError) as caught:
        admit_move(run.run_id, THREE)
    if state is None:
        assert "still goes on" in caught.value.message
        assert "--stop" in caught.value.hint
    assert "moved" not in [line.kind for line in api.history(run.run_id).lines]


def test_a_move_that_the_budget_cannot_pay_changes_nothing(home: Path) -> None:
    """Nor does one to a place that cannot be."""
    run = Played(home, budget_usd=1)
    run.control(until_step=3)
    with pytest.raises(BudgetExhausted):
        admit_move(run.run_id, {"price_usd_per_h": 10_000.0})
    with pytest.raises(SpecError, match="on_demand_infra"):
        admit_move(run.run_id, {"infra": "slurm/a/b", "on_demand_infra": "aws"})
    view = api.view(run.run_id)
    assert view.state is RunState.STOPPED
    assert "moved" not in [line.kind for line in api.history(run.run_id).lines]


class MeanwhileThere(dict[str, Any]):
    """Where one wants to go, until something else happens in mid-admission."""

    def __init__(self, place: dict[str, Any], meanwhile: Callable[[], object]) -> None:
        super().__init__(place)
        self._meanwhile: list[Callable[[], object]] = [meanwhile]

    def get(self, key: str, default: Any = None) -> Any:
        """Return as any, after that has happened."""
        while self._meanwhile:
            self._meanwhile.pop()()
        return super().get(key, default)


def test_of_two_moves_at_once_one_is_refused(home: Path) -> None:
    """Both had seen the run at rest; the second one's place must not hide the first one's nodes."""
    run = Played(home)
    run.control(until_step=3)
    two = {"nodes": NodeRange(2, 2)}
    with pytest.raises(UsageError, match="still goes on"):
        admit_move(run.run_id, MeanwhileThere(THREE, lambda: admit_move(run.run_id, two)))
    with folder_of(run.run_id).journal() as journal:
        assert read_record(journal).limits.nodes_max == 2
        assert [entry.kind for entry in journal.events()].count("moved") == 1


def test_a_move_of_what_was_at_rest_is_refused_if_it_went_on_meanwhile(home: Path) -> None:
    """It has other steps and has spent other money than what was shown and checked."""
    run = Played(home)
    run.control(until_step=3)

    def meanwhile() -> None:
        admit_move(run.run_id, {"nodes": NodeRange(2, 2)})
        run.control(until_step=9)

    with pytest.raises(UsageError, match="has gone on and come to rest"):
        admit_move(run.run_id, MeanwhileThere(THREE, meanwhile))
    with folder_of(run.run_id).journal() as journal:
        assert read_record(journal).limits.nodes_max == 2


# ---------------------------------------------------------------- phases


def phased(*lines: Any, phase: int = 0) -> RunRecord:
    """Return the record of a run, in one of its three phases, to which these things happened."""
    phases = [{"until_step": 10}, {"until_step": 20}, {}]
    job = JobSpec(script="/j", workdir="/", name="j", store="/s").replace(phases=phases)
    begun = made()
    data = {
        "spec": job.in_phase(phase).to_json(),
        "job": job.to_json(),
        "phase": phase,
        "limits": limits_to_json(Limits()),
    }
    record = apply(
        begun, Entry(seq=2, at=0.0, kind=Kind.PHASE_BEGUN.value, attempt=None, data=data)
    )
    for seq, line in enumerate(lines, start=3):
        kind, at, attempt, more = (*line, None, None)[:4]
        record = apply(record, Entry(seq=seq, at=at, kind=kind, attempt=attempt, data=more or {}))
    return record


def after(step: int, reason: str, *, kept: int | None = None) -> list[Any]:
    """Return an attempt that did so many steps, saved them (or others), and ended."""
    save = saved(5.0, step if kept is None else kept)
    return [*launched(), training(), save, ended(9.0, reason, last_step=step)]


@pytest.mark.parametrize(
    ("lines", "phase", "due"),
    [
        (after(10, "phase_done"), 0, 1),
        (after(25, "preempted"), 0, 2),
        (after(12, "preempted", kept=8), 0, None),
        (after(20, "preempted"), 1, 2),
        (after(30, "preempted"), 2, None),
    ],
    ids=["its end", "two at once", "saved before its end", "a notice at its end", "the last"],
)
def test_the_phase_follows_from_the_steps_that_are_saved(
    lines: list[Any], phase: int, due: int | None
) -> None:
    """Not from how the attempt ended; one that is interrupted within a phase goes on in it."""
    action = decide(phased(*lines, phase=phase), Observation(), 10.0, Policy())
    assert (action.phase if isinstance(action, BeginPhase) else None) == due


def test_no_phase_begins_while_nodes_of_the_last_one_are_paid() -> None:
    """The next phase may have another launcher, which knows nothing of them."""
    lines = after(10, "phase_done")
    lines[-1][3]["leaving"] = True
    action = decide(phased(*lines), Observation(), 10.0, Policy())
    assert isinstance(action, Wait)


def test_a_phase_that_ends_is_no_interruption(tmp_path: Path) -> None:
    """Neither is it counted as one, nor does the run pause for it however often."""
    phases = [{"until_step": n, "nodes": 1} for n in range(1, 13)]
    world = World(tmp_path, spec={"phases": [*phases, {}]}, total_steps=14)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    ends = [attempt.end.reason for attempt in record.attempts if attempt.end]
    assert ends == [EndReason.PHASE_DONE] * 12 + [EndReason.FINISHED]
    assert not EndReason.PHASE_DONE.retried
    assert [step for _, step in world.job.trained] == list(range(1, 15))


# ---------------------------------------------------------------- money


def place(infra: str, seq: int, at: float, price: float | None = None) -> Entry:
    """Return a move to a place."""
    data = {
        "spec": {"infra": infra, "price_usd_per_h": price},
        "job": None,
        "phase": 0,
        "limits": limits_to_json(Limits(budget_usd=10.0)),
    }
    return Entry(seq=seq, at=at, kind=Kind.MOVED.value, attempt=None, data=data)


def test_played_money_counts_for_nothing_beside_real_money() -> None:
    """An hour on this machine, then an hour in a cloud: the budget pays the cloud's alone."""
    record = made()
    record = apply(record, place("local", 2, 0.0))
    for seq, line in enumerate(
        [*launched(price=0.9, infra="local", nodes=1), ended(3600.0, "stopped")], start=3
    ):
        record = apply(record, _entry(seq, line))
    assert cost.demo_prices(record)
    assert cost.spent_usd(record, 3600.0) == pytest.approx(0.9)

    record = apply(record, place("aws", 10, 3600.0))
    assert not cost.demo_prices(record)
    assert cost.spent_usd(record, 3600.0) == 0.0
    for seq, line in enumerate(launched(3600.0, 2, price=3.0, infra="aws", nodes=2), start=11):
        record = apply(record, _entry(seq, line))
    assert cost.spent_usd(record, 7200.0) == pytest.approx(6.0)
    assert cost.rate_usd_per_h(record) == pytest.approx(6.0)
    assert cost.cost_usd(record.attempts[0], 7200.0) == pytest.approx(0.9)
    assert [attempt.demo_price for attempt in record.attempts] == [True, False]


def test_a_price_that_the_user_gave_is_real_everywhere() -> None:
    """A machine of one's own costs what one says."""
    record = apply(made(), place("local", 2, 0.0, price=0.5))
    for seq, line in enumerate(launched(price=0.5, infra="local", nodes=2), start=3):
        record = apply(record, _entry(seq, line))
    assert not cost.demo_prices(record)
    assert cost.spent_usd(record, 3600.0) == pytest.approx(1.0)


def _entry(seq: int, line: Any) -> Entry:
    kind, at, attempt, data = (*line, None, None)[:4]
    return Entry(seq=seq, at=at, kind=kind, attempt=attempt, data=data or {})


def test_what_worked_elsewhere_proves_nothing_here() -> None:
    """A right that is missing in the new place is told at once, and not waited for."""
    record = made(*launched(), training(), ended(9.0, "stopped"))
    assert _rounds_of_doubt(record) > 0
    assert _rounds_of_doubt(apply(record, place("aws", 9, 20.0))) == 0


def test_a_move_is_of_the_phase_in_which_the_run_goes_on() -> None:
    """It came to rest before the next phase was written down: the one that is done stays."""
    record = phased(*after(10, "phase_done"))
    job, nodes = create_run._moved_job(record, {"nproc_per_node": 3})
    assert [phase.nproc_per_node for phase in job.phases] == [None, 3, None]
    assert nodes == job.in_phase(1).nodes
    within = phased(*after(7, "stopped"))
    job, _ = create_run._moved_job(within, {"nproc_per_node": 3})
    assert [phase.nproc_per_node for phase in job.phases] == [3, None, None]
