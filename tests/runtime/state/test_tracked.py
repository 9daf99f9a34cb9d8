from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from spotguard.errors import StateMismatch, UnsupportedState
from spotguard.events.states import CheckpointKind
from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.state.tracked import Box, TrackedModule, check_storable, tracked
from spotguard.runtime.state.tree import Packed
from tests.runtime.harness.lab import Rank, adapters, next_attempt, same

if TYPE_CHECKING:
    from collections.abc import Callable


class Net(nn.Module):
    """Linear, BatchNorm, tied weights, a persistent and a passing buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width, bias=False)
        self.third = nn.Linear(width, width, bias=False)
        self.third.weight = self.second.weight
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the net makes of `x`."""
        out: torch.Tensor = self.third(self.second(self.norm(self.first(x)).relu()))
        return out * self.get_buffer("scale")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, then: Any = None) -> None:
    """Take some steps on data that depends on the step only."""
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(5, 3, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if then is not None:
            then()


def saved(**objects: Any) -> Rank:
    """Return a rank that has saved the objects."""
    rank = Rank()
    rank.start()
    rank.now(10, **objects)
    return rank


def fresh(width: int = 4, dtype: torch.dtype = torch.float32) -> Net:
    """Return a net with weights of its own."""
    return Net(width).to(dtype)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in OPTIMIZERS
        for dtype in (torch.float32, torch.bfloat16)
        # torch 2.13's fused SGD gives other momenta each time it is asked, in bf16 on a CPU.
        if (name, dtype) != ("SGD fused", torch.bfloat16)
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_training_goes_on_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    """Restored into new objects, ten more steps give the very weights of twenty undisturbed."""
    torch.manual_seed(0)
    model = fresh(dtype=dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 10)
    rank = saved(model=model, optimizer=optimizer)
    train(model, optimizer, 10)

    torch.manual_seed(99)
    other = fresh(dtype=dtype)
    again = OPTIMIZERS[name](other.parameters())
    train(other, again, 2)  # what is restored into need not be new
    next_attempt(rank.store, model=other, optimizer=again)
    assert other.third.weight is other.second.weight
    train(other, again, 10)

    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(again.state_dict(), optimizer.state_dict())


class Fp32Moments(torch.optim.Optimizer):
    """Keeps fp32 moments and an integer count for bf16 parameters, as large runs do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["count"] = torch.zeros((), dtype=torch.int64)
            state["moment"].mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
            state["count"] += 1
            parameter.add_(state["moment"].to(parameter.dtype), alpha=-self.rate())

    def rate(self) -> float:
        """Return the rate of this step."""
        return 0.01


class EightBit(torch.optim.Optimizer):
    """Keeps its moment in 8 bits, with a map that all parameters share, as bitsandbytes does."""

    qmap = torch.linspace(-1, 1, 256)

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["state1"] = torch.full_like(parameter, 127, dtype=torch.uint8)
                state["qmap1"] = self.qmap
                state["absmax1"] = torch.zeros(1)
                state["step"] = 0
            moment = state["qmap1"][state["state1"].long()] * state["absmax1"]
            moment = 0.9 * moment + 0.1 * parameter.grad.float()
            state["absmax1"] = moment.abs().max().reshape(1)
            level = (moment / state["absmax1"].clamp_min(1e-12) + 1) * 127.5
            state["state1"].copy_(level.round().to(torch.uint8))
            state["step"] += 1
            parameter.add_(moment.to(parameter.dtype), alpha=-0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_8_bit_optimizer_goes_on_bit_by_bit(dtype: torch.dtype) -> None:
    """Quantized moments keep their bytes, and the map that all of them share is stored once."""
    torch.manual_seed(0)
    model = fresh(dtype=dtype)
    optimizer = EightBit(model.parameters())
    train(model, optimizer, 5)
    rank = saved(model=model, optimizer=optimizer)
    train(model, optimizer, 5)
    other = fresh(dtype=dtype)
    again = EightBit(other.parameters())
    next_attempt(rank.store, model=other, optimizer=again)
    states = list(again.state.values())
    assert {state["state1"].dtype for state in states} == {torch.uint8}
    train(other, again, 5)

    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(again.state_dict(), optimizer.state_dict())
    capture = rank.saver.capture(1, CheckpointKind.FINAL, adapters({"optimizer": optimizer}), {})
    assert sum(leaf.name.endswith("qmap1") for leaf in capture.leaves) == 1


def test_fp32_moments_of_bf16_parameters_stay_exact() -> None:
    """torch's own load_state_dict would round them to the parameter's dtype."""
    torch.manual_seed(0)
    model = fresh(dtype=torch.bfloat16)
    optimizer = Fp32Moments(model.parameters())
    train(model, optimizer, 5)
    rank = saved(model=model, optimizer=optimizer)
    other = fresh(dtype=torch.bfloat16)
    again = Fp32Moments(other.parameters())
    next_attempt(rank.store, model=other, optimizer=again)

    assert same(again.state_dict(), optimizer.state_dict())
    first = again.state[again.param_groups[0]["params"][0]]
    assert (first["moment"].dtype, first["count"].dtype) == (torch.float32, torch.int64)


def test_groups_keep_their_settings() -> None:
    """Learning rates and flags of each parameter group come back, and frozen weights too."""
    model = fresh()
    model.first.requires_grad_(False)

    def make(net: Net, rate: float) -> torch.optim.Optimizer:
        groups: list[Any] = [
            {"params": net.norm.parameters()},
            {"params": [net.second.weight], "lr": rate},
        ]
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9)

    optimizer = make(model, 0.25)
    train(model, optimizer, 2)
    rank = saved(model=model, optimizer=optimizer)
    other = fresh()
    again = make(other, 7.0)
    next_attempt(rank.store, model=other, optimizer=again)

    assert [group["lr"] for group in again.param_groups] == [0.5, 0.25]
    assert torch.equal(other.first.weight, model.first.weight)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.9),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=40),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 15),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [3, 12, 12, 15]),
    "StepLR": lambda o: lrs.StepLR(o, 4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.95),
    "LinearLR": lambda o: lrs.LinearLR(o, total_iters=15),
    "ConstantLR": lambda o: lrs.ConstantLR(o, total_iters=12),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 30, 2.0),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 6, cycle_momentum=False),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=8),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, total_iters=5), lrs.CosineAnnealingLR(o, 20)], [5]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, total_iters=4), lrs.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")  # SequentialLR's own doing
def test_schedules_go_on_where_they_were(name: str) -> None:
    """Every learning rate after the resume is the one of the undisturbed run."""

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, model: nn.Module) -> list[Any]:
        seen: list[Any] = []

        def step() -> None:
            scheduler.step()
            seen.extend(group["lr"] for group in optimizer.param_groups)

        train(model, optimizer, 10, step)
        return seen

    torch.manual_seed(0)
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    rates(optimizer, scheduler, model)
    rank = saved(model=model, optimizer=optimizer, scheduler=scheduler)
    expected = rates(optimizer, scheduler, model)

    other = fresh()
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    resumed = SCHEDULERS[name](again)
    next_attempt(rank.store, model=other, optimizer=again, scheduler=resumed)

    assert rates(again, resumed, other) == expected
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def test_a_plateau_is_remembered() -> None:
    """ReduceLROnPlateau keeps its best value (infinite at first) and its patience."""
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lrs.ReduceLROnPlateau(optimizer, patience=2)
    begun = saved(scheduler=scheduler)
    for loss in (3.0, 2.0, 2.5, 2.5):
        scheduler.step(loss)
    rank = saved(optimizer=optimizer, scheduler=scheduler)
    again = torch.optim.SGD(fresh().parameters(), lr=1.0)
    resumed = lrs.ReduceLROnPlateau(again, patience=2)
    next_attempt(begun.store, scheduler=resumed)
    assert resumed.best == float("inf")
    next_attempt(rank.store, optimizer=again, scheduler=resumed)

    assert (resumed.best, resumed.num_bad_epochs) == (2.0, 2)
    resumed.step(2.5)
    assert again.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_grad_scaler_keeps_its_scale() -> None:
    """Scale and growth come back; a scaler that is switched off has nothing to restore."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    scaler.scale(torch.ones(()))
    scaler.update(512.0)
    rank = saved(scaler=scaler, off=torch.amp.GradScaler("cpu", enabled=False))
    resumed = torch.amp.GradScaler("cpu")
    next_attempt(rank.store, scaler=resumed, off=torch.amp.GradScaler("cpu", enabled=False))

    assert resumed.state_dict() == scaler.state_dict()


EMA = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]


def test_averages_go_on() -> None:
    """An EMA keeps its weights and its count."""
    model = fresh()
    average = AveragedModel(model, multi_avg_fn=EMA, use_buffers=True)
    train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        5,
        lambda: average.update_parameters(model),
    )
    rank = saved(ema=average)
    resumed = AveragedModel(fresh(), multi_avg_fn=EMA, use_buffers=True)
    next_attempt(rank.store, ema=resumed)

    assert int(resumed.n_averaged) == 5
    assert same(dict(resumed.state_dict()), dict(average.state_dict()))


def numpy_generator(kind: str) -> Callable[[int], np.random.Generator]:
    """Return how to make a NumPy generator with that kind of bits."""
    return lambda seed: np.random.Generator(getattr(np.random, kind)(seed))


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "random.Random": (random.Random, lambda g: (g.random(), g.gauss(0, 1), g.randrange(10**9))),
    "torch.Generator": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda g: torch.randn(5, generator=g).tolist(),
    ),
    "RandomState": (np.random.RandomState, lambda g: (g.rand(), g.randn())),
    **{
        kind: (
            numpy_generator(kind),
            lambda g: (g.random(), g.normal(size=3).tolist(), int(g.integers(9, dtype="u4"))),
        )
        for kind in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_draw_on_as_if_nothing_happened(name: str) -> None:
    """The same object goes on with the numbers that were due; half-used state included."""
    make, draw = GENERATORS[name]
    generator = make(1)
    draw(generator)
    rank = saved(noise=generator)
    expected = [draw(generator) for _ in range(3)]
    other = make(2)
    next_attempt(rank.store, noise=other)

    assert [draw(other) for _ in range(3)] == expected


def test_dicts_are_restored_in_place() -> None:
    """The script's own dict gets its values back, and loses what came after the save."""
    best = {"accuracy": 0.5, "worse": 2, "weights": torch.arange(3.0), 7: (1, 2)}
    rank = saved(best=best)
    mine: dict[Any, Any] = {"accuracy": 0.0, "later": 1}
    kept = mine
    next_attempt(rank.store, best=mine)

    assert kept is mine
    assert same(mine, best)


def test_ddp_is_looked_through() -> None:
    """A model in DDP and the bare one share their checkpoints, so ranks can come and go."""
    torch.manual_seed(0)
    model = fresh()
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    rank = saved(model=wrapped)
    bare = fresh()
    next_attempt(rank.store, model=bare)

    assert same(dict(bare.state_dict()), dict(model.state_dict()))
    assert set(TrackedModule(wrapped).bare.state_dict()) == set(bare.state_dict())


def test_buffers_that_pass_are_not_stored() -> None:
    """A non-persistent buffer is no state; everything else of the module is."""
    packed = Packed()
    tracked("model", fresh()).pack("model", packed)

    assert "model.norm.running_mean" in packed.leaves
    assert not [name for name in packed.leaves if "passing" in name]
    assert [name for name in packed.leaves if "third" in name] == [], "tied: stored once"


def mismatch(stored: nn.Module, mine: nn.Module) -> StateMismatch:
    """Return the refusal to restore one module into another."""
    rank = saved(model=stored)
    before = {k: v.clone() for k, v in mine.state_dict().items()}
    with pytest.raises(StateMismatch) as problem:
        next_attempt(rank.store, model=mine)
    assert same(before, dict(mine.state_dict())), "a refusal changes nothing"
    return problem.value


def two_layers(*, tied: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return two layers of a shape, which may have one weight."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).to(dtype)
    if tied:
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_have_been_tied_since_are_restored_if_they_were_the_same(
    dtype: torch.dtype,
) -> None:
    """They may have lain on two GPUs; two that differ would leave one of both, or a mixture."""
    stored, mine = two_layers(tied=False), two_layers(tied=True, dtype=dtype)
    apart = saved(model=stored)
    with pytest.raises(
        StateMismatch, match=r"model\.0\.weight and model\.1\.weight are one tensor in the script"
    ):
        next_attempt(apart.store, model=mine)
    stored.load_state_dict({"0.weight": torch.ones(3, 3), "1.weight": torch.ones(3, 3)})
    next_attempt(saved(model=stored).store, model=mine)
    assert all(bool((value == 1).all()) for value in mine.state_dict().values())


def test_two_buffers_over_one_memory_are_two() -> None:
    """A table beside its transpose, and beside its conjugate, which torch makes lazily."""

    def made(table: torch.Tensor) -> nn.Module:
        model = nn.Module()
        model.register_buffer("table", table)
        model.register_buffer("turned", table.t())
        model.register_buffer("conjugate", table.conj())
        return model

    stored, mine = made(torch.randn(3, 3, dtype=torch.complex64)), made(torch.zeros(3, 3) * 1j)
    expected = {key: value.clone() for key, value in stored.state_dict().items()}
    next_attempt(saved(model=stored).store, model=mine)
    assert all(torch.equal(mine.state_dict()[key], value) for key, value in expected.items())


def test_weights_that_are_no_longer_tied_are_both_restored() -> None:
    """What was stored once is read twice."""
    stored, mine = two_layers(tied=True), two_layers(tied=False)
    next_attempt(saved(model=stored).store, model=mine)
    assert same(dict(mine.state_dict()), dict(stored.state_dict()))


def test_a_changed_model_is_told_apart_by_name() -> None:
    """Missing, unexpected and reshaped tensors are listed, each as what it is."""
    smaller, larger = (
        nn.Sequential(nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    )

    grown = mismatch(smaller, larger)
    assert "missing from the checkpoint: 1.bias, 1.weight" in grown.message
    assert "not in the script" not in grown.message
    assert grown.hint
    shrunk = mismatch(larger, smaller)
    assert "not in the script: 1.bias, 1.weight" in shrunk.message
    reshaped = mismatch(nn.Linear(2, 3), nn.Linear(4, 3))
    assert "weight (3, 2) → (3, 4)" in reshaped.message
    assert "bias" not in reshaped.message


def test_a_long_list_of_changes_is_cut() -> None:
    """A wholly different model gives one readable sentence."""
    other = mismatch(nn.Sequential(*(nn.Linear(1, 1) for _ in range(30))), nn.Linear(1, 1))

    assert "…" in other.message
    assert len(other.message) < 400


def test_changed_parameter_groups_are_named() -> None:
    """An optimizer over other parameters is refused, with both counts."""
    model = fresh()
    rank = saved(optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(StateMismatch, match=r"parameter groups of \[5\] .* has \[2\]"):
        next_attempt(rank.store, optimizer=torch.optim.AdamW(model.norm.parameters()))


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"model": {}}, "ema is no longer tracked"),
        ({"model": {}, "ema": {}, "rng": {}}, "rng is new"),
        ({"net": {}, "ema": {}}, "net is new; model is no longer tracked"),
    ],
)
def test_changed_names_are_told(now: dict[str, Any], message: str) -> None:
    """What is tracked must be what was tracked: nothing is left out in silence."""
    rank = saved(model={"a": 1}, ema={"b": 2})
    with pytest.raises(StateMismatch, match=message):
        next_attempt(rank.store, **now)

    assert all(value == {} for value in now.values())


class Tokenizer:
    """Has state, but no way to tell it."""


class HalfStateful:
    """Can tell its state, but not take it back."""

    def state_dict(self) -> dict[str, int]:
        """Return nothing of use."""
        return {}


@pytest.mark.parametrize(
    "value", [Tokenizer(), HalfStateful(), 3, "text", [1], None, torch.ones(2), lambda: 1],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_wrong_objects_are_named(value: Any) -> None:
    """What has no state to restore is refused at `track`, with the name it was given."""
    with pytest.raises(UnsupportedState, match=f"run.track: thing is a {type(value).__name__}"):
        tracked("thing", value)


def test_a_generator_without_state_is_refused() -> None:
    """The operating system's randomness cannot be put back."""
    with pytest.raises(UnsupportedState, match="noise"):
        tracked("noise", random.SystemRandom()).pack("noise", Packed())


class Odd:
    """Its state dict holds what cannot be stored."""

    def state_dict(self) -> dict[str, Any]:
        """Return a function among the values."""
        return {"fn": len}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing back."""


def test_the_odd_part_of_a_state_is_named() -> None:
    """The path inside the object tells where to look."""
    with pytest.raises(UnsupportedState, match=r"metrics\.fn"):
        tracked("metrics", Odd()).pack("metrics", Packed())


def test_modules_come_first() -> None:
    """What refers to the model's parameters is restored after them, whatever the names."""
    order: list[str] = []

    class Watched(Odd):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            order.append("scheduler")

    class WatchedNet(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            order.append("model")
            return super().load_state_dict(*args, **kwargs)

    class WatchedSgd(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            order.append("optimizer")
            super().load_state_dict(state_dict)

    model = WatchedNet(1, 1)
    objects = {"a": Watched(), "b": WatchedSgd(model.parameters()), "c": model}
    rank = saved(**objects)
    order.clear()
    next_attempt(rank.store, **objects)

    assert order == ["model", "optimizer", "scheduler"]
    assert isinstance(rank.coordinator, Alone)


def test_a_box_keeps_one_value() -> None:
    """A number alone cannot be restored in place; in a box it can."""
    rank = Rank()
    box = Box(3.5)
    rank.start(box=box)
    rank.now(1, box=box)
    box.value = 0
    next_attempt(rank.store, box=box)

    assert box.value == 3.5
    assert repr(box) == "Box(3.5)"
    with pytest.raises(UnsupportedState, match="is a float"):
        tracked("best", 3.5)


def test_an_object_whose_state_cannot_be_read_is_refused_in_a_sentence() -> None:
    """As torch's ZeroRedundancyOptimizer, which has its state only after a collective call."""

    class ZeroRedundancyOptimizer(torch.optim.SGD):
        def state_dict(self) -> Any:
            raise RuntimeError("has not been consolidated on this rank")

    class Meter:
        def state_dict(self) -> Any:
            return {"mean": [1.0][2]}

        def load_state_dict(self, state: Any) -> None: ...

    sharded = ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(
        UnsupportedState, match="the state of opt, a ZeroRedundancyOptimizer, ca"
    ) as e:
        check_storable("run.track", "opt", tracked("opt", sharded))
    assert "FSDP2" in str(e.value.hint)
    with pytest.raises(UnsupportedState, match="meter, a Meter, cannot be read: list index"):
        check_storable("run.track", "meter", tracked("meter", Meter()))


def test_one_element_with_a_stride_comes_back() -> None:
    """It counts as contiguous, and no view of its bytes can be had by reshape."""
    module = torch.nn.Module()
    module.scale = torch.nn.Parameter(torch.arange(9.0).reshape(3, 3)[1::3, :1])
    table = torch.arange(12.0)
    values = {"one": table[5::12], "all": table}
    rank = saved(module=module, values=values)
    with torch.no_grad():
        module.scale.zero_()
    values["one"].zero_()
    next_attempt(rank.store, module=module, values=values)
    assert module.scale.item() == 3.0
    assert values["one"].item() == 5.0
