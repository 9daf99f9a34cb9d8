"""Where restored tensors come: into those of a dict, and on the devices that objects are on.

There need not be a GPU: torch's `meta` device holds no values, but has tensors of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from spotguard.checkpoint.lineage import highest_claim
from spotguard.runtime.state import filling
from spotguard.runtime.state.inline_json import from_inline, to_inline
from spotguard.runtime.state.tracked import Box
from tests.runtime.harness.lab import Rank, adapters, next_attempt, same

if TYPE_CHECKING:
    from spotguard.testing import MemoryStore


def saved(**objects: Any) -> Any:
    """Return the store in which the objects were saved."""
    rank = Rank()
    rank.start()
    rank.now(1, **objects)
    return rank.store


def resume(store: MemoryStore, *, strict: bool, **objects: Any) -> None:
    """Restore the objects as `run.steps(strict=strict)` does."""
    claim = highest_claim(store)
    Rank(store, attempt=claim.attempt + 1 if claim else 1).restore(adapters(objects), strict=strict)


def values(start: float) -> dict[str, Any]:
    """Return a dict with tensors at several depths."""
    return {
        "hidden": torch.full((2, 3), start),
        "deep": {"pair": (torch.full((4,), start + 1), [torch.tensor(start + 2)]), 7: None},
        "rows": torch.full((4, 4), start + 3)[:, ::2],
    }


def test_a_boxs_tensor_is_filled_where_it_is() -> None:
    """As that of a dict: a box takes no copy of what it is given."""
    store = saved(box=Box(torch.ones(2)))
    held = torch.zeros(2)
    again = Box(held)
    next_attempt(store, box=again)
    assert again.value is held
    assert held.tolist() == [1, 1]


@pytest.mark.parametrize("strict", [True, False])
def test_a_dicts_tensors_are_filled_where_they_are(strict: bool) -> None:
    """Whoever holds one, as a model's forward pass or an optimizer does, has the restored value."""
    aim = values(5.0)
    store = saved(held=aim)
    held = values(0.0)
    hidden, (four, [one]), rows = held["hidden"], held["deep"]["pair"], held["rows"]
    resume(store, strict=strict, held=held)

    assert held["hidden"] is hidden
    assert held["deep"]["pair"][0] is four
    assert held["deep"]["pair"][1][0] is one
    assert held["rows"] is rows
    assert same(held["deep"], aim["deep"])
    assert torch.equal(hidden, aim["hidden"])
    assert torch.equal(rows, aim["rows"])


def test_a_parameter_that_no_module_has_is_trained_on() -> None:
    """SAC's temperature: a leaf that its optimizer trains, in a dict of the script."""

    def made(value: float) -> tuple[torch.Tensor, Any]:
        alpha = torch.tensor(value, requires_grad=True)
        return alpha, torch.optim.Adam([alpha], lr=0.1)

    def train(alpha: torch.Tensor, optimizer: Any) -> None:
        for _ in range(3):
            loss: Any = (alpha.exp() - 2).square()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    alpha, optimizer = made(1.0)
    train(alpha, optimizer)
    store = saved(alpha={"log_alpha": alpha}, optimizer=optimizer)
    train(alpha, optimizer)
    again, resumed = made(0.0)
    holder = {"log_alpha": again}
    next_attempt(store, alpha=holder, optimizer=resumed)
    train(again, resumed)

    assert holder["log_alpha"] is again
    assert (again.is_leaf, again.requires_grad) == (True, True)
    assert torch.equal(again, alpha)


def test_what_has_another_form_comes_on_the_same_device() -> None:
    """It is what was stored, and the script's own tensor stays as it is."""
    store = saved(held={"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(3)})
    held = {"a": torch.zeros(3, device="meta"), "b": torch.zeros(2)}
    b = held["b"]
    next_attempt(store, held=held)

    assert (held["a"].device.type, held["a"].dtype) == ("meta", torch.float64)
    assert same(held["b"], torch.ones(3))
    assert same(b, torch.zeros(2))


class Slow(nn.Linear):
    """Has a say in how it is loaded."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", [nn.Linear, Slow])
def test_the_best_weights_never_become_the_models(kind: type[nn.Linear], strict: bool) -> None:
    """Set up they are the very weights of the model; saved, they were a copy of earlier ones."""
    model = kind(2, 2)
    best = {"weights": {k: torch.full_like(v, 7.0) for k, v in model.state_dict().items()}}
    store = saved(model=model, best=best)
    other = kind(2, 2)
    again: Any = {"weights": other.state_dict()}
    resume(store, strict=strict, model=other, best=again)

    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert all(bool((value == 7).all()) for value in again["weights"].values())
    nn.init.zeros_(other.weight)
    assert bool((again["weights"]["weight"] == 7).all()), "training changes the best ones no more"


def test_one_placeholder_for_two_values_takes_neither() -> None:
    """Both have their own value; parts of one buffer, which have nothing in common, are filled."""
    store = saved(held={k: torch.full((2,), v) for k, v in zip("abcd", range(4), strict=True)})
    nothing, buffer = torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    held = {"a": nothing, "b": nothing, "c": buffer[:2], "d": buffer[2:]}
    next_attempt(store, held=held)

    assert [held[k].tolist() for k in "abcd"] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert buffer.tolist() == [2, 2, 3, 3]
    assert nothing.tolist() == [0, 0]


def test_what_cannot_be_written_to_is_replaced() -> None:
    """An expanded placeholder has one value only, and one of `inference_mode` keeps its own."""
    store = saved(held={"a": torch.arange(3.0), "b": torch.ones(2)})
    with torch.inference_mode():
        of_inference = torch.zeros(2)
    held = {"a": torch.zeros(1).expand(3), "b": of_inference}
    next_attempt(store, held=held)

    assert held["a"].tolist() == [0, 1, 2]
    assert held["b"].tolist() == [1, 1]
    assert held["b"] is not of_inference


class Average:
    """Takes its weights as they come, as diffusers' EMAModel does."""

    def __init__(self, device: str, count: int = 2) -> None:
        self.shadow = [torch.ones(2, device=device) for _ in range(count)]
        self.noise = torch.zeros(4, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, and the state of a generator, which is never on a device."""
        return {"decay": 0.9, "shadow": self.shadow, "noise": self.noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them as they are."""
        self.shadow, self.noise = state["shadow"], state["noise"]


def test_an_object_gets_its_tensors_on_the_device_that_it_is_on() -> None:
    """Each on that of the tensor in its place; what is new to it comes on the CPU, as ever."""
    average = Average("cpu", count=3)
    store = saved(ema=average)
    again = Average("meta")
    before = list(again.shadow)
    next_attempt(store, ema=again)

    assert [t.device.type for t in again.shadow] == ["meta", "meta", "cpu"]
    assert again.noise.device.type == "cpu"
    assert all(now is not then for now, then in zip(again.shadow, before, strict=False)), (
        "it loads by itself, and may compare what it has with what comes"
    )


class WithSlow(torch.optim.SGD):
    """Has further parts in its state dict."""

    slow = torch.ones(2)

    def state_dict(self) -> Any:
        """Return them, too."""
        return {**super().state_dict(), "slow": [self.slow]}

    def load_state_dict(self, state_dict: Any) -> None:
        """Take them as they come."""
        [self.slow] = state_dict["slow"]
        super().load_state_dict(state_dict)


def test_an_optimizers_further_parts_come_on_their_device() -> None:
    """So do values beside those of parameters, which torch leaves where they are."""

    def made(device: str) -> WithSlow:
        optimizer = WithSlow([nn.Parameter(torch.ones(2))])
        optimizer.slow = torch.ones(2, device=device)
        state: Any = optimizer.state
        state["count"] = torch.zeros(1, device=device)
        return optimizer

    store = saved(optimizer=made("cpu"))
    again = made("meta")
    next_attempt(store, optimizer=again)
    count: Any = again.state
    assert (again.slow.device.type, count["count"].device.type) == ("meta", "meta")


def moves_end(monkeypatch: pytest.MonkeyPatch, *, after: int, problem: RuntimeError) -> None:
    """Let a number of tensors be moved off the CPU, and none after them."""
    move, left = torch.Tensor.to, [None] * after

    def to(tensor: torch.Tensor, device: Any) -> torch.Tensor:
        if not left:
            raise problem
        left.pop()
        return move(tensor, device)

    monkeypatch.setattr(torch.Tensor, "to", to)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def test_what_finds_no_room_on_a_device_comes_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the rest of its object, and no try for each; one word of it for all objects."""
    store = saved(a=Average("cpu", count=3), b=Average("cpu"))
    a, b = Average("meta", count=3), Average("meta")
    moves_end(monkeypatch, after=1, problem=OUT_OF_MEMORY)
    next_attempt(store, a=a, b=b)

    assert [t.device.type for t in a.shadow] == ["meta", "cpu", "cpu"]
    assert [t.tolist() for t in (*a.shadow[1:], *b.shadow)] == [[1, 1]] * 4
    [said] = [m for m in caplog.messages if "has no room" in m]
    assert said.startswith("meta has no room for a second copy of a.shadow.1:")


def test_what_lies_in_text_comes_on_the_cpu_then_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch's top is kept there."""
    stored = to_inline([torch.ones(2)], "top")
    moves_end(monkeypatch, after=0, problem=OUT_OF_MEMORY)
    assert from_inline(stored, [torch.zeros(2, device="meta")])[0].tolist() == [1, 1]


def test_another_failure_of_a_move_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no lack of memory."""
    store = saved(ema=Average("cpu"))
    moves_end(monkeypatch, after=0, problem=RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        next_attempt(store, ema=Average("meta"))


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the GPU."""
        return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("large", "free", "cached", "moved"),
    [(40, 95, 0, False), (40, 96, 0, True), (40, 0, 96, True), (48, 0, 0, True)],
    ids=["scarce", "enough", "held by torch", "small"],
)
def test_a_large_object_is_not_moved_where_it_would_fill_the_device(
    monkeypatch: pytest.MonkeyPatch, large: int, free: int, cached: int, moved: bool
) -> None:
    """The script has to find room after it: twice its size is free, or nothing is tried."""
    monkeypatch.setattr(filling, "_LARGE_BYTES", large)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500 - cached)
    moves: list[torch.device] = []

    def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moves.append(device)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    average = Average("cpu", count=6)  # of 48 bytes
    store = saved(ema=average)
    again = Average("cpu", count=6)
    again.shadow = [t.as_subclass(OnGpu) for t in again.shadow]
    next_attempt(store, ema=again)

    assert moves == [torch.device("cuda", 0)] * (6 if moved else 0)
    assert [t.tolist() for t in again.shadow] == [[1, 1]] * 6
