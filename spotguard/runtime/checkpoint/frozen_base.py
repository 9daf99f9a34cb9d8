"""Parameters that no step changes: stored once, and referred to by every checkpoint after that.

A model that is adapted by a few trained parameters (LoRA) is saved again and again, of which a
hundredth is new. With `run.track(model=model, frozen="skip")` what has no gradient is a base: one
shard that each manifest names, as it names its own. A base that changes after all, because it was
unfrozen or written to by hand, is noticed before the next save, and is stored with it from then on.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spotguard.checkpoint.shard import shard_file, write_layout
from spotguard.errors import CheckpointError
from spotguard.events import keys
from spotguard.runtime.checkpoint.staging import layout_of, live_views

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.checkpoint.shard import ShardLayout
    from spotguard.checkpoint.tensors import ShardInfo
    from spotguard.runtime.state.tree import Leaf
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

_LOOKED_AT = 16
"""Values of each tensor that are compared at each save, spread over it. Whatever changes a tensor
by torch's own ways counts up its version; behind `.data` it does not, and changes all of it."""


@dataclass(frozen=True)
class _Mark:
    """What a frozen tensor was like when the base was taken."""

    leaf: Leaf
    address: int
    version: int

    @classmethod
    def of(cls, leaf: Leaf) -> _Mark:
        return cls(leaf, leaf.tensor.data_ptr(), leaf.tensor._version)

    def is_same(self, leaf: Leaf) -> bool:
        """Return True if neither memory nor version have changed."""
        return (
            leaf.tensor.data_ptr() == self.address
            and leaf.tensor._version == self.version
            and leaf.tensor.dtype == self.leaf.tensor.dtype
        )


class FrozenBase:
    """What this rank's base is, and where it is stored."""

    def __init__(
        self, store: ObjectStore, *, run_id: str, attempt: int, rank: int, world_size: int
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._folder = keys.frozen(attempt)
        self._file = shard_file(rank, world_size)
        self._marks: dict[str, _Mark] = {}
        self._values: list[tuple[list[str], list[torch.Tensor], torch.Tensor]] = []
        """For each dtype and device: names, some values of each tensor, and what they were."""
        self._taken: list[Leaf] = []
        """All leaves of the base, whoever stores them."""
        self._mine: list[Leaf] = []
        """The leaves that this rank stores."""
        self._layout: ShardLayout | None = None
        self._info: ShardInfo | None = None
        self._lock = threading.Lock()

    def take(self, leaves: Iterable[Leaf], mine: Iterable[Leaf], frozen: set[int]) -> None:
        """Take what is frozen now for the base; `mine` is what this rank has to store.

        `frozen` are addresses of parameters that have no gradient.
        """
        taken = [leaf for leaf in leaves if leaf.tensor.data_ptr() in frozen and leaf.size_bytes]
        self._marks = {leaf.name: _Mark.of(leaf) for leaf in taken}
        self._values = _some_values(taken)
        self._taken = taken
        self._mine = [leaf for leaf in mine if leaf.name in self._marks]
        self._layout, self._info = self._layout_of(self._mine), None

    def adopt(self, bases: Sequence[ShardInfo]) -> None:
        """Refer to one of these, if it is what this rank would store: its bytes are in place."""
        if self._layout is not None and self._info is None:
            digest = self._layout.header_hash
            self._info = next((base for base in bases if base.header_hash == digest), None)

    def take_over(self, bases: Sequence[ShardInfo]) -> None:
        """Answer for all of the base, since the rank that stores it is gone: a replica has it.

        `bases` are those of the checkpoint before; what it does not have is stored here anew.
        """
        if len(self._mine) < len(self._taken):
            self._mine, self._layout = self._taken, self._layout_of(self._taken)
            self.adopt(bases)
            if self._info is None:
                self._mine = [mark.leaf for mark in self._marks.values()]
                self._layout = self._layout_of(self._mine)

    def changing(self, leaves: list[Leaf], mine: list[Leaf], frozen: set[int]) -> list[Leaf]:
        """Return those of `mine` that a save must store; the others are as in the base."""
        if not self._marks:
            return mine
        self._look_for_changes(leaves, frozen)
        return [leaf for leaf in mine if leaf.name not in self._marks]

    def _look_for_changes(self, leaves: Iterable[Leaf], frozen: set[int]) -> None:
        now = {leaf.name: leaf for leaf in leaves if leaf.name in self._marks}
        changed = {
            name
            for name, mark in self._marks.items()
            if name not in now or mark.address not in frozen or not mark.is_same(now[name])
        }
        for names, parts, values in self._values:
            if torch.equal(_bits(parts), values):
                continue
            before = torch.split(values, [part.nbytes for part in parts])
            for name, part, bits in zip(names, parts, before, strict=True):
                if not torch.equal(_bits([part]), bits):
                    changed.add(name)
        changed &= self._marks.keys()
        if changed:
            self._let_go(changed)

    def _let_go(self, changed: set[str]) -> None:
        """Store these with each checkpoint from here on."""
        log.info(
            "%d parameters that were frozen have changed, such as %s: they are saved from now on",
            len(changed),
            min(changed),
        )
        kept = [mark.leaf for name, mark in self._marks.items() if name not in changed]
        with self._lock:
            info = self._info
            mine = [leaf for leaf in self._mine if leaf.name not in changed]
            self._marks = {leaf.name: self._marks[leaf.name] for leaf in kept}
            self._values = _some_values(kept)
            if info is None:  # not stored yet: then without them
                self._mine, self._layout = mine, self._layout_of(mine)
            elif not mine:
                self._mine, self._layout, self._info = [], None, None

    def stored(self, timeout_s: float = -1) -> ShardInfo | None:
        """Return what a manifest says of this rank's base, None if it has none; stores it first.

        Blocks until it is stored, or for `timeout_s` while another thread is at it.

        Raises:
            CheckpointError: it changed while it was written, or the time is over.
            StoreError: it could not be stored; the next call tries again.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise CheckpointError("the frozen base is still being stored")
        try:
            if self._info is None and self._layout is not None:
                self._info = self._write(self._layout)
            return self._info
        finally:
            self._lock.release()

    def _write(self, layout: ShardLayout) -> ShardInfo:
        leaves = self._mine
        marks = [self._marks[leaf.name] for leaf in leaves]
        data = live_views(leaves, layout)
        info = write_layout(self._store, self._folder, self._file, layout, data)
        if not all(mark.is_same(leaf) for mark, leaf in zip(marks, leaves, strict=True)):
            raise CheckpointError("the frozen base was changed while it was stored")
        return info.within(self._folder)

    def _layout_of(self, leaves: Sequence[Leaf]) -> ShardLayout | None:
        return layout_of(leaves, {"run_id": self._run_id}) if leaves else None


def _some_values(
    leaves: Iterable[Leaf],
) -> list[tuple[list[str], list[torch.Tensor], torch.Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[str], list[torch.Tensor]]] = {}
    for leaf in leaves:
        tensor = leaf.tensor
        if tensor.is_contiguous():  # others would have to be copied
            flat = tensor.view(-1)
            names, parts = groups.setdefault((tensor.dtype, tensor.device), ([], []))
            names.append(leaf.name)
            parts.append(flat[:: max(1, len(flat) // _LOOKED_AT)][:_LOOKED_AT])
    return [(names, parts, _bits(parts)) for names, parts in groups.values()]


def _bits(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the values' bytes in memory of their own: equal for a NaN, too."""
    return torch.cat(parts).view(torch.uint8)
