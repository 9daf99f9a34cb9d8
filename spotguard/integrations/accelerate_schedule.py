"""The schedules of a script on Accelerate, which are stepped once for each process."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from spotguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    _Rates = list[list[float | None]]
    """Of each function, at each of some places."""

_FUNCTIONS = 4
"""Of a schedule's functions that are looked at; nearly all have one, for all groups."""
_REFUSES = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""What a script's function raises at a step that its schedule does not have."""


class Schedule:
    """A scheduler that Accelerate steps once for each process, on any number of them.

    With `split_batches`, or where the script steps it by itself, it is stepped once everywhere.

    Of schedules by a function, which is not part of a state, one whose length is in steps of all
    processes has its place moved; any other goes on as in the first attempt. Which of the two it is
    cannot be seen where its rate stands still, so some of the rates of the whole run are stored.
    """

    def __init__(self, accelerated: Any, processes: int, steps: int) -> None:
        """`steps` are the optimizer's in the whole run."""
        self._scheduler = accelerated.scheduler
        self._steps = steps
        self._rates: dict[str, Any] | None = None
        self._times = 1
        if accelerated.step_with_optimizer and not accelerated.split_batches:
            self._times = processes
            accelerated.split_batches = True  # stepped once, it steps as often as it should
            accelerated.scheduler = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_scheduler"], name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as often as Accelerate would have in the run's first attempt."""
        scheduler = self._scheduler
        for _ in range(self._times):
            if getattr(scheduler, "total_steps", None) is None or (
                scheduler._step_count <= scheduler.total_steps
            ):
                scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and how often a step of the optimizer steps it."""
        if self._rates is None:  # a function's are the same at each save
            self._rates = _rates_to_tell(self._scheduler, self._times, self._steps)
        return {
            "scheduler": self._scheduler.state_dict(),
            "times": self._times,
            "rates": self._rates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the same place of the schedule."""
        stored, before = dict(state["scheduler"]), state["times"]
        if before != self._times:
            if _counts_all_processes(self._scheduler, self._times, before, state):
                stored["last_epoch"] = stored["last_epoch"] * self._times // before
            else:
                self._times = before
        self._scheduler.load_state_dict(stored)
        self._rates = None


def _counts_all_processes(scheduler: Any, times: int, before: int, state: dict[str, Any]) -> bool:
    """Return True if a schedule is as long as there are processes, so that its place has to move.

    `times` are the steps of the schedule in one of the optimizer, `before` those that it had.
    """
    stored, told = state["scheduler"], state.get("rates")
    if not isinstance(scheduler, LambdaLR) or any(stored.get("lr_lambdas", ())):
        return False  # what its length is comes with its state
    if not told:  # by a version before this one
        return _has_rates(scheduler, stored["last_epoch"] * times // before, stored["_last_lr"])
    # The script may have changed, and lengths are rounded: what is nearer counts.
    moved = _rates_at(scheduler, [step * times for step in told["steps"]])
    stays = _rates_at(scheduler, [step * before for step in told["steps"]])
    return _distance(moved, told["rates"]) <= _distance(stays, told["rates"])


def _has_rates(scheduler: LambdaLR, place: int, rates: Iterable[float]) -> bool:
    """Return True if a schedule by functions has these rates at `place`."""
    base_lrs: Any = scheduler.base_lrs
    found = zip(base_lrs, scheduler.lr_lambdas, rates, strict=True)
    return all(abs(base * rate(place) - last) <= 1e-6 * abs(base) for base, rate, last in found)


def _rates_to_tell(scheduler: Any, times: int, steps: int) -> dict[str, Any]:
    """Return rates of a schedule by functions, and the optimizer's steps at which it has them."""
    if not isinstance(scheduler, LambdaLR):
        return {}

    def rates(step: int) -> _Rates:
        return _rates_at(scheduler, [step * times])

    told = _telling_steps(rates, steps)
    return {"steps": told, "rates": _rates_at(scheduler, [step * times for step in told])}


def _telling_steps(rates: Callable[[int], _Rates], steps: int) -> list[int]:
    """Return steps whose rates tell how long a schedule is.

    Each is two thirds of the one after it, so that there are some in a short warm-up and in a
    schedule that is over long before the run is. Where a rate begins to change after it stood
    still, which is all that some schedules do, the steps before and after that are among them.
    """
    found = [steps]
    while found[-1] > 1:
        found.append(found[-1] * 2 // 3)
    found.reverse()
    ends = [_changes_at(rates, low, high) for low, high in pairwise(found)]
    return sorted({*found, *(step for end in ends if end for step in (end - 1, end))})


def _changes_at(rates: Callable[[int], _Rates], low: int, high: int) -> int | None:
    """Return at which step a rate leaves what it is at `low`; None if it does at once, or never."""
    still = rates(low)
    if still == rates(high) or still != rates(low + 1):
        return None
    return low + bisect_left(range(low, high), True, key=lambda step: rates(step) != still)


def _rates_at(scheduler: LambdaLR, places: Sequence[int]) -> _Rates:
    """Return the rates of a schedule's first functions, each looked at once, at some places."""
    functions = list({id(each): each for each in scheduler.lr_lambdas}.values())
    return [[_rate(each, place) for place in places] for each in functions[:_FUNCTIONS]]


def _rate(function: Callable[[int], float], place: int) -> float | None:
    """Return a rate; None where a function, which may read from a table, has none."""
    try:
        return float(function(place))
    except _REFUSES:
        return None


def _distance(some: _Rates, others: _Rates) -> float:
    """Return by how much rates differ in all."""
    return sum(
        _gap(one, other)
        for pair in zip(some, others, strict=False)
        for one, other in zip(*pair, strict=True)
    )


def _gap(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else 1.0
    return abs(one - other)


class SteppedByScript(LRScheduler):
    """Goes before the class of a schedule that the script steps by itself, in its own loop.

    A rank has several batches of a step, or one: the schedule is stepped by the last of them.
    """

    steps_now: Callable[[], bool]
    """Returns whether no batch of the step is to follow; set on the class that is made."""
    accumulated: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step at the end of the optimizer's step, or outside of one.

        Raises:
            UsageError: it is stepped with each of several batches that are to be accumulated.
        """
        if type(self).steps_now():
            super().step(*args, **kwargs)
        elif self.accumulated > 1:
            raise UsageError(
                "SpotguardDataLoader: the schedule is stepped before the last of the batches that "
                "are accumulated, so its rate would follow the number of ranks",
                hint="give it to accelerator.prepare, or step it under "
                "`if accelerator.sync_gradients:`",
            )


def step_once(schedule: LRScheduler, steps_now: Callable[[], bool], accumulated: int) -> None:
    """Have a schedule that the script steps take one step for each of the optimizer's."""
    kind = type(schedule)
    own = {"steps_now": staticmethod(steps_now), "accumulated": accumulated}
    schedule.__class__ = type(kind.__name__, (SteppedByScript, kind), own)
