"""Orders of samples that are computed: any position is there at once, however long the epoch."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, overload

import numpy as np

from spotguard.runtime.state.rng import mix

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_ROUNDS = 6
_BLOCK = 1 << 12
"""Positions computed in one go: a sample then costs 0.1 microseconds instead of 3."""


class ComputedOrder(ABC):
    """A sample index for each position of an epoch, computed some thousand positions at a time.

    Holds the last 4096 positions that were asked for, whatever the size.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._block = -1
        self._values: list[int] = []

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        """Return the sample index at a position, or those at several, as a list does.

        IndexError for a single position outside the range, also for a negative one.
        """
        if isinstance(at, slice):
            return self._several(range(self._size)[at])
        return self._one(at)

    def _several(self, positions: range) -> list[int]:
        if positions.step != 1 or not positions:
            return [self._one(position) for position in positions]
        self._one(positions[0])  # computes the block that they begin in
        place, count = positions[0] % _BLOCK, len(positions)
        found = self._values[place : place + count]
        if len(found) < count:
            found += [self._one(position) for position in positions[len(found) :]]
        return found

    def _one(self, position: int) -> int:
        if not 0 <= position < self._size:
            raise IndexError(position)
        block, place = divmod(position, _BLOCK)
        if block != self._block:
            start = block * _BLOCK
            self._values = self._at(start, min(start + _BLOCK, self._size))
            self._block = block
        return self._values[place]

    @abstractmethod
    def _at(self, start: int, stop: int) -> list[int]:
        """Return the sample indexes at positions `start` to `stop` - 1."""


class Permutation(ComputedOrder):
    """A pseudo-random permutation of `range(size)`: each index once.

    A balanced Feistel network over the smallest even number of bits that holds `size`, with
    cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): an output
    outside the range is permuted again until it falls inside, less than 4 rounds on average.
    """

    def __init__(self, size: int, key: int) -> None:
        super().__init__(size)
        self._half = max(1, ((max(size - 1, 1)).bit_length() + 1) // 2)
        self._mask = np.uint64((1 << self._half) - 1)
        self._keys = tuple(np.uint64(mix(key, round_)) for round_ in range(_ROUNDS))

    def _at(self, start: int, stop: int) -> list[int]:
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


class Weights:
    """How likely each sample is to be drawn, as running sums: 8 bytes for each sample.

    Raises:
        ValueError: not one finite number from 0 for each sample, or all are 0.
    """

    def __init__(self, weights: ArrayLike, size: int) -> None:
        given = np.asarray(weights, dtype=np.float64)
        if given.shape != (size,):
            raise ValueError(f"of shape {given.shape}, but must be {size} numbers, one a sample")
        if not (np.isfinite(given).all() and (given >= 0).all() and given.any()):
            raise ValueError("not finite and from 0, or all are 0")
        self.sums: NDArray[np.float64] = np.cumsum(given)
        self.last = int(given.nonzero()[0][-1])
        """The last sample that can be drawn at all."""
        self.digest = hashlib.blake2b(given.tobytes(), digest_size=8).hexdigest()


class WeightedDraws(ComputedOrder):
    """Independent draws with replacement, as many as there are samples.

    The draw at a position is the inverse of the weights' running sum, at a uniform number that
    follows from key and position alone (SplitMix64 as a counter-based generator).
    """

    def __init__(self, weights: Weights, key: int) -> None:
        super().__init__(len(weights.sums))
        self._weights = weights
        self._key = np.uint64(mix(key))

    def _at(self, start: int, stop: int) -> list[int]:
        x = np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._key
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        uniform = (x ^ x >> np.uint64(31)) >> np.uint64(11)
        sums = self._weights.sums
        drawn = np.searchsorted(sums, uniform * 2.0**-53 * sums[-1], side="right")
        indices: list[int] = np.minimum(drawn, self._weights.last).tolist()
        return indices
