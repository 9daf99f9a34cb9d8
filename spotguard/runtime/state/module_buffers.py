"""The buffers of the tracked models: what forward passes change beside the weights.

Each rank's forward passes see samples of its own, so running statistics part from rank to rank.
There is one definition for all: the first rank's. The others take them over with the gradients
of each step, so whoever is left when a rank dies holds what the first one would have saved, and
a resume, which gives all ranks the saved ones, changes nothing.
"""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spotguard.errors import UsageError
from spotguard.runtime.state.filling import fill
from spotguard.runtime.state.sharding import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.runtime.distributed.collectives import Collectives

_MOST_BYTES = 4 << 20  # in all; the largest above it are constants (masks, tables), not statistics


class _Place(NamedTuple):
    """Where a buffer is found: a module may put another tensor in place of the one before."""

    name: str
    owner: torch.nn.Module
    key: str
    form: tuple[torch.Size, torch.dtype]


class SmallBuffers:
    """Up to 4 MB of the modules' persistent buffers, the smallest ones, found anew at each use.

    They come by dtype, those with large elements first.
    """

    def __init__(self, modules: Iterable[torch.nn.Module] = ()) -> None:
        found: dict[int, tuple[int, _Place]] = {}
        for module in modules:
            persistent = set(module.state_dict(keep_vars=True))
            for name, buffer in module.named_buffers():
                if name in persistent and not is_dtensor(buffer):
                    found.setdefault(id(buffer), (buffer.nbytes, _place(module, name, buffer)))
        by_size = sorted(found.values(), key=lambda pair: pair[0])
        fits = accumulate((size for size, _ in by_size))
        small = [
            place for (_, place), so_far in zip(by_size, fits, strict=True) if so_far <= _MOST_BYTES
        ]
        self._places = sorted(small, key=_by_dtype)
        self._of_one_dtype = _runs([place.form[1] for place in self._places])

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers as they are now.

        Raises:
            UsageError: one has another shape or dtype than in the beginning, so that no
                checkpoint of it could be restored either.
        """
        # Each step asks this; a module's `__getattr__` would take ten times as long as its dict.
        found = [place.owner._buffers[place.key] for place in self._places]
        for place, now in zip(self._places, found, strict=True):
            if now is None or _form(now) != place.form:
                raise UsageError(
                    f"the buffer {place.name} has another shape or dtype than when the loop began",
                    hint="let it keep its shape, or register it with persistent=False",
                )
        return found  # type: ignore[return-value]  # None was refused

    def copy_to(self, copies: list[torch.Tensor]) -> None:
        """Give `copies`, one for each buffer, the buffers' values."""
        self._copy(copies, self.tensors())

    def copy_from(self, copies: list[torch.Tensor]) -> None:
        """Give the buffers the values of `copies`."""
        self._copy(self.tensors(), copies)

    def _copy(self, to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for run in self._of_one_dtype:  # a GPU copies many tensors at once only if of one dtype
                try:
                    torch._foreach_copy_(to[run], values[run])
                except RuntimeError:  # one may be expanded
                    for target, value in zip(to[run], values[run], strict=True):
                        fill(target, value)


class BufferSync:
    """Gives all ranks the first rank's buffers.

    Args:
        modules: All tracked models; only their small persistent buffers are looked at.
        ranks: The ranks of this attempt.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], ranks: Collectives) -> None:
        self._ranks = ranks
        self._buffers = SmallBuffers(modules if ranks.world_size > 1 else ())
        self._sent = torch.empty(0)
        self._parts: list[torch.Tensor] = []

    def share(self) -> None:
        """Take the first rank's buffers, on every rank. Blocks until they have come."""
        live = self._buffers.tensors()
        if not live:
            return
        self._make_room(live)
        if not self._ranks.rank:
            self._buffers.copy_to(self._parts)
        self._ranks.broadcast(self._sent)
        if self._ranks.rank:
            self._buffers.copy_from(self._parts)

    def _make_room(self, live: Sequence[torch.Tensor]) -> None:
        """Have one flat tensor for all, on the GPU if one is there, and its part of each buffer."""
        devices = {tensor.device for tensor in live}
        device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
        if self._parts and self._sent.device == device:
            return
        sizes = [tensor.nbytes for tensor in live]
        self._sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._parts = [
            part.view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(torch.split(self._sent, sizes), live, strict=True)
        ]


def _by_dtype(place: _Place) -> tuple[int, str]:
    """Return what sorts buffers so that in a flat tensor each begins where its dtype may."""
    dtype = place.form[1]
    return -dtype.itemsize, str(dtype)


def _runs(dtypes: Sequence[torch.dtype]) -> list[slice]:
    """Return where those of one dtype stand, which are side by side."""
    runs = []
    for _, run in groupby(range(len(dtypes)), key=dtypes.__getitem__):
        first, *others = run
        runs.append(slice(first, first + 1 + len(others)))
    return runs


def _place(module: torch.nn.Module, name: str, buffer: torch.Tensor) -> _Place:
    path, _, key = name.rpartition(".")
    return _Place(name, module.get_submodule(path), key, _form(buffer))


def _form(tensor: Any) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
