"""A training whose weights become NaN: that is said once, and what is healthy stays."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.checkpoint.lineage import claim_attempt, restorable
from spotguard.checkpoint.manifest import load_manifest
from spotguard.events.states import CheckpointKind
from spotguard.runtime.process.finite import LossWatch, is_loss
from spotguard.runtime.state.tree import Packed, pack
from spotguard.testing import FakeRendezvous, MemoryStore
from tests.runtime.harness.lab import Rank, adapters, together

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def model_of(dtype: torch.dtype) -> Any:
    """Return a model with a mask and a table that hold infinite values by right."""
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 3)).to(dtype)
    model.register_buffer("mask", torch.full((4, 4), -math.inf))
    table = torch.nn.Parameter(torch.full((3,), math.inf), requires_grad=False)
    model.register_parameter("table", table)
    return model


def healthy(store: MemoryStore) -> dict[int, Any]:
    """Return what each checkpoint of the history says of its weights."""
    refs = restorable(store)
    return {ref.step: load_manifest(store, ref.prefix).counters["finite"] for ref in refs}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_save_says_whether_weights_are_finite(dtype: torch.dtype, value: float) -> None:
    """The last element of the last weight is seen in a save in the background; masks and what is
    frozen may hold what they like. A save in a hurry sees what is NaN from the beginning on."""
    store = MemoryStore()
    rank = Rank(store, keep_last=2)
    model = model_of(dtype)
    rank.start(model=model, count={"n": 1})
    rank.later(10, model=model, count={"n": 1})
    rank.saver.wait()
    with torch.no_grad():  # large, but finite, and so must be their sum
        model[0].weight.fill_(6e4 if dtype is torch.float16 else 1e30)
    rank.later(20, model=model, count={"n": 2})
    rank.saver.wait()
    with torch.no_grad():
        model[1].weight.view(-1)[-1] = value
    rank.later(30, model=model, count={"n": 3})
    rank.saver.wait()
    assert not rank.failed
    with torch.no_grad():
        model[1].weight.fill_(value)
    rank.now(40, CheckpointKind.EMERGENCY, model=model, count={"n": 4})
    rank.now(50, CheckpointKind.BEST, model=model, count={"n": 5})
    assert healthy(store) == {50: False, 40: False, 20: True}
    told = [saved.not_finite for saved in rank.saved if saved.not_finite]
    assert told == [
        "step 30 was saved with weights that are NaN or infinite: model.1.weight; the checkpoint "
        "of step 20, with finite ones, is kept"
    ], "it is said once"
    newest = load_manifest(store, next(iter(restorable(store))).prefix)
    assert newest.kind is CheckpointKind.PERIODIC, "the best is never one of these"


def test_any_rank_may_hold_the_weight_that_is_not_finite() -> None:
    """Of three ranks the second alone holds a part with NaN; the first one commits and says so."""
    words, store = FakeRendezvous(), MemoryStore()
    ranks = [Rank(store, rank, 3, coordinator=words.rank(rank)) for rank in range(3)]
    claim_attempt(store, 1, None)
    model = torch.nn.Linear(2, 2)

    def save(rank: Rank) -> Any:
        capture = rank.saver.capture(1, CheckpointKind.FINAL, adapters({"model": model}), {})
        packed = Packed()
        if rank.rank == 1:
            pack(torch.full((2,), math.nan), "model.bias", packed)
        return rank.saver.save_now(replace(capture, leaves=list(packed.leaves.values())))

    together(*(partial(save, each) for each in ranks))
    assert healthy(store) == {1: False}
    assert ranks[0].saved[0].not_finite == (
        "step 1 was saved with weights that are NaN or infinite: model.bias"
    )


def test_a_loss_that_is_no_number_is_told_once() -> None:
    """With the first step that is known to have none, and the last that had one."""
    told: list[str] = []
    watch = LossWatch(told.append)
    for step, value in ((10, 2.0), (11, None), (12, math.nan), (13, 1.0), (14, math.inf)):
        watch.look("the loss", step, value)
    assert len(told) == 1
    assert "the loss is nan after step 12 (after step 10 it still was a number)" in told[0]
    assert [is_loss(name) for name in ("loss", "train/Loss", "grad_norm")] == [True, True, False]


SCRIPT = """
import torch
import spotguard.runtime as spotguard

run = spotguard.init(save_every="1 steps", keep_last=2, backend="gloo")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(60, 3), torch.randn(60, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=6, micro_batch_size=2)
for step in run.steps(loader, total=9):
    for x, y in step:
        factor = float("nan") if step.number == 3 and run.attempt == 1 else 1.0
        step.backward((model(x) * factor - y).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    run.log(**{"train/loss": step.loss, "grad_norm": float("inf")})
    if run.attempt == 1 and step.number == 7:
        run._job.keeper.saver.wait()
        raise RuntimeError("enough")
"""


@pytest.mark.e2e
def test_a_run_that_became_nan_says_so_and_can_go_back(jobs: Jobs) -> None:
    """The loss, the weights and the resume are told; the last healthy checkpoint is there yet."""
    script = jobs.folder / "script.py"
    script.write_text(SCRIPT)
    said = jobs.run(script, SPOTGUARD_ATTEMPT=1, code=1)
    assert said.count("train/loss is nan after step 3") == 1
    assert said.count("was saved with weights that are NaN or infinite: model.") == 1
    assert "the checkpoint of step 3, with finite ones, is kept" in said
    assert [ref.step for ref in restorable(jobs.store())] == [7, 6, 3]
    warnings = [e.data["message"] for e in jobs.events() if e.kind == "warning"]
    assert len(warnings) == 2, warnings
    again = jobs.run(script, SPOTGUARD_ATTEMPT=2)
    assert "was saved with weights that are NaN or infinite, and training goes on" in again
