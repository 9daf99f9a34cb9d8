"""What a smoke depends on, and that nothing else makes it run again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.drill.smoke import memory
from spotguard.control.drill.smoke.memory import key_of, remember, remembered
from spotguard.policy.plan.smoke import Smoke
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.sources import resolve

if TYPE_CHECKING:
    from spotguard.spec.model import JobSpec

SMOKE = Smoke(
    state_bytes=12, save_s=0.5, step_s=None, step_samples=2, first_step_s=3.0, at=1_700_000_000.0
)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with a script that imports a package beside it."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    (tmp_path / "work" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    Path("train.py").write_text("import spotguard.runtime\nfrom mine import model\n")
    Path("mine/__init__.py").write_text("")
    Path("mine/model.py").write_text("A = 1\n")
    Path("other.py").write_text("A = 1\n")
    Path("small.yaml").write_text("lr: 1\n")
    return tmp_path


def job(*args: str, **flags: Any) -> JobSpec:
    """Return the job."""
    return resolve("train.py", flags=flags, args=args).spec


def test_code_arguments_variables_and_packages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them by itself makes another key."""
    keys = {key_of(job()), key_of(job("--lr", "1")), key_of(job("--lr1"))}
    keys |= {key_of(job(env={"A": "1"})), key_of(job(**{"smoke.steps": "3"}))}
    keys.add(key_of(job("--config=small.yaml")))
    Path("small.yaml").write_text("lr: 2\n")
    keys.add(key_of(job("--config=small.yaml")))
    Path("mine/model.py").write_text("A = 2\n")
    keys.add(key_of(job()))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_installed", lambda: iter(["torch-9.dist-info"]))
        keys.add(key_of(job()))
    assert len(keys) == 9


def test_price_place_and_name_do_not_count() -> None:
    """They are no matter of the script."""
    here = key_of(job(infra="aws", store="s3://a/y"))
    Path("other.py").write_text("A = 2\n")
    assert key_of(job(infra="gcp", nodes="1:4", budget="9", name="x", store="s3://b/x")) == here


def test_what_nodes_get_counts_where_they_are_elsewhere(tmp_path: Path) -> None:
    """A smoke in the folder itself, or before a new line of an ignore file, proves no copy."""
    there = {"infra": "aws", "store": "s3://a/y"}
    keys = {key_of(job()), key_of(job(**there))}
    Path(".gitignore").write_text("mine/\n")
    keys.add(key_of(job(**there)))
    Path(".skyignore").touch()
    keys.add(key_of(job(**there)))
    Path("needs.txt").write_text("rich\n")
    keys.add(key_of(job(**there, **{"node.requirements": "needs.txt"})))
    Path("needs.txt").write_text("rich\nnumpy\n")
    keys.add(key_of(job(**there, **{"node.requirements": "needs.txt"})))
    assert len(keys) == 6


def test_what_is_remembered_comes_back_and_damage_is_forgotten() -> None:
    """A file that makes no sense is as none: the smoke runs again."""
    assert remembered("k") is None
    remember("k", SMOKE)
    assert remembered("k") == SMOKE
    file = spotguard_home() / "smokes" / "k.json"
    for text in ("", "{", "[]", '{"schema": 2}', '{"schema": 1, "state_bytes": -1}', "\0"):
        file.write_text(text)
        assert remembered("k") is None


def test_not_all_smokes_are_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go."""
    monkeypatch.setattr(memory, "_MOST_KEPT", 2)
    for name in "abc":
        remember(name, SMOKE)
    assert len(list((spotguard_home() / "smokes").glob("*.json"))) == 2
    assert remembered("c") == SMOKE
