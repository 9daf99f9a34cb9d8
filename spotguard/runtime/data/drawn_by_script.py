"""Data that a script draws itself, and jobs that have none.

A language model's `get_batch` picks places of one long text at random, with replacement; a job
that learns by reinforcement plays episodes. Neither has a dataset to be read once. What both need
is that a step's micro-batches are the same on any number of ranks. So each is drawn, or played,
with the random generators seeded by its step and its number in the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError
from spotguard.runtime.data.loader import Loader, Share
from spotguard.runtime.data.reading import READ
from spotguard.runtime.state.rng import mix, seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class DrawnLoader(Loader):
    """Has the script draw each micro-batch; made by `run.draws` and `run.episodes`.

    Args:
        draw: Returns a micro-batch of as many samples as it is told. None gives their numbers
            through the run instead, as a range.
        **common: As of `Loader`.
    """

    def __init__(self, draw: Callable[[int], Any] | None, **common: Any) -> None:
        super().__init__(**common, collate_fn=None)
        if draw is not None and not callable(draw):
            raise UsageError(
                f"run.draws needs a function that draws a batch, not a {type(draw).__name__}",
                hint="loader = run.draws(lambda samples: ..., global_batch_size=...)",
            )
        self._draw = draw
        self.any_world = self._reseed

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a save and a resume."""
        return {
            "drawn": "by the script" if self._draw is not None else "episodes",
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "seed": self.seed,
        }

    def epoch_of(self, step: int) -> int:
        """Return 0: there is nothing to pass over."""
        return 0

    def first_step_of(self, epoch: int) -> int:
        """Raise: there is nothing to pass over."""
        raise UsageError(
            "run.steps: what is drawn has no length, so epochs= says nothing",
            hint="give total=, the optimizer steps in all, or use "
            "run.epochs(loader, total=..., steps_per_epoch=...)",
        )

    def shares(self, step: int) -> list[Share]:
        """Return this rank's micro-batches of a step; samples are numbered through the run."""
        first = step * self.global_batch_size
        return self._shares(step, range(first, first + self.global_batch_size))

    def read(self, first_step: int, last_step: int) -> Generator[tuple[Share, Any], None, None]:
        """Yield this rank's micro-batches; nothing is drawn before it is asked for."""
        for step in range(first_step, last_step):
            for share in self.shares(step):
                if self._reseed:
                    seed_everything(mix(self.seed, step, share.number) ^ READ)
                yield share, self._drawn(share)

    def _drawn(self, share: Share) -> Any:
        if self._draw is not None:
            return self._draw(len(share.indices))
        return range(share.indices[0], share.indices[-1] + 1)

    def keep(self, finished: int) -> None:
        """Do nothing: the step says all."""

    def restore(self, shared: Any, own: dict[int, Any], world_size: int) -> str | None:
        """Do nothing: the step says all."""
        return None
