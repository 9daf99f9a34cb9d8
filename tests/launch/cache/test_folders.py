from __future__ import annotations

import fcntl
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from spotguard.shared.cache_folders import COMPILED, cache_folder, on_this_node
from spotguard.shared.node_locks import is_saving, saving

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("~/.cache/huggingface", "~/.cache/huggingface"),
        ("/home/me/.cache/huggingface/", "~/.cache/huggingface"),  # as a shell makes it
        ("data/tokens", "data/tokens"),
        ("./data//tokens/", "data/tokens"),
        ("/home/me/job/data", "data"),
        (COMPILED, COMPILED),
    ],
)
def test_folders_have_one_spelling(given: str, kept: str) -> None:
    """Below the home, or seen from the workdir; nodes have other homes."""
    assert cache_folder(given, home="/home/me", workdir="/home/me/job") == kept
    assert cache_folder(kept, home="/", workdir="/nowhere") == kept
    place = on_this_node(kept, home="/home/node", workdir="/work")
    assert str(place).startswith(("/home/node/", "/work/"))


@pytest.mark.parametrize(
    "given",
    [
        *("~", "~/", ".", "/", "", " ", "..", "../data", "data/../../x", "/tmp/x", "/etc"),
        *("~/.ssh", "~/.ssh/keys", "~/.aws", "~/.config", "~/.config/gcloud", "~/.local"),
        *("~/.spotguard", "~/.sky/x", "~other/x", "/home/me", "/home/me/job", "a\nb"),
    ],
)
def test_what_is_outside_or_private_is_refused(given: str) -> None:
    """Not the home or the workdir as a whole, nothing beside them, no keys and logins."""
    with pytest.raises(ValueError, match="it"):
        cache_folder(given, home="/home/me", workdir="/home/me/job")


def test_saves_have_the_right_of_way(tmp_path: Path) -> None:
    """For as long as any rank of the node saves."""
    path = str(tmp_path / "saving")
    assert not is_saving(path)
    with saving(path):
        assert is_saving(path)
        with saving(path):
            assert is_saving(path)
        assert is_saving(path)
    assert not is_saving(path)


def test_a_rank_that_is_killed_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Its lock goes with it."""
    path = str(tmp_path / "saving")
    begun, begin = os.pipe()
    child = os.fork()
    if not child:
        with saving(path):
            os.write(begin, b"x")
            signal.pause()
    os.read(begun, 1)
    assert is_saving(path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not is_saving(path)


def test_without_a_file_saves_are_as_ever(tmp_path: Path) -> None:
    """No launcher, or a folder that cannot be written to: nothing of it may stop a save."""
    for path in (None, str(tmp_path / "not-there" / "saving")):
        with saving(path):
            pass


def test_who_looks_hides_no_save(tmp_path: Path) -> None:
    """A save that begins in the moment in which somebody looks is seen all the same."""
    path = tmp_path / "saving"
    path.touch()
    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)
        leave = threading.Timer(0.001, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        leave.start()
        with saving(str(path)):
            leave.join()
            assert is_saving(str(path))
