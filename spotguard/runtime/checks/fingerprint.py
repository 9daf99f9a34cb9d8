"""Fingerprints of a training script's whole state after each step, for `spotguard drill`.

What a script forgot to track is found by looking: the probe walks the variables that the training
loop can see (its own and its callers' locals, the script's globals) and writes a hash of each
after every step. Where a disturbed run differs from the undisturbed one right after a resume,
that variable was not restored.
"""

from __future__ import annotations

import collections
import json
import operator
import os
import types
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import xxhash

from spotguard.errors import UnsupportedState
from spotguard.runtime.checks.script import visible
from spotguard.runtime.checks.walker import Walker
from spotguard.runtime.state.filling import flat_bytes
from spotguard.runtime.state.rng import capture_random_states
from spotguard.runtime.state.tracked import TrackedModule, random_accessors, tracked
from spotguard.runtime.state.tree import Packed, pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.job import Job

T = TypeVar("T")

_DEEPEST = 4
_MOST_ITEMS = 10_000


class Probe:
    """Appends one JSON line per step; the first rank only."""

    def __init__(self, path: str, job: Job, *, bitwise: bool) -> None:
        self._job = job
        self._bitwise = bitwise
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(self, finished: int, frame: types.FrameType | None) -> None:
        """Write the fingerprints after `finished` steps, seen from the loop's frame."""
        if self._job.rank:
            return
        line = {
            "attempt": self._job.attempt,
            "step": finished,
            "world_size": self._job.world_size,
            "tracked": {
                name: _packed_hash(t.value) for name, t in self._job.keeper.objects.items()
            },
            "random": _random_hash(),
            "amplifiers": [] if self._bitwise else self._amplifiers(),
            "iterating": self._iterating(),
            "variables": self._variables(frame),
        }
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _amplifiers(self) -> list[str]:
        """Return the names of optimizers that make much of the last bits of a sum."""
        objects = self._job.keeper.objects
        return [n for n, item in objects.items() if isinstance(item.value, torch.optim.LBFGS)]

    def _iterating(self) -> list[str]:
        """Return the names of models whose weights depend on how often a rank has used them."""
        objects = self._job.keeper.objects
        models = [(n, i.value) for n, i in objects.items() if isinstance(i.value, torch.nn.Module)]
        return [n for n, model in models if any(map(_has_spectral_norm, model.modules()))]

    def _variables(self, frame: types.FrameType | None) -> dict[str, dict[str, str]]:
        known = self._known()
        found = self._attributes()
        waiting = collections.deque(visible(frame))
        while waiting:
            name, value = waiting.popleft()
            if id(value) in known and isinstance(value, torch.optim.Optimizer):
                # SAM and the like step by another one, whose state is seldom in their own.
                inner = [(f"{name}.{part}", item) for part, item in vars(value).items()]
                waiting.extend(each for each in inner if isinstance(each[1], torch.optim.Optimizer))
            if name.startswith("__") or name in found or _is_known(value, known):
                continue
            kind = _asked(partial(_kind, value))
            if kind is None:
                continue
            if kind == "object" and name.count(".") < _DEEPEST:
                # Its parts say more than the whole: `trainer.ema` rather than `trainer`.
                waiting.extend((f"{name}.{part}", item) for part, item in vars(value).items())
                known.add(id(value))
                continue
            digest = _Digest(known)
            for part in _generators_in(value) or [value]:
                digest.add(part, 0)
            found[name] = {"kind": kind, "type": type(value).__name__, "hash": digest.hex()}
            if kind in ("object", "tensors", "module") and self._mirrors_a_model(value):
                found[name]["mirrors"] = "weights"
        return found

    def _attributes(self) -> dict[str, dict[str, str]]:
        """Return the plain values that tracked modules have beside their `state_dict`."""
        found: dict[str, dict[str, str]] = {}
        for name, item in self._job.keeper.objects.items():
            if not isinstance(item, TrackedModule):
                continue
            for path, module in item.bare.named_modules(prefix=name):
                for attribute, value in vars(module).items():
                    if isinstance(value, (bool, int, float, str)) and attribute[0] != "_":
                        digest = _Digest(set())
                        digest.add(value, 0)
                        found[f"{path}.{attribute}"] = {
                            "kind": "attribute",
                            "type": type(value).__name__,
                            "hash": digest.hex(),
                        }
        return found

    def _mirrors_a_model(self, value: Any) -> bool:
        """Return True if `value` holds tensors of the shapes of a tracked model: an average."""
        shapes = collections.Counter(_shapes(value, 0))
        for item in self._job.keeper.objects.values():
            if isinstance(item.value, torch.nn.Module):
                wanted = collections.Counter(tuple(p.shape) for p in item.value.parameters())
                if wanted and not wanted - shapes:
                    return True
        return False

    def _known(self) -> set[int]:
        """Return the ids of what is tracked already, and of what a tracked module wraps."""
        known: set[int] = set()
        for item in self._job.keeper.objects.values():
            known.add(id(item.value))
            if isinstance(item.value, torch.nn.Module):
                known.update(id(module) for module in item.value.modules())
                known.update(map(id, _tensors_of(item.value)))
        return known


def _is_known(value: Any, known: set[int]) -> bool:
    """Return whether a variable is tracked, or wraps nothing but what is: `DDP(model)`."""
    if id(value) in known:
        return True
    held = _asked(partial(_tensors_of, value)) if isinstance(value, torch.nn.Module) else None
    return bool(held) and all(id(tensor) in known for tensor in held or ())


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _has_spectral_norm(module: torch.nn.Module) -> bool:
    """Return whether a module is one of torch's two spectral norms, or has the older as a hook."""
    parts = [module, *module._forward_pre_hooks.values()]
    return any(type(part).__name__.endswith("SpectralNorm") for part in parts)


def _kind(value: Any) -> str | None:
    """Return what sort of state a variable is, or None if it is none."""
    if isinstance(value, (types.ModuleType, types.FunctionType, type)):
        return None
    if random_accessors(value) is not None or _generators_in(value):
        return "random"
    if type(value).__module__.startswith("spotguard."):
        return None
    if isinstance(value, types.GeneratorType) or _is_iterator(value):
        return "sampler"
    if isinstance(value, torch.nn.Module):
        return "module" if any(True for _ in value.state_dict()) else None
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if type(value).__name__.endswith("DataLoaderIter"):
        return "sampler"
    if isinstance(value, (bool, int, float, str)):
        return "value"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, (dict, list, tuple, set)):
        return "tensors" if _holds_tensors(value, 0) else "value"
    if callable(getattr(value, "state_dict", None)):
        return "stateful"
    if isinstance(value, torch.utils.data.Dataset) or not hasattr(value, "__dict__"):
        return None
    ours = type(value).__module__ == "__main__" or _holds_tensors(vars(value), 0)
    return "object" if ours else None


def _asked(look: Callable[[], T]) -> T | None:
    """Return what `look` finds out of an object; None if the object's own code raises."""
    try:
        return look()
    except Exception:  # noqa: BLE001 - foreign code, such as a state_dict() that is not ready yet
        return None


def _shapes(value: Any, depth: int) -> list[tuple[int, ...]]:
    if isinstance(value, torch.Tensor):
        return [tuple(value.shape)]
    if isinstance(value, torch.nn.Module):
        return [tuple(p.shape) for p in value.parameters()]
    if depth >= _DEEPEST:
        return []
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dict__"):
        value = list(vars(value).values())
    if not isinstance(value, (list, tuple)):
        return []
    return [shape for item in value[:_MOST_ITEMS] for shape in _shapes(item, depth + 1)]


def _is_iterator(value: Any) -> bool:
    """Return True for an iterator over a list, a range and the like, that knows what is left."""
    return hasattr(value, "__next__") and hasattr(value, "__length_hint__")


def _generators_in(value: Any) -> list[Any]:
    """Return the random generators that a dataset, or a loader's dataset, leads to."""
    dataset = value.dataset if type(value).__name__ == "ElasticLoader" else value
    if not isinstance(dataset, torch.utils.data.Dataset):
        return []
    found = Walker(most=_MOST_ITEMS, follows_globals=True).walk([("", dataset)]).values()
    return [leaf.where() for leaf in found if leaf.kind == "random" and leaf.where]


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return True
    if depth >= _DEEPEST or not isinstance(value, (dict, list, tuple, set)):
        return False
    items = list(value.values() if isinstance(value, dict) else value)[:_MOST_ITEMS]
    return any(_holds_tensors(item, depth + 1) for item in items)


class _Digest:
    """Hashes any value as far as it can be looked into; what cannot be is left out."""

    def __init__(self, known: set[int]) -> None:
        self._hash = xxhash.xxh3_128()
        self._known = set(known)

    def hex(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any, depth: int) -> None:
        if id(value) in self._known or depth > _DEEPEST:
            return
        accessors = random_accessors(value)
        if accessors is not None:
            self.add(accessors[0](value), depth + 1)
        elif value is None or isinstance(value, (bool, int, float, str, bytes, complex)):
            self._hash.update(f"{type(value).__name__}:{value!r};".encode())
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, dict):
            # Sorted, because loading a state may reorder a dict that means the same.
            for key, item in sorted(value.items(), key=lambda pair: repr(pair[0]))[:_MOST_ITEMS]:
                self._hash.update(f"{key!r}=".encode())
                self.add(item, depth + 1)
        elif isinstance(value, (list, tuple)):
            for item in value[:_MOST_ITEMS]:
                self.add(item, depth + 1)
        else:
            _asked(partial(self._add_object, value, depth))

    def _add_tensor(self, value: torch.Tensor) -> None:
        self._hash.update(f"{value.dtype}{tuple(value.shape)}".encode())
        self._hash.update(flat_bytes(value.cpu()).numpy().data)

    def _add_object(self, value: Any, depth: int) -> None:
        if isinstance(value, (types.ModuleType, types.FunctionType, type)):
            return
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            self._hash.update(value.tobytes())
            return
        self._known.add(id(value))  # a cycle ends here
        if _is_iterator(value):
            self._hash.update(str(operator.length_hint(value)).encode())
        elif isinstance(value, types.GeneratorType):
            self.add(dict(value.gi_frame.f_locals) if value.gi_frame else {}, depth + 1)
        elif type(value).__name__.endswith("DataLoaderIter"):
            self._hash.update(str(getattr(value, "_num_yielded", None)).encode())
        elif callable(getattr(value, "state_dict", None)):
            self.add(value.state_dict(), depth + 1)
        elif hasattr(value, "__dict__"):
            self.add(vars(value), depth)


def _random_hash() -> str:
    digest = _Digest(set())
    digest.add(capture_random_states(), 0)
    return digest.hex()


def _packed_hash(value: Any) -> str:
    """Return a hash of an object's state; of one with `comparable_state()`, of that.

    In it there are no times, which differ from run to run.
    """
    packed = Packed()
    comparable = getattr(value, "comparable_state", None)
    try:
        if comparable is None:
            tree = tracked("x", value).pack("x", packed)
        else:
            tree = pack(comparable(), "x", packed)
    except UnsupportedState:
        return ""
    digest = _Digest(set())
    digest.add(json.dumps(tree, sort_keys=True), 0)  # loading reorders some dicts
    for name in sorted(packed.leaves):
        digest.add(packed.leaves[name].tensor, 0)
    return digest.hex()
