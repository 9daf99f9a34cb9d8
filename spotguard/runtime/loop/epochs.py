"""Training by epochs: a loop over them, each a loop over its steps, and a place at its end.

What a script does after the steps of an epoch (an evaluation, a scheduler, a log) changes no
weights. So it belongs to no step: it comes between the boundary after the epoch's last step and
the next one. A checkpoint that is saved in the midst of it holds the state at its beginning, and
says so; the next attempt begins with that epoch, none of its steps left to do, and does it all
again. So it does where the script has ended the run in the midst of an epoch, and where the global
batch has grown with the ranks, and what is left of the epoch is less than one, and left out. Once
the script asks for the next epoch, what it changed belongs to the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from spotguard.runtime.loop.training import Training
    from spotguard.runtime.step import Step


class Epoch:
    """One epoch: iterate for its steps that are still to do."""

    def __init__(self, training: Training, number: int, steps: range, *, total: int) -> None:
        self._training = training
        self.number = number
        """Epochs done before this one: 0 for the first."""
        self.steps = steps
        """The numbers of all its steps, those that an earlier attempt has done, too."""
        self.is_last = number == total - 1
        """True for the last epoch of the run."""

    @property
    def dataset(self) -> Any:
        """What is trained on, for functions that ask the loader that they are given for it."""
        return self._training.loader.dataset

    @property
    def done(self) -> int:
        """How many of its steps are done: 0, or more after a resume in its midst.

        `for number, step in enumerate(epoch, epoch.done)` numbers them as if nothing had happened.
        """
        return min(max(self._training.finished - self.steps.start, 0), len(self.steps))

    def __len__(self) -> int:
        """Return how many optimizer steps the epoch has, `steps_per_epoch`."""
        return len(self.steps)

    def __bool__(self) -> bool:
        """Return True, also if none of its steps is left."""
        return True

    def __iter__(self) -> Iterator[Step]:
        training = self._training
        at_once = False
        while training.finished < self.steps.stop and not training.is_done:
            step = training.begin(at_once=at_once)
            assert step is not None
            yield step
            at_once = training.step is not None  # else the script has ended it
            if at_once:
                training.end(epoch_until=self.steps.stop)
        training.begin_epoch_end(self.number)

    @property
    def is_over(self) -> bool:
        """True once all its steps are done, or the run is to end here."""
        return self._training.finished >= self.steps.stop or self._training.is_done


def epochs_of(
    training: Training, total: int, steps_per_epoch: int | None
) -> Generator[Epoch, None, None]:
    """Yield the epochs that are still to do, the first perhaps in part; saves at the end.

    Args:
        training: Has restored.
        total: Epochs in all.
        steps_per_epoch: Steps of each; None if an epoch is a pass over the data.

    Raises:
        UsageError: an epoch was left before its last step, and yet another asked for.
    """
    loader = training.loader

    def first_step_of(epoch: int) -> int:
        return loader.first_step_of(epoch) if steps_per_epoch is None else epoch * steps_per_epoch

    training.expect_epochs()
    if steps_per_epoch is None and loader.begins_at_epoch_end:
        training.begin_at_epoch_end()
    number = _epoch_of(training.finished, total, first_step_of)
    is_whole = first_step_of(number) == training.finished
    at_its_end = training.at_epoch_end and (is_whole or training.end_early is not None)
    number -= at_its_end and is_whole
    while number < total and (at_its_end or not training.is_done):
        steps = range(first_step_of(number), first_step_of(number + 1))
        epoch = Epoch(training, number, steps, total=total)
        training.begin_epoch(number)
        yield epoch
        if not epoch.is_over:
            raise UsageError(
                f"the loop over epoch {number} was left before its last step, and another epoch "
                "asked for",
                hint='call run.end("why") to end the training there; for shorter epochs give '
                "run.epochs(..., steps_per_epoch=...)",
            )
        training.end_epoch()
        at_its_end = False
        number += 1
    training.finish(None)


def _epoch_of(step: int, total: int, first_step_of: Callable[[int], int]) -> int:
    """Return the epoch (from 0) of `step`, `total` for the step after the last one."""
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        if first_step_of(middle + 1) <= step:
            low = middle + 1
        else:
            high = middle
    return low
