"""A journal whose file is gone, or is another one now."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.journal import Journal
from spotguard.errors import JournalDamaged
from tests.control.world import World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _unlink(journal: Path) -> None:
    journal.unlink()


def _copy_over(journal: Path) -> None:
    copy = journal.with_name("copy")
    shutil.copyfile(journal, copy)
    copy.replace(journal)


@pytest.mark.parametrize("harm", [_unlink, _copy_over])
def test_a_controller_whose_journal_is_gone_acts_no_more(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    """What it launched or took down would stand in a file that nobody finds."""
    world = World(tmp_path, total_steps=1000)
    with world.journal() as journal:
        supervisor = world.supervisor(journal)
        for _ in range(20):
            supervisor.tick()
            world.clock.sleep(0.5)
        harm(journal.path)
        before = list(world.launcher.started)
        world.launcher.clusters.clear()  # each would be a reason to launch

        with pytest.raises(JournalDamaged, match=r"missing|took its place"):
            supervisor.run()

    assert world.launcher.started == before


def test_a_command_does_not_write_into_a_file_that_is_gone(tmp_path: Path) -> None:
    """A wish that nobody will read is refused, not lost."""
    with Journal.create(tmp_path / "journal.db") as journal:
        journal.append("run_created", at=1.0)
        _copy_over(journal.path)
        with pytest.raises(JournalDamaged, match="took its place"):
            journal.append("user_down", at=2.0)
