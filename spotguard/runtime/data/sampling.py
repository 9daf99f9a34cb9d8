"""Which samples an epoch has, and in which order: the dataset's own, shuffled, drawn, a sampler's.

All but a sampler's follow from the seed and the epoch, and give any position at once. A sampler's
order is drawn once for each epoch, on every rank the same way, and held (8 bytes a sample). What
it takes to draw it again after an interruption is kept with the checkpoint.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch

from spotguard.errors import StateMismatch, UsageError
from spotguard.runtime.data.permutation import Permutation, WeightedDraws, Weights
from spotguard.runtime.state.inline_json import from_inline, to_inline
from spotguard.runtime.state.rng import (
    capture_random_states,
    mix,
    restore_random_states,
    seed_everything,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DRAW = 0x2545F4914F6CDD1D
"""The stream of a sampler's own randomness."""


class Order(Protocol):
    """The sample index at each position of one epoch."""

    @overload
    def __getitem__(self, position: int, /) -> int: ...

    @overload
    def __getitem__(self, positions: slice, /) -> Sequence[int]: ...


class Sampling(ABC):
    """The order of every epoch."""

    length: int
    """Positions in an epoch."""
    has_state = False
    """True if `state` says something; each step asks."""

    @abstractmethod
    def order(self, epoch: int) -> Order:
        """Return the order of an epoch."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what must not change between a save and a resume."""

    def checksum(self, epoch: int) -> int | None:
        """Return what ranks must agree on; None for orders that are arithmetic."""
        return None

    def remembers(self, epoch: int) -> bool:
        """Return whether the order of an epoch that is over can be asked for without harm."""
        return True

    def state(self, epoch: int) -> Any:
        """Return, as JSON, what `restore` needs to go on in `epoch`; None if that is nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Go back to where `state` was returned.

        Raises:
            StateMismatch: the order that was trained on cannot be had again.
        """
        assert state is None, "what follows from seed and epoch has no state"


class InOrder(Sampling):
    """Each sample once, by index."""

    def __init__(self, size: int) -> None:
        self.length = size

    def order(self, epoch: int) -> Order:
        """Return the indexes as they are."""
        return range(self.length)

    def identity(self) -> dict[str, Any]:
        """Return that nothing is shuffled."""
        return {"shuffle": False}


class Shuffled(Sampling):
    """Each sample once, in another order each epoch; needs no memory."""

    def __init__(self, size: int, seed: int) -> None:
        self.length = size
        self._seed = seed
        self._last: tuple[int, Permutation] | None = None

    def order(self, epoch: int) -> Order:
        """Return the epoch's permutation."""
        if self._last is None or self._last[0] != epoch:
            self._last = (epoch, Permutation(self.length, mix(self._seed, epoch)))
        return self._last[1]

    def identity(self) -> dict[str, Any]:
        """Return that it is shuffled; the seed is the loader's."""
        return {"shuffle": True}


class Weighted(Sampling):
    """As many independent draws as there are samples, each as likely as its weight says."""

    def __init__(self, weights: Any, size: int, seed: int) -> None:
        self.length = size
        self._seed = seed
        try:
            self._weights = Weights(weights, size)
        except (TypeError, ValueError) as problem:
            raise UsageError(
                f"run.loader: weights are {problem}",
                hint="pass one number from 0 for each sample of the dataset",
            ) from problem
        self._last: tuple[int, WeightedDraws] | None = None

    def order(self, epoch: int) -> Order:
        """Return the epoch's draws."""
        if self._last is None or self._last[0] != epoch:
            self._last = (epoch, WeightedDraws(self._weights, mix(self._seed, epoch)))
        return self._last[1]

    def identity(self) -> dict[str, Any]:
        """Return a digest of the weights: others would draw other samples."""
        return {"weights": self._weights.digest}


@dataclass(frozen=True)
class _Drawn:
    """The order of one epoch, as a sampler gave it."""

    indices: Any
    """An array of them; `Batches` of a batch sampler."""
    checksum: int
    before: Any
    """The sampler's state that it was drawn from."""


class FromSampler(Sampling):
    """What a `torch.utils.data.Sampler` says, drawn a whole epoch at a time.

    An epoch's order must follow from the seeded global generators, the sampler's `generator`, the
    epoch that `set_epoch` tells it, and its `state_dict()`, if it has these; that is tried before
    the first epoch, by drawing it twice.
    """

    has_state = True

    def __init__(self, sampler: Any, size: int, seed: int) -> None:
        _check_sampler(sampler)
        self.length = len(sampler)
        self._sampler = sampler
        self._size = size
        self._seed = seed
        self._keeps_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._drawn: dict[int, _Drawn] = {}
        self._tried = False

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch, drawn when it is asked for first."""
        if epoch not in self._drawn:
            self._drawn[epoch] = self._draw(epoch)
        order: Order = self._drawn[epoch].indices
        return order

    def identity(self) -> dict[str, Any]:
        """Return the length; that the orders agree is checked when they are drawn again."""
        return {"sampler": self.length}

    def remembers(self, epoch: int) -> bool:
        """Return False where to draw the epoch's order again would move the sampler's own state."""
        return not self._keeps_state or epoch in self._drawn

    def checksum(self, epoch: int) -> int | None:
        """Return the checksum of the epoch's order."""
        self.order(epoch)
        return self._drawn[epoch].checksum

    def state(self, epoch: int) -> Any:
        """Return what this epoch, and later ones that were read ahead, are drawn from again."""
        self._drawn = {e: drawn for e, drawn in self._drawn.items() if e >= epoch}
        return {
            "drawn": [[e, drawn.checksum, drawn.before] for e, drawn in self._drawn.items()],
            "now": self._state(),
        }

    def restore(self, state: Any) -> None:
        """Draw again what had been drawn, and make sure that it is the same."""
        self._drawn = {}
        for epoch, checksum, before in state["drawn"]:
            self._load(before)
            self.order(epoch)
            if self._drawn[epoch].checksum != checksum:
                raise StateMismatch(
                    f"run.loader: {self._name} draws another order for epoch {epoch} than the one "
                    "that was trained on",
                    hint="resume with the same sampler and dataset, or give the sampler "
                    "state_dict() and load_state_dict()",
                )
        self._load(state["now"])

    @property
    def _name(self) -> str:
        return type(self._sampler).__name__

    def _state(self) -> Any:
        return to_inline(self._sampler.state_dict(), self._name) if self._keeps_state else None

    def _load(self, state: Mapping[str, Any] | None) -> None:
        if self._keeps_state and state is not None:
            self._sampler.load_state_dict(from_inline(dict(state)))

    def _draw(self, epoch: int) -> _Drawn:
        before = self._state()
        indices = self._indices(epoch)
        if not self._tried:
            self._load(before)
            if self._indices(epoch) != indices:
                raise UsageError(
                    f"run.loader: {self._name} gives another order each time it is asked, so that "
                    "a resume could not read on in it",
                    hint="give it set_epoch(epoch) and draw from that, or state_dict() and "
                    "load_state_dict()",
                )
            self._tried = True
        checksum = zlib.crc32(indices) if isinstance(indices, array) else indices.checksum
        return _Drawn(indices, checksum, before)

    def _indices(self, epoch: int) -> Any:
        """Return the sampler's next order; the script's own randomness is not touched."""
        states = capture_random_states()
        try:
            seed_everything(mix(self._seed, epoch) ^ _DRAW)
            generator = getattr(self._sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(mix(self._seed, epoch) ^ _DRAW)
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            drawn = self._take()
        except (TypeError, OverflowError) as problem:
            raise UsageError(
                f"run.loader: {self._name} does not give sample indices: {problem}",
                hint="pass a Sampler; batches are cut by global_batch_size and micro_batch_size",
            ) from problem
        finally:
            restore_random_states(states)
        self._check_count(drawn)
        self._check_indices(drawn if isinstance(drawn, array) else drawn.indices)
        return drawn

    def _take(self) -> Any:
        return array("q", iter(self._sampler))

    def _check_count(self, drawn: Any) -> None:
        if len(drawn) != self.length:
            raise UsageError(
                f"run.loader: {self._name} says that it has {self.length} indices, "
                f"but gave {len(drawn)}",
                hint="let __len__ return what __iter__ gives, the same each epoch",
            )

    def _check_indices(self, indices: array[int]) -> None:
        if min(indices) < 0 or max(indices) >= self._size:
            raise UsageError(
                f"run.loader: {self._name} gave the index "
                f"{min(indices) if min(indices) < 0 else max(indices)}, "
                f"but the dataset has 0 to {self._size - 1}"
            )


def _check_sampler(sampler: Any) -> None:
    from torch.utils.data import DistributedSampler

    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"run.loader: a {name} shares out samples by rank, which the loader does itself",
            hint="leave it away, or pass a sampler over the whole dataset",
        )
    if not hasattr(sampler, "__len__") or not hasattr(sampler, "__iter__"):
        raise UsageError(
            f"run.loader: sampler is a {name}, but must have __len__ and __iter__",
            hint="pass a torch.utils.data.Sampler, or leave it away",
        )
