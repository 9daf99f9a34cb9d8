"""Schedules that a script steps by itself, beside those that it tracked or gave to its framework.

No checkpoint would have them: their rates would begin anew at each resume. Those of a framework's
optimizers are tracked with the rest; of those in a loop of the script's own is told.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch


def schedules_beside(
    optimizers: Collection[torch.optim.Optimizer], known: Collection[Any]
) -> list[LRScheduler]:
    """Return the schedules of these optimizers that are not among the `known` ones.

    Nothing but the schedule itself knows its optimizer, so all of the process's objects are looked
    through, once.
    """
    if not any(getattr(each.step, "_wrapped_by_lr_sched", False) for each in optimizers):
        return []  # no schedule was made of them
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
