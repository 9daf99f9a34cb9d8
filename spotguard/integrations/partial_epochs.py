"""The order of epochs that read a part of the data only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class FirstOfEpoch:
    """The first samples of each epoch's order: of the seeded one, or of the dataset's own."""

    def __init__(self, length: int, samples: int, *, seed: int | None) -> None:
        self._length = length
        self._samples = samples
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch that is drawn next."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        if self._seed is None:
            return iter(range(self._samples))
        generator = torch.Generator().manual_seed(hash((self._seed, self._epoch)) & (1 << 62) - 1)
        order = torch.randperm(self._length, generator=generator)
        return iter(order[: self._samples].tolist())


class FirstOfSampler:
    """The first samples of each epoch that a sampler of the script's own gives."""

    def __init__(self, sampler: Any, samples: int) -> None:
        self._sampler = sampler
        self._samples = samples

    def __getattr__(self, name: str) -> Any:
        """Answer for the sampler: whether it has `set_epoch`, a generator, or a state."""
        return getattr(self.__dict__["_sampler"], name)

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        # All of them are drawn: a state that the sampler keeps is then that of a whole epoch's end.
        return iter(list(self._sampler)[: self._samples])
