"""What a drill is asked for is checked before anything is trained."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control import api
from spotguard.control.drill.run import DrillOptions, run_drill
from spotguard.errors import SpecError, UsageError

if TYPE_CHECKING:
    from spotguard.spec.model import JobSpec


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a script; a drill that starts it fails the test, and nothing else is touched."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))

    def start(run_id: str) -> None:
        pytest.fail("the drill trained first")

    monkeypatch.setattr(api, "start_controller", start)
    path = tmp_path / "train.py"
    path.write_text("import spotguard.runtime\n")
    return path


@pytest.mark.parametrize(
    "options",
    [
        DrillOptions(steps=4),
        DrillOptions(steps=1, kills=1),
        DrillOptions(kills=60),
        DrillOptions(kills=10**9),
    ],
)
def test_too_many_interruptions_are_refused_at_once(
    script: Path, tmp_path: Path, options: DrillOptions
) -> None:
    """Each needs a step of its own; the sentence says how many fit, and nothing is left behind."""
    with pytest.raises(UsageError, match="too few for") as raised:
        run_drill(script, [], {}, options, lambda _: None)
    assert "--kills" in raised.value.hint
    assert not list((tmp_path / "home").glob("drills/*"))


@pytest.mark.parametrize(
    "flags", [{"save_every": "often"}, {"nproc_per_node": "0"}, {"local.speed_up": "x"}]
)
def test_settings_that_make_no_sense_are_refused_at_once(
    script: Path, tmp_path: Path, flags: dict[str, object]
) -> None:
    """A drill leaves no folder behind for a typo."""
    with pytest.raises(SpecError):
        run_drill(script, [], flags, DrillOptions(), lambda _: None)
    assert not list((tmp_path / "home").glob("drills/*"))


def test_a_script_that_is_missing_is_told_at_once(script: Path, tmp_path: Path) -> None:
    """As everywhere; and no folder is left."""
    with pytest.raises(SpecError, match="there is no file"):
        run_drill(script.with_name("gone.py"), [], {}, DrillOptions(), lambda _: None)
    assert not list((tmp_path / "home").glob("drills/*"))


SETTINGS = (
    'phases = [{ until_step = 9, infra = "aws", gpus = "A100:8" }, { nodes = 4 }]',
    'budget = 5\n[team]\nbudget = "50 / month"',
    'start_at = "2999-01-01T00:00Z"\ndeadline = "1m"\non_demand = "deadline"',
    'notify = ["https://h/"]\ncache = ["~/.cache/huggingface"]\nmax_price = 0.01',
    'market = "on_demand"\ntemplate = "./gone.yaml"',
    '[local]\nmtbf = "1s"\ninterrupt = ["all@step=1:kill"]',
    '[local]\ntrace = "gone.json"',
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_drill_is_the_same_whatever_is_set_for_the_real_run(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    """It runs here and now, is paid by nobody, tells nobody, and only its own plays disturb it."""
    monkeypatch.chdir(tmp_path)
    plain = drilled(script, monkeypatch)
    (tmp_path / "spotguard.toml").write_text(settings)
    assert drilled(script, monkeypatch) == plain
    [*_, calm] = plain
    assert (calm["name"], calm["local"]["interrupt"]) == ("drill-calm", [])


def drilled(script: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the jobs that a drill checks, then the undisturbed one, whose run is not begun."""
    jobs: list[dict[str, Any]] = []

    def noted(spec: JobSpec, *_: object) -> None:
        body = json.dumps(spec.to_json())
        jobs.append(json.loads(body.replace(Path(spec.store).parent.name, "DRILL")))

    def create(spec: JobSpec, **_: object) -> None:
        noted(spec)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(api, "launcher_for", noted)
        patch.setattr(api, "create_run", create)
        patch.setattr("spotguard.control.drill.run.time.strftime", lambda _: secrets.token_hex())
        with pytest.raises(KeyboardInterrupt):
            run_drill(script, [], {}, DrillOptions(), lambda _: None)
    return jobs


def test_a_drill_that_is_cut_off_leaves_no_run_behind(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the moment in which its controller is started: the first error counts."""
    down: list[str] = []

    def start(run_id: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "start_controller", start)
    monkeypatch.setattr(api, "request_down", down.append)
    with pytest.raises(KeyboardInterrupt):
        run_drill(script, [], {}, DrillOptions(), lambda _: None)
    [run_id] = down
    assert run_id.startswith("drill-calm-")
