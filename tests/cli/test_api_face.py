"""The public names: the documented examples work, and loading them costs next to nothing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard import api
from spotguard.control.controller import start
from spotguard.control.journal.record import Kind
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    import pytest

    from spotguard.control.run_folder import RunFolder
    from tests.cli.fake_control import FakeControl

ROOT = Path(__file__).parents[2]
RUN = "job-261125-101500-0c1f"
PAGE = ROOT / "docs" / "reference" / "api.md"
MODULES = [module.name for module in pkgutil.iter_modules(api.__path__)]


def test_the_documented_example_runs(
    control: FakeControl, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands on the page, and asks for what it says."""
    page = (ROOT / "docs" / "reference" / "team.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    Path(script).rename(Path(script).with_name("train.py"))
    monkeypatch.chdir(Path(script).parent)
    exec(example, {})
    asked = [each[0] for each in control.asked]
    assert asked == ["create", "start", "logs", "stop", "resume"]
    spec = control.asked[0][1]
    assert (spec.budget_usd, spec.args, spec.nodes.max) == (20.0, ("--lr", "3e-4"), 2)
    assert control.asked[-1][2] == 30.0


def test_the_documented_example_of_a_sweep_runs(
    home: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands on the page, with controllers that only say that all is done."""
    page = (ROOT / "docs" / "reference" / "sweeps.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    Path(script).rename(Path(script).with_name("train.py"))
    monkeypatch.chdir(Path(script).parent)
    monkeypatch.setattr(start, "start", _be_done)
    exec(example, {})
    said = capsys.readouterr().out
    assert "{'lr': '1e-3'} finished None all steps done" in said
    assert "{'lr': '3e-4'} finished None all steps done" in said


def _be_done(folder: RunFolder) -> None:
    with folder.journal() as journal:
        data = {"state": "finished", "detail": "all steps done", "exit_code": 0}
        journal.append(Kind.SETTLED.value, at=folder.clock().now(), data=data)


def _examples() -> list[str]:
    examples: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return examples


def test_the_page_of_the_names_has_examples_that_run(
    home: Path,
    script: str,
    quick_doctor: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As they stand there, on a run that this machine knows: each says what the page says."""
    make_run(home, RUN, settled=True)
    Path(script).rename(Path(script).with_name("train.py"))
    monkeypatch.chdir(Path(script).parent)
    plan, run, rest = _examples()
    exec(plan, {})
    assert capsys.readouterr().out.startswith("local ")
    exec(run, {})
    said = capsys.readouterr().out
    assert said.startswith(f"{RUN} file://{home / 'store'}/{RUN} 0\n")
    assert RUN in said.splitlines()[-1], "it has no node to run a command on"
    exec(rest, {})
    said = capsys.readouterr().out
    assert "gpus V100:1" in said
    assert "<!doctype html>" in said.lower()


def test_the_examples_name_each_module() -> None:
    """So whoever looks for one finds its use, or its names, on that page."""
    page = PAGE.read_text()
    assert not [name for name in MODULES if f"spotguard.api.{name}" not in page]


def test_every_public_name_is_documented_and_typed() -> None:
    """Each function and method says what it does, and its types; each listed name is there."""
    for name in MODULES:
        module = importlib.import_module(f"spotguard.api.{name}")
        assert module.__all__ == sorted(module.__all__, key=str.lower)
        assert all(hasattr(module, each) for each in module.__all__)
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert ast.get_docstring(node), f"{name}.{node.name}"
                assert node.returns is not None, f"{name}.{node.name}"
    assert {"up", "plan", "runs", "sweep", "Run"} <= set(api.__all__)


def test_what_all_commands_load_is_light() -> None:
    """The names that each command begins with ask for no part of the controller, nor of a cloud."""
    code = (
        "import sys; import spotguard.api; heavy = ('pydantic', 'sky', *map('spotguard.'.__add__, "
        "('control', 'policy', 'launch', 'pages'))); "
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
