from __future__ import annotations

import json
import stat
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from spotguard.cli.policy.controller import words
from spotguard.control import api
from spotguard.control.handover import adopt as adopt_module
from spotguard.control.handover import move as move_module
from spotguard.control.handover import stored_wishes
from spotguard.control.handover.move import Mover, bring_back, end_node, standing
from spotguard.control.home_name import machine_id
from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.journal.stored.controller_nodes import GONE_WITHIN_S, read_nodes
from spotguard.control.supervisor.lease import Lease, read_holder
from spotguard.errors import (
    EnvironmentFailure,
    LauncherFailure,
    SpecError,
    StoreUnavailable,
    UsageError,
)
from spotguard.shared.units import SystemClock
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.model import JobSpec
from tests.control.handover.two_homes import NODE_OFFER, PRICE_USD_PER_H, RUN, Homes

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.nodes.controller_node import ControllerNode


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Homes:
    """A laptop that controls a run, and a node that nobody has asked for yet."""
    made = Homes(tmp_path, monkeypatch)
    assert made.controls("laptop")
    monkeypatch.setattr(move_module, "start", made.begins_again)
    return made


def moved(homes: Homes) -> Mover:
    """Move the controller to the node, from the laptop."""
    with homes.at("laptop"):
        mover = homes.mover()
        homes.clock.on_sleep = lambda: homes.serves()
        mover.move()
        return mover


def test_a_moved_controller_is_the_nodes_alone_and_is_paid_for(homes: Homes) -> None:
    """The node has the lease and the journal, the laptop may not act, and both count the node."""
    moved(homes)

    assert homes.controls("node")
    assert not homes.controls("laptop")
    for home in ("laptop", "node"):
        [node] = homes.record(home).controller_nodes
        assert (node.cluster, node.price_usd_per_h, node.until) == (
            f"{RUN}-c1",
            PRICE_USD_PER_H,
            None,
        )
    rest = homes.record("laptop").settled
    assert rest is not None
    assert "moved to its own node" in rest.detail


def test_a_node_of_unknown_price_is_not_asked_for_under_a_budget(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller stays where it is, and nothing of a node is written down."""
    unknown = replace(NODE_OFFER, price_usd_per_h=None)
    with homes.at("laptop"):
        mover = homes.mover()
        monkeypatch.setattr(mover, "_find", lambda _: unknown)
        with pytest.raises(SpecError, match="unknown"):
            mover.move()
    assert homes.controls("laptop")
    assert not homes.record("laptop").controller_nodes


def test_templates_of_later_phases_go_along_and_one_that_is_gone_keeps_it_here(
    homes: Homes, tmp_path: Path
) -> None:
    """Without it the run would end where that phase begins; nothing of a node is written down."""
    template = tmp_path / "elsewhere" / "mine.yaml"
    phases = [{"until_step": 5}, {"template": str(template)}]
    with homes.at("laptop"):
        mover = homes.mover()
        job = JobSpec.from_json(mover._record.spec).replace(phases=phases)
        mover._record = replace(mover._record, job=job.to_json())
        with pytest.raises(SpecError, match=r"mine\.yaml cannot be read"):
            mover.move()
        assert not homes.record("laptop").controller_nodes
        template.parent.mkdir()
        template.write_text("resources: {disk_tier: best}\n")
        homes.clock.on_sleep = lambda: homes.serves()
        mover.move()
    [task] = homes.submitted
    assert str(template) in task["file_mounts"].values()


def test_a_list_of_runs_says_that_one_is_controlled_elsewhere(homes: Homes) -> None:
    """It is stopped on this machine alone."""
    moved(homes)
    with homes.at("laptop"):
        looked_at = api.fleet()
        looked_at.refresh()
        for runs in (api.list_runs(), looked_at.summaries()):
            [line] = runs
            assert f"{RUN}-c1" in (line.problem or "")


def test_what_is_secret_is_in_a_private_file_and_not_in_the_task(homes: Homes) -> None:
    """No task, thus no list of processes, holds a variable's value; the file goes with the move."""
    seen: list[tuple[int, dict[str, Any]]] = []

    def submit(task: dict[str, Any], cluster: str) -> None:
        private = homes.folder("laptop").path / "private.json"
        seen.append((stat.S_IMODE(private.stat().st_mode), json.loads(private.read_text())))
        Homes.submit(homes, task, cluster)

    homes.submit = submit  # type: ignore[method-assign]
    moved(homes)
    [(mode, private)] = seen
    assert (mode, private["env"], private["notify"]) == (0o600, {}, [])
    assert not (homes.folder("laptop").path / "private.json").exists()
    [task] = homes.submitted
    assert set(task["envs"]) == {
        "CONTROLLER_RUN",
        "CONTROLLER_NUMBER",
        "CONTROLLER_SLURM",
        "CONTROLLER_KUBERNETES",
        "CONTROLLER_WHEEL",
        "CONTROLLER_REQUIREMENTS",
    }
    assert "secrets" not in task


STEPS = (
    (move_module, "publish_node"),
    (Homes, "submit"),
    (Mover, "_note"),
    (Mover, "_ready"),
    (Lease, "hand_to"),
    (Mover, "_rest"),
    (Mover, "_adopted"),
)


@pytest.mark.e2e
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "step"), STEPS)
def test_killed_at_any_step_there_is_one_controller_or_a_way_back(
    homes: Homes, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str, after: bool
) -> None:
    """Never two may act; `status` tells who does, or the way; and the move can be repeated."""
    real = getattr(owner, step)

    def die(*args: Any, **more: Any) -> NoReturn:
        if after:
            real(*args, **more)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, die)
        with pytest.raises(Killed):
            moved(homes)

    # The laptop's controller, which a command starts again, and the node, each as they would act.
    acting = [home for home in ("laptop", "node") if holds(homes, home)]
    assert len(acting) <= 1
    told = "\n".join(words(standing(homes.place, homes.clock.now()), homes.clock.now()))
    assert acting or f"spotguard controller move {homes.place} local" in told
    moved(homes)
    assert homes.controls("node")
    assert not homes.controls("laptop")
    assert len(homes.record("node").controller_nodes) == 1


def holds(homes: Homes, home: str) -> bool:
    """Return whether a controller of that home could begin; it ends at once if it does."""
    if home == "node" and not homes.folder("node").journal_path.exists():
        return False
    return homes.controls(home)


def test_a_laptop_that_is_gone_loses_the_run_to_the_node_that_waits(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it handed over, with all its disk: the node adopts once the lease is old."""
    monkeypatch.setattr(Mover, "_hand_over", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        moved(homes)
    assert homes.serves()
    assert not homes.folder("node").journal_path.exists(), "the laptop's lease is fresh"

    lease = homes.store.get("controller.json").decode()
    found = read_holder(homes.store)
    assert found is not None
    homes.age_lease(100.0)
    assert homes.store.get("controller.json").decode() != lease
    assert homes.serves()
    assert homes.controls("node")


def test_a_node_that_does_not_come_is_ended_and_paid_and_the_run_stays(homes: Homes) -> None:
    """Whatever SkyPilot says of it: the laptop's controller never ceased."""
    homes.problem, homes.mute = "no capacity", True
    with pytest.raises(EnvironmentFailure, match="stays here: its node does not serve: no cap"):
        moved(homes)
    assert homes.ended == [f"{RUN}-c1"]
    [node] = homes.record("laptop").controller_nodes
    assert node.until is not None
    assert homes.controls("laptop")
    homes.problem, homes.mute = "", False
    moved(homes)
    assert [each.number for each in homes.record("node").controller_nodes] == [1, 2]


def test_brought_back_the_node_goes_and_is_paid_until_it_has_gone(homes: Homes) -> None:
    """The node lets go, says until when it costs, and ends; any machine may adopt then."""
    moved(homes)
    homes.serves()
    homes.clock.on_sleep = lambda: homes.serves()
    with homes.at("laptop"):
        bring_back(homes.place, homes.clock, lambda _: None)
    seen = standing(homes.place, homes.clock.now())
    assert not seen.lives
    assert seen.node is None
    assert seen.nodes[0].node.until is not None
    with homes.at("laptop"):
        homes.steering.adopt(homes.place)
        assert homes.record("laptop").controller_nodes[0].until is not None
        assert homes.controls("laptop")
        end_node(homes.place, homes, homes.clock, lambda _: None)
    assert homes.ended == [f"{RUN}-c1"]


def test_the_node_of_a_run_that_goes_on_is_not_ended(homes: Homes) -> None:
    """That would leave nobody: the sentence names both ways out."""
    moved(homes)
    homes.serves()
    with pytest.raises(UsageError, match="controls the run, which goes on") as told:
        end_node(homes.place, homes, homes.clock, lambda _: None)
    assert "controller move" in told.value.hint
    assert homes.ended == []


def test_a_laptop_whose_clock_is_ahead_ends_no_node_that_controls_its_run(homes: Homes) -> None:
    """Nor does it count that node as leaving, unasked."""
    moved(homes)
    homes.serves()
    homes.clock.advance(3600.0)
    with homes.at("laptop"):
        with pytest.raises(UsageError, match="controls the run, which goes on"):
            end_node(homes.place, homes, homes.clock, lambda _: None)
        asked: list[str] = []
        homes.clock.on_sleep = lambda: homes.serves()
        bring_back(homes.place, homes.clock, asked.append)
    assert homes.ended == []
    assert asked == ["asking the node to let the run go"]


def test_a_machine_whose_clock_is_ahead_keeps_its_journal_as_it_may_not_adopt(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that clock the other's controller is dead, and what it did since is missing here."""
    moved(homes)
    homes.serves()
    before = sorted(homes.folder("laptop").path.iterdir())
    monkeypatch.setattr(adopt_module, "time", SimpleNamespace(time=lambda: time.time() + 3600.0))
    with homes.at("laptop"), pytest.raises(UsageError, match="in the hands of"):
        homes.steering.adopt(homes.place)
    assert sorted(homes.folder("laptop").path.iterdir()) == before


@pytest.mark.parametrize("way", ["bring back", "adopt"])
def test_a_node_that_is_gone_is_not_paid_for_ever(homes: Homes, way: str) -> None:
    """Whoever takes the run over says that its node costs no more."""
    moved(homes)
    homes.age_lease(1000.0)
    if way == "bring back":
        bring_back(homes.place, homes.clock, lambda _: None)
    else:
        with homes.at("laptop"):
            homes.steering.adopt(homes.place)
        [known] = homes.record("laptop").controller_nodes
        assert known.until is not None
    [stored] = read_nodes(homes.store)
    assert stored.node.until is not None
    assert stored.node.until <= homes.clock.now() + GONE_WITHIN_S


def test_a_node_that_is_ended_is_not_paid_for_by_the_journal_here(homes: Homes) -> None:
    """It had the run until that came to rest; the bill of this machine's journal ends as well."""
    moved(homes)
    homes.age_lease(1000.0)
    with homes.at("laptop"):
        end_node(homes.place, homes, homes.clock, lambda _: None)
    [node] = homes.record("laptop").controller_nodes
    assert node.until is not None


@pytest.mark.parametrize("goes_in_s", [0.0, 90.0, 2 * GONE_WITHIN_S])
@pytest.mark.parametrize("how", ["given up", "ended"])
def test_a_node_costs_until_it_is_gone_and_not_until_its_end_is_asked_for(
    homes: Homes, how: str, goes_in_s: float
) -> None:
    """SkyPilot takes an order at once, and VMs need minutes. One that is never seen gone costs as
    long as one may last, and its end is asked for again."""
    homes.goes_in_s = goes_in_s
    asked_at: list[float] = []
    down = homes.down

    def order(node: ControllerNode) -> None:
        asked_at.append(homes.clock.now())
        down(node)

    homes.down = order  # type: ignore[method-assign]
    if how == "given up":
        homes.problem, homes.mute = "no capacity", True
        with pytest.raises(EnvironmentFailure, match="stays here"):
            moved(homes)
    else:
        moved(homes)
        homes.age_lease(1000.0)
        homes.clock.on_sleep = lambda: None
        with homes.at("laptop"):
            end_node(homes.place, homes, homes.clock, lambda _: None)
    [node] = homes.record("laptop").controller_nodes
    [stored] = read_nodes(homes.store)
    assert node.until == stored.node.until
    assert node.until is not None
    cost_s = node.until - asked_at[0]
    assert cost_s == pytest.approx(min(goes_in_s, GONE_WITHIN_S), abs=3.0)
    assert (len(asked_at) > 1) == (goes_in_s > 60.0)


def test_what_a_resume_allowed_is_not_lost_by_a_move(homes: Homes) -> None:
    """`run.json` knows the first budget only; it is the newest that the node keeps."""
    newest = Limits(budget_usd=9.0, nodes_min=1, nodes_max=3)
    homes.allows("laptop", newest)
    moved(homes)
    assert homes.record("node").limits == newest


@pytest.mark.parametrize("asked_there", [True, False])
def test_what_a_resume_on_the_node_allowed_comes_back_with_the_run(
    homes: Homes, asked_there: bool
) -> None:
    """A budget that was lowered there would be exceeded here; asked for there, it needs no node."""
    moved(homes)
    homes.serves()
    homes.clock.on_sleep = lambda: homes.serves()
    if asked_there:
        stored_wishes.ask(homes.store, stored_wishes.RESUME, homes.clock, {"budget_usd": 2.0})
    else:
        homes.allows("node", Limits(budget_usd=2.0))
        with homes.at("laptop"):
            bring_back(homes.place, homes.clock, lambda _: None)
    assert read_nodes(homes.store)[0].limits == limits_to_json(Limits(budget_usd=2.0))
    if not asked_there:
        with homes.at("laptop"):
            homes.steering.adopt(homes.place)
        assert homes.record("laptop").limits.budget_usd == 2.0


def test_a_run_without_nodes_goes_on_after_its_move(homes: Homes) -> None:
    """It waited for capacity, say: who adopts it brings it to rest, and here nobody would resume.

    One that came to rest by itself stays so.
    """
    moved(homes)
    assert homes.record("node").settled is not None
    homes.serves()
    homes.serves()
    assert homes.steering.asked == ["resume None None"]


def test_a_run_that_came_to_rest_meanwhile_is_not_woken(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The laptop's controller was stopped, and let the run go, while the node waited for it."""
    monkeypatch.setattr(Mover, "_hand_over", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        moved(homes)
    homes.serves()
    with homes.at("laptop"):
        lease = Lease(homes.store, SystemClock(), machine_id(spotguard_home()))
        lease.take()
        lease.release()
    homes.serves()
    homes.serves()
    assert homes.folder("node").journal_path.exists()
    assert homes.steering.asked == []


def test_a_node_whose_clock_is_ahead_waits_for_the_run_all_the_same(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The laptop's controller lives: by the node's clock it had shown itself an hour ago."""
    monkeypatch.setattr(Mover, "_hand_over", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        moved(homes)
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 3600.0)
        assert homes.serves()
    assert not homes.folder("node").journal_path.exists()
    assert not (homes.folder("node").path / "going-on").exists()
    assert homes.controls("laptop")


def test_a_run_that_is_being_stopped_is_not_handed_over(homes: Homes) -> None:
    """The wish is in the laptop's journal alone: the node would train on."""
    with homes.folder("laptop").journal() as journal:
        journal.append(Kind.USER_STOP.value, at=homes.clock.now())
    with pytest.raises(UsageError, match="comes to rest"):
        moved(homes)
    assert homes.begun_again == [RUN], "nobody else would carry the wish out"
    assert homes.ended == [f"{RUN}-c1"]
    [node] = homes.record("laptop").controller_nodes
    assert node.until is not None
    assert homes.controls("laptop")


@pytest.mark.parametrize("broken", [KeyboardInterrupt(), StoreUnavailable("it is away")])
@pytest.mark.parametrize("owner", [move_module, Lease, Mover])
def test_a_hand_over_that_fails_leaves_the_run_with_a_controller(
    homes: Homes, monkeypatch: pytest.MonkeyPatch, owner: Any, broken: BaseException
) -> None:
    """The one here had ended for it; should the node have the run by then, the new one rests."""
    step = {move_module: "tell_limits", Lease: "hand_to", Mover: "_rest"}[owner]
    monkeypatch.setattr(owner, step, lambda *_, **__: (_ for _ in ()).throw(broken))
    with pytest.raises(type(broken)):
        moved(homes)
    assert homes.begun_again == [RUN]
    assert not (homes.folder("laptop").path / "private.json").exists()


def test_a_refused_request_for_a_node_leaves_no_secrets_behind(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a launch is under way SkyPilot reads the file; after a refusal, or an end, nobody."""
    with monkeypatch.context() as patch:
        refusal = LauncherFailure("no")
        patch.setattr(Homes, "submit", lambda *_: (_ for _ in ()).throw(refusal))
        with pytest.raises(LauncherFailure):
            moved(homes)
    private = homes.folder("laptop").path / "private.json"
    assert not private.exists()
    homes.problem, homes.mute = "no capacity", True
    with pytest.raises(EnvironmentFailure):
        moved(homes)
    assert not private.exists()


def test_handed_over_by_name_no_command_here_takes_it_back(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right after, a controller that is started here again finds the run another's."""
    monkeypatch.setattr(Mover, "_rest", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        moved(homes)
    assert homes.record("laptop").settled is None
    assert not homes.controls("laptop")
    homes.serves()
    assert homes.controls("node")
