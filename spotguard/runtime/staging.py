"""The staging buffer: a flat, page-aligned copy of the state, laid out as the shard file will be.

The layout is computed once for a set of tensors. What only an optimizer's step can change (its
parameters and moments) is copied by a thread while the next forward and backward run; `copied`
says when the optimizer may go on. Everything else is copied at once. The file is written from the
front while the end is still being copied.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch

from spotguard.checkpoint.shard import ShardLayout, TensorSpec
from spotguard.errors import CheckpointError
from spotguard.runtime.state import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.runtime.state import Leaf

_PAGE_BYTES = 4096
_GROUP_BYTES = 32 << 20
"""Copied in one call: large enough to be fast, small enough to be given up soon."""


class WeightsChanged(CheckpointError):
    """Something other than a tracked optimizer's step changed weights while they were copied."""


class Move(NamedTuple):
    """A tensor to copy, and where its copy lies in the file's data."""

    target: torch.Tensor
    source: torch.Tensor
    offset: int


@dataclass(frozen=True)
class Plan:
    """Where each leaf of a state lies in the shard file."""

    signature: tuple[object, ...]
    layout: ShardLayout

    @classmethod
    def of(cls, leaves: Sequence[Leaf], metadata: dict[str, str], before: Plan | None) -> Plan:
        """Return the plan for `leaves`: the one before, if their names and forms are the same."""
        signature = tuple(
            (leaf.name, leaf.tensor.dtype, leaf.tensor.shape, leaf.global_shape, leaf.offsets)
            for leaf in leaves
        )
        if before is not None and before.signature == signature:
            return before
        specs = [
            TensorSpec(
                name=leaf.name,
                dtype=DTYPES[leaf.tensor.dtype],
                shape=tuple(leaf.tensor.shape),
                global_shape=leaf.global_shape,
                offsets=leaf.offsets,
            )
            for leaf in leaves
        ]
        return cls(signature, ShardLayout(specs, metadata))


def live_views(leaves: Sequence[Leaf], plan: Plan) -> list[memoryview]:
    """Return the leaves' bytes in the order of the file; those on a CPU are not copied."""
    return [_view(leaves[index].tensor) for index in plan.layout.order]


def _view(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


class Staged:
    """One state in the buffer; whole once `copied` is set."""

    def __init__(self, data: memoryview, rest: list[Move]) -> None:
        self.data = data
        self.copied = threading.Event()
        """Set when no source is needed any more, whether or not all went well."""
        self._rest = rest
        self._versions = [move.source._version for move in rest]
        self._ready = threading.Condition()
        self._ready_bytes = rest[0].offset if rest else len(data)
        self._problem: Exception | None = None
        if not rest:
            self.copied.set()

    def copy_rest(self) -> None:
        """Copy what was left, in the order of the file; `wait_ready` tells what went wrong."""
        try:
            groups = _groups(self._rest)
            for group, following in zip_longest(groups, groups[1:]):
                _copy(group)
                self._advance(following[0].offset if following else None)
            if self._versions != [move.source._version for move in self._rest]:
                raise WeightsChanged(
                    "weights were changed while they were copied, by something other than a "
                    "tracked optimizer's step()",
                    hint="change weights right after optimizer.step(), or track what changes them",
                )
        except (RuntimeError, CheckpointError) as problem:
            self._problem = problem
        finally:
            self._rest = []
            self._advance(None)
            self.copied.set()

    def wait_ready(self, end: int | None = None) -> None:
        """Block until the first `end` bytes (None: all) may be read; raise what copying raised."""
        if end is None:
            self.copied.wait()
        else:
            with self._ready:
                self._ready.wait_for(lambda: self._ready_bytes >= end)
        if self._problem is not None:
            raise self._problem

    def _advance(self, ready_bytes: int | None) -> None:
        with self._ready:
            self._ready_bytes = len(self.data) if ready_bytes is None else ready_bytes
            self._ready.notify_all()


class StagingBuffer:
    """Memory for one state, reused from save to save; it grows when the state does."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PAGE_BYTES)
        self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._targets: list[tuple[torch.Tensor, int]] = []
        self._plan: Plan | None = None

    def stage(self, leaves: Sequence[Leaf], plan: Plan, *, overlap: bool) -> Staged:
        """Copy `leaves`; with `overlap`, steady ones are left to `Staged.copy_rest`.

        The state staged before must not be needed any more.
        """
        if self._plan is not plan:
            self._lay_out(leaves, plan)
        now: list[Move] = []
        later: list[Move] = []
        for index in plan.layout.order:
            leaf, (target, offset) = leaves[index], self._targets[index]
            move = Move(target, leaf.tensor.detach(), offset)
            (later if overlap and leaf.steady else now).append(move)
        for group in _groups(now):
            _copy(group)
        return Staged(memoryview(self._memory)[: plan.layout.data_bytes], later)

    def warm(self, leaves: Sequence[Leaf], plan: Plan) -> None:
        """Make the buffer ready for such a state, so that the first save need not wait for it."""
        if self._plan is not plan:
            self._lay_out(leaves, plan)

    def _lay_out(self, leaves: Sequence[Leaf], plan: Plan) -> None:
        size = plan.layout.data_bytes
        if size > len(self._memory):
            self._memory = mmap.mmap(-1, -(-size // _PAGE_BYTES) * _PAGE_BYTES)
            self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)
            self._flat.zero_()  # fault the pages in now, not within a save
        offsets = [plan.layout.offset(leaf.name) for leaf in leaves]
        self._targets = [
            (self._target(leaf, offset), offset)
            for leaf, offset in zip(leaves, offsets, strict=True)
        ]
        self._plan = plan

    def _target(self, leaf: Leaf, offset: int) -> torch.Tensor:
        tensor = leaf.tensor
        if not leaf.size_bytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = self._flat[offset : offset + leaf.size_bytes]
        return flat.view(tensor.dtype).view(tensor.shape)


def _groups(moves: list[Move]) -> list[list[Move]]:
    groups: list[list[Move]] = []
    size = _GROUP_BYTES
    for move in moves:
        if size >= _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(move)
        size += move.target.numel() * move.target.element_size()
    return groups


def _copy(group: list[Move]) -> None:
    torch._foreach_copy_([move.target for move in group], [move.source for move in group])
