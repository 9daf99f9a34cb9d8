"""Batches that a batch sampler puts together: each stays whole, and is one micro-batch.

Some losses compare the samples of a batch with each other (in-batch negatives, triplets), so that a
batch sampler decides who meets whom. A step is a number of such batches, shared out over the ranks.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from typing import TYPE_CHECKING, Any, overload

from spotguard.errors import UsageError
from spotguard.runtime.data.loader import ElasticLoader, Share, _Cut
from spotguard.runtime.data.sampling import FromSampler
from spotguard.shared.batching import EpochPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

_OF_RANKS = (
    "rank", "num_replicas", "world_size", "dp_size", "dp_rank", "num_processes", "process_index",
)  # fmt: skip
"""Attributes of batch samplers that give one rank's batches only."""


class Batches:
    """The batches of one epoch, in two arrays: 8 bytes for each sample, and for each batch."""

    def __init__(self, given: Iterable[Iterable[int]]) -> None:
        self.indices = array("q")
        self._ends = array("q", [0])
        for batch in given:
            self.indices.extend(batch)
            if len(self.indices) > self._ends[-1]:
                self._ends.append(len(self.indices))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, place: slice) -> list[tuple[int, ...]]: ...

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        return tuple(self.indices[self._ends[place] : self._ends[place + 1]])

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Batches) and self.indices == other.indices
        return same and self._ends == other._ends  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    @property
    def checksum(self) -> int:
        """Return the checksum of the samples and of where they are cut."""
        return zlib.crc32(self._ends, zlib.crc32(self.indices))


class FromBatchSampler(FromSampler):
    """What a batch sampler says, drawn a whole epoch at a time, as `FromSampler` draws samples."""

    def __init__(self, sampler: Any, size: int, seed: int, *, per_step: int) -> None:
        super().__init__(sampler, size, seed)
        self._per_step = per_step

    def identity(self) -> dict[str, Any]:
        """Return the length; that the batches agree is checked when they are drawn again."""
        return {"batches": self.length}

    def _take(self) -> Batches:
        return Batches(self._sampler)

    def _check_count(self, drawn: Any) -> None:
        # One without duplicates may need some batches more than its length says.
        whole_steps = (self.length - 1) // self._per_step
        if len(drawn) <= whole_steps * self._per_step:
            raise UsageError(
                f"run.loader: {self._name} says that it has {self.length} batches, "
                f"but gave {len(drawn)}, too few for {whole_steps + 1} steps of {self._per_step}",
                hint="let __len__ return what __iter__ gives, or make smaller batches",
            )


class BatchedLoader(ElasticLoader):
    """Makes steps of a batch sampler's batches. Made by `run.loader(batch_sampler=...)`.

    An epoch has as many steps as the sampler's length comes to; the last one has what is left, so
    that each batch which the sampler gives is trained on exactly once.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_sampler: Any,
        asked_for: int,
        global_batch_size: int,
        micro_batch_size: int | None,
        **others: Any,
    ) -> None:
        """`asked_for` is the global batch size that the script gave; a smoke test takes less."""
        size = micro_batch_size or getattr(batch_sampler, "batch_size", None)
        _check(batch_sampler, size, asked_for)
        assert isinstance(size, int)
        super().__init__(
            dataset, global_batch_size=global_batch_size, micro_batch_size=size, **others
        )
        per_step = max(1, self.global_batch_size // size)
        self._sampling = FromBatchSampler(batch_sampler, len(dataset), self.seed, per_step=per_step)
        self._plan = EpochPlan(samples=self._sampling.length, global_batch=per_step)

    def shares(self, step: int) -> list[Share]:
        """Return this rank's batches of step `step` (from 0), each by the samples that it has."""
        epoch, places = self._batches(step)
        batches: Any = self._sampling.order(epoch)
        samples = sum(map(len, batches[places.start : places.stop]))
        found = []
        for share in self._shares(step, places, batches):
            indices: Any = share.indices[0]
            weight = share.weight and len(indices) / samples
            found.append(share._replace(indices=indices, weight=weight))
        return found

    def _samples(self, step: int) -> int:
        return len(self._batches(step)[1])

    def _batches(self, step: int) -> tuple[int, range]:
        """Return the epoch of a step, and which of its batches the step has."""
        epoch, places = self._plan.at(step)
        if self._plan.first_step_of(epoch + 1) == step + 1:
            batches: Any = self._sampling.order(epoch)
            places = range(places.start, len(batches))
        return epoch, places

    def _cut(self, samples: int) -> _Cut:
        """Return how a step of so many batches is cut."""
        if samples not in self._cuts:
            ranges = [self._range(samples, rank) for rank in range(self._world_size)]
            starts = list(itertools.accumulate([1] * samples, initial=0))
            self._cuts[samples] = _Cut([1] * samples, starts, ranges)
        return self._cuts[samples]


def refuse_one_ranks_batches(sampler: Any) -> None:
    """Raise `UsageError` for a batch sampler that gives one rank's batches only."""
    if any(hasattr(sampler, attribute) for attribute in _OF_RANKS):
        raise UsageError(
            f"a {type(sampler).__name__} cuts the batches by the number of ranks",
            hint="pass a batch sampler over the whole dataset, or a sampler of its indices",
        )


def _check(sampler: Any, size: Any, global_batch_size: Any) -> None:
    refuse_one_ranks_batches(sampler)
    name = type(sampler).__name__
    if not isinstance(size, int):
        raise UsageError(
            f"run.loader: {name} has no batch_size",
            hint="say by micro_batch_size how many samples its batches have at most",
        )
    if isinstance(global_batch_size, int) and global_batch_size % size:
        raise UsageError(
            f"run.loader: global_batch_size is {global_batch_size}, which is no multiple of "
            f"{size}, the samples that {name} puts into a batch",
            hint="a step is made of whole batches",
        )
