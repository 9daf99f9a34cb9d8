"""Tests of the seeding that follows the place in the run."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from spotguard.runtime.checkpoint.own_state import random_tree
from spotguard.runtime.checkpoint.restore import restore_random
from spotguard.runtime.state.rng import (
    capture_random_states,
    mix,
    restore_random_states,
    seed_everything,
    spread_over,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _own_randomness() -> Iterator[None]:
    before = capture_random_states()
    yield
    restore_random_states(before)


def _draws() -> list[Any]:
    return [
        random.getrandbits(64),
        random.gauss(0, 1),
        np.random.randint(1 << 31),  # the global generator is what is tested
        np.random.standard_normal(),
        torch.rand(()).item(),
        torch.randn(()).item(),
    ]


def test_the_mixed_bits_never_change() -> None:
    """A resume with a later version draws the numbers that the interrupted run would have drawn."""
    assert mix(0, 0, 0) == 0x80ABE802AC1E182E
    assert mix(7, 1000, 3) == 0x42B623F9B96C7A0B
    assert mix(7, 1000, -1, 1) == 0xB9683BA69F4DA261


@pytest.mark.parametrize("seed", [0, 1, (1 << 32) - 1, 1 << 32, (1 << 64) - 1])
def test_seeding_is_that_of_the_libraries_own_functions(seed: int) -> None:
    """What a seed gives is what each library's documentation promises to keep for ever."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    expected = _draws()

    seed_everything(seed)

    assert _draws() == expected


def test_seeding_forgets_the_second_half_of_a_pair_of_normals() -> None:
    """Normal numbers come in pairs, of which one may be kept back: none outlives the seeding."""
    seed_everything(5)
    expected = _draws()
    random.gauss(0, 1)
    np.random.standard_normal()

    seed_everything(5)

    assert _draws() == expected


def test_another_bit_generator_of_numpy_is_seeded_too() -> None:
    """A script that gave NumPy's global functions another generator gets the same draws again."""
    numpy_random: Any = np.random  # whose types leave these two out
    before = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(np.random.PCG64())
    try:
        seed_everything(5)
        expected = np.random.random(4).tolist()
        seed_everything(5)

        assert np.random.random(4).tolist() == expected
    finally:
        numpy_random.set_bit_generator(before)


class Spread(torch.nn.Module):
    """A model whose layers say that they lie on some GPUs."""

    def __init__(self, *gpus: int) -> None:
        super().__init__()
        self.gpus = gpus

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield a weight on each."""
        yield from (
            SimpleNamespace(is_cuda=True, device=torch.device("cuda", g)) for g in self.gpus
        )


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Generator]]:
    """Play the generators of four GPUs, of which the second is this rank's own."""
    generators = [torch.Generator().manual_seed(number) for number in range(4)]

    def write(state: torch.Tensor, gpu: int | None = None) -> None:
        generators[1 if gpu is None else gpu].set_state(state)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: generators[gpu].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", write)
    yield generators
    spread_over([])


def drawn_on(generators: list[torch.Generator]) -> list[float]:
    """Return what each GPU draws next."""
    return [torch.rand((), generator=each).item() for each in generators]


@pytest.mark.parametrize(("gpus", "seeded"), [((), {1}), ((1,), {1}), ((3, 0, 3), {0, 1, 3})])
def test_every_gpu_that_a_model_lies_on_is_seeded(
    four_gpus: list[torch.Generator], gpus: tuple[int, ...], seeded: set[int]
) -> None:
    """A dropout draws from the generator of its own GPU; those of no model cost nothing."""
    spread_over([Spread(*gpus), torch.nn.BatchNorm1d(2)])
    seed_everything(7)
    first = drawn_on(four_gpus)
    seed_everything(7)
    second = drawn_on(four_gpus)

    assert {gpu for gpu in range(4) if first[gpu] == second[gpu]} == seeded


def test_the_states_of_all_these_gpus_come_back(four_gpus: list[torch.Generator]) -> None:
    """By way of a checkpoint, also into a process that has set up another model since."""
    spread_over([Spread(0, 3)])
    tree = json.loads(json.dumps(random_tree(None)))
    expected = drawn_on(four_gpus)
    drawn_on(four_gpus)
    spread_over([Spread(2)])
    manifest: Any = SimpleNamespace(ranks={"0": tree}, world_size=1)
    assert restore_random(manifest, 0, 1)
    again = drawn_on(four_gpus)

    assert [again[gpu] == expected[gpu] for gpu in range(4)] == [True, True, False, True]
