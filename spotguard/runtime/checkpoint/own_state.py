"""What is a rank's own in a checkpoint: random states, and its place in data only it reads."""

from __future__ import annotations

from typing import Any

import torch

from spotguard.runtime.state.rng import capture_random_states
from spotguard.runtime.state.tree import Packed, pack

PLACE = "place"
"""In what is a rank's own, beside its random states: where it is in data only it reads."""
GENERATORS = "generators"
"""In what is a rank's own: the states of tracked generators that others have begun otherwise."""


def random_tree(states: dict[str, Any] | None) -> Any:
    """Return this rank's random states as JSON: tensors become bytes, they are small."""
    states = states or capture_random_states()
    plain = {
        name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else _as_bytes(value)
        for name, value in states.items()
    }
    return pack(plain, "random", Packed())


def own_tree(random: Any, place: Any, generators: dict[str, Any]) -> Any:
    """Return all of it as one tree; None if there is nothing."""
    beside = {} if place is None else {PLACE: place}
    beside |= {GENERATORS: generators} if generators else {}
    return {**(random or {}), **beside} if beside else random


def _as_bytes(value: Any) -> Any:
    """Replace NumPy arrays inside a generator state by lists, so that no tensor is left."""
    if isinstance(value, dict):
        return {key: _as_bytes(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
