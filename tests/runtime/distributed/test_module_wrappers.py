"""Whole runs of models in DDP and FSDP2, however they are wrapped and whatever is tracked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.harness.processes import wait_until

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Job, Jobs

WRAPPED = Path(__file__).parents[1] / "jobs" / "wrapped.py"
STEPS = 6

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def said_by(ranks: list[Job], of: str = "state") -> dict[int, str]:
    """Return the hash (or length) of the weights after each step; the ranks must agree on it."""
    found: dict[int, str] = {}
    for job in ranks:
        for line in job.said.splitlines():
            if line.startswith(f"{of} "):
                _, number, state = line.split()
                assert found.setdefault(int(number), state) == state, f"ranks differ in {number}"
    return found


def trained(jobs: Jobs, world: int, *, codes: set[int], **how: Any) -> list[Job]:
    """Run one attempt, whose ranks end with these codes."""
    ranks = jobs.start_ranks(world, script=WRAPPED, **how)
    found = {job.wait() for job in ranks}
    assert found == codes, "\n".join(job.said for job in ranks)
    return ranks


@pytest.mark.parametrize(
    ("world", "wrap", "name", "at"),
    [
        (3, "ddp", "SIGTERM", 1),
        (4, "ddp", "SIGTERM", 2),
        (2, "ddp", "SIGTERM", 2),
        (3, "bn", "SIGTERM", 2),
        (3, "unused", "SIGTERM", 2),
        (3, "fsdp", "SIGTERM", 2),
        (4, "fsdp", "SIGTERM", 2),
        (3, "plain", "SIGTERM", 2),
        (3, "ddp", "SIGKILL", 1),
        (3, "ddp", "SIGKILL", 0),
    ],
)
def test_a_resume_on_as_many_ranks_is_bitwise(
    jobs: Jobs, world: int, wrap: str, name: str, at: int
) -> None:
    """Stopped or killed in any step, the first one too: each step's weights are the same bits.

    On three and more ranks the order within a bucket of gradients decides over the last bits, so
    the layout of the first step after a resume has to be that of the others.
    """
    whole = trained(jobs, world, codes={0}, WRAP=wrap, SPOTGUARD_RUN_ID="undisturbed")
    codes = {75} if name == "SIGTERM" else {75, -9}
    halves = trained(jobs, world, codes=codes, WRAP=wrap, VICTIM=1, AT=at, SIGNAL=name)
    first = said_by(halves)
    second = said_by(trained(jobs, world, codes={0}, WRAP=wrap))
    undisturbed = said_by(whole)

    assert sorted(undisturbed) == list(range(STEPS))
    assert sorted({**first, **second}) == list(range(STEPS))
    assert len(first) < STEPS
    assert {**first, **second} == undisturbed
    assert first.items() <= undisturbed.items()


@pytest.mark.parametrize("wrap", ["raw", "untracked", "nested", "compiled", "ignored", "parts"])
def test_a_wrapper_is_found_wherever_it_is(jobs: Jobs, wrap: str) -> None:
    """Ranks with 3, 2 and 2 micro-batches meet once in a step, in whatever way the net is wrapped.

    Their weights are those of the bare net, but for rounding: nothing is averaged twice.
    """
    plain = trained(jobs, 3, codes={0}, WRAP="plain", SPOTGUARD_RUN_ID="plain")
    found = trained(jobs, 3, codes={0}, WRAP=wrap)
    assert lengths(found) == pytest.approx(lengths(plain), rel=1e-5)


@pytest.mark.parametrize("exact", ["", "bitwise"])
def test_a_wrapper_that_comes_too_late_is_refused_by_name(jobs: Jobs, exact: str) -> None:
    """DDP made in the loop would meet with each micro-batch, of which ranks have 3, 2 and 2."""
    for job in trained(jobs, 3, codes={2}, WRAP="late", EXACT=exact):
        assert "put into DDP or FSDP2 after the training loop had begun (wrap it bef" in job.said


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
def test_ranks_that_wait_for_one_are_told_of_soon(jobs: Jobs, wrap: str) -> None:
    """A rank that is busy alone while others wait for it: an event says where each of them is.

    It comes after six times `peer_timeout`, long before the half hour of a collective.
    """
    how: dict[str, Any] = {
        "WRAP": wrap,
        "VICTIM": 1,
        "AT": 2,
        "SIGNAL": "busy",
        "SPOTGUARD_PEER_TIMEOUT": "1s",
    }
    jobs.start_ranks(3, script=WRAPPED, **how)

    def told() -> list[str]:
        messages = [str(e.data.get("message")) for e in jobs.events() if e.kind == "warning"]
        return [message for message in messages if "stood still" in message]

    wait_until(lambda: bool(jobs.claims()), lambda: "a claim")
    wait_until(lambda: bool(told()), lambda: "\n".join(job.said for job in jobs.started))
    [message] = told()
    assert "rank 1 in step 3 at wrapped.py" in message
    assert "in busy_alone()" in message
    assert message.count(" done") == 3, "each rank tells how far it is"
    assert "in backward()" in message


THAWS = """
import os, torch
import spotguard.runtime as spotguard

run = spotguard.init(seed=3)
data = torch.utils.data.TensorDataset(torch.randn(14, 3), torch.randn(14, 1))
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
model[0].requires_grad_(False)
model[2].bias.requires_grad_(False)
net = torch.nn.parallel.DistributedDataParallel(model) if run.world_size > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=2), total=6):
    if step.number == 3:
        model.requires_grad_(True)
    for x, y in step:
        step.backward((net(x) - y).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    length = sum(float(p.detach().double().norm()) for p in model.parameters())
    print(f"length {step.number} {length!r}", flush=True)
"""


def test_what_was_frozen_when_ddp_was_made_is_synchronised_once_it_is_thawed(jobs: Jobs) -> None:
    """DDP never looks at it again; on 3 ranks with 3, 2 and 2 micro-batches all train as one."""
    script = jobs.folder / "script.py"
    script.write_text(THAWS)
    alone = jobs.start(script, SPOTGUARD_RUN_ID="alone")
    assert alone.wait() == 0, alone.said
    ranks = jobs.start_ranks(3, script=script)
    assert [job.wait() for job in ranks] == [0] * 3, "\n".join(job.said for job in ranks)
    assert lengths(ranks) == pytest.approx(lengths([alone]), rel=1e-5)


SWAPS = """
import torch
import spotguard.runtime as spotguard

run = spotguard.init(seed=3)
data = torch.utils.data.TensorDataset(torch.randn(14, 3), torch.randn(14, 1))
first, second, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
model = torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Tanh(), last)
first.requires_grad_(False)
second.requires_grad_(False)
net = torch.nn.parallel.DistributedDataParallel(model) if run.world_size > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=2), total=6):
    if step.number:
        first.requires_grad_(step.number < 3)
        second.requires_grad_(step.number >= 3)
    for x, y in step:
        step.backward((net(x) - y).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    length = sum(float(p.detach().double().norm()) for p in model.parameters())
    print(f"length {step.number} {length!r}", flush=True)
weights = sum(float(p.detach().double().norm()) for p in model.parameters())
print(f"length {9 + run.rank} {weights!r}", flush=True)
"""


def test_one_block_after_another_is_thawed_and_synchronised(jobs: Jobs) -> None:
    """As many parameters are trained as before, but others: each rank ends with the same."""
    script = jobs.folder / "script.py"
    script.write_text(SWAPS)
    alone = jobs.start(script, SPOTGUARD_RUN_ID="alone")
    assert alone.wait() == 0, alone.said
    ranks = jobs.start_ranks(3, script=script)
    assert [job.wait() for job in ranks] == [0] * 3, "\n".join(job.said for job in ranks)
    for job in ranks:
        assert lengths([job])[:6] == pytest.approx(lengths([alone])[:6], rel=1e-5)


def test_what_was_thawed_between_ddp_and_the_loop_is_refused(jobs: Jobs) -> None:
    """DDP does not know of it, and nobody can tell which it is: one sentence on every rank."""
    script = jobs.folder / "script.py"
    script.write_text(THAWS.replace("run.track(", "model.requires_grad_(True)\nrun.track("))
    ranks = jobs.start_ranks(2, script=script)
    assert [job.wait() for job in ranks] == [2, 2], ranks[0].said
    assert all("thawed after their DistributedDataParallel was made" in job.said for job in ranks)


def lengths(ranks: list[Job]) -> list[float]:
    """Return the length of the weights after each step."""
    return [float(text) for _, text in sorted(said_by(ranks, "length").items())]
