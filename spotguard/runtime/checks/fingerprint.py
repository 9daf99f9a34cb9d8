"""Fingerprints of a training's whole state at each boundary, for `spotguard drill`.

A rank writes a line before each of its steps, and after the last one: a hash of each tracked
object, and of all else that the walker reaches from the tracked objects, from the variables that
the loop may still read, and from the data. The first line of an attempt tells what a resume gave
back. Where it differs from the undisturbed run's line of the same boundary, something was lost.
"""

from __future__ import annotations

import collections
import json
import os
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import UnsupportedState
from spotguard.runtime.checks.carried import is_carried
from spotguard.runtime.checks.hashes import Hasher, hash_of
from spotguard.runtime.checks.reachable import (
    Averages,
    code_around,
    is_of_torch,
    module_of,
    name_of,
    saved_whole,
    tracked_roots,
)
from spotguard.runtime.checks.script import frame_of_script, visible
from spotguard.runtime.checks.walker import StateLeaf, Walker, is_installed, of_module
from spotguard.runtime.state.rng import capture_random_states
from spotguard.runtime.state.tree import Packed, pack

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator, Sequence

    from spotguard.runtime.job import Job
    from spotguard.runtime.state.tracked import Tracked

_MOST = 200_000
"""Values at a boundary. Nobody waits for a drill's steps."""
_WHOLE = ("optimizer", "stateful", "position")
"""Kinds of objects that are told as one, whatever of them differs."""
_OF_TRAINING = ("torch.optim.", "torch.amp.", "torch.cuda.amp.", "types")
"""Installed modules whose objects keep a training's state in plain values."""


class Probe:
    """Appends one JSON line for each boundary; on all ranks, to the same file."""

    def __init__(self, path: str, job: Job, *, bitwise: bool) -> None:
        self._job = job
        self._bitwise = bitwise
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._before: dict[str, StateLeaf] = {}

    def record(self, finished: int, data: Sequence[tuple[str, Any]] = ()) -> None:
        """Write the fingerprints after `finished` steps; `data` is what samples are read from."""
        objects = self._job.keeper.objects
        line = {
            "attempt": self._job.attempt,
            "step": finished,
            "rank": self._job.rank,
            "world_size": self._job.world_size,
            "tracked": {name: _state_hash(name, item) for name, item in objects.items()},
            "not_promised": {
                f"{name}.{part}": hash_of(value)
                for name, item in objects.items()
                for part, value in _not_promised(item.value)
            },
            "random": Hasher(whole=True).add(capture_random_states()).digest(),
            "amplifiers": [] if self._bitwise else self._amplifiers(),
            "iterating": self._iterating(),
            "others": self._others(frame_of_script(), data),
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

    def _others(
        self, frame: types.FrameType | None, data: Sequence[tuple[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Return what is reached beside the tracked state, by the names to tell it by."""
        objects = self._job.keeper.objects
        of_tracked = self._walked(saved_whole(objects), tracked_roots(objects))
        # The data last: what a variable leads to is called after it.
        beside = {id(value) for _, value in data}
        of_script = self._walked(of_tracked.seen | beside, _roots(frame))
        names = {id(value): name for name, value in visible(frame)}
        named = [(names.get(id(value), name), value) for name, value in data]
        of_data = self._walked(of_script.seen - beside, named)
        leaves = {**of_data.found, **of_script.found, **of_tracked.found}
        code = code_around(frame)
        parts: dict[str, list[StateLeaf]] = collections.defaultdict(list)
        kinds: dict[str, tuple[str, str]] = {}
        for path, leaf in leaves.items():
            if path in of_tracked.found:
                name, kind, type_ = _within_tracked(leaf)
            elif path in of_script.found and _may_be_state(leaf):
                name, kind, type_ = _in_script(leaf)
            elif path not in of_script.found and leaf.kind == "random":
                name, kind, type_ = path, "random of data", leaf.type
            else:
                continue
            parts[name].append(leaf)
            kinds.setdefault(name, (kind, type_))  # of a list, before those of its items
        averages = Averages(objects)
        found = {}
        for name, held in parts.items():
            kind, type_ = kinds[name]
            is_average = kind in ("tensors", "module", "stateful") and averages.may_be(held)
            found[name] = {
                "kind": "average" if is_average else kind,
                "type": type_,
                "hash": hash_of(sorted((leaf.path, leaf.mark) for leaf in held)),
                "carried": any(self._is_carried(leaf, code) for leaf in held),
            }
        self._before = leaves
        return found

    def _walked(self, known: Any, roots: Any) -> _Walked:
        walker = Walker(known, whole=True, most=_MOST, follows_globals=True)
        return _Walked(walker, walker.walk(roots))

    def _is_carried(self, leaf: StateLeaf, code: list[types.CodeType]) -> bool:
        """Return whether a leaf was changed since the last boundary, and not merely made anew.

        Of the loop's own variables only those are here that it reads before it writes them.
        """
        old = self._before.get(leaf.path)
        if old is None or old.mark == leaf.mark:
            return False
        return leaf.owner is None or is_carried(old, leaf, code)


class _Walked:
    def __init__(self, walker: Walker, found: dict[str, StateLeaf]) -> None:
        self.seen = walker.seen
        self.found = found


def _roots(frame: types.FrameType | None) -> Iterator[tuple[str, Any]]:
    for name, value in visible(frame):
        yield name, value
        if frame is not None:
            for part, item in of_module(value, frame.f_code):
                yield f"{name}.{part}", item


def _within_tracked(leaf: StateLeaf) -> tuple[str, str, str]:
    """Return what to call a leaf that a tracked object leads to, its kind and its type."""
    if leaf.of_kind == "optimizer" and "." in leaf.of:
        return leaf.of, "optimizer", leaf.of_type
    kind = "own value" if is_of_torch(leaf.owner, leaf.kind) else f"own {leaf.kind}"
    return name_of(leaf), kind, leaf.type


def _in_script(leaf: StateLeaf) -> tuple[str, str, str]:
    if leaf.of_kind in _WHOLE:
        return leaf.of, leaf.of_kind, leaf.of_type
    is_part = leaf.kind == "tensor" and isinstance(leaf.owner, torch.nn.Module)
    if leaf.of_kind == "tensors" or (leaf.of_kind == "module" and is_part and leaf.slot is None):
        return leaf.of, leaf.of_kind, leaf.of_type
    return (leaf.path if leaf.kind == "random" else name_of(leaf)), leaf.kind, leaf.type


def _may_be_state(leaf: StateLeaf) -> bool:
    """Return whether a script may lose it: what a package keeps for itself is no matter of it."""
    module = module_of(leaf.owner) if leaf.owner is not None else ""
    if not module or not is_installed(module) or module.startswith(_OF_TRAINING):
        return True
    return leaf.kind == "tensor" and leaf.of_kind in ("module", "optimizer", "stateful", "tensors")


def _has_spectral_norm(module: torch.nn.Module) -> bool:
    """Return whether a module is one of torch's two spectral norms, or has the older as a hook."""
    parts = [module, *module._forward_pre_hooks.values()]
    return any(type(part).__name__.endswith("SpectralNorm") for part in parts)


def _state_hash(name: str, item: Tracked) -> int:
    """Return a hash of an object's state; of one with `comparable_state()`, of that.

    In it there are no times, which differ from run to run.
    """
    packed = Packed()
    comparable = getattr(item.value, "comparable_state", None)
    try:
        tree = item.pack(name, packed) if comparable is None else pack(comparable(), name, packed)
    except UnsupportedState:
        return 0
    leaves = {key: leaf.tensor for key, leaf in packed.leaves.items()}
    # Sorted, because loading a state may reorder a dict that means the same.
    return Hasher(whole=True).add(json.dumps(tree, sort_keys=True)).add(leaves).digest()


def _not_promised(value: Any) -> list[tuple[str, Any]]:
    """Return what an object says of itself that a resume may not keep, part by part."""
    told = getattr(value, "not_promised", None)
    return list(told().items()) if callable(told) else []
