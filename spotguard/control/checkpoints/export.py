"""Merges a checkpoint's shards into one plain safetensors file, piece by piece.

The header is written first, then each piece of each shard goes straight to its place in the file:
memory stays small however large the model and however it was sharded. The shards' hashes are
checked on the way, and only when all of them are right does the file get its name.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.checkpoint.manifest import shard_readers, tensors_that_count
from spotguard.checkpoint.stream import read_chunks
from spotguard.checkpoint.tensors import DTYPE_BYTES
from spotguard.control.checkpoints.dtype import Convert, converter
from spotguard.control.checkpoints.find import short_name
from spotguard.control.checkpoints.module_state import is_module, module_tensors, other_values
from spotguard.control.checkpoints.new_file import new_file, write_at
from spotguard.errors import DamagedCheckpoint, UsageError
from spotguard.events import keys
from spotguard.shared.typo_guess import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from spotguard.checkpoint.lineage import CheckpointRef
    from spotguard.checkpoint.manifest import Manifest
    from spotguard.checkpoint.reading import ShardReader
    from spotguard.checkpoint.strict_json import Json
    from spotguard.checkpoint.tensors import TensorInfo
    from spotguard.control.checkpoints.commands import Progress
    from spotguard.control.checkpoints.find import OpenedRun

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""What the user calls a dtype, and safetensors' name of it."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_USUAL_NAME = "model"
_OTHERS = "take another with --step; spotguard checkpoints verify --all says which are whole"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The file that was written."""

    path: Path
    checkpoint: str
    tensors: int
    size_bytes: int
    left_out: tuple[str, ...]
    """Keys of the module that are no tensors, such as extra state."""
    overflowed: tuple[str, ...]
    """Tensors with values that became infinite in the smaller dtype."""


def export(
    run: OpenedRun,
    ref: CheckpointRef,
    target: Path,
    *,
    dtype: str | None = None,
    weights_only: bool = True,
    object_name: str | None = None,
    replace: bool = False,
    on_progress: Progress | None = None,
) -> Exported:
    """Write one safetensors file with a checkpoint's tensors whole; blocks until it is durable.

    Args:
        run: whose it is.
        ref: the checkpoint.
        target: the file; it appears only when all of it is written and proven.
        dtype: `bf16`, `fp16` or `fp32` for the floating tensors of modules; None keeps all as
            they are. Other objects' tensors (an optimizer's) are never changed.
        weights_only: write one module under the keys of its own state dict, ready for
            `load_state_dict`; else every tensor under the name by which it is stored.
        object_name: the module's name in `run.track`; None is `model`, or the only one there is.
        replace: overwrite `target`.
        on_progress: told of the bytes read.

    Raises:
        UsageError: `target` exists, or there is no such module or dtype.
        ForeignCheckpoint: another run saved it.
        DamagedCheckpoint: a shard is not as its manifest says, or a part is missing.
        EnvironmentFailure: the file cannot be written.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype: given {dtype!r}; allowed: {', '.join(DTYPES)}")
    store, manifest = run.store, run.manifest(ref)
    readers = shard_readers(store, manifest)
    wanted = DTYPES[dtype] if dtype else None
    left_out: tuple[str, ...] = ()
    try:
        if weights_only:
            tree = _module(manifest, object_name)
            names, modules = module_tensors(tree), set(module_tensors(tree).values())
            left_out = tuple(other_values(tree))
        else:
            names, modules = _everything(manifest, readers)
        merge = _Merge(manifest, readers, names, {name: wanted for name in modules if wanted})
        with new_file(target, merge.size_bytes, replace=replace) as descriptor:
            merge.write(descriptor, on_progress)
    except DamagedCheckpoint as problem:
        if store.head(keys.manifest(ref.prefix)) is not None:
            problem.hint = problem.hint or _OTHERS
            raise
        name = short_name(ref.step, ref.attempt)
        raise UsageError(
            f"checkpoint {name} was deleted by retention while it was read; nothing was written",
            hint="pin one of a living run before you export it: spotguard checkpoints pin",
        ) from None
    return Exported(
        path=target,
        checkpoint=ref.prefix,
        tensors=len(names),
        size_bytes=merge.size_bytes,
        left_out=left_out,
        overflowed=merge.overflowed,
    )


# ---------------------------------------------------------------- what to write


def _module(manifest: Manifest, name: str | None) -> Json:
    """Return the tree of the module that is meant."""
    state = manifest.state if isinstance(manifest.state, dict) else {}
    modules = {key: tree for key, tree in state.items() if is_module(tree)}
    if name is None and len(modules) == 1:
        return next(iter(modules.values()))
    if (name or _USUAL_NAME) in modules:
        return modules[name or _USUAL_NAME]
    where = short_name(manifest.step, manifest.attempt)
    if not modules:
        raise UsageError(
            f"checkpoint {where} holds no module: only {', '.join(state) or 'nothing'}",
            hint="pass --everything for all of its tensors",
        )
    if name is None:
        raise UsageError(
            f"checkpoint {where} holds {len(modules)} modules: {', '.join(modules)}",
            hint="say which: --object NAME",
        )
    raise UsageError(
        f"object: checkpoint {where} holds no module {name!r}", hint=did_you_mean(name, modules)
    )


def _everything(
    manifest: Manifest, readers: Sequence[ShardReader]
) -> tuple[dict[str, str], set[str]]:
    """Return {name in the file: stored name} of all tensors, and which belong to modules."""
    names = {name: name for reader in readers for name in reader.tensors}
    modules: set[str] = set()
    state = manifest.state if isinstance(manifest.state, dict) else {}
    for name, tree in state.items():
        if is_module(tree):
            for key, stored in module_tensors(tree).items():
                modules.add(stored)
                names.setdefault(f"{name}.{key}", stored)  # a tied key, stored under another
    return names, modules


# ---------------------------------------------------------------- where it goes


@dataclass
class _Whole:
    """One stored tensor on its way into the file."""

    shape: tuple[int, ...]
    dtype: str
    convert: Convert | None
    keys: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Where each key's copy begins in the file."""

    @property
    def size_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


class _Merge:
    """The layout of the file, made from what the shards' headers say, and the way there."""

    def __init__(
        self,
        manifest: Manifest,
        readers: Sequence[ShardReader],
        names: dict[str, str],
        dtypes: dict[str, str],
    ) -> None:
        self._manifest = manifest
        self._readers = readers
        parts = _distinct_parts(readers, set(names.values()))
        self._tensors = {
            name: _whole(name, list(found.values()), dtypes.get(name))
            for name, found in parts.items()
        }
        for key, name in names.items():
            if name not in self._tensors:
                raise DamagedCheckpoint(f"no shard holds the tensor {name!a}")
            self._tensors[name].keys.append(key)
        # (shard, tensor) of the parts to take; another rank's copy of one is passed over.
        self._taken = {
            (index, name) for name, found in parts.items() for index, _ in found.values()
        }
        self._overflowed: set[str] = set()
        self._header, self.size_bytes = self._place()

    @property
    def overflowed(self) -> tuple[str, ...]:
        """Return the keys of tensors that became infinite somewhere."""
        return tuple(key for name in sorted(self._overflowed) for key in self._tensors[name].keys)

    def _place(self) -> tuple[bytes, int]:
        """Decide where each tensor goes; return the header and the size of the file."""
        # Large elements first: then each tensor begins at a multiple of its element's size.
        ordered = sorted(self._tensors.values(), key=lambda whole: -DTYPE_BYTES[whole.dtype])
        metadata = {
            "format": "pt",
            "run_id": self._manifest.run_id,
            "checkpoint": self._manifest.prefix,
            "step": str(self._manifest.step),
        }
        body: dict[str, object] = {"__metadata__": metadata}
        offsets, end = [], 0
        for whole in ordered:
            for key in whole.keys:
                span = [end, end + whole.size_bytes]
                body[key] = {
                    "dtype": whole.dtype,
                    "shape": list(whole.shape),
                    "data_offsets": span,
                }
                offsets.append((whole, end))
                end = span[1]
        text = json.dumps(body, separators=(",", ":")).encode()
        padded = text.ljust(-(-len(text) // 8) * 8)
        header = len(padded).to_bytes(8, "little") + padded
        for whole, offset in offsets:
            whole.starts.append(len(header) + offset)
        return header, len(header) + end

    def write(self, descriptor: int, on_progress: Progress | None) -> None:
        """Fill the file; each shard is read once, and proven."""
        write_at(descriptor, memoryview(self._header), 0)
        indices = sorted({index for index, _ in self._taken})
        readers = [self._readers[index] for index in indices]
        total = sum(info.size_bytes for reader in readers for info in reader.tensors.values())
        done = 0
        for index, reader in zip(indices, readers, strict=True):
            for chunk in read_chunks(reader):
                if (index, chunk.name) in self._taken:
                    info = reader.tensors[chunk.name]
                    self._put(descriptor, chunk.name, info, chunk.start, chunk.data)
                done += chunk.data.nbytes
                if on_progress:
                    on_progress(done, total)

    def _put(
        self, descriptor: int, name: str, info: TensorInfo, start: int, data: memoryview
    ) -> None:
        """Write a piece of a part to where it belongs, once for each key."""
        whole = self._tensors[name]
        first, count = start // DTYPE_BYTES[info.dtype], data.nbytes // DTYPE_BYTES[info.dtype]
        if whole.convert is not None:
            data, overflowed = whole.convert(data)
            if overflowed:
                self._overflowed.add(name)
        size = DTYPE_BYTES[whole.dtype]
        at = 0
        for element, run in _runs(info, first, count):
            piece = data[at * size : (at + run) * size]
            for begin in whole.starts:
                write_at(descriptor, piece, begin + element * size)
            at += run


_Parts = dict[tuple[int, ...] | None, tuple[int, "TensorInfo"]]
"""By where a part begins in the whole: the shard that holds it, and where."""


def _distinct_parts(readers: Sequence[ShardReader], names: set[str]) -> dict[str, _Parts]:
    """Return the parts of each tensor; of several copies of one, the first."""
    found: dict[str, _Parts] = {}
    for index, tensors in enumerate(tensors_that_count(readers)):
        for name, info in tensors.items():
            # A tensor with fewer rows than ranks has parts without elements, placed anywhere.
            is_idle = info.size_bytes == 0 and math.prod(info.global_shape or (0,)) > 0
            if name in names and not is_idle:
                found.setdefault(name, {}).setdefault(info.offsets, (index, info))
    return found


def _whole(name: str, places: list[tuple[int, TensorInfo]], dtype: str | None) -> _Whole:
    """Return what the parts make together; `DamagedCheckpoint` if they do not fit."""
    parts = [info for _, info in places]
    first = parts[0]
    shape = first.shape if first.global_shape is None else first.global_shape
    if any((part.dtype, part.global_shape) != (first.dtype, first.global_shape) for part in parts):
        raise DamagedCheckpoint(f"the parts of the tensor {name!a} do not fit together")
    if sum(math.prod(part.shape) for part in parts) != math.prod(shape):
        raise DamagedCheckpoint(f"the shards hold only parts of the tensor {name!a}")
    if dtype is None or dtype == first.dtype or first.dtype not in _FLOATS:
        return _Whole(shape, first.dtype, None)
    return _Whole(shape, dtype, converter(first.dtype, dtype))


def _runs(info: TensorInfo, first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (element of the whole, how many) for `count` elements of a part from `first` on.

    A run is what lies side by side in both: the part's innermost rows, or more where it is as
    wide as the whole. All is row-major.
    """
    if info.global_shape is None or info.offsets is None or not info.shape:
        yield first, count
        return
    inner = len(info.shape) - 1
    while inner and info.shape[inner] == info.global_shape[inner]:
        inner -= 1
    row = math.prod(info.shape[inner:])
    strides = [math.prod(info.global_shape[axis + 1 :]) for axis in range(len(info.shape))]
    origin = sum(offset * stride for offset, stride in zip(info.offsets, strides, strict=True))
    outer = list(zip(info.shape[:inner], strides[:inner], strict=True))[::-1]
    while count:
        index, within = divmod(first, row)
        run = min(row - within, count)
        begin = origin + within
        for size, stride in outer:
            index, position = divmod(index, size)
            begin += position * stride
        yield begin, run
        first += run
        count -= run
