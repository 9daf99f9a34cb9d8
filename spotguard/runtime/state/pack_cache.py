"""Packing the tracked objects again and again, without walking again what is the same.

From save to save a model's and an optimizer's tensors are mostly the very same ones; only their
values differ. Then names, leaves, tree and the tree's JSON are those of the last time.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from spotguard.checkpoint.strict_json import Encoded
from spotguard.runtime.state.tracked import TrackedModule
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer
from spotguard.runtime.state.tree import Packed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.runtime.state.tracked import Packs
    from spotguard.runtime.state.tree import Bulk

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Packer:
    """Returns trees and leaves of the tracked objects; one for all saves of a process."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self.keeps = True
        """False once tensors proved to be other ones at each save: old ones are not held then."""

    def pack(self, objects: Mapping[str, Packs]) -> tuple[dict[str, Any], Packed]:
        """Return each object's tree by name, and all leaves; nothing is copied.

        Raises:
            UnsupportedState: something has no safe plain form.
        """
        steady = frozenset(
            address
            for item in objects.values()
            if isinstance(item, TrackedOptimizer)
            for address in item.addresses()
        )
        bulks = {
            name: bulk
            for name, item in objects.items()
            if isinstance(item, (TrackedModule, TrackedOptimizer))
            and (bulk := item.bulk(name)) is not None
        }
        known = self._known
        if known is None or not known.holds(bulks, steady):
            fresh = _Known.of(bulks, steady)
            self.keeps = self.keeps and (known is None or not known.looks_like(fresh))
            self._known = fresh if self.keeps else None
            known = fresh
        packed = known.packed.copy()
        trees = {
            name: bulks[name].complete(known.trees[name], packed)
            if name in bulks
            else item.pack(name, packed)
            for name, item in objects.items()
        }
        return trees, packed


@dataclass(frozen=True, kw_only=True)
class _Known:
    """Parts of objects that are tensors and nothing else, packed."""

    names: list[str]
    tensors: list[torch.Tensor]
    forms: list[tuple[object, ...]] | None
    packed: Packed
    trees: dict[str, Encoded]

    @classmethod
    def of(cls, bulks: Mapping[str, Bulk], steady: frozenset[int]) -> _Known:
        packed = Packed(steady=steady)
        trees = {name: Encoded(bulk.pack(packed)) for name, bulk in bulks.items()}
        tensors = _tensors(bulks)
        return cls(
            names=list(bulks),
            tensors=tensors,
            forms=_forms(tensors),
            packed=packed,
            trees=trees,
        )

    def holds(self, bulks: Mapping[str, Bulk], steady: frozenset[int]) -> bool:
        """Return True if just these were packed: the same tensors, over the same memory."""
        tensors = _tensors(bulks)
        return (
            self.forms is not None
            and len(tensors) == len(self.tensors)
            and all(map(is_, tensors, self.tensors))
            and list(bulks) == self.names
            and steady == self.packed.steady
            and _forms(tensors) == self.forms
        )

    def looks_like(self, other: _Known) -> bool:
        """Return True if only the memory differs: a step puts new tensors in place of old ones."""
        return list(self.packed.leaves) == list(other.packed.leaves)


def _tensors(bulks: Mapping[str, Bulk]) -> list[torch.Tensor]:
    return [tensor for bulk in bulks.values() for tensor in bulk.tensors]


def _forms(tensors: list[torch.Tensor]) -> list[tuple[object, ...]] | None:
    """Return what changes when other memory is put below a tensor (`parameter.data = ...`).

    None if a leaf may be more than a view of its tensor: then each save packs anew.
    """
    if not all(type(t) in _PLAIN and not t.is_complex() and not t.is_neg() for t in tensors):
        return None
    return [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
