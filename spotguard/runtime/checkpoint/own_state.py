"""What is a rank's own in a checkpoint: random states, and its place in data only it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spotguard.runtime.distributed.rank_parts import OBJECTS
from spotguard.runtime.state.rng import capture_random_states
from spotguard.runtime.state.tree import Packed, pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.checkpoint.manifest import Manifest

PLACE = "place"
"""In what is a rank's own, beside its random states: where it is in data only it reads."""
GENERATORS = "generators"
"""In what is a rank's own: the states of tracked generators that others have begun otherwise."""
EPOCH_BEGUN = "epoch_begun"
"""In the counters, and in what is a rank's own: see `EpochBegun`."""
BESIDE_RANDOM = frozenset({PLACE, GENERATORS, EPOCH_BEGUN, OBJECTS})
"""All that may stand beside a rank's random states."""


class EpochBegun(NamedTuple):
    """Which epoch a boundary is of, and what the top of its body had changed, as it was before."""

    epoch: int
    before: dict[str, Any]
    """States as JSON, by the names that the loop gives them; the same on all ranks."""
    own: dict[str, Any]
    """Those that are this rank's alone."""

    @classmethod
    def of(cls, manifest: Manifest | None, rank: int) -> EpochBegun | None:
        """Return what a checkpoint says; None if it is of no epoch whose body had begun."""
        told: Any = manifest.counters.get(EPOCH_BEGUN) if manifest else None
        if manifest is None or not isinstance(told, dict) or type(told.get("epoch")) is not int:
            return None
        mine: Any = manifest.ranks.get(str(rank))
        own = mine.get(EPOCH_BEGUN) if isinstance(mine, dict) else None
        before = told.get("before")
        found = [each if isinstance(each, dict) else {} for each in (before, own)]
        return cls(told["epoch"], *found)

    def counters(self) -> dict[str, Any]:
        """Return what is stored for all ranks."""
        return {"epoch": self.epoch, "before": self.before}


def random_tree(states: dict[str, Any] | None) -> Any:
    """Return this rank's random states as JSON: tensors become bytes, they are small."""
    states = states or capture_random_states()
    plain = {
        name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else _as_bytes(value)
        for name, value in states.items()
    }
    return pack(plain, "random", Packed())


def own_tree(
    random: Any,
    place: Any,
    generators: dict[str, Any],
    begun: EpochBegun | None = None,
    objects: Mapping[str, Any] | None = None,
) -> Any:
    """Return all of it as one tree; None if there is nothing."""
    beside = {} if place is None else {PLACE: place}
    beside |= {GENERATORS: generators} if generators else {}
    beside |= {OBJECTS: objects} if objects else {}
    beside |= {EPOCH_BEGUN: begun.own} if begun is not None and begun.own else {}
    return {**(random or {}), **beside} if beside else random


def _as_bytes(value: Any) -> Any:
    """Replace NumPy arrays inside a generator state by lists, so that no tensor is left."""
    if isinstance(value, dict):
        return {key: _as_bytes(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
