from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.lab.lab_jobs import Lab, Said

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GOOD = "import spotguard.runtime as spotguard\nrun = spotguard.init()\n"
BLOCK = "# /// script\n# [tool.spotguard]\n# {}\n# ///\n" + GOOD


@dataclass(frozen=True)
class Bad:
    """A command line (after `up`), the files around it, and what must be said."""

    words: tuple[str, ...]
    """One of them is `job.py`, which is `script`."""
    said: tuple[str, ...]
    code: int = 2
    script: str = GOOD
    files: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


CASES = {
    "missing file": Bad(("nowhere.py",), ("nowhere.py",)),
    "folder": Bad((".",), ("folder",)),
    "no spotguard in it": Bad(("job.py",), ("job.py", "import spotguard"), script="print(1)\n"),
    "syntax error": Bad(("job.py",), ("job.py", "line 3"), script=GOOD + "def (:\n"),
    "negative budget": Bad(("job.py", "--budget", "-5"), ("budget", "-5")),
    "zero budget": Bad(("job.py", "--budget", "0"), ("budget", "0")),
    "NaN budget": Bad(("job.py", "--budget", "nan"), ("budget", "nan")),
    "infinite budget": Bad(("job.py", "--budget", "inf"), ("budget", "inf")),
    "budget in words": Bad(("job.py", "--budget", "lots"), ("budget", "lots")),
    "budget too small to start": Bad(("job.py", "--budget", "0.001"), ("budget", "--budget"), 20),
    "nodes backwards": Bad(("job.py", "--nodes", "4:1"), ("nodes", "4:1")),
    "no nodes": Bad(("job.py", "--nodes", "0"), ("nodes", "0")),
    "option with a typo": Bad(("job.py", "--bugdet", "5"), ("--bugdet", "--budget")),
    "script's own option": Bad(("job.py", "--lr", "3e-4"), ("--lr", "`--`")),
    "key with a typo": Bad(
        ("job.py",), ("bugdet", "budget"), files={"spotguard.toml": "bugdet = 5\n"}
    ),
    "broken settings file": Bad(
        ("job.py",), ("spotguard.toml", "line 1"), files={"spotguard.toml": "budget = = 5\n"}
    ),
    "variable with a typo": Bad(
        ("job.py",), ("SPOTGUARD_BUGDET", "SPOTGUARD_BUDGET"), env={"SPOTGUARD_BUGDET": "5"}
    ),
    "bad variable": Bad(("job.py",), ("SPOTGUARD_BUDGET", "-5"), env={"SPOTGUARD_BUDGET": "-5"}),
    "script block with a typo": Bad(
        ("job.py",), ("nodse", "nodes", "job.py"), script=BLOCK.format("nodse = 2")
    ),
    "bad script block": Bad(("job.py",), ("nodes", "job.py"), script=BLOCK.format("nodes = -2")),
    "store below a file": Bad(
        ("job.py", "--store", "file.txt/store"), ("file.txt",), 3, files={"file.txt": "x"}
    ),
    "store of an unknown kind": Bad(("job.py", "--store", "ftp://x/y"), ("ftp",)),
    "unknown template": Bad(("job.py", "--template", "slrum"), ("slrum", "slurm")),
    "unknown place": Bad(("job.py", "--infra", "mars"), ("infra", "mars", "local")),
    "interruption that is none": Bad(("job.py", "--interrupt", "tomorrow"), ("tomorrow",)),
    "interruption with a typo": Bad(
        ("job.py", "--interrupt", "node=1@step=4:notcie"), ("notcie", "notice")
    ),
    "missing trace": Bad(("job.py", "--trace", "no.json"), ("trace", "no.json")),
    "trace that is none": Bad(
        ("job.py", "--trace", "t.json"), ("trace", "t.json"), files={"t.json": '{"capacity": 3}'}
    ),
    "no such cloud": Bad(("job.py", "--metadata", "gpc"), ("gpc", "gcp")),
    "bad save interval": Bad(("job.py", "--save-every", "often"), ("save_every", "often")),
    "variable of ours": Bad(
        ("job.py", "--env", "SPOTGUARD_ATTEMPT=7"), ("SPOTGUARD_ATTEMPT", "spotguard itself")
    ),
    "bad speed": Bad(("job.py", "--speed-up", "0"), ("speed_up", "0")),
    "bad deadline": Bad(("job.py", "--deadline", "soon"), ("deadline", "soon")),
}


@pytest.mark.parametrize("bad", CASES.values(), ids=CASES)
def test_bad_input(lab: Lab, bad: Bad) -> None:
    """One clear sentence that names the culprit, the right exit code, and nothing half made."""
    (lab.work / "job.py").write_text(bad.script)
    for name, body in bad.files.items():
        (lab.work / name).write_text(body)

    said = lab.spotguard("up", *bad.words, "--yes", env=bad.env)

    check_said(said, bad.code, *bad.said)
    for folder in ("runs", "store"):
        path = lab.home / folder
        assert not path.exists() or not [p for p in path.rglob("*") if p.is_file()]


def check_said(said: Said, code: int, *words: str) -> None:
    """Assert exactly one sentence on stderr, an optional hint, and this exit code.

    A hint may go on in indented lines: code to copy.
    """
    lines = said.err.splitlines()
    assert said.code == code, said.out + said.err
    assert lines[0].startswith("error: "), said.err
    assert len(lines) == 1 or lines[1].startswith("hint: "), said.err
    assert all(line.startswith("    ") for line in lines[2:]), said.err
    assert "Traceback" not in said.out + said.err
    assert "bug of spotguard" not in said.err
    for word in words:
        assert word in said.err, said.err


@pytest.mark.parametrize("command", ["status", "history", "logs", "stop", "down", "resume"])
def test_unknown_run(lab: Lab, command: str) -> None:
    """A run that does not exist is a usage error, for every command that takes one."""
    check_said(lab.spotguard(command, "nobody"), 2, "no run")


def test_home_that_cannot_be_written(lab: Lab, tmp_path: Path) -> None:
    """A home below a file is the environment's fault, and named."""
    (tmp_path / "file").write_text("x")
    (lab.work / "job.py").write_text(GOOD)
    said = lab.spotguard(
        "up", "job.py", "--yes", env={"SPOTGUARD_HOME": str(tmp_path / "file" / "home")}
    )

    check_said(said, 3, "file/home")
