"""A store that is away, at each moment of a run: what is spent, what is lost, what is said.

`python -m tests.control.runs.test_store_away` prints all of it as a table.
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.cli.views.history_table import happening
from spotguard.control import api
from spotguard.control.controller import one_run
from spotguard.control.controller.rest import Bell, Rest
from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.run_folder import folder_of
from spotguard.control.status.history_words import history_lines
from spotguard.control.status.make_view import run_view
from spotguard.control.status.view import HistoryLine
from spotguard.control.supervisor.decide import state_of
from spotguard.control.supervisor.lease import Lease
from spotguard.control.supervisor.policy import Policy
from spotguard.control.supervisor.supervisor import Supervisor
from spotguard.errors import StoreUnavailable
from spotguard.events.states import RunState
from spotguard.spec.model import build_spec
from spotguard.storage.remote.bounded import BoundedStore
from spotguard.testing import FakeLauncher, FaultyStore, MemoryStore
from spotguard.testing.job import FakeJob
from tests.control.made import launched, made
from tests.control.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.testing.clock import FakeClock
    from spotguard.testing.launcher import FakeCluster

BUDGET_USD = 0.25
"""900 s of the fake cloud's node."""
STEPS = 600
BEGINS_S = 20.0
WISH_S = 4.0
"""How long after the store went away the user wishes something."""
MOMENTS = ("launch", "training", "save", "stop", "down", "resume")
AWAY_S = (10.0, 180.0, math.inf)


class Outage:
    """When the store is away, by the world's clock."""

    def __init__(self, clock: FakeClock, at: float, seconds: float, *, answers_s: float) -> None:
        self._clock, self._at, self._until = clock, at, at + seconds
        self._answers_s = answers_s

    @property
    def is_on(self) -> bool:
        """True while nothing answers."""
        return self._at <= self._clock.now() < self._until

    def strike(self, _key: str) -> None:
        """Let one call of the controller's fail, after all of its own retries."""
        if self.is_on:
            self._clock.sleep(self._answers_s)
            raise StoreUnavailable("the bucket does not answer (scripted)")


@dataclass
class AwayJob(FakeJob):
    """A job of the same store: what it cannot write it writes later, and saves are lost."""

    outage: Outage | None = None

    def __post_init__(self) -> None:
        self._waiting: list[tuple[str, bytes, bool]] = []
        self._inner = self.store
        self.store = self  # type: ignore[assignment]

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Write, or keep it for later."""
        self._waiting.append((key, data, if_absent))
        while self._waiting and not (self.outage and self.outage.is_on):
            found, body, absent = self._waiting.pop(0)
            self._inner.put(found, body, if_absent=absent)
        return ""

    def head(self, key: str) -> Any:
        """See nothing while the store is away."""
        return None if self.outage and self.outage.is_on else self._inner.head(key)

    def get(self, key: str) -> bytes:
        """Read."""
        return self._inner.get(key)

    def list(self, prefix: str) -> Any:
        """List."""
        return self._inner.list(prefix)

    def _save(self, cluster: FakeCluster, play: Any, kind: str) -> None:
        if not (self.outage and self.outage.is_on):
            super()._save(cluster, play, kind)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one outage."""

    state: RunState
    billed_usd: float
    told_usd: float
    released_s: float | None
    """From the user's wish until no node was left; None: there was no wish."""
    trained_again: int
    """Steps that were done twice."""
    launched_while_away: int
    said: tuple[str, ...]
    """Of the story, what is about the store."""


def play(folder: Path, moment: str, away_s: float, *, answers_s: float = 10.0) -> Row:
    """Return what a run comes to, whose store is away from one moment on for so long."""
    world = World(folder, limits=Limits(budget_usd=BUDGET_USD))
    job = AwayJob(store=world.store, total_steps=STEPS)
    world.job = world.launcher._job = job
    begins_s = {"launch": 0.0, "save": 6.5}.get(moment, BEGINS_S)
    begun = world.clock.now()
    if moment == "resume":
        world.run_until(10.0)
        world.write(Kind.USER_STOP)
        world.run()
        begins_s = world.clock.now() - begun
    job.outage = Outage(world.clock, begun + begins_s, away_s, answers_s=answers_s)
    away = FaultyStore(world.store).before("*", job.outage.strike, times=None)
    kind = {"stop": Kind.USER_STOP, "down": Kind.USER_DOWN}.get(moment)
    if moment == "resume":
        world.write(Kind.RESUMED, {"limits": limits_to_json(Limits(budget_usd=BUDGET_USD))})
    started = len(world.launcher.started)
    with world.journal() as journal:
        bounded = BoundedStore(away, clock=world.clock)
        lease = Lease(world.store, world.clock, "here")
        lease.take()  # before the store went away
        lease._store = bounded
        supervisor = world.supervisor(journal, store=bounded, lease=lease)
        wished_at = released_at = None
        launched = 0
        end = world.clock.now() + 3600.0
        while supervisor.record.settled is None and world.clock.now() < end:
            if kind and wished_at is None and world.clock.now() >= begun + begins_s + WISH_S:
                journal.append(kind.value, at=world.clock.now())
                wished_at = world.clock.now()
            alone = not lease.keep()
            supervisor._lookout.alone = alone
            supervisor.tick(alone=alone)
            if job.outage.is_on:
                launched = len(world.launcher.started) - started
                launched -= moment not in ("launch", "resume")
            if wished_at and released_at is None and not world.launcher.living():
                released_at = world.clock.now()
            world.clock.sleep(0.5)
        record = supervisor.record
        lines = [line.text for line in history_lines(journal.read())]
    return Row(
        state=state_of(record),
        billed_usd=world.launcher.billed_usd(),
        told_usd=world.spent_usd(),
        released_s=released_at and wished_at and released_at - wished_at,
        trained_again=len(job.trained) - len({step for _, step in job.trained}),
        launched_while_away=launched,
        said=tuple(line for line in lines if "store" in line),
    )


@pytest.mark.parametrize("away_s", AWAY_S)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_store_that_is_away(tmp_path: Path, moment: str, away_s: float) -> None:
    """No more than the budget is spent, nothing begins, an end is carried out, and it is told."""
    row = play(tmp_path, moment, away_s)
    assert row.billed_usd <= BUDGET_USD
    assert row.told_usd == pytest.approx(row.billed_usd)
    assert row.launched_while_away == 0
    ever = away_s == math.inf
    if moment in ("stop", "down"):
        assert row.state is RunState.STOPPED
    elif ever:
        assert row.state in (RunState.CONTACT_LOST, RunState.DRAINING)
    else:
        assert row.state is RunState.FINISHED
        assert row.trained_again == 0
    if moment == "down":
        assert row.released_s is not None
        assert row.released_s < 30.0, "an order of the user's waits for no store"
    if moment == "stop":
        assert row.released_s is not None
        assert row.released_s < (30.0 if away_s < 30.0 else 360.0)
    if away_s > 30.0:
        assert any("the bucket does not answer" in line for line in row.said)
    if moment in ("stop", "down") and away_s > 30.0:
        words = {"stop": "cannot be asked to save", "down": "released all the same"}
        assert any(words[moment] in line for line in row.said), row.said


def test_nodes_are_released_by_a_controller_that_began_without_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` waits for no store, also where the lease could not be read at the start; it says so.

    A run with nodes is not called stopped before they are released.
    """
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    (tmp_path / "job.py").write_text("print('hello')")
    given = {"script": str(tmp_path / "job.py"), "workdir": str(tmp_path), "name": "job"}
    spec = build_spec({**given, "store": str(tmp_path / "store")})
    folder = folder_of(api.create_run(spec))
    cloud = FakeLauncher(folder.clock(), FakeJob(store=MemoryStore()), teardown_s=0.0)
    with folder.journal() as journal:
        Supervisor(
            journal=journal,
            launcher=cloud,
            store=MemoryStore(),
            clock=folder.clock(),
            policy=Policy(),
            live_path=folder.live_path,
        ).tick()
    assert cloud.living()
    looks = []

    def away(*_: object) -> None:
        looks.append(len(cloud.living()))
        if len(looks) == 2:
            assert api.request_down(folder.run_id)
        assert len(looks) < 40, "its nodes are not released"
        raise StoreUnavailable("no route to the bucket")

    monkeypatch.setattr(one_run, "_STORE_RETRY_S", 0.0)
    monkeypatch.setattr(one_run, "launcher_for", lambda *_, **__: cloud)
    monkeypatch.setattr(one_run, "policy_for", lambda _: Policy(contact_patience_s=0.0))
    monkeypatch.setattr(one_run, "_shared_store", away)
    one_run.control(folder, Rest(folder, Bell()))
    assert cloud.living() == []
    view = api.view(folder.run_id)
    assert view.state is RunState.STOPPED
    assert "its store does not answer" in view.state_detail


@pytest.mark.parametrize("how", ["store", "frozen", "both", "fresh"])
def test_what_is_older_than_it_should_be_says_so(how: str) -> None:
    """A store that is away, a frozen controller, a full home: the picture carries its age."""
    record, now = made(*launched(0.0)), 1_000.0
    looked_at = {"frozen": 300.0, "both": 700.0}.get(how, 995.0)
    if how in ("store", "both"):
        record = replace(record, store_problem="away", store_silent_since=400.0)
    view = run_view(
        record, live=None, now=now, controller_alive=True, store_url="", looked_at=looked_at
    )
    told = [each for each in view.warnings if "since then" in each]
    if how == "fresh":
        assert (view.known_at, told) == (None, [])
        return
    at, age = (300.0, "11 min 40 s") if how == "frozen" else (400.0, "10 min 00 s")
    assert view.known_at == at
    assert len(told) == 1
    assert f"{age} ago" in told[0]
    assert ("store has not answered" if how != "frozen" else "frozen") in told[0]


@pytest.mark.parametrize(
    "text",
    ["saved\n14:03:10  #9  $0.00  the run is finished", "\u202eevil\u2066", "a\x1b[2Kb\u2028c"],
)
def test_words_of_a_job_forge_no_line_of_ours(text: str) -> None:
    """Newlines, terminal control and what turns text around are gone from each line."""
    shown = happening(HistoryLine(at=0.0, attempt=1, kind="job_warning", text=text))
    assert len(shown.splitlines()) == 1
    assert not set(shown) & set("\x1b\u202e\u2066\u2028\n")


def _table(print: Callable[[str], object]) -> None:
    print("| moment | away | state | spent, $ | released after | done twice | said |")
    print("|---|---|---|---|---|---|---|")
    for moment in MOMENTS:
        for away_s in AWAY_S:
            with tempfile.TemporaryDirectory() as folder:
                row = play(Path(folder), moment, away_s)
            released = "" if row.released_s is None else f"{row.released_s:.0f} s"
            said = " · ".join(row.said).replace("|", "/")
            print(
                f"| {moment} | {away_s:g} s | {row.state.value} | {row.billed_usd:.3f} | "
                f"{released} | {row.trained_again} | {said} |"
            )


if __name__ == "__main__":
    _table(lambda line: sys.stdout.write(f"{line}\n"))
