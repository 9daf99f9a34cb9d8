from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.integrations.transformers.harness import TrainerRuns
from tests.runtime.harness.processes import Jobs, Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def with_transformers() -> Iterator[Zygote]:
    """Give a process that has the Trainer loaded, to fork jobs from."""
    made = Zygote("transformers.trainer", "transformers.models.gpt2", "accelerate.optimizer")
    yield made
    made.close()


@pytest.fixture
def runs(with_transformers: Zygote, tmp_path: Path) -> Iterator[TrainerRuns]:
    """Start the Trainer's job in a folder of the test's own; none outlives it."""
    jobs = Jobs(with_transformers, tmp_path)
    yield TrainerRuns(jobs)
    for job in jobs.started:
        if not job.is_over():
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
