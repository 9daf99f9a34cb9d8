from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.runtime.harness.processes import Jobs, Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]


@pytest.fixture(scope="module")
def with_transformers() -> Iterator[Zygote]:
    """Give a process that has the Trainer loaded, to fork jobs from."""
    zygote = Zygote("transformers.trainer", "transformers.models.gpt2", "accelerate.optimizer")
    yield zygote
    zygote.close()


@pytest.fixture
def jobs(with_transformers: Zygote, tmp_path: Path) -> Jobs:
    """Give what starts jobs in a folder of their own."""
    return Jobs(with_transformers, tmp_path)
