from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from spotguard.errors import UsageError
from spotguard.runtime.data.loader import Share
from spotguard.runtime.distributed import buckets
from spotguard.runtime.distributed.buckets import cut_into_buckets, flatten, unflatten
from spotguard.runtime.distributed.gradients import (
    GradientSync,
    _unsynchronised,
    evened_out,
    run_backward,
)
from tests.runtime.harness.simulated import SimulatedRank, Training, on_ranks, simulated_ranks

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

SCRIPT = Path(__file__).parents[1] / "jobs" / "gradients.py"

Gradients = dict[str, "list[float] | None"]

# ---------------------------------------------------------------------- real processes


def gradients_of(jobs: Jobs, world: int, wrap: str, **how: Any) -> list[Gradients]:
    """Return every rank's gradients of the same global batch."""
    ranks = jobs.start_ranks(world, script=SCRIPT, WRAP=wrap, **how)
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


@pytest.mark.e2e
@pytest.mark.parametrize("wrap", ["none", "ddp", "fsdp", "mixed"])
def test_clipping_is_on_the_global_norm(jobs: Jobs, wrap: str) -> None:
    """After the last micro-batch torch's own clipping sees the norm of the global gradient.

    Also where the scaler has just been told to unscale, and where FSDP2 holds parts. Four ranks
    have 2, 2, 1 and 1 micro-batches, and FSDP2 meets in each.
    """
    how: dict[str, Any] = {"NET": "even", "CLIP": 1, "SCALER": 4096}
    [alone] = gradients_of(jobs, 1, "none", **how)
    norm = (alone["norm"] or [0.0])[0]
    assert norm > 10, "it was clipped"
    for world in (2, 4):
        for mine in gradients_of(jobs, world, wrap, **how):
            assert mine["norm"] == pytest.approx([norm], rel=1e-6)
            assert close({**mine, "norm": [norm]}, alone), (world, wrap)


@pytest.mark.e2e
def test_autocast_does_not_depend_on_the_number_of_ranks(jobs: Jobs) -> None:
    """Under bf16 autocast each micro-batch rounds as on one process; the sum is in fp32."""
    how: dict[str, Any] = {"NET": "even", "AMP": "bfloat16", "SCALER": 1024}
    [alone] = gradients_of(jobs, 1, "none", **how)
    for world in (2, 3):
        for mine in gradients_of(jobs, world, "none", **how):
            for name, values in mine.items():
                assert values == pytest.approx(alone[name], rel=1e-6, abs=1e-6), name


# ---------------------------------------------------------------------- simulated ranks

DATA = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
MODEL = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
SIZES: dict[str, dict[str, Any]] = {
    "whole": {"samples": 40, "global_batch": 40, "micro_batch": 2},
    "uneven": {"samples": 50, "global_batch": 29, "micro_batch": 3},
    "few": {"samples": 50, "global_batch": 5, "micro_batch": 2},
}

CASES = [("whole", 0), ("uneven", 0), ("uneven", 1), ("few", 3)]
"""Sizes and a step; the second of the uneven ones is the partial last batch of the epoch."""


def losses(net: nn.Module, batch: list[int]) -> torch.Tensor:
    """Return each sample's loss."""
    out: torch.Tensor = net(DATA[batch])
    return (out.squeeze(1) - DATA[batch].sum(1)).square()


@functools.cache
def at_once(sizes: str, number: int) -> torch.Tensor:
    """Return the gradient of the mean over the whole global batch, in one pass."""
    samples, batch = SIZES[sizes]["samples"], SIZES[sizes]["global_batch"]
    [ranks] = simulated_ranks(1)
    one = Training(
        ranks, MODEL, losses, exact=False, samples=samples, global_batch=batch, micro_batch=batch
    )
    return flat(one.gradients(number))


def flat(gradients: list[torch.Tensor | None]) -> torch.Tensor:
    """Return all gradients in one."""
    return torch.cat([g.reshape(-1) for g in gradients if g is not None])


def check_gradients(world_size: int, sizes: str, number: int, reduction: str) -> None:
    """Compare with one process: within 1e-6, and in bitwise mode to the last bit, on all ranks."""
    aim = at_once(sizes, number)
    for exact in (False, True):

        def gradient(ranks: SimulatedRank, exact: bool = exact) -> torch.Tensor:
            training = Training(ranks, MODEL, losses, exact=exact, **SIZES[sizes])
            return flat(training.gradients(number, reduction=reduction))

        found = on_ranks(world_size, gradient)
        assert all(torch.equal(mine, found[0]) for mine in found)
        assert torch.dist(found[0], aim) <= 1e-6 * aim.norm(), exact
        if exact:
            case = (sizes, number, reduction)
            assert torch.equal(found[0], _BITS.setdefault(case, found[0]))


_BITS: dict[tuple[str, int, str], torch.Tensor] = {}
"""What bitwise mode found for each case on some number of ranks."""


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("sizes", "number"), CASES)
def test_the_gradient_is_the_mean(sizes: str, number: int, reduction: str) -> None:
    """On few ranks and on one: uneven counts, idle ranks, a partial last batch, both reductions."""
    for world_size in (1, 2, 3, 5, 7):
        check_gradients(world_size, sizes, number, reduction)


@pytest.mark.e2e
@pytest.mark.parametrize("worlds", [range(1, 33), range(33, 49), range(49, 65)], ids=str)
def test_the_gradient_is_the_mean_on_1_to_64_ranks(worlds: range) -> None:
    """Each number of ranks, up to many more than there are micro-batches, in one of the cases."""
    for world_size in worlds:
        sizes, number = CASES[world_size % len(CASES)]
        check_gradients(world_size, sizes, number, ("mean", "sum")[world_size // 4 % 2])


# ---------------------------------------------------------------------- the parts


def test_alone_nothing_is_copied() -> None:
    """One process has nobody to meet: gradients are autograd's own, weighted."""
    weight = torch.nn.Parameter(torch.ones(3))
    [ranks] = simulated_ranks(1)
    sync = GradientSync([], [torch.optim.SGD([weight], lr=1.0)], ranks)
    for number, part in enumerate((0.25, 0.75)):
        share = Share(0, number, part, (number,), number == 1)
        sync.backward((weight * 2).sum(), part, share)

    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert not sync.managed_elsewhere


@pytest.mark.parametrize("exact", [False, True])
def test_weights_that_the_script_changes_by_hand_are_trained_together(*, exact: bool) -> None:
    """No optimizer is tracked: on 3 ranks with uneven shares gradients are the mean all the same.

    So they are of what the script thaws later on.
    """
    aim = at_once("uneven", 0)

    def gradient(ranks: SimulatedRank) -> torch.Tensor:
        training = Training(ranks, MODEL, losses, exact=exact, by_hand=True, **SIZES["uneven"])
        first = next(training.model.parameters()).requires_grad_(False)
        training.gradients(0)
        first.requires_grad_()
        training.model.zero_grad()
        assert not training.sync.synchronised(), "by an optimizer, which is to be tracked"
        return flat(training.gradients(0))

    found = on_ranks(3, gradient)
    assert all(torch.equal(mine, found[0]) for mine in found)
    assert torch.dist(found[0], aim) <= 1e-6 * aim.norm()


def test_buckets_hold_one_dtype_and_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, every parameter once, cut where the dtype changes or the bucket is full."""
    monkeypatch.setattr(buckets, "_BUCKET_BYTES", 100)
    sizes = [
        (10, torch.float32),
        (20, torch.float32),
        (5, torch.float64),
        (1, torch.float32),
        (400, torch.float32),
    ]
    parameters = [torch.zeros(n, dtype=dtype) for n, dtype in sizes]
    found = list(cut_into_buckets(parameters))

    assert [p for bucket in found for p in bucket] == parameters
    assert [len(bucket) for bucket in found] == [1, 1, 1, 1, 1]
    for bucket in found:
        assert len({p.dtype for p in bucket}) == 1
    assert [len(b) for b in cut_into_buckets([torch.zeros(5) for _ in range(11)])] == [5, 5, 1]


def test_flat_and_back_keeps_what_is_unused() -> None:
    """A bucket carries a flag for each gradient; an absent one changes nothing it is added to."""
    parameters = [torch.ones(2), torch.ones(1, 2), torch.ones(2)]
    mine = flatten(parameters, [torch.tensor([1.0, -0.0]), None, None])
    other = flatten(parameters, [None, None, torch.tensor([7.0, -0.0])])
    found = unflatten(parameters, mine + other)

    assert mine.tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0]
    assert found[1] is None
    assert found[0] is not None
    assert found[2] is not None
    assert (found[0].tolist(), found[2].tolist()) == ([1, 0], [7, 0])
    assert found[0].signbit().tolist() == found[2].signbit().tolist() == [False, True]


def test_sparse_gradients_are_refused() -> None:
    """They cannot lie in a flat bucket; the way out is named."""
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse gradient") as caught:
        flatten([table.weight], [table.weight.grad])
    assert "sparse=False" in caught.value.hint


def test_a_gradient_that_somebody_holds_is_changed_in_place() -> None:
    """An optimizer or a hook may hold a gradient: the mean is written into it, on every rank."""

    def held(ranks: SimulatedRank) -> bool:
        training = Training(ranks, MODEL, losses, exact=False, **SIZES["few"])
        first = training.gradients(0)
        training.optimizer.zero_grad(set_to_none=False)
        return all(a is b for a, b in zip(first, training.gradients(0), strict=True))

    assert all(on_ranks(2, held))


def test_ranks_with_less_to_do_run_forward_as_often() -> None:
    """The last micro-batch once more, with weight zero, until all ranks have as many."""
    ranges = [range(3), range(3, 5), range(5, 6), range(6, 6)]

    def handed_out(rank: int) -> list[tuple[int, float, bool]]:
        mine = list(ranges[rank]) or [0]
        shares = [Share(7, number, 0.2, (1,), number == mine[-1]) for number in mine]
        found = list(evened_out(((s, s.number) for s in shares), rank, lambda _step: ranges))
        assert all(share.number == batch for share, batch in found)
        return [(share.number, share.weight, share.last) for share, _ in found]

    assert handed_out(0) == [(0, 0.2, False), (1, 0.2, False), (2, 0.2, True)]
    assert handed_out(1) == [(3, 0.2, False), (4, 0.2, False), (4, 0.0, True)]
    assert handed_out(2) == [(5, 0.2, False), (5, 0.0, False), (5, 0.0, True)]
    assert handed_out(3) == [(0, 0.2, False), (0, 0.0, False), (0, 0.0, True)]


def test_what_meets_in_forward_is_known() -> None:
    """SyncBatchNorm within a model does, as FSDP2 does; a plain model does not."""
    [ranks] = simulated_ranks(1)
    assert not GradientSync([nn.Linear(1, 1)], [], ranks).meets_in_forward
    assert GradientSync([nn.Sequential(nn.SyncBatchNorm(2))], [], ranks).meets_in_forward


def test_fsdp1_is_refused() -> None:
    """Its parameters look whole and are parts: summing them over the ranks would be nonsense."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    [ranks] = simulated_ranks(1)
    with pytest.raises(UsageError, match="FullyShardedDataParallel") as caught:
        GradientSync([nn.Sequential(wrapped)], [], ranks)
    assert "fully_shard" in caught.value.hint


@pytest.mark.parametrize("exact", [False, True])
def test_parameters_that_come_later_are_synchronised(exact: bool) -> None:
    """A layer that thaws in mid-run, by `add_param_group`, gets the global gradient like others."""

    def thaw(ranks: SimulatedRank) -> list[torch.Tensor | None]:
        training = Training(ranks, MODEL, losses, exact=exact, **SIZES["uneven"])
        *early, late = training.model.parameters()
        training.optimizer.param_groups[0]["params"] = early
        training.sync._look_at_parameters()
        training.gradients(0)
        training.optimizer.zero_grad()
        late.grad = None
        training.optimizer.add_param_group({"params": [late]})
        return training.gradients(0)

    aim = at_once("uneven", 0)
    for found in on_ranks(3, thaw):
        assert torch.dist(flat(found), aim) <= 1e-6 * aim.norm()


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_of_two_passes_add_up(exact: bool) -> None:
    """What a pass before left in the gradients counts once, as on one process, not on each rank."""

    def twice(ranks: SimulatedRank) -> list[torch.Tensor | None]:
        training = Training(ranks, MODEL, losses, exact=exact, **SIZES["uneven"])
        training.gradients(0)
        return training.gradients(0)

    aim = 2 * at_once("uneven", 0)
    for found in on_ranks(3, twice):
        assert torch.dist(flat(found), aim) <= 1e-6 * aim.norm()


def test_shared_parameters_are_summed_once() -> None:
    """Two optimizers, or two groups, over one parameter do not reduce it twice."""
    weight = torch.nn.Parameter(torch.ones(3))
    found = _unsynchronised([weight, weight], set())

    assert len(found) == 1


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_weight_gives_the_bits_of_the_product(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """To begin backward with the weight is to multiply the loss by it, to the last bit."""
    values = torch.linspace(-3, 5, 97, dtype=dtype)
    gradients = []
    for scaled in (True, False):
        for weight in (1 / 3, 0.1, 1.0, 0.0):
            parameter = values.clone().requires_grad_()
            loss = (parameter.sin() * parameter).sum().reshape(shape)
            if scaled:
                run_backward(loss, weight)
            else:
                (loss * weight).backward()  # type: ignore[no-untyped-call]
            gradients.append(parameter.grad)

    for ours, product in zip(gradients[:4], gradients[4:], strict=True):
        assert ours is not None
        assert product is not None
        assert torch.equal(ours, product)


def test_a_loss_of_each_sample_is_refused() -> None:
    """A loss that nobody reduced has no gradient, whatever its weight."""
    loss = torch.ones(3, requires_grad=True) * 2

    with pytest.raises(RuntimeError, match="scalar outputs"):
        run_backward(loss, 0.5)
