from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.runtime.harness.processes import Jobs, Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """A process that forks jobs quickly; one for each test process."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def jobs(zygote: Zygote, tmp_path: Path) -> Iterator[Jobs]:
    """Start jobs in a folder of the test's own; none outlives it."""
    made = Jobs(zygote, tmp_path)
    yield made
    for job in made.started:
        if job.code is None:
            try:
                os.killpg(job.pid, signal.SIGKILL)
            except ProcessLookupError:
                time.sleep(0)  # it went by itself
            job.wait()
