from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import SpecError
from spotguard.spec.docs import configuration_page
from spotguard.spec.setting_catalogue import by_variable, catalogue
from spotguard.spec.sources import resolve
from spotguard.spec.starter import starter_files
from spotguard.spec.templates import template_names

if TYPE_CHECKING:
    from tests.spec.conftest import Resolve

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_reference_page_is_current() -> None:
    """docs/configuration.md is what the settings say: `python -m spotguard.spec.docs` writes it."""
    assert PAGE.read_text(encoding="utf-8") == configuration_page()


def test_the_page_can_be_written_by_the_command_it_names() -> None:
    """The command in the page works, also for a module that is run as a program."""
    command = [sys.executable, "-m", "spotguard.spec.docs"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == PAGE.read_bytes()


def test_every_setting_is_explained() -> None:
    """No setting without a documentation string, an example and the words for what is allowed."""
    for field in catalogue().values():
        assert field.doc.endswith("."), field.key
        assert field.setting.allowed, field.key
        assert field.setting.example, field.key


def test_no_two_settings_share_a_variable_or_a_flag() -> None:
    """Each variable and each option sets one thing."""
    with_variable = [field for field in catalogue().values() if field.variable]
    flags = [field.flag for field in catalogue().values() if field.flag]
    assert len(by_variable()) == len(with_variable)
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize("key", list(catalogue()))
def test_every_example_is_valid(resolve_job: Resolve, key: str) -> None:
    """What the reference page shows as an example is accepted."""
    table, _, name = key.rpartition(".")
    head = f"[{table}]\n" if table else ""
    resolved = resolve_job(project=f"{head}{name} = {catalogue()[key].setting.example}")
    assert any(value.origin.startswith("spotguard.toml") for value in resolved.values)


@pytest.mark.parametrize("template", template_names())
def test_a_fresh_start_resolves(tmp_path: Path, template: str) -> None:
    """What `init` writes is a job that `up` accepts, with that template and else the defaults."""
    for name, content in starter_files(template).items():
        (tmp_path / name).write_text(content)
    resolved = resolve("train.py", flags={}, environ={}, cwd=tmp_path)
    assert resolved.spec.template == template
    assert resolved.batches == (64, 8)
    given = [value.field for value in resolved.values if value.origin != "default"]
    assert given == ([] if template == "base" else ["template"])


def test_the_starters_comments_are_settings(tmp_path: Path) -> None:
    """Removing the '#' before any setting of the starter gives a file that is accepted."""
    files = starter_files()
    toml = re.sub(r"(?m)^# (?=\w+ = )", "", files["spotguard.toml"])
    (tmp_path / "train.py").write_text(files["train.py"])
    (tmp_path / "spotguard.toml").write_text(toml)
    resolved = resolve("train.py", flags={}, environ={}, cwd=tmp_path)
    origins = {value.field: value.origin for value in resolved.values}
    assert all(origin.startswith("spotguard.toml line ") for origin in origins.values())
    assert len(origins) == len(catalogue())


def test_the_starter_script_is_small_and_whole() -> None:
    """train.py stays under 50 lines and tracks all that changes."""
    script = starter_files()["train.py"]
    assert len(script.splitlines()) < 50
    ast.parse(script)
    assert "run.track(model=model, optimizer=optimizer, scheduler=scheduler)" in script


def test_the_starter_trains_on_the_device_that_the_rank_has() -> None:
    """On a GPU node, model and batches go to the GPU: a beginner copies what stands there."""
    script = starter_files()["train.py"]
    assert "nn.Linear(1, 1).to(run.device)" in script
    assert "model(x.to(run.device)), y.to(run.device)" in script


def test_an_unknown_template_is_refused() -> None:
    """A typo in `init --template` gets the nearest name."""
    with pytest.raises(SpecError) as caught:
        starter_files("azur")
    assert caught.value.hint == "did you mean 'azure'?"
