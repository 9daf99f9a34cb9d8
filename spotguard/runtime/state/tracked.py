"""What `run.track` accepts, and how each kind gives and takes its state."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from spotguard.checkpoint.outside import BaseFiles
from spotguard.errors import StateMismatch, UnsupportedState, UsageError
from spotguard.runtime.state.filling import fill
from spotguard.runtime.state.module_wrappers import (
    bare_module,
    by_todays_keys,
    has_adapters,
    plain_keys,
)
from spotguard.runtime.state.sharding import address, is_dtensor, local_of
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer
from spotguard.runtime.state.tree import Bulk, Packed, is_tensor, pack, tensor_names

Finish = Callable[[], None]
"""Completes a restore once all tensors have been read."""


class Reading(Protocol):
    """The tensors of a checkpoint: asked for first, then read all at once."""

    differences: list[str]
    """What did not fit and was left as the script made it."""
    left_out: set[int]
    """Addresses of parameters that nothing stored fits: their moments begin anew, too."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole stored tensor."""
        ...

    def fits(self, name: str, value: object) -> bool:
        """Return True if `value` is a plain tensor of the stored one's shape and dtype."""
        ...

    def in_place(self, name: str) -> bool:
        """Return whether the tensor may be filled where it is.

        Not where a checkpoint may leave some as they are: one that is tried before it, and is
        damaged, would have written to them. What is stored once for all of them is the same in all.
        """
        ...

    def into(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` (of a sharded one this rank's part) with the stored tensor."""
        ...

    def new(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return new memory to be filled: whole, or cut and placed like the sharded `like`."""
        ...

    def later(self, tree: Any, beside: Any = None, *, fills: bool = False) -> Callable[[], Any]:
        """Return what unpacks `tree` once its tensors have been read.

        A tensor in whose place `beside` has one now comes on that one's device. With `fills` it is
        that very one, filled, if it has the stored one's shape and dtype.
        """
        ...

    def claims(self, name: str, target: torch.Tensor) -> None:
        """Say that `target` will be filled with a stored tensor, so that no other one may be."""
        ...

    def differs(self, problem: StateMismatch) -> None:
        """Raise `problem`; or write it down, if what fits shall be restored without the rest."""
        ...


class Packs(Protocol):
    """Something whose state can be stored."""

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the state; its tensors go into `into`."""
        ...


class Tracked(Packs, Protocol):
    """One tracked object: packs its state, and takes a packed one back."""

    value: Any

    def restore(self, name: str, tree: Any, reading: Reading) -> Finish:
        """Ask `reading` for what the object needs; return what to call once it is there.

        Tensors may be filled where they are; all else stays as it is until then.

        Raises:
            StateMismatch: the stored state does not fit; nothing was changed.
        """
        ...


class TrackedModule:
    """A module: parameters and buffers by name, whatever wraps it."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        skips_frozen: bool = False,
        base: BaseFiles | None = None,
    ) -> None:
        self.value = module
        self.bare: torch.nn.Module = bare_module(module)
        self.skips_frozen = skips_frozen or has_adapters(self.bare)
        """True if parameters without a gradient are stored once, and referred to."""
        self.base = base
        """Files that hold them already, so that they need not even be stored once."""

    def frozen_addresses(self) -> Iterator[int]:
        """Yield the addresses of the parameters that are stored once, as long as they are so."""
        if self.skips_frozen:
            for parameter in self.bare.parameters():
                if not parameter.requires_grad:
                    yield address(parameter)

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the module's state dict, in its order."""
        return self._pack_state(self.bare.state_dict(), name, into)

    def bulk(self, name: str) -> Bulk | None:
        """Return the state dict as it is now, if it holds nothing but tensors."""
        state = self.bare.state_dict(keep_vars=True)
        tensors = list(state.values())
        if not all(isinstance(value, torch.Tensor) for value in tensors):
            return None
        return Bulk(tensors, partial(self._pack_state, state, name), lambda tree, into: tree)

    def _pack_state(self, state: Mapping[str, Any], name: str, into: Packed) -> Any:
        key_of = plain_keys(self.bare)
        pairs = [(key_of(key), value) for key, value in state.items()]
        return [[key, pack(value, f"{name}.{key}", into)] for key, value in pairs]

    def restore(self, name: str, tree: Any, reading: Reading) -> Finish:
        """Have the stored values read into the module's own tensors, on their device, in place."""
        state = self.bare.state_dict()
        own_keys = dict(zip(map(plain_keys(self.bare), state), state, strict=True))
        mine = {plain: state[key] for plain, key in own_keys.items()}
        stored = by_todays_keys(tree, mine)
        tensors = {
            key: stored[key]["name"]
            for key, value in mine.items()
            if isinstance(value, torch.Tensor) and is_tensor(stored.get(key))
        }
        shapes = {key: reading.shape(stored_name) for key, stored_name in tensors.items()}
        problem = _difference(name, list(stored), mine, shapes)
        if problem is not None:
            reading.differs(problem)
            fitting = {k: v for k, v in tensors.items() if shapes[k] == tuple(mine[k].shape)}
            reading.left_out |= {
                address(value)
                for key, value in mine.items()
                if isinstance(value, torch.Tensor) and key not in fitting
            }
            tensors = fitting
        others = {
            key: reading.later(stored[key], value)
            for key, value in mine.items()
            if key in stored and key not in shapes
        }
        plain = _loads_plainly(self.bare)
        read: dict[str, torch.Tensor] = {}
        for key, stored_name in tensors.items():
            if plain and reading.in_place(stored_name):
                reading.into(stored_name, mine[key])
            else:
                reading.claims(stored_name, mine[key])
                like = mine[key] if is_dtensor(mine[key]) else None
                read[key] = reading.new(stored_name, like)

        def finish() -> None:
            values: dict[str, Any] = {key: value() for key, value in others.items()}
            if plain:
                for key, tensor in read.items():
                    fill(local_of(mine[key]), local_of(tensor))
            else:  # whoever has a say in loading gets the values to load
                values.update(read)
            if values:
                own = {own_keys[key]: value for key, value in values.items()}
                self.bare.load_state_dict(own, strict=len(own) == len(mine))

        return finish


class TrackedStateful:
    """Anything with `state_dict()` and `load_state_dict()`: schedulers, scalers, metrics."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the object's state dict."""
        return pack(self.read(), name, into)

    def put(self, state: Any) -> None:
        """Give the object such a state."""
        self.value.load_state_dict(state)

    def read(self) -> Any:
        """Return the object's state dict, in which may be values of its own."""
        state = self.value.state_dict()
        if isinstance(self.value, torch.optim.swa_utils.SWALR):
            # torch 2.6 has a function there, which depends on the arguments of SWALR alone.
            state = {key: value for key, value in state.items() if key != "anneal_func"}
        return state

    def restore(self, name: str, tree: Any, reading: Reading) -> Finish:
        """Have the state dict read; the object loads it then, each tensor on its device."""
        beside = self.read() if tensor_names(tree) else None
        state = reading.later(tree, beside, fills=isinstance(self.value, Box))
        return lambda: self.value.load_state_dict(state()) and None


class TrackedValue:
    """A random generator or a dict: its state is read and written by a pair of functions."""

    def __init__(
        self, value: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None]
    ) -> None:
        self.value = value
        self._read = read
        self._write = write

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the value's state."""
        return pack(self.read(), name, into)

    def put(self, state: Any) -> None:
        """Give the value such a state, which no dict of it is."""
        self._write(self.value, state)

    def read(self) -> Any:
        """Return the state; of a random generator in memory of its own, of a dict a view."""
        return self._read(self.value)

    def restore(self, name: str, tree: Any, reading: Reading) -> Finish:
        """Have the state read; it is written into the same object then, a dict's tensors, too."""
        beside = self.value if isinstance(self.value, dict) else None
        state = reading.later(tree, beside, fills=True)
        return lambda: self._write(self.value, state())


class Box:
    """Holds one plain value, so that it can be saved and restored: a counter, a best loss.

        best = spotguard.Box(float("inf"))
        run.track(model=model, best=best)
        best.value = min(best.value, loss)

    A resume gives back the value that it had.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value
        """The value as it is now."""

    def __repr__(self) -> str:
        return f"Box({self.value!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the saved value."""
        self.value = state["value"]


SAME_OBJECTS = (
    "track the same objects under the same names, start a new run, or pass strict=False to "
    "run.steps() to restore what fits"
)
"""What to do where a checkpoint holds other objects than those that are tracked."""
SENSELESS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What generators raise at states that are none of theirs."""


def _form(tree: Any) -> Any:
    """Return what tells the state of one kind of generator from that of another."""
    if not isinstance(tree, dict):
        return type(tree).__name__
    return sorted(tree), tree.get("$"), tree.get("bit_generator")


class RandomGenerator(TrackedValue):
    """A random generator."""

    def __init__(self, value: Any) -> None:
        pair = random_accessors(value)
        assert pair is not None
        super().__init__(value, *pair)

    def restore(self, name: str, tree: Any, reading: Reading) -> Finish:
        """Have the state read, if it is one of this kind; the generator goes on from it then."""
        if _form(tree) != _form(self.pack(name, Packed())):
            reading.differs(self._mismatch(name, "of another kind"))
            return lambda: None
        state = reading.later(tree)
        return lambda: self.write(name, state())

    def write(self, name: str, state: Any) -> None:
        """Give it a state that `read` has returned.

        Raises:
            StateMismatch: it is the state of something else.
        """
        try:
            self._write(self.value, state)
        except SENSELESS as problem:
            raise self._mismatch(name, f"that makes no sense: {problem}") from problem

    def _mismatch(self, name: str, which: str) -> StateMismatch:
        return StateMismatch(
            f"run.track: {name} is a {type(self.value).__name__}, and the checkpoint holds a state "
            f"{which}",
            hint=SAME_OBJECTS,
        )

    def reseed(self, seed: int) -> None:
        """Begin anew, from a seed of 64 bits."""
        if isinstance(self.value, torch.Generator):
            self.value.manual_seed(seed)
        elif isinstance(self.value, random.Random):
            self.value.seed(seed)
        else:  # NumPy's, of either kind
            bits = getattr(self.value, "bit_generator", None) or self.value._bit_generator
            bits.state = type(bits)(seed).state


def tracked(
    name: str, value: Any, *, skips_frozen: bool = False, base: BaseFiles | None = None
) -> Tracked:
    """Return the adapter for `value`; `skips_frozen` and `base` are for a `TrackedModule`.

    Raises:
        UnsupportedState: there is no way to read and write its state; the message says what to do.
    """
    if isinstance(value, torch.nn.Module):
        return TrackedModule(value, skips_frozen=skips_frozen, base=base)
    if isinstance(value, torch.optim.Optimizer):
        return TrackedOptimizer(value)
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return TrackedStateful(value)
    if random_accessors(value) is not None:
        return RandomGenerator(value)
    if isinstance(value, dict):
        return TrackedValue(value, dict, _replace_dict)
    raise UnsupportedState(
        f"run.track: {name} is a {type(value).__name__}, which has no state_dict()",
        hint="give it state_dict() and load_state_dict(), track a dict that holds its values, or "
        "put a single value into a spotguard.runtime.Box; a variable of the script is tracked by "
        f'run.track_values(globals(), "{name}")',
    )


def check_storable(caller: str, name: str, item: Tracked) -> None:
    """Raise unless the object's state can be stored.

    Raises:
        UnsupportedState: it cannot, or the object's own `state_dict()` failed.
    """
    try:
        item.pack(name, Packed())
    except SENSELESS as problem:
        kind = type(item.value)
        sharded = kind.__name__ == "ZeroRedundancyOptimizer"
        raise UnsupportedState(
            f"{caller}: the state of {name}, a {kind.__name__}, cannot be read: {problem}",
            hint="use FSDP2 (fully_shard) and a plain optimizer: each rank then saves its part"
            if sharded
            else "its state_dict() must work at any step, on each rank by itself",
        ) from problem


def frozen_addresses(objects: Mapping[str, Packs]) -> set[int]:
    """Return the addresses of all parameters that are stored once, as long as they are frozen."""
    modules = (item for item in objects.values() if isinstance(item, TrackedModule))
    return {address for item in modules for address in item.frozen_addresses()}


def trained_names(objects: Mapping[str, Packs]) -> set[str]:
    """Return the names under which the parameters are stored that are trained."""
    modules = {n: item.bare for n, item in objects.items() if isinstance(item, TrackedModule)}
    return {
        f"{name}.{key_of(key)}"
        for name, module in modules.items()
        for key_of in [plain_keys(module)]
        for key, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def words_on_frozen(
    objects: dict[str, Any], frozen: Any, base: Any
) -> tuple[bool, BaseFiles | None]:
    """Return whether `run.track` skips what is frozen, and the files that hold it.

    An object that happens to be called like one of the words is added to `objects`.

    Raises:
        UsageError: `frozen` is another word, or `base` names no safetensors file.
    """
    if frozen is not None and not isinstance(frozen, str):
        objects["frozen"], frozen = frozen, None
    if frozen not in (None, "skip"):
        raise UsageError(f"run.track: frozen is {frozen!r}; allowed: skip")
    if base is None:
        return frozen is not None, None
    paths = list(base) if isinstance(base, (list, tuple)) else [base]
    if paths and all(isinstance(path, (str, os.PathLike)) for path in paths):
        return True, BaseFiles(paths)
    objects["base"] = base
    return frozen is not None, None


def base_files(objects: Mapping[str, Packs]) -> BaseFiles | None:
    """Return the files of all modules' frozen bases, None if none are named."""
    modules = (item for item in objects.values() if isinstance(item, TrackedModule))
    named = list(dict.fromkeys(item.base for item in modules if item.base is not None))
    if len(named) < 2:
        return named[0] if named else None
    return BaseFiles(path for each in named for path in each.paths)


def tracked_slot(holder: Any, name: str) -> Tracked:
    """Return the adapter for a plain value: the attribute or key `name` of `holder`.

    Raises:
        UsageError: there is no such attribute or key.
        UnsupportedState: the value is not a plain one.
    """
    slot = _Slot(holder, name)
    if not slot.exists:
        raise UsageError(
            f"run.track_values: {type(holder).__name__} has no {name!r}",
            hint="give it its first value before that",
        )
    if not _is_plain(slot.read()):
        raise UnsupportedState(
            f"run.track_values: {name} is a {type(slot.read()).__name__}, and no plain value",
            hint=f"track it as an object: run.track({name}=...)",
        )
    return TrackedValue(slot, _Slot.read, _Slot.write)


class _Slot:
    """A place for one value: an attribute of an object, or a key of a dict."""

    def __init__(self, holder: Any, name: str) -> None:
        self._holder = holder
        self._name = name

    @property
    def exists(self) -> bool:
        if isinstance(self._holder, dict):
            return self._name in self._holder
        return hasattr(self._holder, self._name)

    def read(self) -> Any:
        """Return a copy: what is kept of a boundary must not follow a list that grows."""
        holder = self._holder
        value = holder[self._name] if isinstance(holder, dict) else getattr(holder, self._name)
        return value if isinstance(value, (int, float, str)) else copy.deepcopy(value)

    def write(self, value: Any) -> None:
        if isinstance(self._holder, dict):
            self._holder[self._name] = value
        else:
            setattr(self._holder, self._name, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


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


def _loads_plainly(module: torch.nn.Module) -> bool:
    """Return True if loading only copies: no submodule has a method or hook of its own for it."""
    return type(module).load_state_dict is torch.nn.Module.load_state_dict and all(
        type(each)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and not each._load_state_dict_pre_hooks
        and not each._load_state_dict_post_hooks
        for each in module.modules()
    )


def _difference(
    name: str,
    stored: list[str],
    mine: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> StateMismatch | None:
    """Return what differs between a stored module and the script's, None if nothing does."""
    found = {
        "missing from the checkpoint": sorted(set(mine) - set(stored)),
        "not in the script": sorted(set(stored) - set(mine)),
        "reshaped": [
            f"{key} {shape} → {tuple(mine[key].shape)}"
            for key, shape in shapes.items()
            if shape != tuple(mine[key].shape)
        ],
    }
    parts = [
        f"{word}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
        for word, names in found.items()
        if names
    ]
    if not parts:
        return None
    return StateMismatch(
        f"{name}: the model changed since the checkpoint; {'; '.join(parts)}",
        hint="restore with the code that made the checkpoint, start a new run, or pass "
        "strict=False to run.steps() to restore what fits",
    )
