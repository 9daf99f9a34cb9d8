"""Restoring: the newest valid checkpoint of the lineage into the tracked objects.

The first rank chooses (it verifies, and falls back over damaged ones), tells the others, and
claims the attempt once everybody has what they need. Parts of sharded tensors are assembled from
whatever parts were stored, so any number of ranks restores from any other.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from spotguard.checkpoint.lineage import latest_valid
from spotguard.checkpoint.manifest import Manifest, load_manifest
from spotguard.checkpoint.shard import ShardReader
from spotguard.errors import DamagedCheckpoint, StateMismatch
from spotguard.runtime.randomness import restore_random_states
from spotguard.runtime.sharding import is_dtensor, local_part
from spotguard.runtime.state import TORCH_DTYPES, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.checkpoint.tensors import TensorInfo
    from spotguard.runtime.coordination import Coordinator
    from spotguard.runtime.tracked import Tracked
    from spotguard.storage.base import ObjectStore

_CHOICE = "restore/choice"
_CHOICE_TIMEOUT_S = 600.0


@dataclass
class Restored:
    """What there was to restore."""

    manifest: Manifest | None
    """None on a fresh start."""
    prefix: str | None
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Damaged checkpoints that were passed over, with their problem."""
    tensors: StoredTensors | None = None


class StoredTensors:
    """The tensors of one checkpoint, read shard by shard and verified as they are read."""

    def __init__(self, store: ObjectStore, prefix: str, manifest: Manifest) -> None:
        self._readers = [ShardReader(store, prefix, shard) for shard in manifest.shards]
        self._loaded: dict[int, dict[str, memoryview]] = {}
        self._parts: dict[str, list[tuple[int, TensorInfo]]] = {}
        for index, shard in enumerate(manifest.shards):
            for name, info in shard.tensors.items():
                self._parts.setdefault(name, []).append((index, info))

    def verify(self) -> None:
        """Read everything; DamagedCheckpoint if a byte is not as the manifest says."""
        for index in range(len(self._readers)):
            self._shard(index)

    def fetch(self, name: str) -> torch.Tensor:
        """Return the whole tensor `name` in memory of its own."""
        parts = self._parts_of(name)
        index, info = parts[0]
        if info.global_shape is None:
            return self._tensor(index, name, info).clone()
        return self._assemble(name, (0,) * len(info.global_shape), info.global_shape)

    def fetch_like(self, name: str, target: torch.Tensor) -> torch.Tensor:
        """Return the stored tensor cut and placed like `target`, a DTensor."""
        from torch.distributed.tensor import DTensor

        assert is_dtensor(target)
        shape, offsets = local_part(target)
        stored = self._parts_of(name)[0][1]
        whole = stored.global_shape if stored.global_shape is not None else stored.shape
        if tuple(whole) != tuple(target.shape):
            raise StateMismatch(
                f"{name}: reshaped since the checkpoint: {tuple(whole)} → {tuple(target.shape)}"
            )
        local = self._assemble(name, offsets, shape).to(target.to_local().device)
        return DTensor.from_local(
            local,
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=target.shape,
            stride=target.stride(),
        )

    def release(self) -> None:
        """Drop the bytes that were read."""
        self._loaded.clear()

    def _parts_of(self, name: str) -> list[tuple[int, TensorInfo]]:
        parts = self._parts.get(name)
        if not parts:
            raise DamagedCheckpoint(f"no shard holds the tensor {name!r}")
        return parts

    def _assemble(
        self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Copy the overlap of each stored part with the box at `offsets` of `shape`."""
        parts = self._parts_of(name)
        result = torch.empty(shape, dtype=TORCH_DTYPES[parts[0][1].dtype])
        missing = result.numel()
        done: set[tuple[int, ...]] = set()
        for index, info in parts:
            start = info.offsets or (0,) * len(shape)
            if start in done or not math.prod(info.shape):
                continue  # a replica of a part already copied, or a rank without rows
            done.add(start)
            low = [max(a, b) for a, b in zip(start, offsets, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(start, info.shape, offsets, shape, strict=True)
            ]
            if any(h <= lo for lo, h in zip(low, high, strict=True)):
                continue
            source = [slice(lo - a, h - a) for lo, h, a in zip(low, high, start, strict=True)]
            target = [slice(lo - b, h - b) for lo, h, b in zip(low, high, offsets, strict=True)]
            piece = self._tensor(index, name, info)[tuple(source)]
            result[tuple(target)] = piece
            missing -= piece.numel()
        if missing:
            raise DamagedCheckpoint(f"the shards hold only parts of the tensor {name!r}")
        return result

    def _tensor(self, index: int, name: str, info: TensorInfo) -> torch.Tensor:
        data = self._shard(index)[name]
        dtype = TORCH_DTYPES[info.dtype]
        if not len(data):
            return torch.empty(info.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(info.shape)

    def _shard(self, index: int) -> dict[str, memoryview]:
        if index not in self._loaded:
            self._loaded[index] = dict(self._readers[index].verify_and_load())
        return self._loaded[index]


def choose(store: ObjectStore, coordinator: Coordinator, rank: int) -> Restored:
    """Return the checkpoint to go on from, the same on every rank; nothing is changed yet."""
    if rank == 0:
        restored = _choose_first(store)
        coordinator.set(_CHOICE, json.dumps(restored.prefix))
        return restored
    word = coordinator.get(_CHOICE, _CHOICE_TIMEOUT_S)
    if word is None:
        raise ConnectionError("the first rank did not say what to restore")
    prefix = json.loads(word)
    if prefix is None:
        return Restored(None, None)
    manifest = load_manifest(store, prefix)
    return Restored(manifest, prefix, tensors=StoredTensors(store, prefix, manifest))


def _choose_first(store: ObjectStore) -> Restored:
    kept: dict[str, StoredTensors] = {}

    def verify(store: ObjectStore, manifest: Manifest) -> None:
        kept.clear()  # a damaged one need not stay in memory
        kept[manifest.prefix] = StoredTensors(store, manifest.prefix, manifest)
        kept[manifest.prefix].verify()

    manifest, skipped = latest_valid(store, verify=verify)
    if manifest is None:
        if skipped:
            raise DamagedCheckpoint(
                f"all {len(skipped)} checkpoints of this run are damaged; "
                f"the newest: {skipped[0][1]}",
                hint="restore the store from a backup, or start a new run",
            )
        return Restored(None, None)
    return Restored(manifest, manifest.prefix, skipped=skipped, tensors=kept[manifest.prefix])


def apply(restored: Restored, objects: Mapping[str, Tracked]) -> None:
    """Put the stored state into the tracked objects.

    Raises:
        StateMismatch: the script tracks other objects than the checkpoint holds, or their shapes
            differ; nothing was changed in the first case.
    """
    manifest, tensors = restored.manifest, restored.tensors
    if manifest is None or tensors is None:
        return
    state: dict[str, Any] = manifest.state
    missing = sorted(set(objects) - set(state))
    unexpected = sorted(set(state) - set(objects))
    if missing or unexpected:
        changes = [f"{name} is new" for name in missing] + [
            f"{name} is no longer tracked" for name in unexpected
        ]
        raise StateMismatch(
            f"run.track does not fit the checkpoint at step {manifest.step}: {'; '.join(changes)}",
            hint="track the same objects under the same names, or start a new run",
        )
    for name in sorted(objects, key=lambda n: _order(objects[n])):
        objects[name].restore(name, state[name], tensors.fetch, tensors.fetch_like)
    tensors.release()


def _order(item: Tracked) -> int:
    """Modules first, then optimizers, then what refers to them."""
    if isinstance(item.value, torch.nn.Module):
        return 0
    return 1 if isinstance(item.value, torch.optim.Optimizer) else 2


def restore_random(manifest: Manifest, rank: int, world_size: int) -> bool:
    """Put back this rank's random states; False if the checkpoint has none for this rank."""
    tree = manifest.ranks.get(str(rank))
    if tree is None or manifest.world_size != world_size:
        return False
    plain = unpack(tree, _no_tensor)
    states: dict[str, Any] = {
        name: torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if isinstance(value, bytes)
        else value
        for name, value in plain.items()
    }
    if "numpy" in states:
        import numpy as np

        inner = states["numpy"]["state"]
        if isinstance(inner.get("key"), list):
            inner["key"] = np.array(inner["key"], dtype=np.uint32)
    restore_random_states(states)
    return True


def _no_tensor(name: str) -> torch.Tensor:
    raise DamagedCheckpoint(f"a random state names the tensor {name!r}")
