"""Schedules that a script steps by itself, beside those that it gave to its framework.

No checkpoint of the framework has them: their rates would begin anew at each resume.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import torch


def schedules_beside(
    optimizers: Iterable[torch.optim.Optimizer], known: Collection[Any]
) -> list[LRScheduler]:
    """Return the schedules of a framework's optimizers that the framework does not know of.

    Nothing but the schedule itself knows its optimizer, so all of the process's objects are looked
    through, once.
    """
    order = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
    if _found_of(order):
        gc.collect()  # what the script has let go of may be there still
    found = _found_of(order)
    inner = {id(part) for each in (*found, *known) for part in _parts(each)[1:]}
    mine = [each for each in found if id(each) not in inner.union(map(id, known))]
    # In one order on all ranks and in all attempts, as they are tracked by their numbers.
    return sorted(mine, key=lambda each: (order[id(each.optimizer)], type(each).__qualname__))


def _found_of(optimizers: Mapping[int, int]) -> list[LRScheduler]:
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler)
        and id(getattr(each, "optimizer", None)) in optimizers
    ]


def _parts(schedule: Any) -> list[Any]:
    """Return a schedule and those that it is made of, as a `SequentialLR` is."""
    inner = getattr(schedule, "_schedulers", None) or ()
    return [schedule, *(part for each in inner for part in _parts(each))]
