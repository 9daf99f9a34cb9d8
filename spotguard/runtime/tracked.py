"""What `run.track` accepts, and how each kind gives and takes its state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from spotguard.errors import StateMismatch, UnsupportedState
from spotguard.runtime.sharding import is_dtensor
from spotguard.runtime.state import Fetch, Packed, pack, tensor_names, unpack

ShardedFetch = Callable[[str, torch.Tensor], torch.Tensor]
"""Gives the stored tensor of a name, cut and placed like the given (sharded) tensor."""


class Packs(Protocol):
    """Something whose state can be stored."""

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the state; its tensors go into `into`."""
        ...


class Tracked(Packs, Protocol):
    """One tracked object: packs its state, and takes a packed one back."""

    value: Any

    def restore(self, name: str, tree: Any, fetch: Fetch, like: ShardedFetch) -> None:
        """Put the state back; StateMismatch if it does not fit."""
        ...


class TrackedModule:
    """A module: parameters and buffers by name, whatever wraps it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.value = module
        self.bare: torch.nn.Module = (
            module.module if isinstance(module, DistributedDataParallel) else module
        )

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the module's state dict, in its order."""
        entries = self.bare.state_dict().items()
        return [[key, pack(value, f"{name}.{key}", into)] for key, value in entries]

    def restore(self, name: str, tree: Any, fetch: Fetch, like: ShardedFetch) -> None:
        """Copy the stored values into the module's own tensors, on their device, in place."""
        mine = self.bare.state_dict()
        stored = dict(tree)
        _compare_names(name, list(stored), list(mine))

        def value_of(key: str) -> Any:
            target = mine[key]
            if is_dtensor(target):
                return like(tensor_names(stored[key])[0], target)
            return unpack(stored[key], fetch)

        values = {key: value_of(key) for key in mine}
        reshaped = [
            f"{key} {tuple(values[key].shape)} → {tuple(mine[key].shape)}"
            for key in mine
            if isinstance(values[key], torch.Tensor)
            and isinstance(mine[key], torch.Tensor)
            and values[key].shape != mine[key].shape
        ]
        if reshaped:
            raise StateMismatch(f"{name}: reshaped since the checkpoint: {', '.join(reshaped[:8])}")
        self.bare.load_state_dict(values)


class TrackedOptimizer:
    """An optimizer: parameter groups and per-parameter state, dtype-exact."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.value = optimizer

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the optimizer's state dict."""
        into.all_steady = True
        try:
            return pack(self.value.state_dict(), name, into)
        finally:
            into.all_steady = False

    def addresses(self) -> Iterator[int]:
        """Yield the addresses of the parameters that its step changes."""
        for group in self.value.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if is_dtensor(parameter) else parameter
                yield local.data_ptr()

    def restore(self, name: str, tree: Any, fetch: Fetch, like: ShardedFetch) -> None:
        """Load the state; each tensor keeps the dtype it was saved with."""
        params = [p for group in self.value.param_groups for p in group["params"]]
        stored_groups = unpack(tree["param_groups"], fetch)
        stored = [len(group["params"]) for group in stored_groups]
        mine = [len(group["params"]) for group in self.value.param_groups]
        if stored != mine:
            raise StateMismatch(
                f"{name}: parameter groups of {stored} tensors are stored, the script has {mine}",
                hint="build the optimizer over the same parameters, in the same order",
            )
        state = {
            index: {key: _like_param(value, params[index], fetch, like) for key, value in entries}
            for index, entries in _pairs(tree["state"])
        }
        self.value.load_state_dict({"state": state, "param_groups": stored_groups})
        # load_state_dict casts floating state to the parameter's dtype: fp32 moments of bf16
        # parameters would come back rounded. Put the exact ones back.
        for index, entries in state.items():
            for key, value in entries.items():
                held = self.value.state[params[index]].get(key)
                if isinstance(value, torch.Tensor) and held.dtype != value.dtype:
                    self.value.state[params[index]][key] = value.to(held.device)


class TrackedStateful:
    """Anything with `state_dict()` and `load_state_dict()`: schedulers, scalers, metrics."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the object's state dict."""
        return pack(self.value.state_dict(), name, into)

    def restore(self, name: str, tree: Any, fetch: Fetch, like: ShardedFetch) -> None:
        """Load the state dict."""
        self.value.load_state_dict(unpack(tree, fetch))


class TrackedValue:
    """A random generator or a dict: state is read and written by a pair of functions."""

    def __init__(
        self, value: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None]
    ) -> None:
        self.value = value
        self._read = read
        self._write = write

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the value's state."""
        return pack(self.read(), name, into)

    def read(self) -> Any:
        """Return the state; of a random generator in memory of its own, of a dict a view."""
        return self._read(self.value)

    def restore(self, name: str, tree: Any, fetch: Fetch, like: ShardedFetch) -> None:
        """Write the state back into the same object."""
        self._write(self.value, unpack(tree, fetch))


def tracked(name: str, value: Any) -> Tracked:
    """Return the adapter for `value`.

    Raises:
        UnsupportedState: there is no way to read and write its state; the message says what to do.
    """
    if isinstance(value, torch.nn.Module):
        return TrackedModule(value)
    if isinstance(value, torch.optim.Optimizer):
        return TrackedOptimizer(value)
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return TrackedStateful(value)
    pair = random_accessors(value)
    if pair is not None:
        return TrackedValue(value, *pair)
    if isinstance(value, dict):
        return TrackedValue(value, dict, _replace_dict)
    raise UnsupportedState(
        f"run.track: {name} is a {type(value).__name__}, which has no state_dict()",
        hint="give it state_dict() and load_state_dict(), or track a dict that holds its values",
    )


def random_accessors(
    value: Any,
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None:
    """Return how to read and write the state of a random generator object, or None."""
    if isinstance(value, torch.Generator):
        return torch.Generator.get_state, lambda g, state: g.set_state(state) and None
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return lambda g: g.getstate(), lambda g, state: g.setstate(state)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return (
            lambda g: g.bit_generator.state,
            lambda g, state: setattr(g.bit_generator, "state", state),
        )
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return lambda g: g.get_state(legacy=False), lambda g, state: g.set_state(state)
    return None


def _replace_dict(target: dict[Any, Any], state: dict[Any, Any]) -> None:
    target.clear()
    target.update(state)


def _pairs(tree: Any) -> list[tuple[int, list[tuple[str, Any]]]]:
    """Return [(parameter index, [(state key, subtree)])] of a packed optimizer state."""
    entries = tree["items"] if "$" in tree else list(tree.items())
    return [(int(index), list(state.items())) for index, state in entries]


def _like_param(tree: Any, param: torch.Tensor, fetch: Fetch, like: ShardedFetch) -> Any:
    """Unpack one entry of a parameter's state; sharded parameters have sharded moments."""
    if is_dtensor(param) and isinstance(tree, dict) and tree.get("sharded"):
        return like(tree["name"], param)
    return unpack(tree, fetch)


def _compare_names(name: str, stored: list[str], mine: list[str]) -> None:
    missing = sorted(set(mine) - set(stored))
    unexpected = sorted(set(stored) - set(mine))
    if not missing and not unexpected:
        return
    parts = [
        f"{word}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
        for word, names in (
            ("missing from the checkpoint", missing),
            ("not in the script", unexpected),
        )
        if names
    ]
    raise StateMismatch(
        f"{name}: the model changed since the checkpoint; {'; '.join(parts)}",
        hint="restore with the code that made the checkpoint, or start a new run",
    )
