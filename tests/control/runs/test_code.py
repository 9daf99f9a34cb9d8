"""A run's code is what it was when the run began, until a resume, which tells what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.control import create_run as admit
from spotguard.control.controller.one_run import run_store
from spotguard.control.handover.adopt import adopt_run
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.record import Kind
from spotguard.control.journal.stored import code as module
from spotguard.control.journal.stored.code import in_copy, local_variables, read_code
from spotguard.control.run_folder import RunFolder, runs_folder
from spotguard.control.status.history_words import history_lines
from spotguard.control.supervisor.skypilot_request import machine_for, template_for
from spotguard.errors import EnvironmentFailure, SpecError, UsageError
from spotguard.events import env, keys
from spotguard.launch.ranks.worker_environment import script_command
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.sources import resolve

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.spec.model import JobSpec

BLOCK = '# /// script\n# dependencies = ["einops"]\n# ///\n'
SCRIPT = BLOCK + "import spotguard.runtime\nimport pkg\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project that one stands in, with a home of its own."""
    top = tmp_path / "project"
    (top / "pkg").mkdir(parents=True)
    (top / "train.py").write_text(SCRIPT)
    (top / "pkg/__init__.py").write_text("")
    (top / "base.yaml").write_text("lr: 1")
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(top)
    return top


def _job(**flags: object) -> JobSpec:
    return resolve("train.py", flags=flags).spec


def _run(tmp_path: Path, **flags: object) -> tuple[RunFolder, list[str]]:
    said: list[str] = []
    store = str(tmp_path / "store")
    run_id = admit.create_run(_job(store=store, **flags), tell=said.append)
    folder = RunFolder(runs_folder() / run_id)
    with folder.journal() as journal:
        at_rest = {"state": "stopped", "detail": "by the test", "exit_code": 75}
        journal.append(Kind.SETTLED.value, at=read_record(journal).created_at, data=at_rest)
    return folder, said


def _code(folder: RunFolder) -> dict[str, object]:
    with folder.journal() as journal:
        return read_record(journal).code


def test_an_edit_comes_in_by_a_resume_alone_and_is_told(project: Path, tmp_path: Path) -> None:
    """Launches take the copy; `resume` takes the folder, and names what has changed."""
    folder, _ = _run(tmp_path)
    begun = _code(folder)
    assert (
        begun["digest"] == read_code(run_store(str(tmp_path / "store"), folder.run_id))[0]["digest"]
    )
    spec = _job()
    (project / "pkg/__init__.py").write_text("LR = 2")
    (project / "new.py").write_text("")
    (project / "train.py").unlink()
    copy = local_variables(begun, spec)[env.CODE]
    assert (tmp_path / copy / "train.py").read_text() == SCRIPT
    said: list[str] = []
    admit.admit_resume(folder.run_id, same_code=True, tell=said.append)
    assert (_code(folder), said) == (begun, [])
    (project / "train.py").write_text(SCRIPT)
    with folder.journal() as journal:
        data = {"state": "stopped", "detail": "by the test", "exit_code": 75}
        journal.append(Kind.SETTLED.value, at=read_record(journal).created_at, data=data)
    admit.admit_resume(folder.run_id, tell=said.append)
    assert said == [
        "code: 2 files changed since: new.py, pkg/__init__.py; resume --same-code keeps the old"
    ]
    assert _code(folder)["digest"] != begun["digest"]
    with folder.journal() as journal:
        lines = list(history_lines(journal.read(0)))
    assert any("with other code: new.py, pkg/__init__.py" in str(line) for line in lines)


def test_nodes_elsewhere_get_the_copy_with_all_that_each_launch_reads(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Script, block, requirements, template and folder of the task are those of the copy."""
    (project / "mine.yaml").write_text("resources: {disk_tier: high}\n")
    spec = _job(infra="aws", store="s3://b/p", template="mine.yaml")
    snapshot = module.fix_code(spec, lambda _: None)
    code = module.code_data(snapshot)
    (project / "train.py").write_text("import no_more\n")
    (project / "mine.yaml").write_text("resources: {disk_tier: low}\n")
    there = in_copy(spec, code)
    assert machine_for(there).requirements == ("einops",)
    assert template_for(there)["resources"]["disk_tier"] == "high"
    assert (tmp_path / there.script).read_text() == SCRIPT
    assert there.workdir == str(snapshot.files)
    assert in_copy(spec, {}) == spec  # a run that an earlier version began
    snapshot.folder.rename(snapshot.folder.with_name("gone"))
    with pytest.raises(EnvironmentFailure, match="resume RUN"):
        in_copy(spec, code)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("*\n!*.py\n", "line 1 of .gitignore"),
        ("# x\ntrain.py\n", "line 2 of .gitignore"),
    ],
)
def test_a_script_that_no_node_would_have_is_refused(project: Path, rules: str, words: str) -> None:
    """Nothing is launched whose script stays behind; the line and the way out are named."""
    (project / ".gitignore").write_text(rules)
    with pytest.raises(SpecError, match=words) as refused:
        module.fix_code(_job(infra="aws", store="s3://b/p"), lambda _: None)
    assert ".skyignore" in refused.value.hint


def test_whoever_adopts_a_run_goes_on_with_the_same_code_or_is_told(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code comes from a store: the folder of the other machine is compared with the list."""
    folder, _ = _run(tmp_path)
    digest = _code(folder)["digest"]
    place = str(tmp_path / "store" / folder.run_id)
    said: list[str] = []
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "other"))
    adopted = adopt_run(place, said.append, ask=lambda job: True)
    assert _code(adopted)["digest"] == digest
    assert (spotguard_home() / "code" / str(digest)).is_dir()
    assert not [words for words in said if words.startswith("code:")]
    (project / "pkg/__init__.py").write_text("other")
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "third"))
    adopted = adopt_run(place, said.append, ask=lambda job: True)
    (words,) = [words for words in said if words.startswith("code:")]
    assert "differs: pkg/__init__.py" in words
    with pytest.raises(UsageError, match="pkg/__init__"):
        admit.admit_resume(adopted.run_id, same_code=True)


def test_a_run_of_an_earlier_version_goes_on_and_is_fixed_by_its_next_resume(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the journal names no copy, the folder counts, as it did; a resume makes a copy."""
    with monkeypatch.context() as patch:
        patch.setattr(admit, "code_data", lambda _: {})
        folder, _ = _run(tmp_path)
    run_store(str(tmp_path / "store"), folder.run_id).delete(keys.CODE)
    assert _code(folder) == {}
    assert local_variables({}, _job()) == {}
    said: list[str] = []
    admit.admit_resume(folder.run_id, tell=said.append)
    assert _code(folder)["kind"] == "code"
    assert said == []


def test_the_code_of_a_script_that_lies_elsewhere_is_fixed_as_well(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results may go to another folder than that of the code, where one stands."""
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path / "results")
    spec = resolve(project / "train.py", flags={}).spec
    code = module.code_data(module.fix_code(spec, lambda _: None))
    given = local_variables(code, spec)
    assert given[env.CODE_OF] == f"{tmp_path / 'results'}:{project}"
    (project / "train.py").write_text("other")
    command = script_command([spec.script, "--lr"], given)
    assert (tmp_path / command[1]).read_text() == SCRIPT
    assert command[2:] == [spec.script, "--lr"]
