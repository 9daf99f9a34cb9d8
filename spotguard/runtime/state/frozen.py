"""Copies of plain state that are quick to take after each step, and packed only if they are saved.

To pack a state names each value by its path, which takes several times as long as to copy it. Of
all that is kept of a boundary, hardly anything is ever saved: the next boundary takes its place.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch

from spotguard.errors import UnsupportedState
from spotguard.runtime.state.tree import plain_tensor

_AS_IT_IS = frozenset({NoneType, bool, float, str, bytes, complex, torch.dtype, torch.device})
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_KEYS = frozenset({str, int})
_LONGEST_INT_BITS = 64
_SMALL = 1 << 32
"""Counts, which most of the numbers are; they need no further look."""


class NotPlainError(Exception):
    """The state holds something else; whoever asked packs it, which knows more kinds."""


class TooLargeError(Exception):
    """The tensors of the state have more bytes than were allowed."""


def frozen(state: Any, *, most_bytes: int) -> Any:
    """Return a copy of `state` that nothing changes, to be packed later.

    Tensors have memory of their own in it; one that comes twice is copied once.

    Raises:
        NotPlainError: there is something other than plain values, dicts, lists, tuples and tensors
            that can be stored.
        TooLargeError: tensors have more than `most_bytes`.
    """
    try:
        return _Copying(most_bytes).of(state)
    except (UnsupportedState, RecursionError) as problem:
        raise NotPlainError from problem


class _Copying:
    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._copies: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        # Each step comes here several times: sets are asked about many values in one call.
        kind = type(value)
        if kind in _AS_IT_IS or (kind is int and value.bit_length() < _LONGEST_INT_BITS):
            return value
        if kind is list:
            if _AS_IT_IS.issuperset(map(type, value)):
                return value.copy()
            return [self.of(v) for v in value]
        if kind is dict:
            if not _KEYS.issuperset(map(type, value)):
                raise NotPlainError
            return {
                k: v if type(v) in _AS_IT_IS or (type(v) is int and 0 <= v < _SMALL) else self.of(v)
                for k, v in value.items()
            }
        if kind is tuple:
            return tuple([self.of(v) for v in value])
        if kind in _TENSORS:
            return self._copy(value)
        raise NotPlainError

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._copies:
            whole = plain_tensor("", tensor.detach())
            self._room_bytes -= whole.nbytes
            if self._room_bytes < 0:
                raise TooLargeError
            self._copies[id(tensor)] = whole.clone()
        return self._copies[id(tensor)]
