"""What the walker finds, in the terms of a resume: what is saved, and what the rest is called.

Both checks of untracked state ask here: that of a run's first steps, and the drill's fingerprints.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch

from spotguard.runtime.checks.carried import functions_of, nested
from spotguard.runtime.state.tracked import Box, TrackedModule, TrackedStateful
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator, Mapping

    from spotguard.runtime.checks.walker import StateLeaf
    from spotguard.runtime.state.tracked import Tracked

_TRUSTED = ("torch.", "spotguard.")


def saved_whole(objects: Mapping[str, Tracked]) -> Iterator[int]:
    """Yield the ids of what is saved whole."""
    for item in objects.values():
        if isinstance(item, TrackedModule):
            state = item.bare.state_dict(keep_vars=True)
            yield from (id(v) for v in state.values() if isinstance(v, torch.Tensor))
            yield from map(id, item.bare.parameters())
        elif not isinstance(item, (TrackedStateful, TrackedOptimizer)) or is_trusted(item.value):
            yield id(item.value)


def tracked_roots(objects: Mapping[str, Tracked]) -> Iterator[tuple[str, Any]]:
    """Yield the tracked objects with their names, modules without what wraps them."""
    for name, item in objects.items():
        yield name, item.bare if isinstance(item, TrackedModule) else item.value


def is_trusted(value: Any) -> bool:
    """Return whether an object's state is all of it: of torch's, and of ours."""
    return isinstance(value, Box) or type(value).__module__.startswith(_TRUSTED)


def is_of_torch(owner: Any, kind: str) -> bool:
    """Return whether torch itself looks after an attribute: caches, and counts for its warnings."""
    return kind == "value" and owner is not None and module_of(owner).startswith(_TRUSTED)


def module_of(owner: Any) -> str:
    """Return the name of the module that an object's class, or a function or class, is from."""
    of = owner if hasattr(owner, "__code__") or isinstance(owner, type) else type(owner)
    return str(getattr(of, "__module__", "") or "")


def name_of(leaf: StateLeaf) -> str:
    """Return the path of the attribute or variable that holds a leaf."""
    path = leaf.of if leaf.of_kind == "position" else leaf.path
    path = path.removeprefix("len(").rstrip(")")
    while path.endswith("]"):
        path = path[: path.rfind("[")]
    return path


def code_around(frame: types.FrameType | None) -> list[types.CodeType]:
    """Return the code of a loop, and of the functions and methods beside it."""
    if frame is None:
        return []
    return [*functions_of(frame.f_globals), *nested(frame.f_code)]


class Averages:
    """Tells collections of tensors that have the shapes of a tracked model's weights."""

    def __init__(self, objects: Mapping[str, Tracked]) -> None:
        self._wanted = [
            collections.Counter(tuple(p.shape) for p in item.bare.parameters() if p.requires_grad)
            for item in objects.values()
            if isinstance(item, TrackedModule)
        ]

    def may_be(self, leaves: Iterable[StateLeaf]) -> bool:
        """Return whether these leaves may be an average of weights, or a copy of them."""
        values = [leaf.where() for leaf in leaves if leaf.kind == "tensor" and leaf.where]
        there = collections.Counter(tuple(v.shape) for v in values if v is not None)
        return any(each and not each - there for each in self._wanted)
