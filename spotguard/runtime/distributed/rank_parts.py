"""Which tracked objects the ranks do not hold alike: each rank saves its own of those.

Most of a training state is the same on all ranks, so the first one saves it for all. Some
optimizers share out their state over the ranks (Muon of nanochat and of modded-nanogpt,
distributed Shampoo): what the first rank holds is a part, and a resume from it would begin the
other parts anew, without a word. So nothing is assumed: hashes of what the ranks hold are compared
after the attempt's first, second, fourth, eighth … step, since an optimizer may begin to keep its
state later.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from spotguard.errors import DamagedCheckpoint, StateMismatch
from spotguard.runtime.state.filling import flat_bytes
from spotguard.runtime.state.tracked import TrackedModule
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer
from spotguard.runtime.state.tree import Packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.state.pack_cache import Packer
    from spotguard.runtime.state.tracked import Packs, Reading, Tracked

log = logging.getLogger("spotguard")

NAMES = "per_rank"
"""In a checkpoint's counters: the names of the objects of which each rank has stored its own."""
OBJECTS = "objects"
"""In what is a rank's own in a checkpoint: the trees of these objects, by name."""
_PATIENCE_S = 120.0
_LOOK_UP_S = 0.25
_SILENT = "silent"
_WAY_OUT = (
    "start as many ranks as the checkpoint has, or start a new run; a state that is the same on "
    "all ranks, or that FSDP2 shards, is resumed on any number of them"
)


class PackedParts(NamedTuple):
    """What a checkpoint stores of the tracked objects."""

    tree: dict[str, Any]
    """Of the objects that all ranks hold alike, and of the first rank's."""
    packed: Packed
    own: dict[str, Any]
    """The trees of this rank's own objects; the first rank's stand in `tree`."""
    own_leaves: frozenset[str]
    """The names of the tensors in there."""


class RankParts:
    """Knows of which objects each rank saves its own."""

    def __init__(
        self,
        coordinator: Coordinator,
        rank: int,
        world_size: int,
        given_up: Callable[[], bool],
    ) -> None:
        """`given_up`: returns True once no word of another rank is to be waited for any more."""
        self._coordinator = coordinator
        self._rank, self._world_size = rank, world_size
        self._given_up = given_up
        self._round = 0
        self._left_out: frozenset[str] = frozenset()
        self._said_of: frozenset[str] = frozenset()
        self.names: frozenset[str] = frozenset()
        """The models and optimizers of which each rank saves its own."""

    def leave_out(self, names: frozenset[str]) -> None:
        """Compare nothing of these: each rank's own from the beginning, and saved as such."""
        self._left_out = names

    def adopt(self, manifest: Manifest | None) -> None:
        """Begin with what the checkpoint says that this attempt goes on from."""
        if manifest is not None and manifest.world_size == self._world_size:
            self.names = frozenset(_names_in(manifest))

    def after_step(
        self, done: int, objects: Mapping[str, Tracked], tell: Callable[[str], None]
    ) -> None:
        """Compare if `done`, the steps of this attempt, is 1, 2, 4, 8 …; as `compare`.

        It comes before the gate, so that no rank leaves without it: one that has not heard what
        the others found would save other parts than the manifest says, and nobody could restore.
        """
        if not done & (done - 1):
            self.compare(objects, tell)

    def compare(self, objects: Mapping[str, Tracked], tell: Callable[[str], None]) -> None:
        """Find the objects that some rank holds otherwise than the first; `tell` of new ones.

        All ranks call it at the same boundary, and each blocks until all have, or one is gone.
        """
        if self._world_size == 1:
            return
        self._round += 1
        mine = {n: digest_of(n, item) for n, item in objects.items() if n not in self._left_out}
        try:
            differ = self._told(mine) if self._rank else self._gathered(mine)
        except ConnectionError as problem:
            log.debug("what the ranks hold was not compared: %s", problem)
            return
        for name in sorted(differ.keys() - self.names - self._said_of):
            tell(_said(name, objects[name], differ[name], self._world_size))
        # A survivor must be able to save alone what a whole checkpoint needs: of small objects,
        # such as a list of the samples that a rank has seen, the saving rank's own is enough.
        large = {name for name in differ if _is_large(objects[name])}
        self.names |= large
        self._said_of |= differ.keys()

    def _gathered(self, mine: dict[str, str | None]) -> dict[str, int]:
        """Return the first rank that holds an object otherwise, by name; all ranks hear of it."""
        differ: dict[str, int] = {}
        for peer in range(1, self._world_size):
            word = self._hear(str(peer))
            if word is None:
                self._say("all", _SILENT)
                return {}
            theirs = json.loads(word)
            for name, digest in mine.items():
                if digest is not None and theirs.get(name) != digest:
                    differ.setdefault(name, peer)
        self._say("all", json.dumps(differ))
        return differ

    def _told(self, mine: dict[str, str | None]) -> dict[str, int]:
        self._say(str(self._rank), json.dumps(mine))
        word = self._hear("all")
        return {} if word in (None, _SILENT) else dict(json.loads(str(word)))

    def _say(self, key: str, word: str) -> None:
        self._coordinator.set(f"alike/{self._round}/{key}", word)

    def _hear(self, key: str) -> str | None:
        end = time.monotonic() + _PATIENCE_S
        while not self._given_up() and time.monotonic() < end:
            word = self._coordinator.get(f"alike/{self._round}/{key}", _LOOK_UP_S)
            if word is not None:
                return word
        return None

    # ------------------------------------------------------------------ saving and restoring

    def pack(self, packer: Packer, objects: Mapping[str, Packs]) -> PackedParts:
        """Pack all objects; the tensors of this rank's own get names that no other rank uses."""
        own = {name for name in self.names if name in objects} if self._rank else set()
        tree, packed = packer.pack({n: item for n, item in objects.items() if n not in own})
        shared = set(packed.leaves)
        trees = {n: objects[n].pack(f"{n}@{self._rank}", packed) for n in sorted(own)}
        mine = frozenset(packed.leaves.keys() - shared)
        return PackedParts(tree, packed, trees, mine)

    def counters(self) -> dict[str, Any]:
        """Return what a checkpoint's counters say of it; nothing where all is alike."""
        return {NAMES: sorted(self.names)} if self.names else {}


def trees_of(
    manifest: Manifest,
    rank: int,
    world_size: int,
    objects: Mapping[str, Tracked],
    reading: Reading,
) -> dict[str, Any]:
    """Return the stored trees for this rank, by name: its own where each rank has stored one.

    On another number of ranks it is refused, unless what fits shall be restored without the rest.

    Raises:
        StateMismatch: the checkpoint has other ranks' parts.
        DamagedCheckpoint: this rank's own is not there.
    """
    state: dict[str, Any] = dict(manifest.state)
    names = [name for name in _names_in(manifest) if name in objects]
    if names and manifest.world_size != world_size:
        for name in names:
            said = (
                f"{name} was another one on each of {manifest.world_size} ranks at step "
                f"{manifest.step}, and now there are {world_size}"
            )
            reading.differs(StateMismatch(said, hint=_WAY_OUT))
        return state
    if rank and names:
        found: Any = manifest.ranks.get(str(rank))
        own = found.get(OBJECTS) if isinstance(found, dict) else None
        for name in names:
            if not isinstance(own, dict) or name not in own:
                raise DamagedCheckpoint(f"the checkpoint has nothing of rank {rank}'s own {name}")
            state[name] = own[name]
    return state


def digest_of(name: str, item: Packs) -> str | None:
    """Return a hash of what an object holds; None of what is sharded, which no rank has whole."""
    packed = Packed()
    tree = item.pack(name, packed)
    leaves = list(packed.leaves.values())
    if any(leaf.global_shape is not None for leaf in leaves):
        return None
    digest = xxhash.xxh3_128(json.dumps(tree, default=repr).encode())
    for part in _contents([leaf.tensor for leaf in leaves]):
        digest.update(part)
    return digest.hexdigest()


def _contents(tensors: list[torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield what tells the tensors' values: their bytes on a CPU, else sums made on the device."""
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        flat = flat_bytes(tensor)
        if tensor.is_cpu:
            yield flat.numpy().data
        else:
            whole = len(flat) - len(flat) % 4
            sums += [
                flat[:whole].view(torch.int32).sum(dtype=torch.int64),
                flat.sum(dtype=torch.int64),
            ]
    for device in dict.fromkeys(each.device for each in sums):
        of_device = torch.stack([each for each in sums if each.device == device])
        yield of_device.cpu().numpy().data


def _names_in(manifest: Manifest) -> list[str]:
    told: Any = manifest.counters.get(NAMES)
    return [name for name in told if isinstance(name, str)] if isinstance(told, list) else []


def _said(name: str, item: Tracked, peer: int, world_size: int) -> str:
    said = f"rank {peer} holds another {name} than rank 0"
    if _is_large(item):
        return (
            f"{said}: from now on each rank saves its own, and the run can be resumed on "
            f"{world_size} ranks only. If all ranks should hold the same, they train apart"
        )
    return f"{said}: a resume gives all ranks the one of the rank that saved, as a rule rank 0"


def _is_large(item: Tracked) -> bool:
    """Return whether no resume can do without each rank's own."""
    return isinstance(item, (TrackedModule, TrackedOptimizer))
