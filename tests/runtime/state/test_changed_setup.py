from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.runtime.state.boundary_copy import GroupShadow
from spotguard.runtime.state.changed_setup import SetUp
from spotguard.runtime.state.tracked import tracked
from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

THAWS = """
import hashlib, os, signal, sys, time, torch
import spotguard.runtime as spotguard

run = spotguard.init(seed=3, save_every="100 steps")
data = torch.utils.data.TensorDataset(torch.randn(28, 3), torch.randn(28, 1))
backbone, head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
model = torch.nn.Sequential(backbone, torch.nn.Tanh(), head)
backbone.requires_grad_(os.environ.get("TRAINED") == "all")
net = torch.nn.parallel.DistributedDataParallel(model) if run.world_size > 1 else model
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=2), total=14):
    if step.number == 4:  # once, as in a fourth epoch
        backbone.requires_grad_(True)
        optimizer.add_param_group({"params": list(backbone.parameters()), "lr": 0.01})
    if step.number == 6 and run.world_size == 1:  # DDP waits for what it knows
        head.bias.requires_grad_(False)
    for x, y in step:
        step.backward((net(x) - y).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    if step.number == int(os.environ.get("TOLD_AT", -1)) and run.rank == run.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
        while run._job.watch.agreed is None:
            time.sleep(0.001)
whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("digest", hashlib.sha256(whole).hexdigest(), [p.requires_grad for p in model.parameters()])
"""
E2E = pytest.mark.e2e


@E2E
@pytest.mark.parametrize("told_at", [4, 8])
@pytest.mark.parametrize("world", [1, 3])
def test_what_the_loop_thawed_is_trained_on_after_a_resume(
    jobs: Jobs, world: int, told_at: int
) -> None:
    """The line that thaws, and adds a group, is not come to again: the checkpoint repeats it."""
    script = jobs.folder / "script.py"
    script.write_text(THAWS)

    def attempt(code: int, **env: Any) -> str:
        if world == 1:
            return jobs.run(script, code=code, **env)
        ranks = jobs.start_ranks(world, script=script, **env)
        assert [job.wait() for job in ranks] == [code] * world, "\n".join(j.said for j in ranks)
        return ranks[0].said

    undisturbed = digest(attempt(0, SPOTGUARD_RUN_ID="calm"))
    attempt(75, TOLD_AT=told_at)
    attempt(75, SPOTGUARD_ATTEMPT=2, TOLD_AT=10)
    resumed = attempt(0, SPOTGUARD_ATTEMPT=3)

    assert digest(resumed) == undisturbed


@E2E
def test_a_script_that_sets_up_something_else_today_is_believed(jobs: Jobs) -> None:
    """What it froze or thawed before is not repeated over its head, and that is said."""
    script = jobs.folder / "script.py"
    script.write_text(THAWS.replace("if step.number == 4", "if False"))
    jobs.run(script, code=75, TOLD_AT=8)
    script.write_text(
        THAWS.replace("if step.number == 4", "if False")
        .replace("optimizer = ", "head.weight.requires_grad_(False)\noptimizer = ")
        .replace("if p.requires_grad", "if p is not backbone.weight and p is not backbone.bias")
    )
    resumed = jobs.run(script, SPOTGUARD_ATTEMPT=2)

    assert "model: the script sets up other parameters to be trained" in resumed
    assert digest(resumed).endswith("[False, False, False, True]")


def net() -> torch.nn.Module:
    """Return two layers, of which the first is frozen."""
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    made[0].requires_grad_(False)
    return made


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer, SetUp]:
    """Return what a script sets up."""
    model = net()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)  # type: ignore[index]
    objects = {"model": tracked("model", model), "opt": tracked("opt", optimizer)}
    return model, optimizer, SetUp(objects)


def thawed() -> dict[str, Any]:
    """Return the changes of a loop that thawed the first layer."""
    model, optimizer, set_up = made()
    assert set_up.changes() == {}
    model[0].requires_grad_(True)  # type: ignore[index]
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})  # type: ignore[index]
    changes: dict[str, Any] = json.loads(json.dumps(set_up.changes()))
    return changes


def test_an_older_checkpoint_takes_back_what_a_damaged_one_told() -> None:
    """Each is followed from the set-up on, not from the one that was tried before."""
    model, optimizer, set_up = made()
    set_up.follow(thawed())
    assert all(p.requires_grad for p in model.parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert json.loads(json.dumps(set_up.changes())) == thawed()
    set_up.follow({})
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        [],
        {"module model": 3},
        {"module model": {"set_up": None, "trained": [1]}},
        {"module model": {"set_up": [], "trained": {"nobody": True}}},
        {"optimizer opt": {"set_up": [2], "added": [["model", "0.weight"], 3, [["x", "y"]], [[]]]}},
        {"optimizer opt": {"set_up": [2], "added": {"a": 1}}},
    ],
)
def test_a_checkpoint_that_makes_no_sense_changes_nothing(nonsense: Any) -> None:
    """What comes from a store may be anything."""
    model, optimizer, set_up = made()
    set_up.follow(nonsense)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def test_a_change_that_no_resume_can_repeat_is_told_when_it_is_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A group of tensors that are in no tracked module cannot be named: one warning, at once."""
    _, optimizer, set_up = made()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert set_up.changes() == {}
    assert set_up.changes() == {}
    assert [r.message for r in caplog.records if "parameter groups were changed" in r.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


def test_what_a_step_changed_is_not_of_the_boundary_before_it() -> None:
    """A step that is given up is done again: what it froze for a while, or added, is not kept."""
    model, optimizer, set_up = made()
    shadow = GroupShadow([optimizer])
    shadow.take()
    set_up.take()
    model[0].requires_grad_(True)  # type: ignore[index]
    model[1].requires_grad_(False)  # type: ignore[index]
    optimizer.add_param_group({"params": list(model[0].parameters())})  # type: ignore[index]
    shadow.put_back()

    assert set_up.changes(halfway=True) == {}
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    optimizer.add_param_group({"params": list(model[0].parameters())})  # type: ignore[index]
    set_up.take()
    model[1].requires_grad_(True)  # type: ignore[index]
    halfway = set_up.changes(halfway=True)
    assert halfway["module model"]["trained"] == {
        **dict.fromkeys(["0.weight", "0.bias"], True),
        **dict.fromkeys(["1.weight", "1.bias"], False),
    }
    assert len(halfway["optimizer opt"]["added"]) == 1


def test_a_group_of_what_is_grouped_already_is_passed_over() -> None:
    """It cannot be added: the state that does not fit is refused in words, later."""
    changes = thawed()
    changes["optimizer opt"]["added"] = [[["model", "1.weight"]]]
    _, optimizer, set_up = made()
    set_up.follow(changes)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def reshape(model: Any) -> None:
    """Give the model's head more classes, and another buffer."""
    model[1] = torch.nn.Linear(2, 3)
    model.register_buffer("seen", torch.zeros(1))


def test_layers_that_the_loop_reshapes_are_told_at_the_first_save() -> None:
    """The next attempt sets up the old ones, and refuses: its user hears so before that."""
    model, told = net(), list[str]()
    set_up = SetUp(
        {"model": tracked("model", model), "other": tracked("other", net())}, told.append
    )
    set_up.take()
    set_up.changes()
    assert told == []
    reshape(model)
    set_up.take()
    assert told == []  # no step pays for it
    set_up.changes()
    set_up.changes(halfway=True)
    [words] = told
    assert "model: the loop added, removed or reshaped 1.bias, 1.weight, seen; " in words
    assert "make all layers before the loop" in words


def test_what_no_checkpoint_holds_may_be_of_another_shape() -> None:
    """A mask that is kept for the longest text so far; a lazy layer, which had no shape yet."""
    model, told = net(), list[str]()
    model[0] = torch.nn.LazyLinear(2)  # type: ignore[operator]
    model.register_buffer("mask", torch.zeros(1), persistent=False)
    set_up = SetUp({"model": tracked("model", model)}, told.append)
    model(torch.zeros(1, 2))
    model.mask = torch.zeros(2)
    set_up.changes()
    assert told == []
