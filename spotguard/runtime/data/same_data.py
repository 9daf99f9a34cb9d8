"""Whether a resume reads the data that the attempt before read: by a few bytes of a micro-batch.

A resume finds its place by indices, or by reading a stream again. Neither notices that a file has
changed, that a transform draws from a generator of its own, or that a stream is another one each
time. So checkpoints keep the hash of something that was read, and a resume reads it once more.
"""

from __future__ import annotations

import copy
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from spotguard.runtime.state.tracked import RandomGenerator, TrackedValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from spotguard.runtime.data.loader import Loader, Share
    from spotguard.runtime.state.tracked import Tracked

_MOST_LEAVES = 32
_MOST_BYTES = 4096
"""Of a leaf its beginning and its end are looked at, so many bytes each."""
_DEEPEST = 6
_EVERY = 8
"""Steps between two that are remembered, which costs a step microseconds."""
_SHOWN = 4
_KEY = "__key__"
"""Names a sample of webdataset's; beside it stand paths, which differ from node to node."""


def hash_of(sample: Any) -> str | None:
    """Return a hash of what was read, without a copy of it; None if nothing in it can be hashed."""
    if isinstance(sample, dict) and isinstance(sample.get(_KEY), str):
        return xxhash.xxh3_64_hexdigest(sample[_KEY].encode())
    return _hash(list(islice(_leaves(sample, _DEEPEST), _MOST_LEAVES)))


class _Leaf(NamedTuple):
    path: str
    value: Any
    version: int = 0


def _leaves(value: Any, deep: int, path: str = "") -> Iterator[_Leaf]:
    """Yield tensors of the CPU, arrays and plain values in a sample, or in a batch of some."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided:
            yield _Leaf(path, value, value._version)
    elif value is None or isinstance(value, (str, bytes, int, float, bool)):
        yield _Leaf(path, value)
    elif isinstance(value, dict) and deep:
        for key, inner in value.items():
            yield from _leaves(inner, deep - 1, f"{path}/{key}")
    elif isinstance(value, (list, tuple)) and deep:
        for number, inner in enumerate(value[:_MOST_LEAVES]):
            yield from _leaves(inner, deep - 1, f"{path}/{number}")
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
        yield _Leaf(path, value)


def _hash(leaves: list[_Leaf]) -> str | None:
    if not leaves:
        return None
    digest = xxhash.xxh3_64()
    for leaf in leaves[:_MOST_LEAVES]:
        digest.update(f"{leaf.path} {type(leaf.value).__name__}".encode())
        value = leaf.value
        if isinstance(value, torch.Tensor):
            flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            if value.numel() and not value.is_quantized:
                few = max(1, _MOST_BYTES // value.element_size())
                for part in (flat[:few], flat[-few:]):
                    digest.update(part.view(torch.uint8).numpy().data)
        elif hasattr(value, "tobytes"):  # an array
            digest.update(f"{value.dtype} {value.shape}".encode())
            if value.dtype != object:
                flat = value.reshape(-1)
                digest.update(flat[:_MOST_BYTES].tobytes())
                digest.update(flat[-_MOST_BYTES:].tobytes())
        else:
            digest.update(repr(value)[:_MOST_BYTES].encode())
    return digest.hexdigest()


def _without_arrays(batch: Any) -> list[_Leaf]:
    """Return some leaves of a batch; no array, which does not tell that it was written to."""
    leaves = islice(_leaves(batch, _DEEPEST), 2 * _MOST_LEAVES)
    return [leaf for leaf in leaves if not hasattr(leaf.value, "tobytes")][:_MOST_LEAVES]


def _holds_tensors(value: Any) -> bool:
    """Return whether a copy of a tracked value may be large."""
    inside = value.values() if isinstance(value, dict) else ()
    return any(isinstance(each, (torch.Tensor, dict, list)) for each in inside)


class DataCheck:
    """Remembers the first micro-batch of a step that the first rank has read, of some steps.

    Every number of ranks gives that one to the first rank. What the script changes in place is not
    hashed any more, and arrays and generators are not held: they would have to be copied.
    """

    def __init__(self, loader: Loader, objects: Mapping[str, Tracked], told: Any) -> None:
        """`told`: what `counters` returned when the checkpoint to go on from was made."""
        self._loader = loader
        values = [item for item in objects.values() if type(item) is TrackedValue]
        self._values = [item for item in values if not _holds_tensors(item.read())]
        self._told = told
        self._share: Share | None = None
        self._leaves: list[_Leaf] = []
        self._settings = loader.settings.now()
        """The dataset's, when it was read: with others another batch is read."""

    @classmethod
    def of(
        cls, loader: Loader, objects: Mapping[str, Tracked], told: Any, *, may: bool
    ) -> DataCheck | None:
        """Return it for data by index that are seeded, and have the loader read once more.

        What draws from a tracked generator is not the same when it is read again.
        """
        drawn = any(isinstance(item, RandomGenerator) for item in objects.values())
        if not may or drawn or not hasattr(loader, "dataset"):
            return None
        made = cls(loader, objects, told)
        again = made.again(told)
        loader.again = [] if again is None else [again]
        return made

    def begin(
        self, batches: Iterator[tuple[Share, Any]], *, tell: Callable[[str], None]
    ) -> Iterator[tuple[Share, Any]]:
        """Compare what is read once more, if anything is; return an iterator over the rest."""
        if self._loader.again:
            before = [copy.deepcopy(item.read()) for item in self._values]
            share, batch = next(batches)
            for item, value in zip(self._values, before, strict=True):  # a data set may count
                item.put(value)
            if words := self.difference(self._told, share, batch):
                tell(words)
        return self.watch(batches)

    def watch(self, batches: Iterator[tuple[Share, Any]]) -> Iterator[tuple[Share, Any]]:
        """Yield from `batches`, and remember each step's first one."""
        for share, batch in batches:
            if share.number == 0 and (self._share is None or share.step % _EVERY == 0):
                self._share, self._leaves = share, _without_arrays(batch)
                self._settings = self._loader.settings.now()
            yield share, batch

    def counters(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps; None if nothing can be compared."""
        share, leaves = self._share, self._leaves
        if (
            share is None
            or self._loader.settings.differ(self._settings)
            or any(
                isinstance(leaf.value, torch.Tensor) and leaf.value._version != leaf.version
                for leaf in leaves
            )
        ):
            return None
        found = _hash(leaves)
        if found is None:
            return None
        return {"step": share.step, "samples": list(share.indices)[:_MOST_LEAVES], "hash": found}

    def again(self, told: Any) -> Share | None:
        """Return the micro-batch to read once more, as a checkpoint has it; None if there is none.

        Where micro-batches are cut otherwise today there is nothing to compare.
        """
        if not isinstance(told, dict) or type(told.get("step")) is not int or told["step"] < 0:
            return None
        if not self._loader.remembers(told["step"]):  # drawing would move the sampler's own state
            return None
        shares = self._loader.shares(told["step"])
        mine = next((share for share in shares if share.number == 0), None)
        if mine is None or list(mine.indices)[:_MOST_LEAVES] != told.get("samples"):
            return None
        return mine

    def difference(self, told: Any, share: Share, batch: Any) -> str:
        """Return what to say if a micro-batch that was read once more is another one, or ""."""
        if _hash(_without_arrays(batch)) == told.get("hash"):
            return ""
        shown = ", ".join(map(str, share.indices[:_SHOWN]))
        more = ", …" if len(share.indices) > _SHOWN else ""
        return (
            f"{type(self._loader.dataset).__name__} gives other data than before: samples {shown}"
            f"{more} of step {share.step} are not what they were when they were trained on, and "
            "training goes on with what it gives now. Its files or its code have changed, or it "
            "draws from a generator, the clock or an unsorted list of files that no seed reaches"
        )
