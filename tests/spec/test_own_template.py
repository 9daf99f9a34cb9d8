from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.errors import SpecError
from spotguard.spec.model.own_template import read_own_template
from spotguard.spec.sources import resolve

if TYPE_CHECKING:
    from pathlib import Path


def refused(tmp_path: Path, text: str) -> SpecError:
    """Return how a template with this text is refused."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_own_template(str(path), taken=("~/.ssh",))
    assert caught.value.message.startswith("template: ")
    assert "\n" not in caught.value.message
    return caught.value


def test_what_is_a_templates_to_say_is_taken(tmp_path: Path) -> None:
    """As it is."""
    path = tmp_path / "mine.yaml"
    path.write_text("resources: {disk_tier: best, ports: 8080}\nenvs: {NCCL_DEBUG: INFO}\n")
    assert read_own_template(str(path)) == {
        "resources": {"disk_tier": "best", "ports": 8080},
        "envs": {"NCCL_DEBUG": "INFO"},
    }


@pytest.mark.parametrize(
    ("text", "key", "way_out"),
    [
        ("run: python train.py", "run", "script of the job"),
        ("setup: pip install x", "setup", "--setup"),
        ("num_nodes: 3", "num_nodes", "--nodes"),
        ("resources: {accelerators: A100}", "resources.accelerators", "--gpus"),
        ("resources: {cpus: 96+}", "resources.cpus", "node.cpus"),
        ("resources: {memory: 512+}", "resources.memory", "node.memory"),
        ("resources: {use_spot: true}", "resources.use_spot", "--market"),
        ("resources: {autostop: false}", "resources.autostop", "ends nodes"),
        ("envs: {SPOTGUARD_STORE: s3://x}", "envs.SPOTGUARD_STORE", "another name"),
        ("envs: {JOB_SCRIPT: x.py}", "envs.JOB_SCRIPT", "another name"),
        ("secrets: {A: b}", "secrets", "env"),
        ("file_mounts: {~/.ssh/id: /etc/hosts}", "file_mounts.~/.ssh/id", "another place"),
        ("volumes: {~/a/..//.ssh/: x}", "volumes.~/a/..//.ssh/", "another place"),
    ],
)
def test_what_is_ours_is_refused_by_its_name(
    tmp_path: Path, text: str, key: str, way_out: str
) -> None:
    """And says where it belongs."""
    problem = refused(tmp_path, text)
    assert f"has {key}, which is spotguard's own to say" in problem.message
    assert way_out in problem.hint


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("envs: {HF_TOKEN: hush-hush}", "envs.HF_TOKEN"),
        ("envs: {WANDB_API_KEY: hush-hush}", "envs.WANDB_API_KEY"),
        ("envs: {GREETING: ghp_hushhushhushhushhushhushhushhushhush}", "envs.GREETING"),
        ("resources: {labels: {a: AKIAHUSHHUSHHUSHHUSH}}", "resources.labels.a"),
        ("config: {url: 'https://me:hush@host/'}", "config.url"),
    ],
)
def test_secrets_are_refused_and_not_repeated(tmp_path: Path, text: str, where: str) -> None:
    """A template is shown by `plan --yaml`."""
    problem = refused(tmp_path, text)
    assert f"a secret in {where}" in problem.message
    assert "hush" not in f"{problem.message}{problem.hint}".lower()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "is no table"),
        ("", "is no table"),
        ("a: [", "is no valid YAML"),
        ("resources: 3", "resources that is no table"),
        ("envs: {A: [1]}", "envs.A that is no text"),
        ("ressources: {cpus: 3}", "has the key 'ressources'"),
        ("file_mounts: {/data: ./here}", "nobody knows the folder"),
        ("x: !!python/object/apply:os.system ['touch pwned']", "is no valid YAML"),
        ("a" * (300 << 10), "is larger than"),
    ],
)
def test_other_nonsense_is_told_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    """Nothing of it is run."""
    assert words in refused(tmp_path, text).message


def test_a_relative_path_is_seen_from_where_it_stands(tmp_path: Path) -> None:
    """A shipped template's name stays a name, and a typo of one is told as that."""
    (tmp_path / "job.py").write_text("import spotguard.runtime\n")

    def template(name: str) -> str:
        flags = {"template": name}
        return resolve(tmp_path / "job.py", flags=flags, environ={}, cwd=tmp_path).spec.template

    assert template("./mine.yaml") == template("mine.yaml") == str(tmp_path / "mine.yaml")
    assert template("aws") == "aws"
    with pytest.raises(SpecError) as caught:
        template("awss")
    assert "aws" in caught.value.hint
