"""Whole runs whose loss is a mean over tokens: the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

TOKENS = Path(__file__).parents[1] / "jobs" / "levers" / "tokens.py"

Trained = list[tuple[float, float]]
"""Loss and length of the weights after each step."""


def by_hand(*, empty: bool = False) -> Trained:
    """Return what the job does, of which each step is one batch on one process."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 9, (32,), generator=draw)
    if empty:
        tokens[8:12] = 0
    texts = torch.randn(32, 8, 6, generator=draw)
    labels = torch.randint(0, 5, (32, 8), generator=draw)
    for row, count in zip(labels, tokens.tolist(), strict=True):
        row[count:] = -100
    found = []
    for step in range(4):
        rows = slice(16 * (step % 2), 16 * (step % 2) + 16)
        loss = nn.functional.cross_entropy(net(texts[rows]).flatten(0, 1), labels[rows].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        length = sum(p.detach().double().square().sum().item() for p in net.parameters()) ** 0.5
        found.append((loss.item(), length))
    return found


def trained(jobs: Jobs, world: int, **how: Any) -> Trained:
    """Return what a run says, of which all ranks must say the same."""
    ranks = jobs.start_ranks(world, script=TOKENS, **how)
    assert [job.wait() for job in ranks] == [0] * world, "\n".join(job.said for job in ranks)
    lines = [[ln for ln in job.said.splitlines() if ln.startswith("step ")] for job in ranks]
    assert all(each == lines[0] for each in lines)
    return [(float(line.split()[2]), float(line.split()[3])) for line in lines[0]]


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "how"),
    [
        (1, {}),
        (1, {"REDUCTION": "sum"}),
        (3, {}),
        (3, {"REDUCTION": "sum", "ZERO": "set"}),
        (3, {"WRAP": "ddp"}),
        (3, {"WRAP": "ddp", "ZERO": "set", "EMPTY": "1"}),
        (3, {"WRAP": "fsdp"}),
        (3, {"EMPTY": "1"}),
        (3, {"EMPTY": "1", "EXACT": "bitwise"}),
        (5, {}),
    ],
    ids=str,
)
def test_the_gradient_is_the_mean_over_all_tokens(
    jobs: Jobs, world: int, how: dict[str, str]
) -> None:
    """Micro-batches of 4 to 30 tokens on ranks that have 2, 1 and 1 of them, or none.

    Each step's loss and weights are those of one batch on one process, within fp32's rounding; a
    rank that has no token at all, whose own mean is NaN, changes nothing.
    """
    found = trained(jobs, world, **how)
    for mine, other in zip(found, by_hand(empty="EMPTY" in how), strict=True):
        assert mine == pytest.approx(other, rel=2e-6)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_bitwise_runs_are_bitwise_by_tokens_too(jobs: Jobs) -> None:
    """What is divided in the end is the same on each number of ranks."""
    one = trained(jobs, 1, EXACT="bitwise", SPOTGUARD_RUN_ID="one")
    assert trained(jobs, 3, EXACT="bitwise", SPOTGUARD_RUN_ID="three") == one


MISUSES = {
    "negative": ("step.backward(loss, weight=-1)", "weight is -1.0, but must be a number from 0"),
    "nan": ("step.backward(loss, weight=float('nan'))", "weight is nan, but must be a number"),
    "part": ("step.backward(loss, weight=3, reduction='part')", "allowed with weight=: mean, sum"),
    "mixed": (
        "step.backward(loss, weight=3 if step.done == 0 else None)",
        "some micro-batches of the step have a weight=, and some have none",
    ),
    "mixed the other way": (
        "step.backward(loss, weight=3 if step.done else None)",
        "some micro-batches of the step have a weight=, and some have none",
    ),
}

SCRIPT = """
import torch
import spotguard.runtime as spotguard

run = spotguard.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(list(torch.randn(8, 2)), global_batch_size=4, micro_batch_size=2),
                      total=2):
    for x in step:
        loss = model(x).mean()
        MISUSE
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.e2e
@pytest.mark.parametrize("name", MISUSES)
def test_a_wrong_weight_is_told_in_one_sentence(jobs: Jobs, tmp_path: Path, name: str) -> None:
    """Before anything is trained on it."""
    call, message = MISUSES[name]
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.replace("MISUSE", call))
    assert message in jobs.run(script, code=2)


ONE_BATCH = """
import torch
import spotguard.runtime as spotguard

run = spotguard.init(seed=1)
data = torch.utils.data.TensorDataset(torch.ones(8, 1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=4), total=2):
    for (x,) in step:
        step.backward((model(x) * 0 + 2.5).mean(), weight=512)
    print("seen", step.mean_loss().item(), step.loss.item(), step.own_loss.item(), flush=True)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.e2e
def test_the_loss_of_one_batch_is_not_multiplied_by_its_tokens(jobs: Jobs) -> None:
    """One rank with one micro-batch: the mean is the loss itself, whichever way it is asked for."""
    script = jobs.folder / "script.py"
    script.write_text(ONE_BATCH)
    said = jobs.run(script)
    assert [line for line in said.splitlines() if line.startswith("seen")] == [
        "seen 2.5 2.5 2.5"
    ] * 2
