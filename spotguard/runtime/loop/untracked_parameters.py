"""Parameters that a tracked optimizer trains, and of which no checkpoint would have the values.

Their moments come back, and they themselves as the script makes them: a resume would go on from
other weights than it had, and nothing would fail. So the loop does not begin with such.
"""

from __future__ import annotations

from numbers import Number
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import UsageError
from spotguard.runtime.state.sharding import address, is_fsdp_module
from spotguard.runtime.state.tracked import Box, TrackedModule, TrackedStateful, TrackedValue
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from spotguard.runtime.state.tracked import Tracked

_WAY_OUT = (
    "track what holds them: run.track(head=arcface), or, of parameters alone, a dict: "
    'run.track(alpha={"log_alpha": log_alpha})'
)
_FEW = 1000
"""Of so many numbers it is looked at each one."""
_UNKNOWN = -1
_WITHOUT_NUMBERS = (type(None), int, torch.dtype, torch.device)
_WITHOUT_COPIES = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, Box)


def refuse_untracked(objects: Mapping[str, Tracked], warn: Callable[[str], None]) -> None:
    """Look through what the tracked optimizers train; `warn` hears of what cannot be known.

    Raises:
        UsageError: nothing that is tracked has some of it.
    """
    held = KnownParameters(objects.values())
    for name, item in objects.items():
        if not isinstance(item, TrackedOptimizer):
            continue
        lost = [p for p in item.parameters() if p.requires_grad and p not in held]
        if not lost:
            continue
        what = (
            f"{name} trains {len(lost)} parameters that are in no tracked module and no tracked "
            f"dict, the first of shape {tuple(lost[0].shape)}"
        )
        holders = " or ".join(n for n, o in objects.items() if _may_hold(o, lost))
        if not holders:
            raise UsageError(f"{what}: a resume would not have their values", hint=_WAY_OUT)
        warn(f"{what}: a resume has their values only if {holders} saves them ({_WAY_OUT})")


class KnownParameters:
    """The tensors whose values a checkpoint has: these very ones, or others over their memory."""

    def __init__(self, items: Iterable[Tracked]) -> None:
        self._tensors = [tensor for item in items for tensor in _tensors_of(item)]
        self._ids = set(map(id, self._tensors))
        self._addresses: set[int] | None = None
        """Asked for only if needed: in most scripts a parameter is just the one of the module."""

    def __contains__(self, parameter: torch.Tensor) -> bool:
        if id(parameter) in self._ids or not parameter.numel():
            return True
        if self._addresses is None:
            self._addresses = {address(t) for t in self._tensors if _has_memory(t)}
        return _has_memory(parameter) and address(parameter) in self._addresses


def _tensors_of(item: Tracked) -> Iterator[torch.Tensor]:
    """Yield the tensors that are saved with a tracked object, as far as they can be seen."""
    if isinstance(item, TrackedModule):
        yield from item.bare.parameters()
        yield from item.bare.buffers()
        if any(map(is_fsdp_module, item.bare.modules())):
            # After a forward pass it may show whole weights; its own are in the state dict.
            yield from _tensors_in(item.bare.state_dict(keep_vars=True))
    elif isinstance(item, (TrackedStateful, TrackedValue)):
        yield from _tensors_in(item.read())


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
        return
    for value in _parts(state):
        yield from _tensors_in(value)


def _parts(state: Any) -> Iterable[Any]:
    """Return what a container holds; nothing of many numbers, such as a history of millions."""
    if isinstance(state, dict):
        return state.values()
    if isinstance(state, (list, tuple)) and _count(state) <= _FEW:
        return state
    return ()


def _count(items: list[Any] | tuple[Any, ...]) -> int:
    """Return how many numbers a list holds, or lists of the same length in it; 0 if others.

    It looks at the first and the last of them only, so it takes no time.
    """
    if not items:
        return 0
    first, last = items[0], items[-1]
    if isinstance(first, Number) and isinstance(last, Number):
        return len(items)
    if isinstance(first, (list, tuple)) and isinstance(last, (list, tuple)):
        each = _count(first)
        return len(items) * each if last is first or _count(last) == each else 0
    return 0


def _may_hold(item: Tracked, lost: list[torch.Tensor]) -> bool:
    """Return True if an object of the script's may have copies of these parameters in its state.

    It has as many numbers in one place as the first has, or as all have, or the number that a
    single one is. Or it has something of which is not known what it holds, such as bytes.
    """
    if not isinstance(item, TrackedStateful) or isinstance(item.value, _WITHOUT_COPIES):
        return False
    if not getattr(item.value, "holds_parameters", True):
        return False  # an integration's own bookkeeping
    sizes = (lost[0].numel(), sum(parameter.numel() for parameter in lost), _UNKNOWN)
    return any(size in sizes for size in _sizes_in(item.read()))


def _sizes_in(state: Any) -> Iterator[int]:
    """Yield how many numbers there are in each place of a state, as far as it is known."""
    if isinstance(state, (dict, list, tuple)):
        if not isinstance(state, dict):
            yield _count(state)
        for value in _parts(state):
            yield from _sizes_in(value)
    elif isinstance(state, torch.Tensor):
        yield state.numel()
    elif isinstance(state, float):
        yield 1
    elif not isinstance(state, _WITHOUT_NUMBERS):
        size = getattr(state, "size", _UNKNOWN)  # an array of NumPy's has its size
        yield size if isinstance(size, int) else _UNKNOWN


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and address(tensor) != 0
