"""A home keeps its name wherever it is moved to, and no copy of it has the same one."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from spotguard.control import api, home_name
from spotguard.control.controller.one_run import control
from spotguard.control.controller.rest import Bell, Rest
from spotguard.control.home_name import home_news, machine_id
from spotguard.control.run_folder import RunFolder
from spotguard.control.supervisor.lease import Lease
from spotguard.errors import UsageError
from spotguard.shared.units import SystemClock
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from pathlib import Path

RUN = "job-250101-000000-aaaa"


def copy(home: Path, to: Path) -> Path:
    """Copy a home as `cp -a` does."""
    return shutil.copytree(home, to, symlinks=True)


def on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be another machine from here on."""
    monkeypatch.setattr(home_name, "_host", lambda: "another")


def test_a_home_has_one_name(tmp_path: Path) -> None:
    """It is made once, another home has another, and only its user can read it."""
    name = machine_id(tmp_path / "home")
    assert machine_id(tmp_path / "home") == name
    assert machine_id(tmp_path / "other") != name
    assert (tmp_path / "home" / "machine-id").stat().st_mode & 0o077 == 0
    assert home_news(tmp_path / "home") == ""
    assert home_news(tmp_path / "none") == ""
    assert not (tmp_path / "none").exists()


def test_a_name_that_an_older_version_made_stays(tmp_path: Path) -> None:
    """Where it is, is written down from here on."""
    name = "0123456789abcdef" * 2
    (tmp_path / "machine-id").write_text(name)
    assert machine_id(tmp_path) == name
    assert machine_id(copy(tmp_path, tmp_path / "copy")) != name


def test_a_home_that_was_moved_keeps_its_name(tmp_path: Path) -> None:
    """Also where another home has taken its place since."""
    home = tmp_path / "home"
    name = machine_id(home)
    moved = home.rename(tmp_path / "moved")
    machine_id(home)
    assert machine_id(moved) == name
    assert home_news(moved) == ""


def test_a_copy_gets_a_name_of_its_own_and_says_so_once(tmp_path: Path) -> None:
    """The original keeps its own."""
    home = tmp_path / "home"
    name = machine_id(home)
    copied = copy(home, tmp_path / "copy")
    news = home_news(copied)
    assert f"is a copy of {home}" in news
    assert "spotguard adopt" in news
    assert home_news(copied) == ""
    assert machine_id(copied) != name
    assert machine_id(home) == name


def test_a_copy_whose_original_is_gone_was_moved(tmp_path: Path) -> None:
    """As `mv` does it between filesystems."""
    home = tmp_path / "home"
    name = machine_id(home)
    copied = copy(home, tmp_path / "copy")
    shutil.rmtree(home)
    assert machine_id(copied) == name
    assert machine_id(copy(copied, tmp_path / "again")) != name


@pytest.mark.parametrize("same_path", [False, True])
def test_a_home_that_was_copied_to_another_machine_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_path: bool
) -> None:
    """Its original is not seen from there, also not by the same path."""
    home = tmp_path / "home"
    name = machine_id(home)
    copied = copy(home, tmp_path / "copy")
    shutil.rmtree(home)
    if same_path:
        copied = copied.rename(home)
    on_another_host(monkeypatch)
    assert machine_id(copied) != name


def test_a_home_that_several_machines_share_has_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the very same file; so it is for a container that is started anew on its volume."""
    name = machine_id(tmp_path)
    on_another_host(monkeypatch)
    assert machine_id(tmp_path) == name


def test_a_home_that_was_put_back_from_a_backup_keeps_its_name(tmp_path: Path) -> None:
    """On the same machine, at the same place."""
    home = tmp_path / "home"
    name = machine_id(home)
    backup = copy(home, tmp_path / "backup")
    shutil.rmtree(home)
    backup.rename(home)
    assert machine_id(home) == name


def test_an_original_that_cannot_be_looked_at_may_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is not sure takes another name."""
    home = tmp_path / "home"
    name = machine_id(home)
    copied = copy(home, tmp_path / "copy")
    original, read = home / "machine-id", home_name._read

    def refuse(path: Path) -> object:
        if path == original:
            raise PermissionError
        return read(path)

    monkeypatch.setattr(home_name, "_read", refuse)
    assert machine_id(copied) != name


def test_a_home_that_cannot_be_written_is_looked_at_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` of a copy on a full disk says nothing of it, and does not fail."""
    home = tmp_path / "home"
    machine_id(home)
    copied = copy(home, tmp_path / "copy")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(home_name, "_write", full)
        assert home_news(copied) == ""
    assert "is a copy" in home_news(copied)


@pytest.mark.parametrize("body", ["", "\n", "\n{}", "x\n[]", "x\n{", 'x\n{"path": 5}'])
def test_a_spoilt_file_is_no_end(tmp_path: Path, body: str) -> None:
    """A name that is there counts; where there is none, one is made."""
    (tmp_path / "machine-id").write_text(body)
    name = machine_id(tmp_path)
    assert name == (body.partition("\n")[0] or name)
    assert name
    assert machine_id(tmp_path) == name


def test_a_copied_home_launches_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs come to rest there, and go on there only once they are adopted."""
    store = make_run(home, RUN)
    original = Lease(store, SystemClock(), machine_id(home))
    original.take()
    copied = copy(home, home.with_name("copy"))
    monkeypatch.setenv("SPOTGUARD_HOME", str(copied))

    folder = RunFolder(copied / "runs" / RUN)
    control(folder, Rest(folder, Bell()))

    view = api.view(RUN)
    assert view.state.value == "stopped"
    assert f"taken over by a controller on {os.uname().nodename}" in view.state_detail
    assert not view.attempts
    with pytest.raises(UsageError, match="in the hands of"):
        api.resume(RUN)
    assert original.keep()
