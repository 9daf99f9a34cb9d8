"""Parameters that no step changes: stored once, and referred to by every checkpoint after that.

A model that is adapted by a few trained parameters (LoRA) is saved again and again, of which a
hundredth is new. With `run.track(model=model, frozen="skip")` what has no gradient is a base: one
shard that each manifest names, as it names its own. A base that changes after all, because it was
unfrozen or written to by hand, is noticed before the next save, and is stored with it from then on.

With `run.track(model=model, base="base.safetensors")` what is bit by bit in such a file is not even
stored once: another shard, of which the header alone is written, refers to it by its hash.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import xxhash

from spotguard.checkpoint.outside import ENTRY, entry_of
from spotguard.checkpoint.reading import ShardReader
from spotguard.checkpoint.shard import outside_file, refer_to_layout, shard_file, write_layout
from spotguard.errors import CheckpointError, DamagedCheckpoint, StoreError
from spotguard.events import keys
from spotguard.runtime.checkpoint.staging import bytes_of, layout_of, live_views
from spotguard.runtime.state.weight_witness import TensorSample
from spotguard.shared.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from spotguard.checkpoint.outside import BaseFiles, OutsidePlace
    from spotguard.checkpoint.shard import ShardLayout
    from spotguard.checkpoint.tensors import ShardInfo, TensorInfo
    from spotguard.runtime.state.tree import Leaf
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")


class FrozenBase:
    """What this rank's base is, and where it is stored."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        run_id: str,
        attempt: int,
        rank: int,
        world_size: int,
        files: BaseFiles | None = None,
    ) -> None:
        """`files` are those that the script names: what they hold is referred to, not stored."""
        self._store = store
        self._metadata = {"run_id": run_id}
        self._folder = keys.frozen(attempt)
        self._rank, self._world_size = rank, world_size
        self._files = files
        self._marks: dict[str, Leaf] = {}
        """The leaves that are as they were when the base was taken."""
        self._sample = TensorSample(())
        """Of their tensors, in that order."""
        self._taken: list[Leaf] = []
        """All leaves of the base, whoever stores them."""
        self._is_all_mine = False
        """True if this rank answers for all of them."""
        self._rest: list[Leaf] = []
        """The leaves that this rank still has to store."""
        self._stored: dict[ShardInfo, set[str]] = {}
        """What manifests say of this rank's base, and the tensors there that still count."""
        self._proven: Sequence[ShardInfo] = ()
        self._lock = threading.Lock()

    def take(self, leaves: Iterable[Leaf], mine: Iterable[Leaf], frozen: set[int]) -> None:
        """Take what is frozen now for the base; `mine` is what this rank has to store.

        `frozen` are addresses of parameters that have no gradient.
        """
        taken = [leaf for leaf in leaves if leaf.tensor.data_ptr() in frozen and leaf.size_bytes]
        self._mark(taken)
        self._taken, self._stored = taken, {}
        self._rest = [leaf for leaf in mine if leaf.name in self._marks]
        self._is_all_mine = len(self._rest) == len(taken)

    def adopt(self, bases: Sequence[ShardInfo]) -> None:
        """Refer to one of these, if it is what this rank would store: its bytes are in place.

        `bases` are proven: the objects hold what they hold.
        """
        self._proven = bases
        self._adopt_rest(bases)

    def _adopt_rest(self, bases: Sequence[ShardInfo]) -> None:
        if self._rest:
            digest = self._layout_of(self._rest).header_hash
            same = next((base for base in bases if base.header_hash == digest), None)
            if same is not None:
                self._have_stored(same)

    def take_over(self, bases: Sequence[ShardInfo]) -> None:
        """Answer for all of the base, since the rank that stores it is gone: a replica has it.

        `bases` are those of the checkpoint before; what it does not have is stored here anew.
        """
        if self._is_all_mine:
            return
        self._is_all_mine = True
        # Of any other a tensor may have changed since: of it the checkpoint has a newer one.
        same = [b for b in bases if b.folder == self._folder or b in self._proven]
        self._rest = self._taken
        self._adopt_rest(same)
        if self._rest:
            self._adopt_all(same)
        if self._rest:
            self._rest = list(self._marks.values())

    def _adopt_all(self, bases: Sequence[ShardInfo]) -> None:
        """Refer to all of these if they are the whole base, a part of which is outside.

        What cannot be read now counts as not there: the state is to be captured in any case.
        """
        if any(base.outside for base in bases):
            own = self._layout_of(self._taken).tensors
            try:
                held = {base: ShardReader(self._store, "", base).tensors for base in bases}
            except (StoreError, DamagedCheckpoint) as problem:
                log.warning("the frozen base is referred to or stored anew: %s", problem)
                return
            theirs = {name: info for tensors in held.values() for name, info in tensors.items()}
            if _forms(theirs) == _forms(own):
                self._stored = {base: set(tensors) for base, tensors in held.items()}
                self._rest = []

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
            if name not in now
            or mark.tensor.data_ptr() not in frozen
            or _place(mark) != _place(now[name])
        }
        changed |= self._written()
        if changed:
            self._let_go(changed)

    def _let_go(self, changed: set[str]) -> None:
        """Store these with each checkpoint from here on."""
        log.info(
            "%d parameters that were frozen have changed, such as %s: they are saved from now on",
            len(changed),
            min(changed),
        )
        kept = [leaf for name, leaf in self._marks.items() if name not in changed]
        with self._lock:
            self._mark(kept)
            self._rest = [leaf for leaf in self._rest if leaf.name not in changed]
            left = {info: names - changed for info, names in self._stored.items()}
            self._stored = {info: names for info, names in left.items() if names}

    def stored(self, timeout_s: float = -1) -> tuple[ShardInfo, ...]:
        """Return what a manifest says of this rank's base, if it has one; stores it first.

        Blocks until it is stored, or for `timeout_s` while another thread is at it.

        Raises:
            CheckpointError: it changed while it was written, or the time is over.
            StoreError: it could not be stored; the next call tries again.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise CheckpointError("the frozen base is still being stored")
        try:
            if self._files is not None and self._rest:
                self._refer(self._files)
                self._files = None  # each rest is looked for once
            if self._rest:
                layout = self._layout_of(self._rest)
                file = shard_file(self._rank, self._world_size)
                data = live_views(self._rest, layout)
                info = write_layout(self._store, self._folder, file, layout, data)
                self._check_same(self._rest)
                self._have_stored(info.within(self._folder))
            return tuple(self._stored)
        finally:
            self._lock.release()

    def _refer(self, files: BaseFiles) -> None:
        """Refer to what the script's files hold bit by bit; the rest is still to be stored."""
        places = self._found_in(files)
        leaves = [leaf for leaf in self._rest if leaf.name in places]
        rest = [leaf for leaf in self._rest if leaf.name not in places]
        if leaves:
            layout = layout_of(leaves, {**self._metadata, ENTRY: entry_of(places)})
            file = outside_file(self._rank, self._world_size)
            data = live_views(leaves, layout)
            info = refer_to_layout(self._store, self._folder, file, layout, data)
            self._check_same(leaves)
            self._stored[info] = set(places)
        _tell(files, leaves, rest)
        self._rest = rest
        self._adopt_rest(self._proven)

    def _found_in(self, files: BaseFiles) -> dict[str, OutsidePlace]:
        """Return where the files hold the very bytes of leaves; blocks while both are hashed."""
        found = {}
        forms = self._layout_of(self._rest).tensors
        try:
            for leaf in self._rest:
                if files.may_hold(forms[leaf.name]):
                    digest = xxhash.xxh3_128_hexdigest(bytes_of(leaf.tensor))
                    place = files.find(forms[leaf.name], digest)
                    if place is not None:
                        found[leaf.name] = place
        except OSError as problem:
            log.warning("the files of base= cannot be read, so it is stored: %s", problem)
            return {}
        return found

    def _have_stored(self, info: ShardInfo) -> None:
        self._stored[info] = {leaf.name for leaf in self._rest}
        self._rest = []

    def _check_same(self, leaves: Iterable[Leaf]) -> None:
        if not self._written().isdisjoint(leaf.name for leaf in leaves):
            raise CheckpointError("the frozen base was changed while it was stored")

    def _mark(self, leaves: Sequence[Leaf]) -> None:
        self._marks = {leaf.name: leaf for leaf in leaves}
        self._sample = TensorSample(leaf.tensor for leaf in leaves)
        self._sample.take()

    def _written(self) -> set[str]:
        names = list(self._marks)
        return {names[number] for number in self._sample.changed()}

    def _layout_of(self, leaves: Sequence[Leaf]) -> ShardLayout:
        return layout_of(leaves, self._metadata)


def _forms(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (info.dtype, info.shape) for name, info in tensors.items()}


def _tell(files: BaseFiles, referred: Sequence[Leaf], rest: Sequence[Leaf]) -> None:
    """Say what of the base is in the files, and what is not and why that matters."""
    size = format_bytes(sum(leaf.size_bytes for leaf in referred))
    where = f"{files.paths[0]}" + (f" and {len(files.paths) - 1} more" if files.paths[1:] else "")
    log.info("%s of the frozen base are referred to in %s", size, where)
    if rest:
        size = format_bytes(sum(leaf.size_bytes for leaf in rest))
        log.info(
            "%s of it, such as %s, are not in there bit by bit: stored once", size, rest[0].name
        )


def _place(leaf: Leaf) -> tuple[int, torch.dtype]:
    return leaf.tensor.data_ptr(), leaf.tensor.dtype
