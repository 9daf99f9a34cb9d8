"""Every JSON document that the commands print, printed by the commands themselves.

What only clouds, hours or a SkyPilot could bring about is laid out in advance; from there on, all
is as a user has it: the journal is read, the picture is made, the command prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.api import checkpoints as api_checkpoints
from spotguard.api import doctor, launching
from spotguard.checkpoint.shard import shard_file, write_shard
from spotguard.cli.main import main
from spotguard.control import api
from spotguard.control.checkpoints import find
from spotguard.control.checkpoints.find import OpenedRun
from spotguard.control.controller import start
from spotguard.control.doctor import checks
from spotguard.control.doctor import store as doctor_store
from spotguard.control.doctor.clouds import Clouds
from spotguard.control.drill import batch_trial
from spotguard.control.drill import run as drill
from spotguard.control.drill.report import DrillReport, Finding
from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.market_log import market_path, note_market
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.journal.stored.logs import LogLine
from spotguard.control.journal.team.budget import TeamBudget, Word
from spotguard.control.status import market
from spotguard.control.sweep import commands
from spotguard.events import keys
from spotguard.events.states import CheckpointKind, Market
from spotguard.launch.aws_prices import PricePoint
from spotguard.launch.base import Offer, PriceSource, Skipped, Survey, Unchecked
from spotguard.policy.market.sightings import Sighting
from spotguard.policy.plan.batch_curve import BatchCurve, TriedSize
from spotguard.policy.plan.forecast import CostForecast
from spotguard.policy.plan.smoke import Smoke
from spotguard.shared.units import SystemClock
from spotguard.storage import open_store
from spotguard.testing import MemoryStore
from spotguard.testing.job import JobFate
from spotguard.testing.launcher import FAKE_OFFER
from tests.checkpoint.crashes.savings import blocks, claim, flip, save
from tests.cli import pictures
from tests.control.doctor.test_orphans import FakeBooks, beats, cluster
from tests.control.profile.test_profile_request import respond
from tests.control.run_folders import make_run
from tests.control.world import RUN_ID, World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORETOLD = CostForecast(
    work_s=3600.0,
    work_from="--work",
    cost_usd=9.0,
    cost_low_usd=8.0,
    cost_high_usd=11.0,
    finish_at=7200.0,
    finish_low_at=7000.0,
    finish_high_at=7900.0,
    late_pct=0.0,
    on_demand_usd=30.0,
    market="V100 as recorded in 8 zones of aws",
    market_at=1.0,
)
POINT = PricePoint(at=9.0, region="r", zone="y", instance_type="t", usd_per_h=0.4)

Documents = dict[str, list[Any]]
"""Documents by the command that printed them."""

_OF_TERMINALS = ("FORCE_COLOR", "COLUMNS", "LINES")


def stand_alone(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Redirect spotguard's home, which is returned, and stand in an empty folder, `work`."""
    for name in list(os.environ):
        if name.startswith(("SPOTGUARD_", "SKYPILOT_")) or name in _OF_TERMINALS:
            patch.delenv(name)
    home = folder / "home"
    patch.setenv("SPOTGUARD_HOME", str(home))
    patch.setenv("SPOTGUARD_SMOKE_WHEN", "never")  # real processes; who tests it says so
    patch.setenv("SKY_RUNTIME_DIR", str(folder))  # a SkyPilot that was never used
    (folder / "work").mkdir(parents=True)
    patch.chdir(folder / "work")
    return home


def all_documents(folder: Path) -> Documents:
    """Return what each command prints of situations that differ as much as they can."""
    documents: Documents = {}
    for number, part in enumerate(
        (_of_runs, _of_teams, _of_sweeps, _of_plans, _of_the_doctor, _of_checkpoints)
    ):
        with pytest.MonkeyPatch.context() as patch:
            home = stand_alone(patch, folder / str(number))
            for command, printed in part(patch, home):
                documents.setdefault(command, []).extend(printed)
    return documents


def _printed(*words: str, args: tuple[str, ...] = (), codes: tuple[int, ...] = (0,)) -> list[Any]:
    """Return the documents that a command prints: one, or one on each line.

    Args:
        words: the command line.
        args: the script's own arguments.
        codes: exit codes that it may end with.
    """
    arguments = [*words, "--json", *(("--", *args) if args else ())]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        code = main(arguments)
    assert code in codes, (arguments, code)
    if words[0] == "logs":
        return [json.loads(line) for line in out.getvalue().splitlines()]
    return [json.loads(out.getvalue())]


# ---------------------------------------------------------------- runs


def _of_teams(patch: pytest.MonkeyPatch, home: Path) -> Iterator[tuple[str, list[Any]]]:
    store = str(home / "team")
    (home / "team").mkdir(parents=True)
    yield "team", _printed("team", store)
    yield "team", _printed("team", store, "--budget", "100 / week")
    for run_id, most_usd in (("run-1", 80.0), ("run-2", 30.0)):
        word = Word(spent=0.0, most=most_usd, living=False)
        TeamBudget(open_store(store), SystemClock(), run_id).ask(word)
    yield "team", _printed("team", store)


def _of_sweeps(patch: pytest.MonkeyPatch, home: Path) -> Iterator[tuple[str, list[Any]]]:
    """A sweep of which one point is over and one goes on; and one whose runs are not begun."""
    patch.setattr(start, "start", lambda folder: None)
    script, store = _script(), str(home / "store")
    named = ("up", script, "--store", store, "--budget", "4", "--yes", "--detach")
    yield "sweep", _printed(*named, "--sweep", "lr=1,2", "--sweep-metric", "loss")
    sweep_id = commands.name_of(None)
    (home / "eventful").mkdir()
    _eventful(home / "eventful")
    (home / "eventful" / "journal.db").replace(home / "runs" / f"{sweep_id}-01" / "journal.db")
    yield "sweep", _printed("sweep")
    yield "sweep", _printed("sweep", f"{store}/{sweep_id}")
    yield "sweep", _printed("sweep", "--stop")


def _of_runs(patch: pytest.MonkeyPatch, home: Path) -> Iterator[tuple[str, list[Any]]]:
    patch.setattr(api, "ensure_controlled", lambda run_id: False)
    patch.setattr(api, "create_run", lambda spec, found, **code: RUN_ID)
    patch.setattr(api, "start_controller", lambda run_id: None)
    patch.setattr(api, "resume", lambda run_id, **limits: None)
    lines = [LogLine(attempt=1, node=0, text="step 8\n"), LogLine(attempt=2, node=None, text="x")]
    patch.setattr(api, "logs", lambda run_id, follow, query: iter(lines))
    script = _script()
    settled = (_eventful, _failed)
    for number, live in enumerate(
        (*settled, _unpriced, _waiting, _queued, _just_created, _never_launched)
    ):
        patch.setenv("SPOTGUARD_HOME", str(home / str(number)))
        folder = home / str(number) / "runs" / RUN_ID
        folder.mkdir(parents=True)
        live(folder)
        yield "status", _printed("status")
        detach = () if live in settled else ("--detach",)
        codes = (10, 20) if live in settled else (0,)
        yield "up", _printed("up", script, "--yes", *detach, codes=codes)
        yield "resume", _printed("resume", *detach, codes=codes)
        yield "history", _printed("history", "--all")
        yield "runs", _printed("runs")
        yield "report", _printed("report")
        if live is _eventful:
            yield "profile", _profiles(patch)
        yield "logs", _printed("logs")
        if live is _eventful:
            yield "drill", _drills(patch, script)
    shown = pictures.run(recoveries=(pictures.recovery(),))
    patch.setattr(api, "view", lambda run_id: shown)
    patch.setattr(api, "foretold", lambda run_id: replace(shown, forecast=FORETOLD))
    yield "status", _printed("status")
    yield "up", _printed("up", script, "--yes", "--detach")
    yield "resume", _printed("resume", "--detach")


def _profiles(patch: pytest.MonkeyPatch) -> list[Any]:
    """Print what two ranks of the first attempt recorded."""
    store = MemoryStore()
    respond(store, 0, 1, attempt=1)
    with patch.context() as meanwhile:
        opened = OpenedRun(run_id=RUN_ID, store=store, at_rest=False)
        meanwhile.setattr(find, "open_run", lambda text: opened)
        return _printed("profile", "--attempt", "1")


def _script() -> str:
    with open("job.py", "w") as file:  # noqa: PTH123 - in the folder in which we are
        file.write("import spotguard.runtime as spotguard\n\nrun = spotguard.init()\n")
    return "job.py"


def _eventful(folder: Path) -> None:
    """Train through notices, losses, silence and refusals until the budget is used up."""
    fates = {
        1: JobFate(how="notice", at_s=9, regroup_s=2.0),
        2: JobFate(how="lose_and_tell", at_s=9),
        3: JobFate(how="silence", at_s=5, for_s=40.0),
    }
    world = World(
        folder,
        limits=Limits(budget_usd=0.15, nodes_min=1, nodes_max=3),
        spec={"on_demand_infra": "aws"},
        fates=fates,
        total_steps=10_000,
    )
    world.launcher.refuse_late("no more of these").fail_down("no answer")
    world.run_until(12.0)
    key = keys.event(1, at=world.clock.now(), node=3, rank=3, count=1)
    world.store.put(key, b"rubbish")
    world.run()


def _failed(folder: Path) -> None:
    """Be stopped by the user, resumed with a deadline, and fail by the script's own error."""
    world = World(folder, fates={1: JobFate(how="term", at_s=9), 3: JobFate(how="fail", at_s=4)})
    world.run_until(16.0)
    world.write(Kind.USER_STOP)
    world.run()
    limits = Limits(deadline_at=world.clock.now() + 1e6)
    world.write(Kind.RESUMED, {"limits": limits_to_json(limits)})
    world.run()


def _unpriced(folder: Path) -> None:
    """Be in the middle of training where no price is known; the launcher says nothing."""
    nowhere = _offer("fake", Market.SPOT)
    world = World(folder, launcher={"offers": [nowhere]}, total_steps=10_000)
    world.run_until(8.0)
    world.launcher.outage_until = world.clock.now() + 30.0
    world.run_until(35.0)


def _never_launched(folder: Path) -> None:
    """Never train: the launcher fails."""
    world = World(folder)
    world.launcher.fail_launch("the disk of the machine is full")
    world.run()


def _waiting(folder: Path) -> None:
    """Wait for capacity."""
    World(folder, launcher={"capacity": 0}).run_until(5.0)


def _queued(folder: Path) -> None:
    """Wait for the team's money."""
    world = World(folder)
    world.write(Kind.WAITING, {"retry_at": world.clock.now(), "why": "too little", "team": True})


def _just_created(folder: Path) -> None:
    """Be nothing but asked for."""
    World(folder)


def _drills(patch: pytest.MonkeyPatch, script: str) -> list[Any]:
    found = Finding(variable="schedule", label="scheduler", step=13, detail="starts again")
    ended = api.view(RUN_ID).attempts[:-1]
    reports = (
        DrillReport(
            passed=not findings,
            summary="one state is not restored",
            findings=findings,
            notes=notes,
            interruptions=[drill.interruption(attempt) for attempt in ended],
            steps=40,
            parted_at=parted_at,
            largest_loss_difference=drift,
        )
        for findings, notes, parted_at, drift in (([found], ["log"], 13, None), ([], [], None, 0.0))
    )
    printed = []
    for report in reports:
        patch.setattr(doctor, "run_drill", lambda *_, report=report: report)
        printed += _printed("drill", script, codes=(0, 10))
    return printed


# ---------------------------------------------------------------- before a run


def _of_plans(patch: pytest.MonkeyPatch, home: Path) -> Iterator[tuple[str, list[Any]]]:
    script = _script()
    job = ("--env", "SECRET=hunter2", "--interrupt", "all@step=9:kill", "--budget", "200")
    yield "config show", _printed("config", "show", script)
    yield "config show", _printed("config", "show", script, *job)
    yield "plan", _printed("plan", script)
    short = ("--work", "1h", "--deadline", "3h", "--runs", "2", "--market", "H100")
    yield "simulate", _printed("simulate", script, *short)
    found = Survey(
        offers=(FAKE_OFFER, _offer("aws", Market.SPOT, 0.25), _offer("gcp", Market.ON_DEMAND)),
        skipped=(Skipped(place="aws/eu-west-1", market=Market.SPOT, why="has no price"),),
        sources=(
            PriceSource(infra="aws", source="SkyPilot's catalogue", read_at=1_700_000_000.5),
            PriceSource(infra="gcp", source="SkyPilot's catalogue", read_at=None),
        ),
        unchecked=(Unchecked(place="slurm/lab/spot", why="SkyPilot does not answer"),),
    )
    patch.setenv("SPOTGUARD_PHASES", "[{ until_step = 5 }, { nodes = 2, price = 0.5 }]")
    yield "plan", _printed("plan", script)
    patch.delenv("SPOTGUARD_PHASES")
    patch.setattr(launching, "survey", lambda spec, tell: found)
    yield "plan", _printed("plan", script, "--infra", "aws", "--gpus", "B300")
    patch.setattr(api, "plan_forecast", lambda spec, found, state_bytes: FORETOLD)
    yield "plan", _printed("plan", script, "--start-at", "2030-05-01T22:00Z")
    yield "market show", _printed("market", "show")
    lost = Sighting(at=5.0, kind="lost", place="aws/r/z/t", accelerator="V100", age_s=9.0)
    price = Sighting(at=6.0, kind="price", place="aws/r/z/u", usd_per_h=0.5)
    note_market(market_path(), [lost, price])
    yield "market show", _printed("market", "show")
    patch.setattr(market, "spot_prices", lambda region, kinds, *, days, now: [POINT])
    yield "market refresh", _printed("market", "refresh")
    with open(script, "w") as file:  # noqa: PTH123 - in the folder in which we are
        file.write("# /// script\n# dependencies = ['no-such-thing']\n# ///\n")
        file.write("import spotguard.runtime as spotguard\n\nrun = spotguard.init()\n")
    rules = ("--on-demand", "fallback-after 20m", "--on-demand-infra", "gcp", "--deadline", "9h")
    sizes = ("--global-batch", "20", "--micro-batch", "8")
    smoke = Smoke(
        state_bytes=4_000_000_000,
        save_s=9.5,
        step_s=0.25,
        step_samples=2,
        first_step_s=11.0,
        at=1_700_000_000.5,
        emergency_s=20.2,
        notice_s=120.0,
    )
    patch.setattr(launching, "known_smoke", lambda spec: smoke)
    tried = (
        TriedSize(samples=2, fits=True, peak_bytes=400_000_000, pass_s=0.1),
        TriedSize(samples=62, fits=True, peak_bytes=700_000_000, pass_s=1.0),
        TriedSize(samples=128, fits=False, peak_bytes=None, pass_s=None),
    )
    curve = BatchCurve(
        memory_bytes=1_000_000_000,
        kept_free_bytes=100_000_000,
        global_batch_size=512,
        ranks=2,
        most=256,
        chosen=58,
        tried=tried,
    )
    patch.setattr(batch_trial, "try_batches", lambda spec, tell, **_: curve)
    more = ("--nodes", "1:4", "--probe")
    yield "plan", _printed("plan", script, *job, *rules, *sizes, *more, args=("--lr",))


def _offer(infra: str, market: Market, price: float | None = None) -> Offer:
    return Offer(
        infra=infra,
        region=None,
        zone=None,
        instance_type=None,
        market=market,
        price_usd_per_h=price,
        on_demand_usd_per_h=None,
    )


# ---------------------------------------------------------------- the doctor


def _of_the_doctor(patch: pytest.MonkeyPatch, home: Path) -> Iterator[tuple[str, list[Any]]]:
    patch.setattr(doctor_store, "SPEED_BYTES", 1_000_000)
    patch.setattr(checks, "check_torch", checks.check_python)
    yield "doctor", _printed("doctor")
    (home.parent / "file").write_text("")
    yield "doctor", _printed("doctor", str(home.parent / "file" / "store"), codes=(3,))
    make_run(home, RUN_ID)
    beats(home, 1_700_000_000.0)
    listed = [
        cluster(home),
        cluster(home, "job-1-2", instance_type=None, price_usd_per_h=None, sky_usd=None),
    ]
    patch.setattr(doctor, "skypilot_books", lambda: FakeBooks(listed=listed))
    said = Clouds(asked=True, named=("aws",), enabled=("gcp",), disabled={"aws": "no credentials"})
    patch.setattr(checks, "look_at_clouds", lambda places: said)
    yield "doctor", _printed("doctor", codes=(3,))
    yield "doctor", _printed("doctor", "--end-orphans", "--yes", codes=(0, 3))


# ---------------------------------------------------------------- checkpoints


def _of_checkpoints(patch: pytest.MonkeyPatch, home: Path) -> Iterator[tuple[str, list[Any]]]:
    store = make_run(home, "a-run", settled=True)
    claim(store, 1)
    save(store, 10)
    save(store, 20)
    claim(store, 2, keys.checkpoint(20, 1))
    save(store, 30, 1)
    save(store, 30, 2, parent=keys.checkpoint(20, 1))
    save(store, 40, 2, parent=keys.checkpoint(30, 2))
    write_shard(store, keys.checkpoint(50, 2), shard_file(0, 2), blocks(50))
    yield "checkpoints show", _printed("checkpoints", "show", "--step", "10")
    store.delete(keys.manifest(keys.checkpoint(20, 1)))
    yield "checkpoints show", _printed("checkpoints", "show")
    yield "checkpoints verify", _printed("checkpoints", "verify", "--all")
    flip(store, keys.checkpoint(40, 2) + shard_file(1, 2), -9)
    yield "checkpoints verify", _printed("checkpoints", "verify", "--all", codes=(10,))
    yield "checkpoints ls", _printed("checkpoints", "ls")
    flip(store, keys.claim(2), 8)
    yield "checkpoints ls", _printed("checkpoints", "ls")
    yield "checkpoints archive", _archived(patch)


def _archived(patch: pytest.MonkeyPatch) -> list[Any]:
    store = MemoryStore()  # a folder has no archive
    claim(store, 1)
    for step in (10, 20, 30, 40):
        kind = CheckpointKind.BEST if step == 20 else CheckpointKind.PERIODIC
        save(store, step, kind=kind, created_at=1_600_000_000.0 + step)
    opened = OpenedRun(run_id="a-run", store=store, at_rest=True)
    patch.setattr(api_checkpoints, "open_run", lambda run: opened)
    how = ("checkpoints", "archive", "a-run", "--older-than", "90d")
    return [*_printed(*how, "--dry-run"), *_printed(*how, "--yes")]
