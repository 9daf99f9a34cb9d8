"""Weights that were exchanged after a boundary are noticed, whatever holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spotguard.runtime.state import weight_witness
from spotguard.runtime.state.weight_witness import TensorSample, WeightWitness, sampled


def test_exchanged_weights_are_noticed_and_steps_are_not() -> None:
    """By values, behind `.data` and by other memory in its place; put back, all is well."""
    model = torch.nn.Linear(20, 3)
    witness = WeightWitness([torch.optim.SGD(model.parameters(), lr=0.1)])
    assert not witness.differs(), "nothing was taken yet"
    witness.take()
    assert not witness.differs()
    raw = model.weight.detach().clone()
    model.weight.data.copy_(raw + 1)
    assert witness.differs()
    model.weight.data.copy_(raw)
    assert not witness.differs()
    model.weight.data = raw + 1
    assert witness.differs()
    witness.take()
    assert not witness.differs()


def test_parts_that_were_gathered_meanwhile_say_nothing() -> None:
    """Of another size they cannot be compared, and the next boundary takes them as they are."""
    weight = torch.nn.Parameter(torch.zeros(4))
    frozen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    empty = torch.nn.Parameter(torch.zeros(0))
    witness = WeightWitness([torch.optim.SGD([frozen, empty, weight], lr=0.1)])
    witness.take()
    weight.data = torch.ones(3)
    assert not witness.differs()
    witness.take()
    weight.data += 1
    assert witness.differs()


def test_what_is_taken_in_inference_mode_can_be_taken_again() -> None:
    """As the first time is where a script evaluates under `torch.inference_mode()`."""
    weight = torch.nn.Parameter(torch.tensor([1.0, float("nan")]))
    witness = WeightWitness([torch.optim.SGD([weight], lr=0.1)])
    with torch.inference_mode():
        witness.take()
        assert not witness.differs()
    weight.data += 1
    assert witness.differs()
    witness.take()
    assert not witness.differs(), "a weight that is no number is the same, too"


def test_without_weights_nothing_differs() -> None:
    """As of a run whose optimizers come later."""
    witness = WeightWitness([])
    witness.take()
    assert not witness.differs()


def test_weights_that_no_optimizer_trains_are_watched() -> None:
    """Those of a module beside the trained one, and of a part of it; not numbers of other kinds."""
    model, average = torch.nn.Linear(20, 3), torch.nn.Linear(20, 3)
    model.average = torch.nn.Linear(2, 2)
    model.base = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.later = torch.nn.Parameter(torch.zeros(4, device="meta"))
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    witness = WeightWitness([optimizer], [model, average.requires_grad_(False)])
    witness.take()
    for weight in (average.weight, average.bias, model.average.weight, model.average.bias):
        assert not witness.differs()
        weight.data += 1
        assert witness.differs()
        witness.take()


def test_a_module_that_is_cast_for_the_evaluation_is_another_and_no_error() -> None:
    """What cannot be compared is not as it was: the save is declined, and nothing is raised."""
    trained, frozen = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    witness = WeightWitness([torch.optim.SGD(trained.parameters())], [trained, frozen])
    witness.take()
    assert not witness.differs()
    frozen.bfloat16()
    assert witness.differs()
    frozen.float()
    assert witness.differs(), "rounded"
    frozen.bfloat16()
    witness.take()
    assert not witness.differs(), "cast for good"


def test_of_a_module_in_parts_only_its_own_weights_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP2 shows whole weights after a forward pass, and takes their memory back at the next."""
    whole = torch.nn.Linear(3, 3)
    monkeypatch.setattr(weight_witness, "is_fsdp_module", lambda module: module is whole)
    witness = WeightWitness([], [torch.nn.Sequential(whole)])
    witness.take()
    for weight in whole.parameters():
        weight.untyped_storage().resize_(0)
    witness.take()
    assert not witness.differs()


def _by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[:] += 1


def _by_fused_step(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()


def _by_other_memory(weight: torch.Tensor) -> None:
    weight.data = weight.detach() + 1


WRITES: dict[str, Any] = {
    "data": lambda weight: weight.data.mul_(2),
    "data =": _by_other_memory,
    "set_": lambda weight: weight.set_(weight.detach().clone() + 1),
    "swap_tensors": lambda weight: torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
        weight, torch.nn.Parameter(weight.detach() + 1)
    ),
    "numpy": _by_numpy,
    "fused": _by_fused_step,
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 3.0),
    "one element": lambda weight: weight.detach()[1, 1].fill_(9.0),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["rows", "columns", "every second"])
def test_writes_that_torch_does_not_count_are_noticed(
    how: str, dtype: torch.dtype, layout: str
) -> None:
    """Of three tensors it is the one that was written to, however it lies in memory."""
    if how in ("numpy", "fused") and dtype is torch.bfloat16:
        dtype = torch.float32  # which NumPy does not know, and a fused step rounds away
    tensors = [torch.nn.Parameter(torch.rand(30, 40).to(dtype) + 1) for _ in range(3)]
    if layout == "columns":
        tensors[1] = torch.nn.Parameter((torch.rand(40, 30).to(dtype) + 1).t())
    elif layout == "every second":
        tensors[1] = torch.nn.Parameter((torch.rand(60, 80).to(dtype) + 1)[::2, ::2])
    sample = TensorSample(tensors)
    sample.take()
    assert sample.changed() == set()
    assert not sample.differs()
    with torch.no_grad():
        WRITES[how](tensors[1])
    assert sample.changed() == {1}
    sample.take()
    assert sample.changed() == set()


@pytest.mark.parametrize("count", [0, 1, 15, 17, 1000])
def test_tensors_of_any_size_and_kind_can_be_sampled(count: int) -> None:
    """None, one, and a stretched-out one; numbers of one byte to eight, side by side."""
    kinds = (torch.int64, torch.bool, torch.float16, torch.float8_e4m3fn, torch.complex64)
    tensors = [torch.zeros(count).to(kind) for kind in kinds]
    tensors += [torch.zeros(3 * count)[::3], torch.zeros(1).expand(count)]
    sample = TensorSample(tensors)
    sample.take()
    for number, tensor in enumerate(tensors[:-1]):
        assert sample.changed() == set()
        tensor.data.view(
            torch.uint8 if tensor.dtype is torch.float8_e4m3fn else tensor.dtype
        ).fill_(1)
        assert sample.changed() == ({number} if count else set())
        sample.take()
    assert len(sampled(tensors)) == len(tensors)
