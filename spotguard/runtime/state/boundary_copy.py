"""What a step changes before `optimizer.step()`, as it was at the last step boundary.

A forward pass changes buffers (BatchNorm's running statistics), and a loop's body draws from
random generators and counts in dicts, long before weights change. If that step is given up, what
is saved must be all of one boundary: that of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from spotguard.runtime.state.frozen import NotPlainError, TooLargeError, frozen
from spotguard.runtime.state.module_buffers import SmallBuffers
from spotguard.runtime.state.rng import capture_random_states
from spotguard.runtime.state.tracked import TrackedModule, TrackedStateful, TrackedValue
from spotguard.runtime.state.tree import Leaf, Packed, pack
from spotguard.runtime.state.weight_witness import sampled
from spotguard.shared.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from spotguard.runtime.state.best import BestState
    from spotguard.runtime.state.tracked import Packs, Tracked

_LARGEST_BYTES = 4 << 20
_STEPS_LOOKED_AT = 10
_MOST_MARKS = 10_000
_PLAIN = frozenset({float, int, bool, str, tuple, type(None)})


class BufferShadow:
    """Keeps the small persistent buffers as they were at the last `take`."""

    def __init__(self, modules: Iterable[torch.nn.Module] = ()) -> None:
        self._buffers = SmallBuffers(modules)
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers.tensors()]

    def take(self) -> None:
        """Copy the buffers as they are now."""
        if self._copies:
            self._buffers.copy_to(self._copies)

    def over(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Return `leaves` with copies of the last `take` in the place of these buffers.

        The buffers stay as they are: forward passes may go on to change them while it is saved.
        """
        held = dict(zip(map(_place, self._buffers.tensors()), self._copies, strict=True))
        held.pop(None, None)
        return [
            replace(leaf, tensor=copy.clone())
            if (copy := held.get(_place(leaf.tensor))) is not None
            else leaf
            for leaf in leaves
        ]


class _LargeObjects:
    """Tells of objects that a step changes before its weights, and that are too large for copies.

    Many are not: an average of the weights follows them after `optimizer.step()`. So each is looked
    at in the first few steps, and no longer, since to be asked for its state may cost it much.
    """

    def __init__(self, warn: Callable[[str], None] | None) -> None:
        self._warn = warn
        self._items: dict[str, TrackedValue | TrackedStateful] = {}
        self._marks: dict[str, list[Any]] = {}
        self._steps_left = _STEPS_LOOKED_AT

    def add(self, name: str, item: Tracked) -> None:
        """Look at an object from this boundary on."""
        if self._warn is not None and isinstance(item, (TrackedValue, TrackedStateful)):
            self._items[name] = item
            self._steps_left = _STEPS_LOOKED_AT

    def take(self) -> None:
        """Take note of what the objects are like at a boundary."""
        if self._steps_left:
            self._steps_left -= 1
            self._marks = {name: _mark_of(item.read()) for name, item in self._items.items()}

    def look(self) -> None:
        """Tell, once, of each object that has changed since the boundary."""
        marks, self._marks = self._marks, {}  # what changes from here on is safe
        for name, mark in marks.items():
            if self._warn is not None and _mark_of(self._items[name].read()) != mark:
                del self._items[name]
                self._warn(_not_held(name))


class ObjectShadow:
    """Keeps the state of generators, dicts and the user's own objects of the last `take`.

    Left out are objects of more than 4 MB, which would slow each step, and, unless `all_kinds` are
    kept, what changes only with the weights: models, optimizers and gradient scalers (whose state
    costs a device sync).
    """

    def __init__(
        self,
        objects: Mapping[str, Tracked] | None = None,
        *,
        with_random: bool = False,
        all_kinds: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`warn` is told, once, of each object that is left out and changes before the weights."""
        self._large = _LargeObjects(warn)
        self._objects = objects or {}
        self._copies = {
            name: _copying(name, item)
            for name, item in self._objects.items()
            if all_kinds
            or isinstance(item, TrackedValue)
            or (
                isinstance(item, TrackedStateful)
                and not isinstance(item.value, torch.amp.GradScaler)
            )
        }
        """What copies the state of each object; each step calls them."""
        self._count = len(self._copies)
        self._held: dict[str, Packs] = {}
        self._with_random = with_random
        self.random_states: dict[str, Any] | None = None
        """The global generators' states, if they are part of what is saved."""

    def take(self) -> None:
        """Keep the objects' states as they are now."""
        for name, copied in list(self._copies.items()):
            held = copied()
            if held is None:
                del self._copies[name]
                self._held.pop(name, None)
                self._large.add(name, self._objects[name])
            else:
                self._held[name] = held
        self._large.take()
        if self._with_random:
            self.random_states = capture_random_states()

    def look(self) -> None:
        """See what has changed of the objects that are left out: weights are about to."""
        self._large.look()

    def take_whole(self) -> bool:
        """Keep the states as they are now; False, for ever, once one is too large or in parts."""
        if self._is_whole:
            self.take()  # which finds out
        return self._is_whole

    @property
    def _is_whole(self) -> bool:
        return len(self._copies) == self._count

    def over(self, objects: Mapping[str, Tracked]) -> dict[str, Packs]:
        """Return `objects` with what was kept of them in their place."""
        return {**objects, **self._held}


class GroupShadow:
    """Keeps what optimizers have beside tensors, such as learning rates, as at the last `take`.

    A schedule that follows a metric moves them in the body, before the weights change.
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        """Keep those of the optimizers among the tracked `values`."""
        self._optimizers = [v for v in values if isinstance(v, torch.optim.Optimizer)]
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Each group, and the values that it had."""
        self._counts: list[tuple[torch.optim.Optimizer, int]] = []
        """How many groups each optimizer had: a script may add some in its loop."""

    def take(self) -> None:
        """Keep the values as they are now."""
        self._held = [
            (group, _values(group))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
        self._counts = [(each, len(each.param_groups)) for each in self._optimizers]

    def put_back(self) -> None:
        """Give the groups the values of the last `take`; one added since is added again then."""
        for group, held in self._held:
            group.update(held)
        for optimizer, count in self._counts:
            del optimizer.param_groups[count:]


class StepShadow:
    """All that a step may change before the weights, as it was at the last boundary."""

    def __init__(
        self,
        buffers: BufferShadow | None = None,
        objects: ObjectShadow | None = None,
        groups: GroupShadow | None = None,
    ) -> None:
        self._buffers = buffers or BufferShadow()
        self._objects = objects or ObjectShadow()
        self._groups = groups or GroupShadow()

    @classmethod
    def of(
        cls,
        objects: Mapping[str, Tracked],
        *,
        with_random: bool,
        warn: Callable[[str], None] | None = None,
    ) -> StepShadow:
        """Return that of all tracked objects, and of the global generators."""
        modules = [item.bare for item in objects.values() if isinstance(item, TrackedModule)]
        return cls(
            BufferShadow(modules),
            ObjectShadow(objects, with_random=with_random, warn=warn),
            GroupShadow(item.value for item in objects.values()),
        )

    @property
    def buffers(self) -> BufferShadow:
        """Return what puts the buffers as they were among the leaves of a state."""
        return self._buffers

    @property
    def random_states(self) -> dict[str, Any] | None:
        """Return the global generators' states, if they are part of what is saved."""
        return self._objects.random_states

    def take(self) -> None:
        """Keep everything as it is now: a step has just ended."""
        self._buffers.take()
        self._objects.take()
        self._groups.take()

    def look(self) -> None:
        """See, before weights change, what a save within this step would have held in part."""
        self._objects.look()

    def boundary(self, objects: Mapping[str, Tracked]) -> dict[str, Packs]:
        """Return `objects` as they were, but for buffers, which `buffers` puts in.

        The optimizers' groups are put back in place, the rest is left alone.
        """
        self._groups.put_back()
        return self._objects.over(objects)


@dataclass(frozen=True)
class BoundaryState:
    """What is saved of a boundary, beside its number."""

    objects: Mapping[str, Packs]
    random_states: dict[str, Any] | None
    best: BestState
    shared: Any
    """The loader's place, the same on all ranks."""
    own: Any
    """This rank's part of it."""
    buffers: BufferShadow | None = None
    """Puts modules' buffers as they were at the boundary among the leaves; None: as they are."""


@dataclass(frozen=True)
class _HeldState:
    """A state of its own, made a tree only if it is saved."""

    state: Any

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the state."""
        return pack(self.state, name, into)


@dataclass(frozen=True)
class _HeldForLater:
    """What gives a state of its own."""

    later: Callable[[], Any]

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the state."""
        return pack(self.later(), name, into)


@dataclass(frozen=True)
class _HeldTree:
    """An object's state, with copies of its tensors."""

    tree: Any
    leaves: dict[str, Leaf]

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the state."""
        into.leaves.update(self.leaves)
        return self.tree


def _mark_of(state: Any) -> list[Any]:
    """Return what tells a state from a later one: values, and a few bytes of each tensor.

    Of arrays only the shape is looked at: what fills them counts in a value beside them.
    """
    found: list[Any] = []
    tensors: list[torch.Tensor] = []
    waiting = [state]
    while waiting and len(found) < _MOST_MARKS:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append((value.shape, None if value.is_inference() else value._version))
            tensors.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            found.append(len(value))
            waiting += value[-_MOST_MARKS:]
        else:
            found.append(repr(value) if type(value) in _PLAIN else getattr(value, "shape", None))
    return [*found, *sampled(tensors)]


def _not_held(name: str) -> str:
    return (
        f"{name} changes before optimizer.step() and is not copied after each step, as it has more "
        f"than {format_bytes(_LARGEST_BYTES)} or is in parts: a save within a step holds what that "
        "step has changed of it by then, and the step is done again; change it after "
        "optimizer.step(), or give it a hold_state()"
    )


def _place(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return where a tensor's values are, and in which order; None if it has none."""
    if not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """Return all of an optimizer's group but its parameters; its tensors copied."""
    values = {**group}
    del values["params"]
    if not _PLAIN.issuperset(map(type, values.values())):  # hardly ever; and each step comes here
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                values[key] = value.clone()
    return values


def _copying(name: str, item: Tracked) -> Callable[[], Packs | None]:
    """Return what copies the object's state; it gives None if that is too large or in parts.

    An object that is asked at each step, of which hardly an answer is used, may have a
    `hold_state()` that does no more than what cannot be done later: it returns what gives the
    state of this moment, or None if nothing quick does.
    """
    if isinstance(item, TrackedValue) and not isinstance(item.value, dict):
        return lambda: _HeldState(item.read())  # a generator gives a copy
    if not isinstance(item, (TrackedValue, TrackedStateful)):
        return lambda: _held_tree(name, item)
    # A dict of the script's own kind may have an answer to any name.
    stateful = isinstance(item, TrackedStateful)
    quick = getattr(item.value, "hold_state", None) if stateful else None

    def copied() -> Packs | None:
        later = None if quick is None else quick()
        if later is not None:
            return _HeldForLater(later)
        try:
            return _HeldState(frozen(item.read(), most_bytes=_LARGEST_BYTES))
        except TooLargeError:
            return None
        except NotPlainError:
            return _held_tree(name, item)

    return copied


def _held_tree(name: str, item: Tracked) -> _HeldTree | None:
    packed = Packed()
    tree = item.pack(name, packed)
    leaves = packed.leaves.values()
    if sum(leaf.size_bytes for leaf in leaves) > _LARGEST_BYTES:
        return None
    if any(leaf.global_shape is not None for leaf in leaves):
        return None
    for leaf in leaves:
        leaf.tensor = leaf.tensor.clone()
    return _HeldTree(tree, packed.leaves)
