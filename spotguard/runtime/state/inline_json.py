"""Small state as one JSON value, its tensors inside it.

For what lies beside the tracked objects in a manifest, such as the position in a stream of data,
and need not be cut, placed or read in parts.
"""

from __future__ import annotations

import base64
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import UnsupportedState
from spotguard.runtime.state.filling import Placer, flat_bytes
from spotguard.runtime.state.tree import (
    DTYPES,
    TORCH_DTYPES,
    Packed,
    leaves_beside,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.state.tree import Leaf

_LARGEST_BYTES = 16 << 20  # every rank reads all of a manifest, and sends its part of it to one


def to_inline(value: Any, name: str) -> dict[str, Any]:
    """Return `value` as JSON that shares nothing with it.

    Raises:
        UnsupportedState: something in it has no safe plain form, or it is larger than 16 MB.
    """
    packed = Packed()
    tree = pack(value, name, packed)
    size_bytes = sum(leaf.size_bytes for leaf in packed.leaves.values())
    if size_bytes > _LARGEST_BYTES:
        raise UnsupportedState(
            f"the state of {name} has {size_bytes >> 20} MB, at most {_LARGEST_BYTES >> 20} fit",
            hint="let its state_dict() tell where it is, not what it holds (such as a buffer)",
        )
    return inlined(tree, packed)


def inlined(tree: Any, packed: Packed) -> dict[str, Any]:
    """Return a packed tree with its tensors, all of which are whole, as `from_inline` takes it."""
    return {"tree": tree, "tensors": {n: _encoded(leaf) for n, leaf in packed.leaves.items()}}


def from_inline(
    stored: dict[str, Any],
    beside: Any = None,
    *,
    fills: Callable[[torch.Tensor], bool] = lambda _: False,
) -> Any:
    """Return a value equal to the one that `to_inline` was given.

    A tensor in whose place `beside` has one comes on that one's device; where `fills` says so of
    that one, it is that very one, filled, if it has the same shape and dtype.
    """
    present: dict[str, deque[Any]] = {}
    for name, each in leaves_beside(stored["tree"], beside):
        present.setdefault(name, deque()).append(each)

    placer = Placer()

    def take(name: str) -> Any:
        values, there = _decoded(stored["tensors"][name]), present[name].popleft()
        may_fill = isinstance(there, torch.Tensor) and fills(there)
        return placer.placed(name, values, there, fills=may_fill)

    return unpack(stored["tree"], take)


def _encoded(leaf: Leaf) -> list[Any]:
    tensor = leaf.tensor.cpu().contiguous()
    raw = flat_bytes(tensor).numpy().tobytes()
    return [DTYPES[tensor.dtype], list(tensor.shape), base64.b64encode(raw).decode()]


def _decoded(stored: list[Any]) -> torch.Tensor:
    dtype, shape, text = stored
    raw = bytearray(base64.b64decode(text, validate=True))
    if not raw:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(raw, dtype=TORCH_DTYPES[dtype]).reshape(shape)
