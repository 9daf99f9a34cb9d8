"""A few bytes of each of some tensors, as they were: by them it is noticed that tensors changed.

torch counts how often a tensor was written to (`_version`), but not all writes: those of
`fused=True` optimizers, of BatchNorm to its statistics, by `.data`, by NumPy and by a CUDA graph's
replay are not counted. So a few bytes are compared as well.

An evaluation may put averaged weights in the place of the model's, and put those back at its end.
A save within it would take the average for the training's state. So it would where a script goes on
with an average before it evaluates at an epoch's end: the next attempt would average once more.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch

from spotguard.runtime.state.filling import flat_bytes
from spotguard.runtime.state.sharding import is_dtensor, is_fsdp_module, local_of
from spotguard.runtime.state.tracked import TrackedModule
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.runtime.state.tracked import Tracked

_LOOKED_AT = 16
"""Elements of each tensor, spread over it, of which the bytes are kept."""
_OPTIMIZERS = _MODULES = 4
_USUAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Numbers that any device compares; a frozen base may be in others."""


class _Form(NamedTuple):
    """What a tensor is beside its values."""

    address: int
    elements: int
    dtype: torch.dtype
    device: torch.device


_Kind = tuple[torch.device, int]
"""Device and bytes of an element: what bytes that are read at once have in common."""


class TensorSample:
    """Keeps a few bytes of each tensor; the order of `tensors` gives them their numbers."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._forms: list[_Form] = []
        self._versions: list[int | None] = []
        self._parts: list[torch.Tensor] = []
        """Views of the elements that are looked at, as rows of bytes."""
        self._of_kind: dict[_Kind, list[int]] = {}
        self._kept: dict[_Kind, torch.Tensor] = {}

    def take(self) -> None:
        """Keep the tensors' bytes as they are now. Never waits for a device."""
        held = [local_of(tensor) for tensor in self._tensors]
        forms = list(map(_form, held))
        if forms != self._forms:
            self._forms = forms
            self._parts = list(map(_part, held))
            self._of_kind = {}
            for number, form in enumerate(forms):
                kind = form.device, form.dtype.itemsize
                self._of_kind.setdefault(kind, []).append(number)
        self._versions = list(map(_written, held))
        self._kept = self._read()

    def changed(self) -> set[int]:
        """Return the numbers of the tensors that were written to, or lie elsewhere, since `take`.

        Waits for the device.
        """
        held = [local_of(tensor) for tensor in self._tensors]
        found = {n for n, tensor in enumerate(held) if _form(tensor) != self._forms[n]}
        found |= {n for n, tensor in enumerate(held) if _written(tensor) != self._versions[n]}
        for kind, now in self._read().items():
            if not torch.equal(now, self._kept[kind]):
                pairs = zip(self._split(kind, now), self._split(kind), strict=True)
                found |= {n for (n, one), (_, other) in pairs if not torch.equal(one, other)}
        return found

    def differs(self) -> bool:
        """Return True if a tensor has other values than at the last `take`, wherever it lies now.

        One of another size is not compared: a wrapper has gathered its parts, or given them back.
        Waits for the device.
        """
        for kind in self._of_kind:
            for number, before in self._split(kind):
                held = local_of(self._tensors[number])
                then, now = self._forms[number], _form(held)
                if now.elements != then.elements:
                    continue
                # A script may have cast or moved its module for the evaluation.
                if (now.dtype, now.device) != (then.dtype, then.device):
                    return True
                if not torch.equal(_bytes(_part(held)), before):
                    return True
        return False

    def _read(self) -> dict[_Kind, torch.Tensor]:
        return {
            kind: torch.cat([_bytes(self._parts[number]) for number in numbers])
            for kind, numbers in self._of_kind.items()
        }

    def _split(
        self, kind: _Kind, rows: torch.Tensor | None = None
    ) -> list[tuple[int, torch.Tensor]]:
        """Return the rows of each tensor of a kind, by its number; by default those kept."""
        numbers = self._of_kind[kind]
        lengths = [_rows(self._parts[number]) for number in numbers]
        parts = torch.split(self._kept[kind] if rows is None else rows, lengths)
        return list(zip(numbers, parts, strict=True))


def sampled(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """Return a few bytes of each tensor. Waits for the device."""
    return [_bytes(_part(local_of(tensor))).cpu().numpy().tobytes() for tensor in tensors]


class WeightWitness(TensorSample):
    """Keeps some bytes of the first and the last weight of each optimizer, and no more.

    So it does of each module, of the weights that no optimizer trains.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        modules: Iterable[torch.nn.Module] = (),
    ) -> None:
        found: list[torch.Tensor] = []
        trained: set[int] = set()
        for optimizer in optimizers:
            weights = [w for group in optimizer.param_groups for w in group["params"]]
            trained |= set(map(id, weights))
            if len(found) < 2 * _OPTIMIZERS:
                found += _outermost(w for w in weights if w.requires_grad)
        for module in islice(modules, _MODULES):
            # FSDP2 shows whole weights at times, whose memory it takes back: its own are DTensors.
            of_parts = any(map(is_fsdp_module, module.modules()))
            others = (
                w
                for w in module.parameters()
                if id(w) not in trained and _is_usual(w) and (is_dtensor(w) or not of_parts)
            )
            found += _outermost(others)
        super().__init__(found)

    @classmethod
    def of(cls, objects: Iterable[Tracked]) -> WeightWitness:
        """Return that of all tracked objects."""
        found = list(objects)
        optimizers = (item.value for item in found if isinstance(item, TrackedOptimizer))
        return cls(optimizers, [item.bare for item in found if isinstance(item, TrackedModule)])


def _outermost(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first and the last of which this rank holds something."""
    usable = [weight for weight in weights if local_of(weight).numel()]
    return list(dict.fromkeys((usable[0], usable[-1]))) if usable else []


def _is_usual(weight: torch.Tensor) -> bool:
    plain = type(weight) is torch.nn.Parameter or is_dtensor(weight)
    return plain and not weight.is_meta and weight.dtype in _USUAL


def _form(tensor: torch.Tensor) -> _Form:
    return _Form(tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.device)


def _written(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of some of a tensor's elements, as rows of bytes if it is in one piece."""
    held, count, size = tensor.detach(), tensor.numel(), tensor.element_size()
    if not count or not held.data_ptr():  # FSDP2 takes the memory of what it has gathered
        return torch.empty((0, size), dtype=torch.uint8, device=held.device)
    if _is_dense(held):
        step = max(1, count // _LOOKED_AT)
        rows = held.as_strided((count,), (1,)).view(torch.uint8).view(count, size)
        return rows[step // 2 :: step][:_LOOKED_AT]
    return held[tuple(slice(None, None, max(1, length - 1)) for length in held.shape)]


def _bytes(part: torch.Tensor) -> torch.Tensor:
    if part.dtype is torch.uint8 and part.dim() == 2:
        return part
    return flat_bytes(part).view(part.numel(), -1)


def _rows(part: torch.Tensor) -> int:
    return len(part) if part.dtype is torch.uint8 and part.dim() == 2 else part.numel()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill one piece of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    whole = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != whole:
            return False
        whole *= length
    return True
