"""The order of samples: a seeded permutation that needs no memory and gives any index at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spotguard.runtime.randomness import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 6
_BLOCK = 1 << 12
"""Positions computed in one go: a sample then costs 0.1 microseconds instead of 3."""


class Permutation:
    """A pseudo-random permutation of `range(size)`; any position is there at once.

    A balanced Feistel network over the smallest even number of bits that holds `size`, with
    cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): an output
    outside the range is permuted again until it falls inside, less than 4 rounds on average.
    Holds the last 4096 positions that were asked for, whatever the size.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._half = max(1, ((max(size - 1, 1)).bit_length() + 1) // 2)
        self._mask = np.uint64((1 << self._half) - 1)
        self._keys = tuple(np.uint64(mix(key, round_)) for round_ in range(_ROUNDS))
        self._block = -1
        self._values: list[int] = []

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        """Return the sample index at `position`; IndexError outside the range."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        block, place = divmod(position, _BLOCK)
        if block != self._block:
            start = block * _BLOCK
            self._values = self._permuted(start, min(start + _BLOCK, self._size))
            self._block = block
        return self._values[place]

    def _permuted(self, start: int, stop: int) -> list[int]:
        values = self._encrypt(np.arange(start, stop, dtype=np.uint64))
        while (outside := values >= self._size).any():
            values[outside] = self._encrypt(values[outside])
        indices: list[int] = values.tolist()
        return indices

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = np.uint64(self._half)
        left, right = values >> half, values & self._mask
        for key in self._keys:
            # One multiply-xorshift (modulo 2**64) is enough mixing for six rounds.
            hashed = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)
            hashed = (hashed ^ hashed >> np.uint64(29)) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ (hashed >> np.uint64(31) & self._mask)
        whole: NDArray[np.uint64] = left << half | right
        return whole
