from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from spotguard.runtime import gradients
from spotguard.runtime.gradients import GradientSync

if TYPE_CHECKING:
    from tests.runtime.processes import Jobs

SCRIPT = Path(__file__).parent / "jobs" / "gradients.py"

Gradients = dict[str, list[float] | None]


def gradients_of(jobs: Jobs, world: int, wrap: str) -> list[Gradients]:
    """Return every rank's gradients of the same global batch."""
    ranks = jobs.start_ranks(world, script=SCRIPT, WRAP=wrap)
    assert [job.wait() for job in ranks] == [0] * world, ranks[0].said
    return [parsed(job.said) for job in ranks]


def parsed(said: str) -> Gradients:
    """Return the gradients that a job printed, by parameter."""
    lines = [line.split(" ", 2) for line in said.splitlines() if line.startswith("grad ")]
    return {name: None if text == "none" else json.loads(text) for _, name, text in lines}


def close(one: Gradients, other: Gradients) -> bool:
    """Return whether two sets of gradients agree within 1e-6."""
    assert one.keys() == other.keys()
    return all(
        a is b is None or (a is not None and b is not None and a == pytest.approx(b, abs=1e-6))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


@pytest.mark.e2e
def test_gradients_do_not_depend_on_the_number_of_ranks(jobs: Jobs) -> None:
    """On 1, 2 and 3 ranks, in DDP or not: the global mean, and unused parameters stay unused.

    A parameter that only one rank used has a gradient on all; one that nobody used has none, as
    on one process: its optimizer must skip it, not decay it.
    """
    [alone] = gradients_of(jobs, 1, "none")
    for world, wrap in ((2, "none"), (3, "none"), (2, "ddp"), (1, "ddp")):
        for mine in gradients_of(jobs, world, wrap):
            if wrap == "ddp":  # DDP itself gives unused parameters zeros when ranks differ
                for name in ("never.weight", "never.bias"):
                    assert not any(mine[name] or [])
                    mine[name] = None
            assert close(mine, alone), (world, wrap)

    assert alone["never.weight"] is None
    assert alone["odd.weight"] is not None


def test_alone_nothing_is_copied() -> None:
    """One process has nobody to meet: gradients are autograd's own, weighted."""
    weight = torch.nn.Parameter(torch.ones(3))
    sync = GradientSync([], [torch.optim.SGD([weight], lr=1.0)], 1)
    for share in (0.25, 0.75):
        sync.backward((weight * 2).sum(), share, last=share == 0.75)

    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert not sync.managed_elsewhere


def test_buckets_hold_one_dtype_and_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, every parameter once, cut where the dtype changes or the bucket is full."""
    monkeypatch.setattr(gradients, "_BUCKET_BYTES", 100)
    sizes = [
        (10, torch.float32),
        (20, torch.float32),
        (5, torch.float64),
        (1, torch.float32),
        (400, torch.float32),
    ]
    parameters = [torch.zeros(n, dtype=dtype) for n, dtype in sizes]
    buckets = list(gradients._buckets(parameters))

    assert [p for bucket in buckets for p in bucket] == parameters
    assert [len(bucket) for bucket in buckets] == [1, 1, 1, 1, 1]
    for bucket in buckets:
        assert len({p.dtype for p in bucket}) == 1
    assert [len(b) for b in gradients._buckets([torch.zeros(5) for _ in range(11)])] == [5, 5, 1]


def test_flat_and_back_keeps_what_is_unused() -> None:
    """A bucket carries a flag for each gradient: absent ones stay absent, others are replaced."""
    used, unused, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    used.grad = torch.tensor([1.0, 2.0])
    kept = used.grad
    flat = gradients._flatten([used, unused, late])
    assert flat.tolist() == [1, 2, 0, 0, 0, 0, 1, 0, 0]
    flat[4:6], flat[8] = 7.0, 1.0  # another rank used the last one
    flat[0] = 5.0
    gradients._unflatten([used, unused, late], flat)

    assert used.grad is kept, "in place: an optimizer or a hook may hold it"
    assert kept.tolist() == [5, 2]
    assert unused.grad is None
    assert late.grad is not None
    assert late.grad.tolist() == [7, 7]


def test_shared_parameters_are_summed_once() -> None:
    """Two optimizers, or two groups, over one parameter do not reduce it twice."""
    weight = torch.nn.Parameter(torch.ones(3))
    found = gradients._unsynchronised(
        [], [torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([weight], lr=1.0)]
    )

    assert len(found) == 1
