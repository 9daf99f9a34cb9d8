"""One checkpoint in detail, as its manifest tells it: objects, tensors, counters, ancestors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from spotguard.checkpoint.lineage import list_all
from spotguard.checkpoint.manifest import load_manifest, shard_readers, tensors_that_count
from spotguard.control.checkpoints.commands import SCHEMA, CheckpointRow, find_row
from spotguard.control.checkpoints.module_state import is_module, tensor_names
from spotguard.errors import CheckpointError, DamagedCheckpoint
from spotguard.shared.json_documents import INLINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spotguard.checkpoint.lineage import CheckpointRef, Listing
    from spotguard.checkpoint.manifest import Manifest
    from spotguard.checkpoint.reading import ShardReader
    from spotguard.checkpoint.tensors import ShardInfo, TensorInfo
    from spotguard.control.checkpoints.find import OpenedRun
    from spotguard.storage.base import ObjectStore


_MOST_PARENTS = 10
"""Each takes a request of its own, one after the other."""


@dataclass(frozen=True, kw_only=True)
class ObjectRow:
    """One tracked object."""

    name: str
    is_module: bool
    """Whether `export` can write its weights."""
    tensors: int


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """Where a tensor, or a rank's part of one, is stored."""

    file: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    """Where the part begins in the whole; None for a whole tensor."""
    start: int
    """Of its bytes in the file, the first."""
    end: int
    """Of its bytes in the file, the first behind them."""


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor, whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartRow, ...]

    @property
    def size_bytes(self) -> int:
        """Return the bytes that are stored of it, copies included."""
        return sum(part.end - part.start for part in self.parts)


class FileRow(NamedTuple):
    """One shard."""

    file: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointDetail:
    """All that a manifest says."""

    row: CheckpointRow = field(metadata=INLINE)
    parents: tuple[str, ...]
    """Prefixes of the checkpoints it descends from that still exist, the nearest first; few."""
    more_parents: bool
    """Whether there may be more of them."""
    lost_parent: str | None
    """The first ancestor that is gone (retention) or cannot be read; None back to the start."""
    files: tuple[FileRow, ...]
    objects: tuple[ObjectRow, ...]
    tensors: tuple[TensorRow, ...]
    counters: dict[str, Any]
    """What the runtime counts: seconds of training, epochs, the loader's place."""
    versions: dict[str, str]
    """Of what wrote it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointDocument:
    """What `checkpoints show --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    run_id: str
    detail: CheckpointDetail = field(metadata=INLINE)


def describe(
    run: OpenedRun, ref: CheckpointRef, listing: Listing | None = None
) -> CheckpointDetail:
    """Return all that the manifest and the shards' headers say; no tensor's data is read.

    Args:
        run: in whose store it is.
        ref: the checkpoint.
        listing: of the store, if the caller has one.

    Raises:
        DamagedCheckpoint: the manifest, or a shard's header, cannot be read.
        StateMismatch: a newer spotguard wrote it.
    """
    store, manifest = run.store, load_manifest(run.store, ref.prefix)
    row = find_row(run, ref, listing or list_all(store))
    if row is None:
        raise DamagedCheckpoint(f"{ref.prefix} vanished while it was read")
    parents, lost, more = _ancestors(store, manifest)
    return CheckpointDetail(
        row=row,
        parents=parents,
        more_parents=more,
        lost_parent=lost,
        files=tuple(FileRow(_file(shard), shard.size_bytes) for shard in manifest.shards),
        objects=tuple(_objects(manifest)),
        tensors=tuple(_tensors(shard_readers(store, manifest))),
        counters=manifest.counters,
        versions=manifest.versions,
    )


def _file(shard: ShardInfo) -> str:
    """Return a shard's name; with its folder, if that is not the checkpoint's own."""
    return f"{shard.folder or ''}{shard.file}"


def _ancestors(store: ObjectStore, manifest: Manifest) -> tuple[tuple[str, ...], str | None, bool]:
    """Return the chain of the nearest parents, where it breaks off, and whether it goes on."""
    found: list[str] = []
    parent = manifest.parent
    while parent is not None and parent not in found:
        if len(found) == _MOST_PARENTS:
            return tuple(found), None, True
        try:
            before = load_manifest(store, parent)
        except CheckpointError:
            return tuple(found), parent, False
        found.append(parent)
        parent = before.parent
    return tuple(found), None, False


def _objects(manifest: Manifest) -> Iterator[ObjectRow]:
    state = manifest.state if isinstance(manifest.state, dict) else {}
    for name, tree in state.items():
        yield ObjectRow(name=name, is_module=is_module(tree), tensors=len(tensor_names(tree)))


def _tensors(readers: Sequence[ShardReader]) -> Iterator[TensorRow]:
    found: dict[str, list[tuple[ShardInfo, TensorInfo]]] = {}
    for reader, tensors in zip(readers, tensors_that_count(readers), strict=True):
        for name, info in tensors.items():
            found.setdefault(name, []).append((reader.info, info))
    for name, places in found.items():
        first = places[0][1]
        yield TensorRow(
            name=name,
            dtype=first.dtype,
            shape=first.shape if first.global_shape is None else first.global_shape,
            parts=tuple(
                PartRow(
                    file=_file(shard),
                    shape=info.shape,
                    offsets=info.offsets,
                    start=info.start,
                    end=info.end,
                )
                for shard, info in places
            ),
        )
