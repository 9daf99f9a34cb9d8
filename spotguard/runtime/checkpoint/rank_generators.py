"""Tracked random generators that are another one on each rank: each gets its own state back.

A script may seed a generator by its rank, for noise that shall not be the same everywhere. With one
rank's state for all, all ranks would draw the same numbers after a resume. A rank that the
checkpoint does not know draws numbers that no other one draws.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import DamagedCheckpoint
from spotguard.runtime.checkpoint.own_state import GENERATORS
from spotguard.runtime.distributed.rendezvous import LostContact
from spotguard.runtime.state.rng import mix
from spotguard.runtime.state.tracked import SENSELESS, RandomGenerator
from spotguard.runtime.state.tree import DTYPES, TORCH_DTYPES, Packed, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.state.tracked import Packs, Tracked

_WORD = "generators"


class RankGenerators:
    """Which of the tracked generators are this rank's own."""

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self.names = names

    @classmethod
    def found(
        cls,
        objects: Mapping[str, Tracked],
        coordinator: Coordinator,
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> RankGenerators:
        """Return those that some rank's script has begun otherwise than the first rank's.

        All ranks call it, and each blocks until all have.

        Raises:
            LostContact: nothing is heard of another rank.
        """
        mine = {
            name: _digest(item)
            for name, item in objects.items()
            if isinstance(item, RandomGenerator)
        }
        if not mine or world_size == 1:
            return cls()

        def hear(word: str, peer: int) -> Any:
            told = coordinator.get(f"{_WORD}/{word}", timeout_s)
            if told is None:
                raise LostContact(f"no word of the random generators from rank {peer}")
            return json.loads(told)

        if rank:
            coordinator.set(f"{_WORD}/{rank}", json.dumps(mine))
            return cls(frozenset(hear("own", 0)))
        others = [hear(str(peer), peer) for peer in range(1, world_size)]
        own = [name for name in mine if any(each.get(name) != mine[name] for each in others)]
        coordinator.set(f"{_WORD}/own", json.dumps(own))
        return cls(frozenset(own))

    def states(self, objects: Mapping[str, Packs]) -> dict[str, Any]:
        """Return the state of each as plain JSON, by name."""
        return {name: _plain(name, objects[name]) for name in sorted(self.names)}

    def read(self, manifest: Manifest, rank: int) -> dict[str, Any]:
        """Return the states that a checkpoint holds of this rank's, by name.

        Raises:
            DamagedCheckpoint: one of them makes no sense.
        """
        kept = {name: _kept(manifest, str(rank), name) for name in sorted(self.names)}
        return {name: _state(each) for name, each in kept.items() if each is not None}

    def restore(
        self,
        states: Mapping[str, Any],
        manifest: Manifest,
        objects: Mapping[str, Tracked],
        rank: int,
        seed: int,
    ) -> None:
        """Give each the state that this rank's had; else make it draw what no other one draws.

        Raises:
            StateMismatch: it is the state of something else.
        """
        for name in sorted(self.names):
            item = objects[name]
            assert isinstance(item, RandomGenerator)
            if name in states:
                item.write(name, states[name])
            elif rank or any(_kept(manifest, peer, name) for peer in manifest.ranks):
                item.reseed(mix(seed, manifest.step, rank, zlib.crc32(name.encode())))


def _digest(item: RandomGenerator) -> str:
    return hashlib.sha256(json.dumps(_plain("", item)).encode()).hexdigest()


def _plain(name: str, item: Packs) -> dict[str, Any]:
    packed = Packed()
    tree = item.pack(name, packed)
    leaves = {
        leaf.name: [DTYPES[leaf.tensor.dtype], pack(leaf.tensor.numpy().tobytes(), "", Packed())]
        for leaf in packed.leaves.values()
    }
    return {"tree": tree, "leaves": leaves}


def _kept(manifest: Manifest, rank: str, name: str) -> Any:
    own: Any = manifest.ranks.get(rank)
    generators = own.get(GENERATORS) if isinstance(own, dict) else None
    return generators.get(name) if isinstance(generators, dict) else None


def _state(kept: Any) -> Any:
    def leaf(name: str) -> torch.Tensor:
        dtype, raw = kept["leaves"][name]
        return torch.frombuffer(bytearray(unpack(raw, _none)), dtype=TORCH_DTYPES[dtype]).clone()

    try:
        return unpack(kept["tree"], leaf)
    except SENSELESS as problem:
        raise DamagedCheckpoint(f"a rank's random generator makes no sense: {problem}") from None


def _none(name: str) -> torch.Tensor:
    raise DamagedCheckpoint(f"a random generator names the tensor {name!r}")
