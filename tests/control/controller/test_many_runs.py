from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from spotguard.control import api
from spotguard.control.run_folder import folder_of
from spotguard.errors import EnvironmentFailure
from spotguard.events.states import RunState
from tests.control.runs.test_api import a_spec, wait_for

if TYPE_CHECKING:
    from pathlib import Path


def controller(run_id: str) -> int | None:
    """Return the id of the process that controls a run."""
    return folder_of(run_id).controller_pid()


def lives(pid: int | None) -> bool:
    """Return whether a process of ours has not ended."""
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.e2e
def test_a_home_has_one_process_for_each_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes: begun once by commands that race; a damaged run and a kill -9 take no other
    run with them; another AWS_PROFILE has a process of its own; each ends with its last run."""
    tomorrow = a_spec(home).replace(start_at=time.time() + 86_400.0)
    runs = [api.create_run(tomorrow) for _ in range(5)]
    racing = [threading.Thread(target=api.start_controller, args=(run,)) for run in runs[:3]]
    for each in racing:
        each.start()
    for each in racing:
        each.join()
    [first] = {controller(run) for run in runs[:3]}
    assert first

    folder_of(runs[3]).journal_path.write_bytes(b"rubbish" * 100)
    with pytest.raises(EnvironmentFailure, match="not a SQLite file"):
        api.start_controller(runs[3])
    with monkeypatch.context() as patch:
        patch.setenv("AWS_PROFILE", "another")
        api.start_controller(runs[4])
    second = controller(runs[4])
    assert second
    assert second != first
    assert psutil.Process(second).environ()["AWS_PROFILE"] == "another"

    os.kill(first, signal.SIGKILL)
    wait_for(lambda: controller(runs[0]) is None)
    assert api.ensure_controlled(runs[0])
    third = controller(runs[0])
    wait_for(lambda: {controller(run) for run in runs[:3]} == {third})
    assert controller(runs[4]) == second

    for run in (*runs[:3], runs[4]):
        assert api.request_stop(run)
    wait_for(lambda: not any(map(lives, (second, third))))
    assert list((home / "controllers").glob("*/")) == []
    assert {api.view(run).state for run in runs[:3]} == {RunState.STOPPED}
    for run in runs[:3]:
        lines = folder_of(run).log_path.read_text().splitlines()
        assert lines
        assert not any(other in line for line in lines for other in runs if other != run)
