"""Tests of the seeding that follows the place in the run."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from spotguard.runtime.state.rng import (
    capture_random_states,
    mix,
    restore_random_states,
    seed_everything,
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
