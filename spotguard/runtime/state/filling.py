"""Writing stored values into tensors that a script holds, where they are.

Of an expanded tensor several elements lie in one place of memory. Torch reads such a tensor like
any other and refuses to write to it: a module with an expanded mask would train and be saved, and
could never be restored.

Two names may stand for one memory when a script is set up, and for two by the time it is saved: the
best weights are the model's own until they are copied. To fill both would leave the last one's
values in either. So it is known of each place in memory which stored tensors go there.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import StateMismatch
from spotguard.runtime.state.sharding import is_dtensor, local_of

if TYPE_CHECKING:
    from collections.abc import Iterable

Pair = tuple[torch.Tensor, object]
"""Stored values, and what the script has in their place."""

log = logging.getLogger("spotguard")

_LARGE_BYTES = 256 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Give `target` these values, of its own shape; to an expanded one once for each place.

    Raises:
        StateMismatch: elements that lie in one place would have to differ.
    """
    axes = [a for a, s in enumerate(target.stride()) if s == 0 and target.shape[a] > 1]
    if not axes:
        target.copy_(values)
        return
    once, values_once = target, values
    for axis in axes:
        once, values_once = once.narrow(axis, 0, 1), values_once.narrow(axis, 0, 1)
    if not _same(values_once.expand(values.shape), values):
        raise StateMismatch(
            f"a tensor of shape {tuple(target.shape)} is expanded from one of {tuple(once.shape)} "
            "in this script, and has values in the checkpoint that differ along it",
            hint="call .clone() on what expand() returns",
        )
    once.copy_(values_once)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a flat tensor, over its own memory if that lies in one piece."""
    held = tensor.detach().contiguous()
    # Not `reshape(-1)`: one element of a strided tensor counts as contiguous and keeps its stride,
    # which no view of another dtype takes.
    return held.as_strided((held.numel(),), (1,)).view(torch.uint8)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all values are equal, or no numbers in both."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


class Claims:
    """Which stored tensors are read to which memory."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[int, int, str]]] = {}
        """Of each storage, by its address: from where to where in it, and what goes there."""

    def add(self, name: str, target: torch.Tensor) -> None:
        """Take note that the stored tensor `name` goes to the memory of `target`."""
        storage, start, end = _extent(target)
        if end > start:
            self._places.setdefault(storage, []).append((start, end, name))

    def are_one(self, name: str, target: torch.Tensor) -> bool:
        """Return True if nothing but `name` goes to any of the memory of `target`."""
        storage, start, end = _extent(target)
        return all(
            name == other or end <= first or last <= start
            for first, last, other in self._places.get(storage, ())
        )


def may_share(value: object) -> bool:
    """Return True if `value` is a plain tensor, whose place in memory can be asked for."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
        return False
    return type(value) in _PLAIN or is_dtensor(value)


class Placer:
    """Puts the stored values of one object where the script has its own, while there is room.

    Beside the object's own on a device they take its memory twice, and thrice if it copies them. A
    run that nearly fills its device would end at each resume. So what finds no room stays on the
    CPU with all that follows it there, and an object that has it copied into its own needs none.
    """

    def __init__(
        self, pairs: Iterable[Pair] = (), short_of: set[torch.device] | None = None
    ) -> None:
        """Of large `pairs` it is asked first whether there is room; `short_of` was told before."""
        self._short_of = set() if short_of is None else short_of
        self._full = _full_devices(pairs)
        """Devices that had no room."""

    def placed(self, name: str, values: torch.Tensor, present: object, *, fills: bool) -> Any:
        """Return stored values where `present` is, if that is a tensor: on its device.

        With `fills` it is filled with them, and returned, if they can be put into it.
        """
        if not isinstance(present, torch.Tensor):
            return values
        if fills and _may_be_filled(present, values):
            with torch.no_grad():
                local_of(present).copy_(local_of(values))
            return present
        if is_dtensor(values) or present.device == values.device:
            return values
        if present.device not in self._full:
            try:
                return values.to(present.device)
            except torch.OutOfMemoryError:
                self._full.add(present.device)
        self._tell(name, present.device)
        return values

    def _tell(self, name: str, device: torch.device) -> None:
        """Say that a device is full, once."""
        if device not in self._short_of:
            self._short_of.add(device)
            log.warning(
                "%s has no room for a second copy of %s: it and what follows it in the same object "
                "are handed to load_state_dict on the CPU",
                device,
                name,
            )


def _full_devices(pairs: Iterable[Pair]) -> set[torch.device]:
    """Return the devices that have not twice the room for what would be moved there.

    Twice, since an object may copy what it gets. Little is moved without a question.
    """
    needed: Counter[torch.device] = Counter()
    for values, present in pairs:
        if isinstance(present, torch.Tensor) and not is_dtensor(values):
            needed[present.device] += values.nbytes
    return {
        device
        for device, size in needed.items()
        if size > _LARGE_BYTES and device.type == "cuda" and _room(device) < 2 * size
    }


def _room(device: torch.device) -> int:
    """Return how many bytes can be had of a GPU; what torch holds and does not use is free, too."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _may_be_filled(present: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if a script's tensor is such that these values can be put into it as they are."""
    return (
        (type(present) in _PLAIN or is_dtensor(present))
        and is_dtensor(present) == is_dtensor(values)
        and present.dtype == values.dtype
        and present.shape == values.shape
        and not present.is_inference()
        and not _is_expanded(local_of(present))
    )


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return True if several elements lie in one place, which can have one value only."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _extent(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of a tensor's storage, and where in memory it begins and ends."""
    local = local_of(tensor)
    start = local.data_ptr()
    if not start or not local.numel():  # it has no memory
        return 0, 0, 0
    steps = zip(local.shape, local.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    end = start + (last + 1) * local.element_size()
    return local.untyped_storage().data_ptr(), start, end
