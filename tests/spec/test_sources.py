from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import SpecError
from spotguard.events.env import JOB_VARIABLES
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.sources import resolve

if TYPE_CHECKING:
    from spotguard.spec.sources import Resolved
    from tests.spec.conftest import Resolve


def origin(resolved: Resolved, field: str) -> str:
    """Return who gave a field's value."""
    return next(v.origin for v in resolved.values if v.field == field)


def test_each_source_beats_the_ones_below_it(resolve_job: Resolve) -> None:
    """Flag > variable > script block > project file > user file > default; each says who it was."""
    sources = [
        ("flags", {"budget": 1}, "flag --budget"),
        ("environ", {"SPOTGUARD_BUDGET": "2"}, "env SPOTGUARD_BUDGET"),
        ("block", "[tool.spotguard]\nbudget = 3", "job.py line 3"),
        ("project", "budget = 4", "spotguard.toml line 1"),
        ("user", "\n\nbudget = 5", "/home/config.toml line 3"),
    ]
    for first in range(len(sources)):
        given = {name: value for name, value, _ in sources[first:]}
        resolved = resolve_job(**given)  # type: ignore[arg-type]
        assert resolved.spec.budget_usd == first + 1
        assert origin(resolved, "budget").endswith(sources[first][2])
    resolved = resolve_job()
    assert resolved.spec.budget_usd is None
    assert origin(resolved, "budget") == "default"


def test_sources_mix_setting_by_setting(resolve_job: Resolve) -> None:
    """A table in one file does not hide the same table in another."""
    resolved = resolve_job(
        project="[local]\nmtbf = '60s'\n[env]\nA = 'project'\nB = 'project'",
        user="[local]\nmtbf = '1h'\ninterrupt_seed = 7\n[env]\nC = 'user'",
        flags={"env": ["B=flag=1"]},
    )
    assert (resolved.spec.local.mtbf_s, resolved.spec.local.interrupt_seed) == (60.0, 7)
    assert resolved.spec.env == {"A": "project", "B": "flag=1", "C": "user"}
    assert origin(resolved, "env.B") == "flag --env"
    assert origin(resolved, "local.interrupt_seed").endswith("config.toml line 3")


def test_defaults_stand_for_themselves(resolve_job: Resolve, tmp_path: Path) -> None:
    """Without any setting there is a whole spec: in this folder, with the store in the home."""
    spec = resolve_job().spec
    assert (spec.name, spec.workdir, spec.infra) == ("job", str(tmp_path), "local")
    assert spec.store == str(tmp_path / "home" / "store")
    assert (spec.nodes.min, spec.nodes.max, spec.save_every) == (1, 1, "auto")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"environ": {"SPOTGUARD_BUDGTE": "1"}}, ["SPOTGUARD_BUDGTE", "'SPOTGUARD_BUDGET'"]),
        ({"project": "budgte = 1"}, ["budgte", "spotguard.toml", "'budget'"]),
        ({"block": "[tool.spotguard]\nnods = 2"}, ["nods", "job.py", "'nodes'"]),
        ({"user": "savE_evry = 'auto'"}, ["savE_evry", "config.toml", "'save_every'"]),
        ({"project": "[local]\nspeedup = 3"}, ["local.speedup", "'local.speed_up'"]),
        ({"project": "mtbf = '60s'"}, ["mtbf", "[local]"]),
        ({"flags": {"bugdet": 3}}, ["bugdet", "'budget'"]),
        ({"project": "[zzzz]\nq = 1"}, ["zzzz", "known are", "budget"]),
    ],
)
def test_a_name_that_does_not_exist_gets_the_nearest(
    resolve_job: Resolve, given: dict[str, object], said: list[str]
) -> None:
    """A typo is never ignored: the message names it, where it stands, and what it should be."""
    with pytest.raises(SpecError) as caught:
        resolve_job(**given)  # type: ignore[arg-type]
    for words in said:
        assert words in f"{caught.value} {caught.value.hint}"


def test_the_jobs_own_variables_are_no_typos(resolve_job: Resolve) -> None:
    """A command run inside a job does not stumble over what the launcher told the job."""
    own = dict.fromkeys(JOB_VARIABLES, "7") | {"SPOTGUARD_DEBUG": "1", "SPOTGUARD_SAVE_EVERY": "9s"}
    resolved = resolve_job(environ=own)
    assert (resolved.spec.seed, resolved.spec.save_every) == (7, "9s")
    assert resolved.spec.local.metadata == "aws"


def test_a_wish_to_trace_samples_reaches_the_job(resolve_job: Resolve) -> None:
    """`SPOTGUARD_TRACE_SAMPLES=path spotguard up …` is passed on; other job variables are not."""
    spec = resolve_job(environ={"SPOTGUARD_TRACE_SAMPLES": "/x", "SPOTGUARD_ATTEMPT": "3"}).spec
    assert spec.env == {"SPOTGUARD_TRACE_SAMPLES": "/x"}


@pytest.mark.parametrize(
    "name",
    [
        "SPOTGUARD_S3_SSE",
        "SPOTGUARD_S3_SSE_KMS_KEY_ID",
        "SPOTGUARD_GCS_KMS_KEY",
        "SPOTGUARD_AZURE_ENCRYPTION_SCOPE",
    ],
)
def test_a_key_for_the_store_reaches_the_job(resolve_job: Resolve, name: str) -> None:
    """The nodes encrypt as the shell does from which the run was started."""
    assert resolve_job(environ={name: "mine"}).spec.env == {name: "mine"}


def test_relative_paths_are_seen_from_where_they_stand(
    resolve_job: Resolve, tmp_path: Path
) -> None:
    """A path in a file does not depend on the folder from which the command is run."""
    spec = resolve_job(
        {"store": "s/../out"}, user="[local]\ntrace = 'a.json'", environ={"SPOTGUARD_TRACE": " "}
    ).spec
    assert spec.store == str(tmp_path / "out")
    assert spec.local.trace == str(tmp_path / "home" / "a.json")
    assert resolve_job({"store": "s3://bucket/a//b"}).spec.store == "s3://bucket/a//b"
    assert resolve_job({"store": "~/s"}).spec.store == str(Path.home() / "s")
    assert resolve_job({"store": "~nobody-here/s"}).spec.store == str(tmp_path / "~nobody-here/s")


def test_not_given_is_not_a_value(resolve_job: Resolve) -> None:
    """Flags that are None or empty, and empty variables, leave the word to the next source."""
    flags: dict[str, object] = {"budget": None, "local.interrupt": [], "env": ()}
    resolved = resolve_job(flags, environ={"SPOTGUARD_BUDGET": ""}, project="budget = 4")
    assert resolved.spec.budget_usd == 4


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("budget = ", "spotguard.toml: is not valid TOML"),
        ("budget = 1\nbudget 2\n", "line 2"),
        ("env = 'token'", "env: given a value (spotguard.toml); allowed: a table [env]"),
        ("local = 3", "local: given 3 (spotguard.toml); allowed: a table [local]"),
        ("a = " + "[" * 5000, "spotguard.toml: is not valid TOML"),
    ],
)
def test_broken_files_are_named(resolve_job: Resolve, toml: str, said: str) -> None:
    """A file that is no TOML, or not the TOML that is expected, gets one sentence."""
    with pytest.raises(SpecError) as caught:
        resolve_job(project=toml)
    assert said in str(caught.value)


def test_a_broken_block_is_named_by_the_scripts_own_line(resolve_job: Resolve) -> None:
    """TOML's complaint about the script's block has the line number of the script."""
    with pytest.raises(SpecError, match=r"job\.py: is not valid TOML.*line 3"):
        resolve_job(block="[tool.spotguard]\nbudget 3")
    with pytest.raises(SpecError, match=r"job\.py: given 3 as spotguard; allowed: a table"):
        resolve_job(block="[tool]\nspotguard = 3")


def test_two_blocks_are_one_too_many(tmp_path: Path) -> None:
    """PEP 723 allows one block; taking either silently would be a guess."""
    (tmp_path / "job.py").write_text(
        "# /// script\n# a = 1\n# ///\n\n" * 2 + "import spotguard.runtime"
    )
    with pytest.raises(SpecError, match="more than one"):
        resolve("job.py", flags={}, environ={}, cwd=tmp_path)


def test_windows_line_ends_and_other_blocks_are_understood(tmp_path: Path) -> None:
    """A block saved with CRLF counts; one of another type does not."""
    text = "# /// script\n# [tool.spotguard]\n# budget = 3\n# ///\n\n# /// other\n# x\n# ///\n"
    text += "import spotguard.runtime\n"
    (tmp_path / "job.py").write_bytes(text.replace("\n", "\r\n").encode())
    resolved = resolve("job.py", flags={}, environ={}, cwd=tmp_path)
    assert resolved.spec.budget_usd == 3


def test_files_that_cannot_be_read_are_named(resolve_job: Resolve, tmp_path: Path) -> None:
    """A folder or binary rubbish in a settings file's place is one sentence, not a traceback."""
    resolve_job()
    project = tmp_path / "spotguard.toml"
    project.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="not UTF-8"):
        resolve(tmp_path / "job.py", flags={}, environ={}, cwd=tmp_path)
    project.unlink()
    project.mkdir()
    with pytest.raises(SpecError, match="cannot be read"):
        resolve(tmp_path / "job.py", flags={}, environ={}, cwd=tmp_path)


def test_what_config_show_prints_holds_no_secret(resolve_job: Resolve) -> None:
    """Values of the job's variables never leave the spec: not in rows, not in JSON, not in repr."""
    resolved = resolve_job({"env": ["HF_TOKEN=hunter2"]}, environ={"SPOTGUARD_NODES": "1:4"})
    shown = json.dumps(resolved.to_json()) + "".join(v.text for v in resolved.values)
    assert "hunter2" not in shown + repr(resolved)
    assert "***" in shown
    assert resolved.spec.env == {"HF_TOKEN": "hunter2"}


def test_values_are_shown_as_they_could_be_written(resolve_job: Resolve) -> None:
    """What `config show` prints can be pasted into a file and means the same."""
    flags = {"deadline": "1h30m", "nodes": "1:4", "save_every": "2m", "local.interrupt": ["a", "b"]}
    shown = {v.field: v.value for v in resolve_job(flags).values}
    again = resolve_job({key: shown[key] for key in flags})
    assert again.spec == resolve_job(flags).spec
    assert shown["deadline"] == "5400s"
    assert {v.field: v.text for v in again.values}["budget"] == "not set"


def test_a_missing_workdir_is_named(resolve_job: Resolve) -> None:
    """A job is not launched in a folder that does not exist."""
    with pytest.raises(SpecError, match=r"workdir: given '.*/nowhere' \(env SPOTGUARD_WORKDIR\)"):
        resolve_job(environ={"SPOTGUARD_WORKDIR": "nowhere"})


def test_a_variable_without_equals_is_refused_unseen(resolve_job: Resolve) -> None:
    """`--env` without '=' is refused without repeating the text: it may be a secret."""
    with pytest.raises(SpecError, match="NAME=VALUE") as caught:
        resolve_job({"env": ["hunter2"]})
    assert "hunter2" not in str(caught.value)


def test_the_home_is_read_on_every_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Changing SPOTGUARD_HOME takes effect at once, and an empty one is none."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path))
    assert spotguard_home() == tmp_path
    assert spotguard_home({"SPOTGUARD_HOME": ""}) == Path.home() / ".spotguard"
    monkeypatch.setenv("SPOTGUARD_HOME", "relative")
    assert spotguard_home() == Path(os.getcwd()) / "relative"  # noqa: PTH109 - the oracle


def test_the_users_own_file_is_shown_from_their_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The origin reads `~/.spotguard/config.toml`, as the user would write it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".spotguard").mkdir()
    (tmp_path / ".spotguard" / "config.toml").write_text("keep_last = 5")
    (tmp_path / "job.py").write_text("import spotguard.runtime")
    resolved = resolve("job.py", flags={}, environ={}, cwd=tmp_path)
    assert origin(resolved, "keep_last") == "~/.spotguard/config.toml line 1"
