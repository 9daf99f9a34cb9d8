"""Smokes of whole scripts in real processes: what works passes, what does not is named by line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from spotguard.control.drill.smoke.run import known_smoke, run_smoke
from spotguard.errors import SmokeFailed
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.sources import resolve
from tests.control.drill.smoke.broken_scripts import (
    GOOD,
    HEAD,
    LOADER,
    LOSS,
    SCRIPTS,
    SETUP,
    TRACK,
    Broken,
    loop,
)
from tests.runtime.harness.processes import wait_until

if TYPE_CHECKING:
    from spotguard.spec.model import JobSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PATIENT = "200s"
"""Other tests run beside; of scripts that end by themselves, how long they take is not the point.
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder, with a home of its own."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def job(source: str, *args: str, limit: str = PATIENT, **flags: Any) -> JobSpec:
    """Return the job of a script on AWS."""
    Path("train.py").write_text(source)
    given = {"infra": "aws", "store": "s3://nowhere/runs", "smoke.limit": limit, **flags}
    return resolve("train.py", flags=given, args=args).spec


@pytest.mark.parametrize("broken", SCRIPTS.values(), ids=SCRIPTS)
def test_what_does_not_work_is_told_by_its_line(broken: Broken, folder: Path) -> None:
    """In one sentence, within the limit, and nothing is left: no process, no file."""
    began_at = time.monotonic()
    with pytest.raises(SmokeFailed) as problem:
        run_smoke(job(broken.source, limit=broken.limit or PATIENT), lambda _: None)
    told = problem.value.message
    assert f"train.py line {broken.line} (" in told, told
    assert broken.says in f"{told} {problem.value.hint}", told
    assert "\n" not in told
    assert problem.value.exit_code == 10
    if broken.limit:
        assert time.monotonic() - began_at < 60
    assert not list(spotguard_home().rglob("running-*"))
    assert not [
        found.pid
        for found in psutil.process_iter(["environ"])
        if str(spotguard_home()) in (found.info["environ"] or {}).get("SPOTGUARD_PROGRESS", "")
    ]
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_what_works_passes_and_is_not_tried_again_until_something_changes() -> None:
    """The plan learns what was measured; another file beside it, or argument, is tried anew."""
    Path("helper.py").write_text("LR = 1e-3\n")
    source = "import helper\n" + GOOD
    spec = job(source)
    assert known_smoke(spec) is None
    told: list[str] = []
    first = run_smoke(spec, told.append)
    assert first.smoke is not None
    assert not first.is_old
    assert first.smoke.state_bytes > 9 * 3 * 4
    assert first.smoke.notice_s == 120.0
    assert first.smoke.step_samples == 2
    assert first.smoke.step_s is not None
    assert len(told) == 2

    again = run_smoke(spec, told.append)
    assert again.is_old
    assert again.smoke == first.smoke == known_smoke(spec)
    assert len(told) == 2
    assert known_smoke(job(source, "--lr", "1")) is None
    Path("helper.py").write_text("LR = 1e-4\n")
    assert known_smoke(job(source)) is None


def test_a_smoke_touches_nothing_of_the_run() -> None:
    """No store, no tracker, no file after the loop, and no more samples than two steps need."""
    here = Path.cwd()  # the smoke's own folder is a copy, which goes away
    look = (
        "import json, os\n"
        'keep = ("SPOTGUARD_STORE", "WANDB_MODE", "MLFLOW_TRACKING_URI", "SPOTGUARD_SMOKE", '
        '"CUDA_VISIBLE_DEVICES", "SPOTGUARD_RUN_ID", "MINE")\n'
        f'with open("{here}/seen.jsonl", "a") as file:\n'
        "    print(json.dumps({k: os.environ.get(k) for k in keep}), file=file)\n"
    )
    count = f'open("{here}/batches.txt", "a").write(f"{{len(a)}} "); {LOSS}'
    source = look + HEAD + SETUP + TRACK + LOADER + loop(count) + f'open("{here}/model.pt", "w")\n'
    outcome = run_smoke(job(source, env={"MINE": "yes"}), lambda _: None)
    assert outcome.smoke is not None
    assert not Path("model.pt").exists()
    assert Path("batches.txt").read_text().split() == ["2"] * 3
    for line in Path("seen.jsonl").read_text().splitlines():
        assert str(spotguard_home() / "smokes") in line
        assert '"WANDB_MODE": "disabled"' in line
        assert '"CUDA_VISIBLE_DEVICES": ""' in line
        assert '"MLFLOW_TRACKING_URI": "file:' in line
        assert '"MINE": "yes"' in line


def test_a_script_that_needs_its_own_batches_is_tried_with_them() -> None:
    """Few samples are for the CPU's sake; they are no reason to refuse a script."""
    source = HEAD + SETUP + TRACK + LOADER + loop("loss = (model(a).view(8, 1) - b).pow(2).mean()")
    smoke = run_smoke(job(source), lambda _: None).smoke
    assert smoke is not None
    assert smoke.step_samples is None


def test_a_script_of_fewer_steps_passes() -> None:
    """It ends by itself, and the second process finds nothing left to do."""
    source = HEAD + SETUP + TRACK + LOADER + loop(total=1)
    assert run_smoke(job(source), lambda _: None).smoke is not None


def test_a_save_that_no_notice_leaves_time_for_is_refused_also_when_remembered() -> None:
    """How large it is was measured; what that means depends on nodes, cloud and market."""
    big = "run.track(big={'big': torch.zeros(5_000_000)})\n"
    source = HEAD + SETUP + TRACK + big + LOADER + loop()
    few = {"smoke.upload_mb_per_s": "0.15"}
    with pytest.raises(
        SmokeFailed, match=r"train.py line 8 .*2 min 41 s.*the notice is 2 min"
    ) as p:
        run_smoke(job(source, **few), lambda _: None)
    assert "--nodes" in p.value.hint
    with pytest.raises(SmokeFailed):
        run_smoke(job(source, **few), lambda _: None)
    for enough in ({"nodes": "2"}, {"market": "on_demand"}, {"infra": "aws,gcp"}, {}):
        spec = job(source, **({} if enough == {} else {**few, **enough}))
        if "gcp" in spec.infra:
            with pytest.raises(SmokeFailed, match="the notice is 30 s"):
                run_smoke(spec, lambda _: None)
            continue
        outcome = run_smoke(spec, lambda _: None)
        assert outcome.is_old


def test_what_this_machine_lacks_is_no_reason_to_refuse() -> None:
    """Nodes install what the script says it needs: here it cannot be tried, and that is said."""
    block = '# /// script\n# dependencies = ["no-such-package-xyz>=3"]\n# ///\n'
    outcome = run_smoke(job(block + "import no_such\n" + GOOD), lambda _: None)
    assert outcome.smoke is None
    assert "lacks no-such-package-xyz>=3" in outcome.skipped

    Path("needs.txt").write_text("# mine\nno-such-package-xyz  # really\n")
    outcome = run_smoke(job(GOOD, **{"node.requirements": "needs.txt"}), lambda _: None)
    assert "lacks no-such-package-xyz" in outcome.skipped

    spec = job("import no_such_kernels\n" + GOOD, **{"node.image": "docker:me/train:1"})
    outcome = run_smoke(spec, lambda _: None)
    assert "lacks no_such_kernels, which the nodes' image or setup may bring" in outcome.skipped


@pytest.mark.parametrize(
    ("files", "head", "says", "way_out"),
    [
        (
            {".gitignore": "*.yaml\n!base.yaml\n", "base.yaml": "lr: 1"},
            "open('base.yaml').read()\n",
            "base.yaml is not copied to the nodes, by line 1 of .gitignore",
            ".skyignore overrides it",
        ),
        (
            {".gitignore": "# made\ndata/\n", "data/__init__.py": ""},
            "import data\n",
            "data/__init__.py is not copied to the nodes, by line 2 of .gitignore",
            ".skyignore overrides it",
        ),
        (
            {},
            "open('linked/base.yaml').read()\n",
            "linked is a link that leads out",
            "--file-mount",
        ),
        ({}, "import xxhash, rich, moto\n", "moto is installed here, and nobody", "name moto"),
        (
            {"needs.txt": "rich\n"},
            "import rich, xxhash, moto\n",
            "moto is installed here, and nobody",
            "node.requirements",
        ),
    ],
)
def test_what_is_here_and_not_on_the_nodes_stops_it(
    folder: Path, files: dict[str, str], head: str, says: str, way_out: str
) -> None:
    """What is tried is what a node gets: the copy that SkyPilot makes, and packages with a name."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder.parent / "outside").mkdir()
    (folder.parent / "outside/base.yaml").write_text("lr: 1")
    (folder / "linked").symlink_to("../outside")
    flags = {"node.requirements": "needs.txt"} if "needs.txt" in files else {}
    with pytest.raises(SmokeFailed) as problem:
        run_smoke(job(head + GOOD, **flags), lambda _: None)
    assert "train.py line 1 (" in problem.value.message
    assert says in problem.value.message
    assert way_out in problem.value.hint


def test_too_little_memory_is_no_reason_to_refuse() -> None:
    """The nodes have more than this machine, or so it is hoped."""
    source = HEAD + SETUP + TRACK + LOADER + loop('raise MemoryError("no room")')
    outcome = run_smoke(job(source), lambda _: None)
    assert outcome.smoke is None
    assert "more memory" in outcome.skipped


def test_a_script_that_gathers_gradients_passes_and_is_told_of() -> None:
    """Over more steps than a smoke has: nothing proves that it is wrong; it is told each time."""
    each = "    optimizer.step()\n    optimizer.zero_grad()\n"
    every = "    if step.number % 4 == 3:\n" + each.replace("    ", "        ")
    body = loop().replace(each, every)
    spec = job(HEAD + SETUP + TRACK + LOADER + body)
    outcome = run_smoke(spec, lambda _: None)
    assert outcome.smoke is not None
    assert "train.py line 16 (`optimizer.step()`)" in outcome.warning
    assert known_smoke(spec) is None


_SMOKE = """
from spotguard.control.drill.smoke.run import run_smoke
from spotguard.spec.sources import resolve
flags = {"infra": "aws", "store": "s3://nowhere/runs", "smoke.limit": "600s"}
run_smoke(resolve("train.py", flags=flags, args=()).spec, lambda _: None)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_smoke_ends_with_the_command_that_made_it(folder: Path, number: signal.Signals) -> None:
    """Nobody else would stop its script, which would train here to the end."""
    begun = str(folder / "begun")  # where the script works, a copy is
    Path("train.py").write_text(HEAD + f"import time\nopen({begun!r}, 'w')\ntime.sleep(3600)\n")
    smoke = subprocess.Popen([sys.executable, "-c", _SMOKE], stderr=subprocess.DEVNULL)
    wait_until((folder / "begun").exists, lambda: "the script is run")
    smoked = psutil.Process(smoke.pid).children(recursive=True)
    smoke.send_signal(number)
    smoke.wait()
    assert smoked
    wait_until(lambda: not any(each.is_running() for each in smoked), lambda: "it is ended")
