"""Whole runs of compiled models: like eager ones, with which they share their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.checkpoint.lineage import restorable
from spotguard.checkpoint.manifest import load_manifest
from spotguard.storage import open_store
from tests.runtime.distributed.test_module_wrappers import said_by

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

COMPILED = Path(__file__).parents[1] / "jobs" / "levers" / "compiled.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def trained(
    jobs: Jobs, world: int, wrap: str, *, run_id: str = "a-run", at: int | None = None
) -> dict[int, str]:
    """Run one attempt; return the hash of the weights after each of its steps."""
    stop: dict[str, Any] = {} if at is None else {"AT": at}
    ranks = jobs.start_ranks(world, script=COMPILED, WRAP=wrap, SPOTGUARD_RUN_ID=run_id, **stop)
    code = 0 if at is None else 75
    assert [job.wait() for job in ranks] == [code] * world, "\n".join(job.said for job in ranks)
    return said_by(ranks)


@pytest.mark.parametrize(
    ("world", "eager", "wraps"),
    [
        (1, "plain", ("compiled", "plain", "parts")),
        (1, "plain", ("in place", "compiled", "plain")),
        (3, "ddp", ("compiled ddp", "ddp", "ddp compiled")),
        (3, "fsdp", ("fsdp compiled", "fsdp", "fsdp compiled")),
    ],
)
def test_a_run_goes_on_compiled_or_not(
    jobs: Jobs, world: int, eager: str, wraps: tuple[str, str, str]
) -> None:
    """Three ranks have 2, 1 and 1 of four micro-batches, and each attempt is compiled otherwise.

    Every step's weights are, bit for bit, those of an eager run that nobody disturbed, and the
    checkpoints have the names that the eager model has.
    """
    undisturbed = trained(jobs, world, eager, run_id="undisturbed")
    found = trained(jobs, world, wraps[0], at=1)
    found |= trained(jobs, world, wraps[1], at=3)
    found |= trained(jobs, world, wraps[2])
    assert found == undisturbed
    assert len(undisturbed) == 6
    store = open_store(str(jobs.folder / "spotguard-runs" / "a-run"))
    saves = [load_manifest(store, ref.prefix) for ref in restorable(store)]
    assert len(saves) == 3
    for save in saves:
        names = [key for key, _ in save.state["model"]]
        assert names == [f"{n}.{kind}" for n in (0, 3, 6, 9) for kind in ("weight", "bias")]
