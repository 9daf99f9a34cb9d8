"""A stream that every rank reads as a whole, keeping its own micro-batches of each step.

So the samples of a step are those at its place in the one order of the stream, on any number of
ranks, and nothing is read twice or left out when that number changes. The price is that each rank
reads, and transforms, what the others train on: as frameworks do that share a stream out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotguard.runtime.data.reading import READ
from spotguard.runtime.data.streaming import (
    LoaderOfStreams,
    Stream,
    check_source,
)
from spotguard.runtime.state.rng import kept_random_states, mix, seed_everything

if TYPE_CHECKING:
    from collections.abc import Generator

    from spotguard.runtime.data.loader import Share


class WholeStreamLoader(LoaderOfStreams):
    """Makes the micro-batches of each step of the next samples of one stream.

    Every micro-batch is full: one that meets the end of a pass goes on with the next pass.
    """

    def __init__(self, source: Any, *, replay: bool = False, **common: Any) -> None:
        super().__init__(**common)
        check_source(source, replay=replay)
        self._stream = Stream(self._found_again(source, replay=replay))
        self._at = (0, 0)
        """The step and the micro-batch of it that is read next."""

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a save and a resume."""
        return {
            "streams": "whole",
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "seed": self.seed,
        }

    def read(self, first_step: int, last_step: int) -> Generator[tuple[Share, Any], None, None]:
        """Yield this rank's micro-batches; nothing is read before it is asked for."""
        try:
            for step in range(first_step, last_step):
                for share in self.shares(step):
                    yield share, self.collate(self._read(step, share.number))
        finally:
            self._stream.close()

    def keep(self, finished: int) -> None:
        """Read on over what other ranks trained on, and take down where the stream is."""
        if self._at[0] < finished:
            with kept_random_states():  # what the script draws next is the same on all ranks
                self._pass_over(finished, 0)
        self.shared = self._stream.state()

    def begin(self, first: int) -> None:
        """Begin at step `first`, where `restore` has gone to."""
        self._at = (first, 0)

    def restore(self, shared: Any, own: dict[int, Any], world_size: int) -> str | None:
        """Go on where the stream was."""
        if shared is not None:
            self._stream.restore(shared)
        return None

    def _read(self, step: int, number: int) -> list[Any]:
        """Return the samples of a micro-batch, once those before it have been passed over."""
        self._pass_over(step, number)
        return self._next()

    def _pass_over(self, step: int, number: int) -> None:
        while self._at < (step, number):
            self._next()

    def _next(self) -> list[Any]:
        step, number = self._at
        sizes = self._cut(self.global_batch_size).sizes
        if self._reseed:  # on each rank the same, whoever trains on it
            seed_everything(mix(self.seed, step, number) ^ READ)
        samples = [self._stream.next() for _ in range(sizes[number])]
        self._at = (step, number + 1) if number + 1 < len(sizes) else (step + 1, 0)
        return samples
