"""Notice losses that are made of what several ranks hold: they change with the number of ranks.

A contrastive loss gathers the features of all ranks before its backward pass, so each sample is
compared with as many others as the ranks have at that moment. No sharing out of samples can make
that the same on another number of ranks; so it is told where that number changes, or may change.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from spotguard.runtime.data.loader import Share

_STEPS = 2
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather"),
)
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120


class OwnCollectives:
    """Looks at the script's first steps, between a micro-batch and its backward pass."""

    def __init__(self, went_backward: Callable[[], int], tell: Callable[[str], None]) -> None:
        """`went_backward`: how many micro-batches of the step under way have begun to."""
        self._went_backward = went_backward
        self._tell = tell
        self._before = 0
        self._told = False

    def watch(self, batches: Iterator[tuple[Share, Any]]) -> Iterator[tuple[Share, Any]]:
        """Yield from `batches`, and look at what is done with those of the first steps."""
        first: int | None = None
        for share, batch in batches:
            first = share.step if first is None else first
            if self._told or share.step >= first + _STEPS:
                yield share, batch
                break
            self._before = self._went_backward()
            with_ours = {name: getattr(dist, name) for name in _COLLECTIVES}
            for name, function in with_ours.items():
                setattr(dist, name, self._noticing(name, function))
            try:
                yield share, batch
            finally:
                for name, function in with_ours.items():
                    setattr(dist, name, function)
        yield from batches

    def _noticing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            if not self._told and self._went_backward() == self._before and _is_of_script():
                self._told = True
                self._tell(_WORDS.format(name=name))
            return function(*args, **kwargs)

        return noticed


_WORDS = (
    "the script calls {name} between a micro-batch and its backward pass: where a loss is made of "
    "what all ranks hold, as contrastive ones are, it changes with the number of ranks and with the"
    " micro-batches of each, and so does the training; keep the number of nodes fixed, or compute "
    "such a loss within a micro-batch"
)


@functools.cache
def _wrappers() -> tuple[str, ...]:
    """Return the folders of code that calls collectives for the script: torch's wrappers, ours."""
    places = (
        ("distributed", "fsdp"),
        ("distributed", "tensor"),
        ("distributed", "_composable"),
        ("nn", "parallel"),
        ("nn", "modules", "_functions.py"),  # SyncBatchNorm's
    )
    return (*(os.path.join(_torch(), *place) for place in places), _OURS)  # noqa: PTH118


@functools.cache
def _torch() -> str:
    return os.path.dirname(torch.__file__)  # noqa: PTH120 - compared with the names of code


def _is_of_script() -> bool:
    """Return whether the script, and no wrapper of torch's or of ours, calls what called this."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_wrappers()):
            return False
        if not file.startswith(_torch()):
            return True
        frame = frame.f_back
    return False
