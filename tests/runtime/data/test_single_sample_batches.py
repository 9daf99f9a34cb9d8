from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from spotguard.runtime.data.loader import ElasticLoader
from spotguard.runtime.data.single_sample_batches import warning_of_lone_sample

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Jobs


def loader(samples: int, **over: Any) -> ElasticLoader:
    """Return what the second of two ranks reads: the last micro-batch of each step."""
    asked: dict[str, Any] = {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "shuffle": True,
        "drop_last": False,
        "seed": 3,
        "reseed": True,
        "collate_fn": None,
        "num_workers": 0,
        "options": {},
        "rank": 1,
        "world_size": 2,
    }
    return ElasticLoader(list(range(samples)), **{**asked, **over})


def network() -> nn.Module:
    """Return a model with the layer inside."""
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3)))


def test_the_step_the_layer_and_the_way_out_are_named() -> None:
    """21 samples are steps of 4 + 4, 4 + 4 and 4 + 1: the third one is named."""
    said = warning_of_lone_sample([nn.Linear(1, 1), network()], loader(21), 0, 30)
    assert said is not None
    for word in ("step 3,", "(1.0)", "drop_last=True", "micro_batch_size"):
        assert word in said
    resumed = warning_of_lone_sample([network()], loader(21), 4, 30)
    assert resumed is not None
    assert "step 6," in resumed


@pytest.mark.parametrize(
    ("samples", "over", "steps"),
    [
        (22, {}, 30),  # two samples are enough
        (24, {}, 30),  # no short micro-batch
        (21, {"drop_last": True}, 30),
        (21, {}, 2),  # the run ends before
        (21, {"micro_batch_size": 1}, 30),  # the first step fails at once, in torch's own words
    ],
)
def test_nothing_is_said_where_torch_will_not_complain_later(
    samples: int, over: dict[str, Any], steps: int
) -> None:
    """No false alarm, and none for what fails at once."""
    assert warning_of_lone_sample([network()], loader(samples, **over), 0, steps) is None


def test_layers_that_can_take_one_sample_are_let_be() -> None:
    """In evaluation, over an image's pixels, or over all ranks there is more than one value."""
    others = [network().eval(), nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.LayerNorm(3)]
    assert warning_of_lone_sample(others, loader(21), 0, 30) is None


SCRIPT = """
import torch
from torch import nn
import spotguard.runtime as spotguard

run = spotguard.init(seed=1)
model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader([torch.ones(2)] * 9, global_batch_size=4), total=5):
    print("step", step.number + 1, flush=True)
    for x in step:
        step.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_it_is_said_before_the_first_step(jobs: Jobs, tmp_path: Path) -> None:
    """The hours of an epoch are not spent on finding out; and what is said comes true."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    said = jobs.run(script, code=1)

    warned, began = said.index("micro-batch of one sample"), said.index("step 1\n")
    assert warned < began
    assert "step 3, the last of its epoch" in said
    assert said.index("step 3\n") < said.index("Expected more than 1 value per channel")
    [event] = [event for event in jobs.events() if event.kind == "warning"]
    assert "BatchNorm1d (1)" in event.data["message"]
