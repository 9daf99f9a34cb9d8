"""What is a rank's own in a checkpoint: its random states, and its place in data only it reads."""

from __future__ import annotations

from typing import Any

import torch

from spotguard.runtime.state.rng import capture_random_states
from spotguard.runtime.state.tree import Packed, pack

PLACE = "place"
"""In what is a rank's own, beside its random states: where it is in data only it reads."""


def random_tree(states: dict[str, Any] | None) -> Any:
    """Return this rank's random states as JSON: tensors become bytes, they are small."""
    states = states or capture_random_states()
    plain = {
        name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else _as_bytes(value)
        for name, value in states.items()
    }
    return pack(plain, "random", Packed())


def own_tree(random: Any, place: Any) -> Any:
    """Return both as one tree; None if there is nothing."""
    return random if place is None else {**(random or {}), PLACE: place}


def _as_bytes(value: Any) -> Any:
    """Replace NumPy arrays inside a generator state by lists, so that no tensor is left."""
    if isinstance(value, dict):
        return {key: _as_bytes(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
