from __future__ import annotations

import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from spotguard.errors import UsageError
from spotguard.runtime.distributed.bitwise_reduce import BitwiseSync, SumNode, TreeSum, whole_nodes
from spotguard.runtime.starting import _check_exact
from spotguard.shared.batching import rank_range
from tests.runtime.distributed.test_gradients import gradients_of
from tests.runtime.harness.lab import raw
from tests.runtime.harness.processes import digest
from tests.runtime.harness.simulated import SimulatedRank, Training, on_ranks, simulated_ranks

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

# ---------------------------------------------------------------------- the tree


def words() -> TreeSum[str]:
    """Return a sum that says in which order it adds."""
    return TreeSum(lambda left, right: f"({left}+{right})")


@functools.cache
def sum_on(leaves: int, world_size: int) -> str:
    """Return how so many leaves are added up by so many ranks."""
    everything = words()
    for rank in range(world_size):
        mine = words()
        for leaf in rank_range(leaves, world_size, rank):
            mine.push(SumNode(0, leaf, str(leaf)))
        for node in mine.nodes:
            everything.push(node)
    return everything.total()


def test_the_tree_is_the_one_of_the_documentation() -> None:
    """Halves first; what is left on the right joins as it is."""
    assert sum_on(1, 1) == "0"
    assert sum_on(8, 1) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert sum_on(7, 1) == "(((0+1)+(2+3))+((4+5)+6))"
    assert sum_on(5, 1) == "(((0+1)+(2+3))+4)"


@pytest.mark.parametrize("leaves", [*range(1, 34), 63, 64, 65, 96, 127])
def test_the_order_does_not_depend_on_the_ranks(leaves: int) -> None:
    """For every number of ranks up to beyond the micro-batches: the very same additions."""
    aim = sum_on(leaves, 1)
    for world_size in range(2, leaves + 3):
        assert sum_on(leaves, world_size) == aim, world_size


def test_a_rank_holds_few_nodes() -> None:
    """Two per level at most, at any moment: memory grows with the logarithm of its leaves."""
    for start in (0, 1, 5, 100, 127):
        tree = words()
        for count in range(1, 300):
            tree.push(SumNode(0, start + count - 1, "x"))
            assert len(tree.nodes) <= 2 * math.ceil(math.log2(count + 1))
        levels = [node.level for node in tree.nodes]
        assert all(levels.count(level) <= 2 for level in levels)


def test_the_plan_knows_the_nodes_of_all_ranks() -> None:
    """What a rank will send follows from its range alone, as the others must foresee it."""
    assert whole_nodes(range(3, 6)) == [SumNode(0, 3, None), SumNode(1, 2, None)]
    assert whole_nodes(range(4, 8)) == [SumNode(2, 1, None)]
    assert whole_nodes(range(2, 2)) == []


# ---------------------------------------------------------------------- simulated ranks

DATA = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {"samples": 30, "global_batch": 19, "micro_batch": 2}
"""Ten micro-batches, the last of one sample; then six, in the last batch of the epoch."""


class Picky(nn.Module):
    """One layer is for some micro-batches only, one for none; dtypes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.some = nn.Linear(5, 5)
        self.never = nn.Linear(2, 2)
        self.wide = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, *, some: bool) -> Any:
        """Return one number per sample."""
        x = self.first(x).tanh()
        x = self.some(x).tanh() if some else x
        return self.last(x) * self.wide.float()


PICKY = Picky()


def losses(model: nn.Module, batch: list[int]) -> torch.Tensor:
    """Return each sample's loss; a micro-batch with an index above 20 uses one layer more."""
    out: torch.Tensor = model(DATA[batch], some=max(batch) > 20)
    return out.square().squeeze(1)


def picky(ranks: SimulatedRank) -> Training:
    """Return the training of that model in bitwise mode."""
    return Training(ranks, PICKY, losses, exact=True, **SIZES)


def steps_on(world_size: int, *, clear: bool = True) -> list[bytes]:
    """Return every rank's weights and optimizer state after some steps in bitwise mode."""

    def train(ranks: SimulatedRank) -> bytes:
        training = picky(ranks)
        for number in range(4):
            training.gradients(number)
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=clear)
        states = training.optimizer.state_dict()["state"].values()
        kept = [value for state in states for value in state.values()]
        return b"".join(map(raw, [*training.model.parameters(), *kept]))

    torch.set_num_threads(1)
    return on_ranks(world_size, train)


@pytest.mark.parametrize("clear", [True, False])
def test_weights_and_optimizer_are_the_same_to_the_last_bit(clear: bool) -> None:
    """On 1 to 13 ranks, more than micro-batches, with gradients set to None or to zero."""
    [aim] = steps_on(1, clear=clear)
    for world_size in (2, 3, 4, 5, 7, 10, 13):
        for mine in steps_on(world_size, clear=clear):
            assert mine == aim, world_size


def test_unused_parameters_stay_unused() -> None:
    """One that no micro-batch used has no gradient; one that some used has theirs, on all ranks."""

    def first_step(ranks: SimulatedRank) -> Training:
        training = picky(ranks)
        training.gradients(0)
        return training

    for world_size in (1, 3):
        for training in on_ranks(world_size, first_step):
            grads = {name: p.grad for name, p in training.model.named_parameters()}
            assert grads["never.weight"] is None
            assert grads["some.weight"] is not None
            assert grads["wide"] is not None
            assert grads["wide"].dtype == torch.float64


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_from_before_the_step_are_added_to(world_size: int) -> None:
    """As with autograd: what `zero_grad` did not take away stays, in its own memory."""

    def twice(ranks: SimulatedRank) -> bool:
        training = picky(ranks)
        first = [None if g is None else g.clone() for g in training.gradients(0)]
        memory = [p.grad for p in training.model.parameters()]
        second = training.gradients(0)
        return all(a is b for a, b in zip(memory, second, strict=True)) and all(
            a is b is None or (a is not None and b is not None and torch.equal(2 * a, b))
            for a, b in zip(first, second, strict=True)
        )

    assert all(on_ranks(world_size, twice))


def test_layout_follows_the_parameter() -> None:
    """A gradient from others lies in memory as autograd's own: a norm is summed in that order."""

    conv = nn.Conv2d(3, 4, 3)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)

    def loss_of(model: nn.Module, batch: list[int]) -> torch.Tensor:
        x = DATA[batch].repeat(1, 12).view(-1, 3, 4, 4)
        out: torch.Tensor = model(x)
        return out.square().mean((1, 2, 3))

    def strides(ranks: SimulatedRank) -> Any:
        training = Training(ranks, conv, loss_of, exact=True, **SIZES)
        return [(g.stride(), g.norm().item()) for g in training.gradients(0) if g is not None]

    assert len({str(found) for world in (1, 2, 3) for found in on_ranks(world, strides)}) == 1


def test_what_it_sends_is_as_little_as_an_all_reduce() -> None:
    """Where ranks own whole subtrees, each sends its gradient twice; else twice per level."""

    def sent(world_size: int) -> float:
        def count(ranks: SimulatedRank) -> float:
            training = Training(
                ranks, nn.Linear(4, 250), lambda m, b: m(DATA[b]).mean(1),
                exact=True, samples=16, global_batch=16, micro_batch=1,
            )  # fmt: skip
            training.gradients(0)
            return ranks.sent_bytes / (250 * 5 * 4)

        return float(max(on_ranks(world_size, count)))

    assert sent(2) == pytest.approx(1.0, rel=0.02)
    assert sent(4) == pytest.approx(1.5, rel=0.02)
    assert sent(3) <= (4 + 1) * 2 / 3 * 1.02


# ---------------------------------------------------------------------- refusals


def sync_of(*modules: nn.Module, any_world: bool = True) -> BitwiseSync:
    """Return what would synchronise the modules."""
    [ranks] = simulated_ranks(1)
    loader: Any = SimpleNamespace(any_world=any_world)
    return BitwiseSync(modules, [], ranks, loader)


def refused(*modules: nn.Module) -> str:
    """Return why a model cannot be exact."""
    with pytest.raises(UsageError) as caught:
        sync_of(*modules)
    return caught.value.message


def test_statistics_of_a_rank_are_refused() -> None:
    """BatchNorm's running values depend on who saw what; frozen, or without them, it is fine."""
    assert "(BatchNorm1d)" in refused(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert "(SyncBatchNorm)" in refused(nn.SyncBatchNorm(2))
    for fine in (
        nn.BatchNorm1d(2).eval(),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.InstanceNorm1d(2),
        nn.LayerNorm(2),
    ):
        sync_of(fine)


def test_streams_are_refused() -> None:
    """There each rank has samples of its own: other ranks, other micro-batches."""
    with pytest.raises(UsageError, match="one stream for each rank"):
        sync_of(any_world=False)


def test_wrong_arguments_are_named() -> None:
    """Another word than `bitwise`, and randomness that is left to the ranks."""
    with pytest.raises(UsageError, match="exact is 'bits'; allowed: bitwise"):
        _check_exact("bits", reseed=True)
    with pytest.raises(UsageError, match="needs reseed=True"):
        _check_exact("bitwise", reseed=False)
    _check_exact(None, reseed=False)
    _check_exact("bitwise", reseed=True)


# ---------------------------------------------------------------------- real processes

ELASTIC = Path(__file__).parents[1] / "jobs" / "elastic.py"


@pytest.mark.e2e
def test_real_ranks_agree_to_the_last_bit(jobs: Jobs) -> None:
    """Over gloo, plain and in DDP, with bf16 autocast and a scaler: the very same gradients.

    Here DDP keeps out of it: it scales and divides by the number of ranks.
    """
    how = {"EXACT": 1, "AMP": "bfloat16", "SCALER": 1024, "CLIP": 1}
    [alone] = gradients_of(jobs, 1, "none", **how)
    for world, wrap in ((2, "none"), (3, "none"), (2, "ddp"), (3, "ddp")):
        for mine in gradients_of(jobs, world, wrap, **how):
            assert mine == alone, (world, wrap)


@pytest.mark.e2e
@pytest.mark.parametrize("wrap", ["none", "ddp"])
@pytest.mark.parametrize("exact", ["", "bitwise"])
def test_a_run_that_grows_and_shrinks(jobs: Jobs, exact: str, wrap: str) -> None:
    """1, 3, 2, then 4 ranks train a GPT with dropout as one process does, at every step.

    The losses agree within 1e-5; in bitwise mode weights and optimizer agree to the last bit.
    """
    how: dict[str, Any] = {"EXACT": exact, "WRAP": wrap}
    alone = jobs.run(ELASTIC, **how, SPOTGUARD_RUN_ID="alone")
    said = []
    for world, until in ((1, 3), (3, 6), (2, 9), (4, 12)):
        ranks = jobs.start_ranks(world, script=ELASTIC, SPOTGUARD_MAX_STEPS=until, **how)
        assert [job.wait() for job in ranks] == [0] * world, ranks[0].said
        said += [job.said for job in ranks]

    assert losses_in(said) == pytest.approx(losses_in([alone]), rel=1e-5)
    if exact:
        assert digests_in(said) == digests_in([alone])
        assert {digest(text) for text in said[-4:]} == {digest(alone)}


def losses_in(said: list[str]) -> dict[int, float]:
    """Return the global loss of each step: the sum of what the ranks had of it."""
    found: dict[int, float] = {}
    for line in "\n".join(said).splitlines():
        if line.startswith("loss "):
            _, step, value = line.split()
            found[int(step)] = found.get(int(step), 0.0) + float(value)
    return found


def digests_in(said: list[str]) -> set[str]:
    """Return the distinct lines that tell a step's weights and optimizer state."""
    lines = "\n".join(said).splitlines()
    return {line for line in lines if line.startswith("state ")}
