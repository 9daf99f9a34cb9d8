"""The tensors of a checkpoint on their way back: asked for first, then read all at once.

Parts of sharded tensors are put together from whatever parts were stored, so any number of ranks
restores from any other; only the pieces of the shards that are needed are read.
"""

from __future__ import annotations

import math
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spotguard.checkpoint.manifest import shard_readers, tensors_that_count
from spotguard.checkpoint.reading import Want, holds_already, read_wanted
from spotguard.errors import DamagedCheckpoint, StateMismatch
from spotguard.runtime.state.filling import Claims, Placer, fill, flat_bytes
from spotguard.runtime.state.sharding import is_dtensor, local_part
from spotguard.runtime.state.tree import TORCH_DTYPES, leaves_beside, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.checkpoint.outside import BaseFiles
    from spotguard.checkpoint.tensors import ShardInfo, TensorInfo
    from spotguard.storage.base import ObjectStore


class StoredTensors:
    """The tensors of one checkpoint, of all its shards."""

    def __init__(
        self,
        store: ObjectStore,
        manifest: Manifest,
        *,
        near: ObjectStore | None = None,
        named: BaseFiles | None = None,
        strict: bool = True,
    ) -> None:
        """`named` are the files of a frozen base that may lie outside the store."""
        self._strict = strict
        self.differences: list[str] = []
        """What did not fit, where that is allowed."""
        self.left_out: set[int] = set()
        """Addresses of parameters that nothing stored fits."""
        self._readers = shard_readers(store, manifest, near=near, named=named)
        self._wants: dict[int, list[Want]] = {}
        self._afterwards: list[Callable[[], None]] = []
        self._asked: dict[tuple[object, ...], tuple[str, torch.Tensor]] = {}
        """What is read into which memory, which stays its own as long as this holds the tensor."""
        self._claims = Claims()
        self._short_of: set[torch.device] = set()
        """Devices of which was said that they have no room for what is restored."""

    def differs(self, problem: StateMismatch) -> None:
        """Raise `problem`; or write it down, if what fits shall be restored without the rest."""
        if self._strict:
            raise problem
        self.differences.append(problem.message)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole stored tensor."""
        return _form(self._parts_of(name)[0].info)[1]

    def fits(self, name: str, value: object) -> bool:
        """Return True if `value` is a plain tensor of the stored one's shape and dtype."""
        return (
            isinstance(value, torch.Tensor)
            and not is_dtensor(value)
            and value.dtype == self._dtype(name)
            and self._has_shape(name, value)
        )

    def in_place(self, name: str) -> bool:
        """Return True unless an older checkpoint may leave the tensor as it is."""
        return self._strict or bool(self._readers[self._parts_of(name)[0].shard].info.folder)

    def into(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` (of a DTensor this rank's part) with the stored tensor, by `read`.

        Raises:
            StateMismatch: it has another shape.
            DamagedCheckpoint: the shards do not hold all of it.
        """
        shape = self.shape(name)
        if tuple(target.shape) != shape:
            raise StateMismatch(
                f"{name}: reshaped since the checkpoint: {shape} → {tuple(target.shape)}"
            )
        self.claims(name, target)
        if is_dtensor(target):
            part, offsets = local_part(target)
            self._fill(name, target.to_local().detach(), _Box(offsets, part))
            return
        target = target.detach()
        place = _place(target)
        if target.numel() and place in self._asked:  # tied weights stand twice in a module's state
            self._check_tied(self._asked[place][0], name, target)
            return
        self._asked[place] = name, target
        index, info = self._parts_of(name)[0]
        if info.global_shape is None and _takes_bytes(target, info):  # nearly all are like this
            if info.size_bytes:
                self._wants.setdefault(index, []).append(Want(info.start, _bytes_of(target)))
            return
        self._fill(name, target, _Box((0,) * len(shape), shape))

    def _check_tied(self, first: str, name: str, target: torch.Tensor) -> None:
        """See to it that what is stored as two tensors, and is one in the script, is the same.

        It would else be the one or the other, or a part of each.
        """
        if first == name:
            return
        second = torch.empty(target.shape, dtype=target.dtype)
        self.into(name, second)

        def check() -> None:
            if not _is_same(second, target.cpu()):
                self.differs(
                    StateMismatch(
                        f"{first} and {name} are one tensor in the script, and two that differ in "
                        "the checkpoint",
                        hint="tie them, or leave them apart, as the code that made the checkpoint",
                    )
                )

        self._afterwards.append(check)

    def new(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return new memory that `read` fills: whole, or cut and placed like the DTensor `like`."""
        if like is None or not is_dtensor(like):
            tensor = torch.empty(self.shape(name), dtype=self._dtype(name))
            self.into(name, tensor)
            return tensor
        from torch.distributed.tensor import DTensor

        held = like.to_local()
        local = torch.empty(held.shape, dtype=self._dtype(name), device=held.device)
        tensor = DTensor.from_local(
            local,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        self.into(name, tensor)
        return tensor

    def later(self, tree: Any, beside: Any = None, *, fills: bool = False) -> Callable[[], Any]:
        """Return what unpacks `tree` once `read` has been called.

        A tensor in whose place `beside` has one now comes on that one's device. With `fills` it is
        that very one, filled, if it has the stored one's shape and dtype, and no other stored
        tensor goes to its memory. Where the device has no room, it comes on the CPU.
        """
        asked: dict[str, deque[tuple[torch.Tensor, Any]]] = {}
        for name, present in leaves_beside(tree, beside):
            like = present if is_dtensor(present) and self._has_shape(name, present) else None
            asked.setdefault(name, deque()).append((self.new(name, like), present))
            if fills and isinstance(present, torch.Tensor):
                self.claims(name, present)

        def unpacked() -> Any:
            # What is filled needs no room, and hardly any is not, with `fills`.
            moved = () if fills else (pair for pairs in asked.values() for pair in pairs)
            placer = Placer(moved, self._short_of)

            def take(name: str) -> Any:
                read, present = asked[name].popleft()
                may_fill = fills and isinstance(present, torch.Tensor)
                may_fill = may_fill and self._claims.are_one(name, present)
                return placer.placed(name, read, present, fills=may_fill)

            return unpack(tree, take)

        return unpacked

    def claims(self, name: str, target: torch.Tensor) -> None:
        """Say that `target` will be filled with a stored tensor, so that no other one may be."""
        self._claims.add(name, target)

    def read(self) -> None:
        """Read, prove and place all that was asked for; blocks until it is there.

        Raises:
            DamagedCheckpoint: something needed is not as the manifest says; what was asked for
                may be filled in part.
            BaseNotFound: a file of the frozen base is missing or has changed.
            StoreError: the store failed, which says nothing about the bytes.
        """
        asked = [(self._readers[index], wants) for index, wants in self._wants.items()]
        read_wanted(
            (reader, wants)
            for reader, wants in asked
            if not (reader.info.folder and holds_already(reader, wants))
        )
        for place in self._afterwards:
            place()

    @property
    def bases(self) -> tuple[ShardInfo, ...]:
        """Return the bases that count as a whole: no tensor of them was stored anew since."""
        pairs = zip(self._readers, self._counting, strict=True)
        return tuple(
            reader.info
            for reader, counts in pairs
            if reader.info.folder and len(counts) == len(reader.tensors)
        )

    @cached_property
    def _counting(self) -> list[dict[str, TensorInfo]]:
        return tensors_that_count(self._readers)

    @cached_property
    def _parts(self) -> dict[str, list[_Part]]:
        found: dict[str, list[_Part]] = {}
        for index, header in enumerate(self._counting):
            for name, info in header.items():
                parts = found.setdefault(name, [])
                parts.append(_Part(index, info))
                if _form(info) != _form(parts[0].info):
                    raise DamagedCheckpoint(f"the parts of the tensor {name!r} do not fit together")
        return found

    def _parts_of(self, name: str) -> list[_Part]:
        parts = self._parts.get(name)
        if not parts:
            raise DamagedCheckpoint(f"no shard holds the tensor {name!r}")
        return parts

    def _has_shape(self, name: str, value: torch.Tensor) -> bool:
        return tuple(value.shape) == self.shape(name)

    def _dtype(self, name: str) -> torch.dtype:
        return _dtype_of(self._parts_of(name)[0].info)

    def _fill(self, name: str, target: torch.Tensor, box: _Box) -> None:
        """Ask for what each stored part has in common with `box`, which `target` holds."""
        missing = math.prod(box.shape)
        done: set[tuple[int, ...]] = set()
        for index, info in self._parts_of(name):
            stored = _Box(info.offsets or (0,) * len(info.shape), info.shape)
            common = stored.overlap(box)
            if common is None or stored.start in done:
                continue  # nothing of ours, or a replica of a part that is asked for already
            done.add(stored.start)
            self._ask(index, info, target, common.within(stored), common.within(box))
            missing -= math.prod(common.shape)
        if missing:
            raise DamagedCheckpoint(f"the shards hold only parts of the tensor {name!r}")

    def _ask(
        self, index: int, info: TensorInfo, target: torch.Tensor, source: _Box, place: _Box
    ) -> None:
        """Want the bytes of the box `source` of a stored part at the box `place` of `target`."""
        size = target.element_size()
        wants = self._wants.setdefault(index, [])
        run, into = source.run_in(info.shape), place.run_in(tuple(target.shape))
        if run is not None and into is not None and _takes_bytes(target, info):
            memory = _bytes_of(target)[into * size : (into + math.prod(place.shape)) * size]
            wants.append(Want(info.start + run * size, memory))
            return
        axis = source.first_axis()
        row_bytes = math.prod(info.shape[axis + 1 :]) * _dtype_of(info).itemsize
        if run is None and row_bytes > self._readers[index].info.piece_bytes:
            # Between what is needed of one row and of the next lie pieces that nobody needs.
            for number in range(source.shape[axis]):
                one, its_place = source.row(axis, number), place.row(axis, number)
                self._ask(index, info, target, one, its_place)
            return
        # All from its first element to its last is read beside it, and the box is copied then.
        rows = torch.empty(
            (*source.shape[: axis + 1], *info.shape[axis + 1 :]), dtype=_dtype_of(info)
        )
        inside = _Box(
            (*(0 for _ in source.shape[: axis + 1]), *source.start[axis + 1 :]), source.shape
        )
        cut, first = rows[_slices(inside)], source.at(info.shape)
        low, high = (each.at(tuple(rows.shape)) * rows.element_size() for each in inside.ends())
        memory = _bytes_of(rows)[low : high + rows.element_size()]
        wants.append(Want(info.start + first * rows.element_size(), memory))
        self._afterwards.append(lambda: fill(target[_slices(place)], cut))


class _Part(NamedTuple):
    """A stored tensor, or a part of one, in the shard with this index."""

    shard: int
    info: TensorInfo


class _Box(NamedTuple):
    """A rectangular part of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: _Box) -> _Box | None:
        """Return what both have in common, None if that is nothing."""
        low = tuple(map(max, self.start, other.start))
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        ]
        shape = tuple(h - lo for lo, h in zip(low, high, strict=True))
        return _Box(low, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: _Box) -> _Box:
        """Return this box as seen from the first element of `outer`."""
        start = tuple(a - b for a, b in zip(self.start, outer.start, strict=True))
        return _Box(start, self.shape)

    def first_axis(self) -> int:
        """Return the first dimension along which the box is longer than 1, or the last one."""
        longer = (axis for axis, size in enumerate(self.shape) if size != 1)
        return next(longer, max(len(self.shape) - 1, 0))

    def row(self, axis: int, number: int) -> _Box:
        """Return the part of the box that is its row `number` along a dimension."""
        start, shape = list(self.start), list(self.shape)
        start[axis], shape[axis] = start[axis] + number, 1
        return _Box(tuple(start), tuple(shape))

    def run_in(self, shape: tuple[int, ...]) -> int | None:
        """Return where the box begins in a row-major tensor of `shape`, counted in elements.

        None if its elements do not lie side by side there.
        """
        axis = len(shape)
        while axis and self.shape[axis - 1] == shape[axis - 1]:
            axis -= 1
        if any(size != 1 for size in self.shape[: max(axis - 1, 0)]):
            return None
        return self.at(shape)

    def at(self, shape: tuple[int, ...]) -> int:
        """Return where the first element lies in a row-major tensor of `shape`, in elements."""
        at = 0
        for position, size in zip(self.start, shape, strict=True):
            at = at * size + position
        return at

    def ends(self) -> tuple[_Box, _Box]:
        """Return the first and the last element, each as a box."""
        one = (1,) * len(self.shape)
        last = tuple(at + size - 1 for at, size in zip(self.start, self.shape, strict=True))
        return _Box(self.start, one), _Box(last, one)


def _form(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    """Return what all parts of a tensor have in common: dtype and shape of the whole."""
    return info.dtype, info.shape if info.global_shape is None else info.global_shape


def _slices(box: _Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True))


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return where a tensor's values are, and how they lie there."""
    form = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, form


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both hold the same bytes, those of a NaN, too."""
    return torch.equal(flat_bytes(one), flat_bytes(other))


def _takes_bytes(target: torch.Tensor, info: TensorInfo) -> bool:
    """Return True if the stored bytes can be put into the memory of `target` as they are."""
    return (
        target.is_cpu
        and target.dtype == _dtype_of(info)
        and target.is_contiguous()
        and not target.is_conj()  # whose values are not those in memory
        and not target.is_neg()
    )


def _dtype_of(info: TensorInfo) -> torch.dtype:
    return TORCH_DTYPES[info.dtype]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as flat bytes."""
    return memoryview(flat_bytes(tensor).numpy().data)
