from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard import storage
from spotguard.cli.main import main
from spotguard.control import api
from spotguard.control.controller import one_run
from spotguard.control.controller.rest import Bell, Rest
from spotguard.control.create_run import admit_resume
from spotguard.control.handover.adopt import adopt_run
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import RunFolder, folder_of
from spotguard.control.supervisor import skypilot_request
from spotguard.control.supervisor.actions import Intend, Settle, Wait
from spotguard.control.supervisor.decide import Observation, decide
from spotguard.control.supervisor.lease import Lease
from spotguard.control.supervisor.policy import Policy
from spotguard.control.supervisor.supervisor import Supervisor
from spotguard.errors import (
    BudgetExhausted,
    DeadlineReached,
    EnvironmentFailure,
    JournalDamaged,
    SpecError,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from spotguard.events.states import EndReason, Market, RunState
from spotguard.launch.base import Offer, Survey
from spotguard.shared.units import SystemClock, to_iso
from spotguard.spec.model import JobSpec, build_spec
from spotguard.storage import PrefixedStore, open_store
from spotguard.testing.bucket import MemoryBucket
from spotguard.testing.clock import FakeClock
from spotguard.testing.job import FakeJob, JobFate
from spotguard.testing.launcher import FAKE_OFFER, FakeLauncher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.launch.base import Unchecked
    from spotguard.storage.base import ObjectStore


def a_spec(home: Path, script: str = "pass", **fields: Any) -> JobSpec:
    """Return a job whose script holds `script`."""
    path = home.parent / "job.py"
    path.write_text(script)
    given = {"script": str(path), "workdir": str(home.parent), "name": "job"}
    return build_spec({**given, "store": str(home / "store"), **fields})


def settle(run_id: str, state: RunState = RunState.PAUSED, exit_code: int = 11) -> None:
    """Write down that the run came to rest."""
    with folder_of(run_id).journal() as journal:
        data = {"state": state.value, "detail": "so", "exit_code": exit_code}
        journal.append(Kind.SETTLED.value, at=time.time(), data=data)


def wait_for(condition: Callable[[], bool], patience_s: float = 40.0) -> None:
    """Return once the condition holds."""
    give_up_at = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.05)


def finish(run_id: str) -> None:
    """Wait until the run has settled and its controller has left."""
    wait_for(lambda: api.view(run_id).state.settled)
    wait_for(lambda: not api.view(run_id).controller_alive)


def test_a_new_run_is_written_down_whole(home: Path) -> None:
    """Journal and run.json exist, private and public; nothing is launched yet."""
    run_id = api.create_run(a_spec(home, env={"TOKEN": "hush"}, nodes="1:3", budget_usd=5))
    view = api.view(run_id)
    assert (view.state, view.budget_usd, view.spent_usd) == (RunState.LAUNCHING, 5.0, 0)
    assert not view.controller_alive
    stored = home / "store" / run_id / "run.json"
    assert "hush" not in stored.read_text()
    assert json.loads(stored.read_text())["limits"]["nodes_max"] == 3
    assert (home / "runs" / run_id).stat().st_mode & 0o077 == 0
    assert api.exit_code(run_id) == 75


def test_who_has_just_asked_the_clouds_asks_them_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` has shown where the nodes can be had: creating the run asks nobody again."""
    offer = Offer(
        infra="aws",
        region="us-east-1",
        zone=None,
        instance_type="g6.xlarge",
        market=Market.SPOT,
        price_usd_per_h=0.25,
        on_demand_usd_per_h=0.8,
    )
    asked: list[str] = []

    def find_offers(spec: JobSpec) -> Survey:
        asked.append("offers")
        return Survey(offers=(offer,))

    def check_places(spec: JobSpec) -> tuple[Unchecked, ...]:
        asked.append("places")
        return ()

    monkeypatch.setattr(skypilot_request, "find_offers", find_offers)
    monkeypatch.setattr(skypilot_request, "check_places", check_places)
    monkeypatch.setattr(skypilot_request, "preview", lambda spec, offers: {})
    spec = a_spec(home, infra="aws", store=f"file://{home}/store")

    api.create_run(spec, Survey(offers=(offer,)))
    assert asked == []
    api.create_run(spec)
    assert asked == ["offers", "places"]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    """The bucket that every URL of S3 names; whether it keeps conditions has to be tried."""
    made = MemoryBucket(heeds_conditions=None)
    monkeypatch.setattr(MemoryBucket, "url", "s3://bucket/runs")
    monkeypatch.setattr(storage, "_open_bucket", lambda scheme, url: made)
    return made


def test_no_run_begins_on_a_server_that_ignores_conditions(
    home: Path, bucket: MemoryBucket
) -> None:
    """It is told before anything is launched; neither here nor there is anything of the run."""
    bucket.ignores_conditions = True
    with pytest.raises(StoreError, match="s3://bucket/runs ignores the condition"):
        api.create_run(a_spec(home, store=bucket.url))
    assert list((home / "runs").iterdir()) == []
    assert not bucket.objects


def test_a_run_on_such_a_server_is_not_resumed(home: Path, bucket: MemoryBucket) -> None:
    """An older version began it: no controller could take it, so nothing says that it goes on."""
    run_id = api.create_run(a_spec(home, store=bucket.url))
    settle(run_id)
    bucket.ignores_conditions = True
    objects = dict(bucket.objects)

    with pytest.raises(StoreError, match="ignores the condition"):
        admit_resume(run_id)
    assert api.view(run_id).state is RunState.PAUSED
    assert bucket.objects == objects


def test_a_run_on_such_a_server_is_not_adopted(home: Path, bucket: MemoryBucket) -> None:
    """Nor is its journal moved aside, as it would be for a new one."""
    run_id = api.create_run(a_spec(home, store=bucket.url))
    bucket.ignores_conditions = True
    journal = folder_of(run_id).journal_path
    journal.write_bytes(b"damaged")

    with pytest.raises(StoreError, match="ignores the condition"):
        adopt_run(f"{bucket.url}/{run_id}")
    assert journal.read_bytes() == b"damaged"


def mode(path: Path) -> int:
    """Return the permissions of a folder."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("old", [None, 0o755, 0o777])
def test_the_default_store_is_private(home: Path, old: int | None) -> None:
    """Nobody else reads what is trained, also where an older version made it for all to enter."""
    store = home / "store"
    if old is not None:
        store.mkdir(parents=True)
        store.chmod(old)
    run_id = api.create_run(a_spec(home))
    assert mode(store) == 0o700
    store.chmod(0o755)
    settle(run_id)
    admit_resume(run_id)
    assert mode(store) == 0o700


def test_a_store_that_the_user_chose_is_as_open_as_before(home: Path) -> None:
    """It may be shared on purpose; so may the folder that a link in its place leads to."""
    chosen, team = home.parent / "chosen", home.parent / "team"
    for folder in (home, chosen, team):
        folder.mkdir()
        folder.chmod(0o755)
    api.create_run(a_spec(home, store=str(chosen)))
    (home / "store").symlink_to(team)
    api.create_run(a_spec(home))
    assert (mode(chosen), mode(team)) == (0o755, 0o755)


def test_somebody_elses_default_store_is_left_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root does not lock out the user whose home it works in."""
    store = home / "store"
    store.mkdir(parents=True)
    store.chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    api.create_run(a_spec(home))
    assert mode(store) == 0o755


BAD: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "grammar": ({"local": {"interrupt": ("node=0@lunch:notice",)}}, SpecError),
    "trace": ({"local": {"trace": "/no/such/trace.json"}}, SpecError),
    "budget": ({"budget_usd": 0.0001}, BudgetExhausted),
    "store": ({"store": "/proc/nowhere"}, StoreError),
    "scheme": ({"store": "s33://bucket/x"}, UsageError),
}


@pytest.mark.parametrize("name", BAD)
def test_a_run_that_cannot_start_leaves_nothing(home: Path, name: str) -> None:
    """Bad options, an empty purse or an unwritable store: one error, and no half-made run."""
    fields, error = BAD[name]
    with pytest.raises(error):
        api.create_run(a_spec(home, **fields))
    assert not list(home.glob("runs/*"))
    assert not list(home.glob("runs/.*"))
    assert api.list_runs() == []


def test_a_home_that_cannot_be_written_is_named(home: Path) -> None:
    """The sentence names the folder and the variable that moves it."""
    home.write_text("a file")
    with pytest.raises(EnvironmentFailure) as caught:
        api.create_run(a_spec(home, store=str(home.parent / "store")))
    assert str(home) in caught.value.message
    assert "SPOTGUARD_HOME" in caught.value.hint


def test_runs_are_found_by_what_users_type(home: Path) -> None:
    """None is the newest, a unique beginning is enough, a typo gets the nearest name."""
    with pytest.raises(UsageError, match="no run on this machine"):
        api.find_run(None)
    first = api.create_run(a_spec(home, name="alpha"))
    second = api.create_run(a_spec(home, name="beta"))
    for run_id, stamp in ((first, "alpha-240101-000000-aaaa"), (second, "beta-250101-000000-bbbb")):
        (home / "runs" / run_id).rename(home / "runs" / stamp)
    assert api.find_run(None) == "beta-250101-000000-bbbb"
    assert api.find_run("alp") == "alpha-240101-000000-aaaa"
    with pytest.raises(UsageError) as caught:
        api.find_run("alpho-240101-000000-aaaa")
    assert "alpha-240101-000000-aaaa" in caught.value.hint
    (home / "runs" / "alpha-250101-000000-cccc").mkdir()
    with pytest.raises(UsageError, match="2 runs begin with 'alpha'"):
        api.find_run("alpha")
    with pytest.raises(UsageError, match="no run"):
        api.view("../runs")


def test_a_script_whose_name_begins_with_a_digit_gets_a_cluster_name(home: Path) -> None:
    """Clouds want a letter there; found out only at the launch otherwise."""
    assert api.create_run(a_spec(home, name="3dgs")).startswith("run-3dgs-")


def test_a_resume_is_refused_in_words(home: Path) -> None:
    """A run that goes on, has finished, or has no money or time left says so."""
    run_id = api.create_run(a_spec(home, budget_usd=0.02, deadline_s=3600))
    with pytest.raises(UsageError, match="still goes on"):
        api.resume(run_id)
    settle(run_id)
    with pytest.raises(BudgetExhausted, match=r"\$0\.0001"):
        api.resume(run_id, budget_usd=0.0001)
    with pytest.raises(DeadlineReached, match="passed at"):
        api.resume(run_id, deadline_s=0.0)
    with pytest.raises(SpecError, match="nodes"):
        api.resume(run_id, nodes="4:1")
    settle(run_id, RunState.FINISHED, 0)
    with pytest.raises(UsageError, match="finished all its steps"):
        api.resume(run_id)
    assert api.exit_code(run_id) == 0


def test_wishes_after_the_end_are_no_ones(home: Path) -> None:
    """Stopping a settled run changes nothing and starts nothing."""
    run_id = api.create_run(a_spec(home))
    settle(run_id)
    assert api.request_stop(run_id) is False
    assert api.request_down(run_id) is False
    assert api.ensure_controlled(run_id) is False


def test_a_damaged_journal_hides_no_other_run(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is listed as lost, with the reason; the others stay as they are."""
    good = api.create_run(a_spec(home, name="good"))
    bad = api.create_run(a_spec(home, name="bad"))
    folder_of(bad).journal_path.write_bytes(b"rubbish" * 100)
    states = {run.run_id: run.state for run in api.list_runs()}
    assert states == {good: RunState.LAUNCHING, bad: RunState.CONTACT_LOST}
    with pytest.raises(JournalDamaged) as damage:
        api.view(bad)
    assert main(["runs"]) == 0
    assert capsys.readouterr().err == f"{bad}: {damage.value.message}\n"


def test_adopting_needs_a_run_that_needs_it(home: Path) -> None:
    """No run there, or a whole journal here: refused, nothing changed."""
    run_id = api.create_run(a_spec(home))
    with pytest.raises(UsageError, match=r"no run\.json"):
        api.adopt(f"{home}/store/job-250101-000000-aaaa")
    with pytest.raises(UsageError, match="does not name a run"):
        api.adopt("job")
    with pytest.raises(UsageError, match="is whole"):
        api.adopt(f"{home}/store/{run_id}")


@pytest.mark.parametrize(
    ("total_steps", "state"), [(20, RunState.FINISHED), (1000, RunState.PAUSED)]
)
def test_the_store_alone_tells_the_whole_story(
    home: Path, total_steps: int, state: RunState
) -> None:
    """On a machine that never saw the run, adopting gives the same attempts, costs and state."""
    run_id = api.create_run(a_spec(home, budget_usd=0.03, store=str(home.parent / "store")))
    clock = FakeClock(time.time())
    store = PrefixedStore(open_store(home.parent / "store"), run_id)
    fates = {1: JobFate(how="notice", at_s=6), 2: JobFate(how="lose", at_s=6)}
    job = FakeJob(store=store, total_steps=total_steps, fates=fates)
    launcher = FakeLauncher(clock, job, teardown_s=1.0)
    folder = folder_of(run_id)
    with folder.journal() as journal:
        Supervisor(
            journal=journal,
            launcher=launcher,
            store=store,
            clock=clock,
            policy=Policy(survivor_patience_s=2.0),
            live_path=folder.live_path,
            tick_s=0.5,
        ).run()
    before = api.view(run_id)
    assert before.state is state

    shutil.rmtree(home)
    assert api.adopt(f"{home.parent}/store/{run_id}", ask=lambda job: True) == run_id
    after = api.view(run_id)
    assert (after.state, after.step, after.saved_step) == (state, before.step, before.saved_step)
    assert after.spent_usd == pytest.approx(before.spent_usd)
    assert after.on_demand_usd == pytest.approx(before.on_demand_usd)
    for mine, theirs in zip(after.attempts, before.attempts, strict=True):
        assert (mine.end_reason, mine.nodes, mine.steps_lost, mine.notice_s) == (
            theirs.end_reason,
            theirs.nodes,
            theirs.steps_lost,
            theirs.notice_s,
        )


def test_a_run_that_was_elsewhere_is_brought_back_by_adopting(home: Path) -> None:
    """The journal here is whole, and old: `resume` refuses and says the way; it is kept."""
    run_id = api.create_run(a_spec(home))
    folder = folder_of(run_id)
    with folder.journal() as journal:
        settled = {"state": "stopped", "detail": "", "exit_code": 75}
        journal.append(Kind.SETTLED.value, at=time.time(), data=settled)
    store = PrefixedStore(open_store(f"{home}/store"), run_id)
    elsewhere = Lease(store, SystemClock(), "elsewhere")
    elsewhere.adopt()
    with pytest.raises(UsageError, match="in the hands of"):
        api.adopt(f"{home}/store/{run_id}")
    elsewhere.release()
    with pytest.raises(UsageError, match="Another machine had the run since") as caught:
        api.resume(run_id)
    assert caught.value.hint == f"bring it here: spotguard adopt {store.url.rstrip('/')}"

    assert api.adopt(f"{home}/store/{run_id}") == run_id
    assert list(folder.path.glob("journal.db.outdated-*"))
    assert "adopted" in [line.kind for line in api.history(run_id).lines]
    with pytest.raises(UsageError, match="is whole"):
        api.adopt(f"{home}/store/{run_id}")
    Lease(store, SystemClock(), "elsewhere").adopt()  # at once: nobody controls it


def test_only_one_controller_holds_a_run(home: Path) -> None:
    """The lock is for one; it is seen while held, and free as soon as its holder is gone."""
    run_id = api.create_run(a_spec(home))
    folder = RunFolder(home / "runs" / run_id)
    assert folder.controller_pid() is None
    with folder.control(patience_s=0.0) as first:
        assert first
        assert folder.controller_pid() == os.getpid()
        with folder.control(patience_s=0.0) as second:
            assert not second
        assert api.ensure_controlled(run_id) is False
    assert folder.controller_pid() is None


def test_that_a_controller_is_gone_is_told_once_however_often_one_is_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who follows a run tries every five seconds, maybe for days."""

    def fail(run_id: str) -> None:
        raise EnvironmentFailure("it did not start")

    monkeypatch.setattr(api, "start_controller", fail)
    run_id = api.create_run(a_spec(home))
    for _ in range(3):
        with pytest.raises(EnvironmentFailure):
            api.ensure_controlled(run_id)
    kinds = [line.kind for line in api.history(run_id).lines]
    assert kinds.count("controller_repaired") == 1


def test_a_controller_that_cannot_start_says_why(home: Path) -> None:
    """The error is what it printed, not a timeout."""
    run_id = api.create_run(a_spec(home))
    folder_of(run_id).journal_path.write_bytes(b"rubbish" * 100)
    with pytest.raises(EnvironmentFailure, match="not a SQLite file"):
        api.start_controller(run_id)


class OutOfReach:
    """A store that cannot be opened so many times, and what happens after each try."""

    def __init__(self, tries: int, then: Callable[[int], None]) -> None:
        self.left, self.done, self._then = tries, 0, then

    def __call__(self, root: str, run_id: str) -> ObjectStore:
        """Stand in for what opens the run's store."""
        self._then(self.done)
        self.done += 1
        if self.done <= self.left:
            raise StoreUnavailable("no route to the bucket")
        return PrefixedStore(open_store(root), run_id)


def test_a_controller_without_its_store_waits_for_it_and_tells_why(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays in control, so nobody restarts it; the reason is told once, and its end."""
    folder = folder_of(api.create_run(a_spec(home)))
    told: list[tuple[RunState, str]] = []

    def look(tries: int) -> None:
        assert api.ensure_controlled(folder.run_id) is False
        if tries:
            view = api.view(folder.run_id)
            told.append((view.state, view.state_detail))
        if tries == 3:  # the user leaves once it can be read, so that nothing is launched
            assert api.request_down(folder.run_id)

    monkeypatch.setattr(one_run, "_STORE_RETRY_S", 0.0)
    monkeypatch.setattr(one_run, "_shared_store", OutOfReach(3, look))
    one_run.control(folder, Rest(folder, Bell()))

    assert len(told) == 3
    for state, detail in told:
        assert state is RunState.CONTACT_LOST
        assert "store cannot be read" in detail
        assert "no route to the bucket" in detail
    kinds = [line.kind for line in api.history(folder.run_id).lines]
    assert (kinds.count("store_lost"), kinds.count("store_back")) == (1, 1)
    assert kinds.count("controller_started") == 1
    assert "controller_repaired" not in kinds
    assert api.view(folder.run_id).state is RunState.STOPPED


def test_a_run_without_nodes_can_be_ended_while_its_store_is_gone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who deleted the bucket gets rid of the run, and is told what was wrong."""
    folder = folder_of(api.create_run(a_spec(home)))

    def end(tries: int) -> None:
        if tries == 1:
            assert api.request_down(folder.run_id)
        assert tries < 5, "it does not end"

    monkeypatch.setattr(one_run, "_STORE_RETRY_S", 0.0)
    monkeypatch.setattr(one_run, "_shared_store", OutOfReach(99, end))
    one_run.control(folder, Rest(folder, Bell()))

    view = api.view(folder.run_id)
    assert view.state is RunState.STOPPED
    assert "no route to the bucket" in view.state_detail


@pytest.mark.e2e
def test_a_failing_script_ends_with_its_traceback(home: Path) -> None:
    """Real processes: status shows the script's error, not torchrun's; the logs have it all."""
    run_id = api.create_run(a_spec(home, "print('hello')\nraise KeyError('mine')\n"))
    api.start_controller(run_id)
    finish(run_id)
    view = api.view(run_id)
    assert (view.state, api.exit_code(run_id)) == (RunState.FAILED, 10)
    assert (view.traceback or "").endswith("KeyError: 'mine'")
    assert next(line.text for line in api.logs(run_id, follow=True)) == "hello"
    assert view.spent_usd is not None
    assert view.spent_usd > 0


@pytest.mark.e2e
def test_a_killed_controller_is_repaired_and_its_journal_rebuilt(home: Path) -> None:
    """kill -9 of the controller: noticed, replaced, nothing launched twice; then its journal is
    destroyed, and the run is adopted from its store with its costs."""
    run_id = api.create_run(a_spec(home, "import time\ntime.sleep(600)\n"))
    api.start_controller(run_id)
    wait_for(lambda: "launched" in [line.kind for line in api.history(run_id).lines])
    pid = folder_of(run_id).controller_pid()
    assert pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not api.view(run_id).controller_alive)
    assert api.ensure_controlled(run_id) is True
    assert api.ensure_controlled(run_id) is False
    api.request_down(run_id)
    finish(run_id)
    kinds = [line.kind for line in api.history(run_id).lines]
    assert kinds.count("launched") == 1
    assert "controller_repaired" in kinds
    view = api.view(run_id)
    assert [attempt.end_reason for attempt in view.attempts] == [EndReason.STOPPED]

    folder = folder_of(run_id)
    folder.journal_path.write_bytes(b"rubbish" * 1000)
    assert api.adopt(f"{home}/store/{run_id}") == run_id
    again = api.view(run_id)
    assert again.spent_usd == pytest.approx(view.spent_usd)
    assert [attempt.end_reason for attempt in again.attempts] == [EndReason.STOPPED]
    assert again.state is RunState.STOPPED
    kept = [path.name for path in folder.path.glob("journal.db.damaged-*")]
    assert len(kept) == 1
    with Journal.open(folder.journal_path) as journal:
        assert journal.events()[0].kind == "run_created"


def test_a_run_that_begins_later_launches_nothing_before(home: Path) -> None:
    """It waits, says until when, can be stopped, and its deadline counts from its begin."""
    begins_at = 60 * (time.time() // 60) + 7200.0
    text = f"{to_iso(begins_at)[:16]}Z"
    run_id = api.create_run(a_spec(home, start_at=text, deadline_s=3600.0))
    with folder_of(run_id).journal() as journal:
        record = read_record(journal)
    assert record.limits.deadline_at == begins_at + 3600.0
    offers = Observation(offers=(FAKE_OFFER,))
    assert isinstance(decide(record, offers, begins_at - 1.0, Policy()), Wait)
    assert isinstance(decide(record, offers, begins_at + 1.0, Policy()), Intend)
    assert api.view(run_id).state_detail.startswith(f"begins at {text[:-1]}")
    stopped = replace(record, wish=Kind.USER_STOP)
    assert isinstance(decide(stopped, offers, begins_at - 1.0, Policy()), Settle)


@pytest.mark.parametrize(
    "text", ["22:00", "2026-05-01", "2026-05-01T22:00", "soon", True, -5, 1e12]
)
def test_a_begin_needs_an_instant_with_a_zone(home: Path, text: object) -> None:
    """What is no instant is refused in one sentence that says what is one."""
    with pytest.raises(SpecError, match="instant with a zone"):
        a_spec(home, start_at=text)
