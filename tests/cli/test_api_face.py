"""The public names: the documented example works, and the commands use no others for the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard import api
from spotguard.control.controller import start
from spotguard.control.journal.record import Kind

if TYPE_CHECKING:
    import pytest

    from spotguard.control.run_folder import RunFolder
    from tests.cli.fake_control import FakeControl

ROOT = Path(__file__).parents[2]
_BEHIND = {
    *("view", "history", "logs", "request_stop", "request_down", "resume"),
    *("create_run", "start_controller", "list_runs", "list_stored_runs"),
}
_SWEEPS = "spotguard.control.sweep.commands"
"""What `spotguard.api` has under its own names."""


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


def test_commands_use_the_public_names() -> None:
    """So a program can do what a person can, and both find the same errors."""
    folder = ROOT / "spotguard" / "cli"
    wrong = []
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        inner = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "spotguard.control"
            for alias in node.names
        }
        wrong += [
            f"{path.stem}:{node.lineno} {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr in _BEHIND
            and ast.unparse(node.value) in inner
        ]
        wrong += [
            f"{path.stem}:{node.lineno} imports {_SWEEPS}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and _SWEEPS in (node.module, *(f"{node.module}.{each.name}" for each in node.names))
        ]
    assert not wrong


def test_every_public_name_is_documented_and_typed() -> None:
    """Each function and method says what it does, and its types."""
    tree = ast.parse(Path(api.__file__).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert {"up", "runs", "stop", "status"} <= {node.name for node in functions}
    for node in functions:
        assert ast.get_docstring(node), node.name
        assert node.returns is not None, node.name
