"""Onto the nodes of a run: the right node, words as they were typed, and their exit code."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.cli.main import main
from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.run_folder import RunFolder
from spotguard.control.status.ssh_commands import command_on, shell_on
from spotguard.errors import UsageError
from spotguard.spec.model import JobSpec
from tests.cli.documents import stand_alone
from tests.control.made import ended, launched

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = ("a b", "$(touch pwned)", "'", '"; touch pwned #', "`id`", "*", "\n", "--", "-o", "é", "")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a folder of its own."""
    return stand_alone(monkeypatch, tmp_path)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that has the words run by a shell here, as sshd does, and notes where it was to go."""
    place = tmp_path / "bin" / "ssh"
    place.parent.mkdir()
    place.write_text(
        '#!/bin/sh\n[ "$1" = -T ] && shift\necho "$1" > "$SSH_WENT_TO"\nshift\nexec sh -c "$*"\n'
    )
    place.chmod(0o700)
    monkeypatch.setenv("PATH", f"{place.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_WENT_TO", str(tmp_path / "went"))
    return tmp_path / "went"


def a_run(home: Path, *lines: Any, infra: str = "aws") -> None:
    """Write a run's journal, in which these things happened."""
    folder = RunFolder(home / "runs" / "job-1")
    folder.path.mkdir(parents=True)
    place = {"infra": infra, "store": "s3://b" if infra != "local" else str(home / "store")}
    spec = JobSpec(script="/job.py", workdir=str(home.parent), name="job", **place)  # type: ignore[arg-type]
    with Journal.create(folder.journal_path) as journal:
        created = {
            "run_id": "job-1",
            "name": "job",
            "store_root": spec.store,
            "limits": limits_to_json(Limits()),
            "spec": spec.to_json(),
        }
        journal.append(Kind.CREATED.value, at=time.time(), data=created)
        for kind, at, attempt, *data in lines:
            told = data[0] if data else {}
            journal.append(kind, at=time.time() + at, attempt=attempt, data=told)


def test_each_node_has_the_name_that_skypilot_gave_it(home: Path) -> None:
    """The first is the cluster, the others its workers; no other node is made up."""
    a_run(home, *launched(nodes=3))
    assert shell_on("job-1").words == ("ssh", "job-1-1")
    assert shell_on("job-1", 2).words == ("ssh", "job-1-1-worker2")
    with pytest.raises(UsageError, match="no node 3") as refused:
        shell_on("job-1", 3)
    assert refused.value.hint == "it has: 0, 1, 2"


@pytest.mark.parametrize("lines", [(), (*launched(), ended(9.0, "preempted"))], ids=len)
def test_a_run_without_nodes_is_said(home: Path, lines: Any) -> None:
    """Instead of an ssh that finds nobody."""
    a_run(home, *lines)
    with pytest.raises(UsageError, match="has no nodes now"):
        shell_on("job-1")
    with pytest.raises(UsageError, match="has no nodes now"):
        command_on("job-1", ["ls"])


def test_words_arrive_as_they_were_typed(
    home: Path, ssh: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever a shell would make of them, nothing of it happens."""
    a_run(home, *launched())
    words = ["printf", "<%s>", *HOSTILE]
    assert main(["exec", "job-1", "--node", "1", "--", *words]) == 0
    assert capfd.readouterr().out == "".join(f"<{word}>" for word in HOSTILE)
    assert ssh.read_text() == "job-1-1-worker1\n"
    assert not list(home.parent.rglob("pwned"))


@pytest.mark.parametrize("infra", ["aws", "local"])
@pytest.mark.parametrize("code", [0, 3, 10, 75])
def test_the_commands_exit_code_is_passed_on(home: Path, ssh: Path, infra: str, code: int) -> None:
    """From there and from here."""
    a_run(home, *launched(infra=infra), infra=infra)
    assert main(["exec", "job-1", "--", "sh", "-c", f"exit {code}"]) == code


def test_who_ends_by_a_signal_ends_as_in_a_shell(home: Path) -> None:
    """With 128 and the signal's number."""
    a_run(home, *launched(infra="local"), infra="local")
    assert main(["exec", "job-1", "--", "sh", "-c", "kill -9 $$"]) == 137


def test_ssh_that_fails_is_explained(
    home: Path, ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own code stays, and a hint says how its configuration is mended."""
    a_run(home, *launched())
    assert main(["exec", "job-1", "--", "sh", "-c", "exit 255"]) == 255
    assert "sky status --refresh" in capsys.readouterr().err


def test_a_command_of_a_local_run_works_where_its_nodes_do(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the job's folder; a shell is refused with one sentence that names the way."""
    a_run(home, *launched(infra="local"), infra="local")
    assert main(["exec", "job-1", "--", "pwd"]) == 0
    assert capfd.readouterr().out.strip() == str(home.parent)
    assert main(["ssh", "job-1"]) == 2
    said = capfd.readouterr().err
    assert "processes of this machine" in said
    assert "spotguard exec job-1 -- bash" in said


@pytest.mark.parametrize("infra", ["aws", "local"])
def test_what_is_not_there_is_said(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    infra: str,
) -> None:
    """A missing command, or ssh itself, is a sentence and the code of the environment."""
    a_run(home, *launched(infra=infra), infra=infra)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert main(["exec", "job-1", "--", "no-such-tool"]) == 3
    assert "cannot be run" in capsys.readouterr().err


def test_a_command_is_needed(home: Path) -> None:
    """An empty one is no command."""
    a_run(home, *launched())
    assert main(["exec", "job-1", "--"]) == 2
    with pytest.raises(UsageError, match="no command"):
        command_on("job-1", [""])
