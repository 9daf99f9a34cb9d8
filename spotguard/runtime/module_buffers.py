"""The buffers of the tracked models: what forward passes change beside the weights.

Each rank's forward passes see samples of its own, so running statistics part from rank to rank.
There is one definition for all: the first rank's. The others take them over with the gradients
of each step, so whoever is left when a rank dies holds what the first one would have saved, and
a resume, which gives all ranks the saved ones, changes nothing.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spotguard.errors import UsageError
from spotguard.runtime.sharding import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.runtime.collectives import Collectives

_MOST_BYTES = 4 << 20  # in all; the largest above it are constants (masks, tables), not statistics


class _Place(NamedTuple):
    """Where a buffer is found: a module may put another tensor in place of the one before."""

    name: str
    owner: torch.nn.Module
    key: str
    form: tuple[torch.Size, torch.dtype]


class SmallBuffers:
    """Up to 4 MB of the modules' persistent buffers, the smallest ones, found anew at each use."""

    def __init__(self, modules: Iterable[torch.nn.Module] = ()) -> None:
        found: dict[int, tuple[int, _Place]] = {}
        for module in modules:
            persistent = set(module.state_dict(keep_vars=True))
            for name, buffer in module.named_buffers():
                if name in persistent and not is_dtensor(buffer):
                    found.setdefault(id(buffer), (buffer.nbytes, _place(module, name, buffer)))
        by_size = sorted(found.values(), key=lambda pair: pair[0])
        fits = accumulate((size for size, _ in by_size))
        self._places = [
            place for (_, place), so_far in zip(by_size, fits, strict=True) if so_far <= _MOST_BYTES
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers as they are now.

        Raises:
            UsageError: one has another shape or dtype than in the beginning, so that no
                checkpoint of it could be restored either.
        """
        found = [getattr(place.owner, place.key) for place in self._places]
        for place, now in zip(self._places, found, strict=True):
            if now is None or _form(now) != place.form:
                raise UsageError(
                    f"the buffer {place.name} has another shape or dtype than when the loop began",
                    hint="let it keep its shape, or register it with persistent=False",
                )
        return [tensor.detach() for tensor in found]


class BufferSync:
    """Gives all ranks the first rank's buffers.

    Args:
        modules: All tracked models; only their small persistent buffers are looked at.
        ranks: The ranks of this attempt.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], ranks: Collectives) -> None:
        self._ranks = ranks
        self._buffers = SmallBuffers(modules if ranks.world_size > 1 else ())

    def share(self) -> None:
        """Take the first rank's buffers, on every rank. Blocks until they have come."""
        live = self._buffers.tensors()
        if not live:
            return
        sent = as_bytes(live)
        self._ranks.broadcast(sent)
        if self._ranks.rank:
            from_bytes(sent, live)


def as_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors of any dtype in one flat tensor, on the GPU if one is there."""
    devices = {tensor.device for tensor in tensors}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    plain = [t.resolve_conj().resolve_neg().reshape(-1).to(device) for t in tensors]
    return torch.cat(
        [torch.cat([plain[i] for i in of_one]).view(torch.uint8) for of_one in _by_dtype(tensors)]
    )


def from_bytes(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Fill `tensors` with the bytes that `as_bytes` made of as many of the same forms."""
    begin = 0
    for of_one in _by_dtype(tensors):
        targets = [tensors[i] for i in of_one]
        end = begin + sum(target.nbytes for target in targets)
        whole = flat[begin:end].view(targets[0].dtype)
        parts = torch.split(whole, [t.numel() for t in targets])
        shaped = [part.view(t.shape) for part, t in zip(parts, targets, strict=True)]
        torch._foreach_copy_(targets, shaped)
        begin = end


def _by_dtype(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """Return the tensors' numbers by dtype, large elements first: each begins where it may."""
    groups: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(number)
    return [groups[dtype] for dtype in sorted(groups, key=lambda dtype: -dtype.itemsize)]


def _place(module: torch.nn.Module, name: str, buffer: torch.Tensor) -> _Place:
    path, _, key = name.rpartition(".")
    return _Place(name, module.get_submodule(path), key, _form(buffer))


def _form(tensor: Any) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
