"""Parameters that an optimizer trains and nothing saves: refused before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from spotguard.errors import UsageError
from spotguard.runtime.loop.untracked_parameters import refuse_untracked
from spotguard.runtime.state.tracked import Box
from tests.runtime.harness.lab import adapters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime.harness.processes import Jobs


def told(**objects: Any) -> list[str]:
    """Return what is said of the tracked objects; a refusal is raised."""
    said: list[str] = []
    refuse_untracked(adapters(objects), said.append)
    return said


def sgd(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    """Return an optimizer of these."""
    return torch.optim.SGD(parameters, lr=0.1)


class Agent:
    """Tells its state as it is told to."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        """Return it."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Take nothing back."""


MODEL, HEAD = nn.Linear(3, 2), nn.Linear(2, 5)
ALPHA = torch.zeros(1, requires_grad=True)
LARGE = torch.zeros(1000, 100, requires_grad=True)
IMAGE = nn.Parameter(torch.zeros(1, 3, 4, 4))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a loss with weights": (
        {"model": MODEL, "optimizer": sgd(*MODEL.parameters(), *HEAD.parameters())},
        r"optimizer trains 2 parameters that are in no tracked module .* shape \(5, 2\)",
    ),
    "a temperature, beside a schedule and a count": (
        {
            "model": MODEL,
            "of_alpha": sgd(ALPHA),
            "schedule": torch.optim.lr_scheduler.StepLR(sgd(ALPHA), 3),
            "scaler": torch.amp.GradScaler("cpu"),
            "best": Box(0.5),
        },
        r"of_alpha trains 1 parameters .* shape \(1,\)",
    ),
    "an image": ({"optimizer": torch.optim.LBFGS([IMAGE])}, r"shape \(1, 3, 4, 4\): a resume wou"),
    "a head, beside a history": (
        {
            "log": Agent({"losses": [0.5] * 7, "pairs": [(1, 0.5)] * 4, "n": 3}),
            "o": sgd(HEAD.weight),
        },
        r"o trains 1 parameters .* shape \(5, 2\)",
    ),
    "a copy in a dict": ({"alpha": {"a": ALPHA.detach().clone()}, "o": sgd(ALPHA)}, "o trains 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_resume_would_lose_is_refused(name: str) -> None:
    """In one sentence with the optimizer's name and the first one's shape; and the way out."""
    objects, message = REFUSED[name]
    with pytest.raises(UsageError, match=message) as refused:
        told(**objects)
    assert "run.track(head=arcface)" in str(refused.value.hint)
    assert 'run.track(alpha={"log_alpha": log_alpha})' in str(refused.value.hint)


FLAT = torch.zeros(6)
EMBEDDING, TIED_HEAD = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
TIED_HEAD.weight = EMBEDDING.weight
ADAPTED = nn.ModuleDict({"base": nn.Linear(3, 2).requires_grad_(False), "lora": nn.Linear(3, 1)})
LAZY = nn.LazyLinear(3)
PART = FLAT[2:4].requires_grad_()
TRACKED: dict[str, dict[str, Any]] = {
    "the model's": {"model": MODEL, "optimizer": sgd(*MODEL.parameters())},
    "two modules'": {"a": MODEL, "b": HEAD, "o": sgd(*MODEL.parameters(), *HEAD.parameters())},
    "frozen ones": {"model": MODEL, "o": sgd(*MODEL.parameters(), torch.ones(3))},
    "in a dict": {"alpha": {"log_alpha": ALPHA}, "o": sgd(ALPHA)},
    "deep in a dict": {"all": {"x": [1, ({"a": ALPHA}, IMAGE)]}, "o": sgd(ALPHA, IMAGE)},
    "in a box": {"alpha": Box(ALPHA), "o": sgd(ALPHA)},
    "over the memory of a dict's": {"alpha": {"a": ALPHA.detach()}, "o": sgd(ALPHA)},
    "parts of a module's": {"all": nn.ParameterList([PART]), "o": sgd(FLAT[2:4].requires_grad_())},
    "in an object's state": {"agent": Agent({"model": MODEL.state_dict()}), "o": sgd(MODEL.weight)},
    "compiled": {"model": torch.compile(MODEL, backend="eager"), "o": sgd(*MODEL.parameters())},
    "tied": {"model": nn.Sequential(MODEL, MODEL), "o": sgd(*MODEL.parameters())},
    "tied, of two modules": {"a": EMBEDDING, "o": sgd(*TIED_HEAD.parameters())},
    "adapters, and a frozen base": {"model": ADAPTED, "o": sgd(*ADAPTED["lora"].parameters())},
    "and the base with them": {"model": ADAPTED, "o": sgd(*ADAPTED.parameters())},
    "numbered, of many": {"all": {"x": [*enumerate([ALPHA] * 2000)]}, "o": sgd(ALPHA)},
    "of no shape yet": {"model": LAZY, "o": torch.optim.SGD(LAZY.parameters())},
}  # fmt: skip


@pytest.mark.parametrize("name", TRACKED)
def test_what_is_saved_is_not_refused(name: str) -> None:
    """Whatever holds it: a module, a dict at any depth, or an object that tells its state."""
    assert told(**TRACKED[name]) == []


@pytest.mark.parametrize(
    ("state", "parameter"),
    [
        ({"shadow": [p.detach().clone() for p in HEAD.parameters()]}, HEAD.weight),
        ({"alpha": np.zeros(1)}, ALPHA),
        ({"alpha": 0.5}, ALPHA),
        ({"step_and_alpha": (3, 0.5)}, ALPHA),
        ({"head": HEAD.bias.tolist()}, HEAD.bias),
        ({"head": tuple(HEAD.weight.flatten().tolist())}, HEAD.weight),
        ({"head": HEAD.weight.tolist()}, HEAD.weight),
        ({"all": [0.5] * 100_000}, LARGE),
        (
            {"head": torch.nn.utils.parameters_to_vector(HEAD.parameters()).detach()},
            [*HEAD.parameters()],
        ),
        ({"head": b"PK.."}, HEAD.weight),
        ({"head": bytearray(3)}, HEAD.weight),
        ({"head": ["AAAA"]}, HEAD.weight),
        ({"head": {1.5, 2.5}}, HEAD.weight),
    ],
    ids=[
        "copies",
        "array",
        "number",
        "in a tuple",
        "list",
        "flat tuple",
        "lists",
        "long list",
        "one vector",
        "bytes",
        "bytearray",
        "text",
        "other",
    ],
)
def test_an_object_that_may_save_it_is_believed(state: Any, parameter: Any) -> None:
    """Its state dict has copies, or may have: one warning for the optimizer, which names it."""
    parameters = parameter if isinstance(parameter, list) else [parameter]
    [warning] = told(agent=Agent(state), o=sgd(*parameters))
    assert f"o trains {len(parameters)} parameters" in warning
    assert "a resume has their values only if agent saves them (track what" in warning


class Watched(list[Any]):
    """Tells if somebody goes through it."""

    def __iter__(self) -> Iterator[Any]:
        """Fail."""
        raise AssertionError("it was gone through")


def test_a_long_history_is_not_gone_through() -> None:
    """Of millions of numbers, or of lists of them, the length says enough."""
    state = {"returns": Watched([0.5] * 5000), "moves": Watched([(1, 2, 0.5)] * 5000)}
    with pytest.raises(UsageError, match="o trains 1"):
        told(agent=Agent(state), o=sgd(HEAD.weight))
    assert told(all={**state, "head": HEAD.weight}, o=sgd(HEAD.weight)) == []


SCRIPT = """
import torch
import torch.distributed as dist
import spotguard.runtime as spotguard
from spotguard.errors import UsageError
from spotguard.runtime.loop.untracked_parameters import refuse_untracked

run = spotguard.init(backend="gloo")
model, head = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
{wrap}
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
loader = run.loader(torch.ones(21, 3), global_batch_size=7, micro_batch_size=1)
run.track(model=model, optimizer=optimizer{more})
{before}
for step in run.steps(loader, total=2):
    for x in step:
        step.backward(head(model(x)).sum())
    optimizer.step()
    optimizer.zero_grad()
print("the end")
"""
SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (run.world_size,))
for part in (model, head):
    fully_shard(part, mesh=mesh, reshard_after_forward=False)
"""
SHOWS_WHOLE = """
with torch.no_grad():
    head(model(torch.ones(1, 3)))
assert not any(hasattr(p, "to_local") for p in model.parameters()), "it shows whole weights"
try:
    refuse_untracked(run._job.keeper.objects, print)
except UsageError:
    print("refused")
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("wrap", "more", "code"),
    [("", "", 2), (SHARDED, "", 2), ("", ", head=head", 0), (SHARDED, ", head=head", 0)],
    ids=["refused", "sharded, refused", "tracked", "sharded, tracked"],
)
def test_the_loop_does_not_begin_with_what_it_would_lose(
    jobs: Jobs, wrap: str, more: str, code: int
) -> None:
    """On 3 ranks, all end with the same sentence; FSDP2 that shows whole weights loses nothing."""
    script = jobs.folder / "script.py"
    script.write_text(SCRIPT.format(wrap=wrap, more=more, before=SHOWS_WHOLE if wrap else ""))
    ranks = jobs.start_ranks(3, script=script)

    assert [job.wait() for job in ranks] == [code] * 3, ranks[0].said
    for job in ranks:
        assert ("optimizer trains 2 parameters that are in no" in job.said) == bool(code)
        assert ("the end" in job.said) != bool(code)
        assert ("refused" in job.said.split()) == bool(wrap and code)
        assert "Traceback" not in job.said
