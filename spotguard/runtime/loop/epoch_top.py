"""The top of an epoch's body, which a resume within the epoch comes to again.

    for epoch in run.epochs(loader, total=200):
        scheduler.step()
        order = torch.randperm(100, generator=generator)
        for step in epoch: ...

What such lines make for the rest of the epoch must be there again. What they change of the tracked
state is in the state already, once an epoch's steps have begun. So a checkpoint from then on holds,
beside the state, what they had changed of it, as it was before them. A resume puts that in place,
yields the epoch, and, where its steps go on, puts in place what it had restored. So each line finds
what it found the first time, and nothing counts twice.

That is for what is small: schedules, values, random generators, the settings of optimizers. Weights
and moments are left out, and what has more than 4 MB.

Weights are there as they were changed. So is what says that they were, or else a script that asks
would change them once more: the flags of optimizers are left out (of a schedule-free one `train()`
moves the weights, and says so there); and where weights were changed nothing is kept but random
generators, which say nothing of weights.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from spotguard.errors import SpotguardError, UnsupportedState
from spotguard.runtime.checkpoint.own_state import EpochBegun, random_tree
from spotguard.runtime.checkpoint.restore import put_random_back
from spotguard.runtime.distributed.wrappers import parameters_of
from spotguard.runtime.state.filling import Claims, may_share
from spotguard.runtime.state.inline_json import from_inline, inlined, to_inline
from spotguard.runtime.state.tracked import (
    SENSELESS,
    RandomGenerator,
    TrackedModule,
    TrackedStateful,
    TrackedValue,
)
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer
from spotguard.runtime.state.tree import Packed, tensor_names
from spotguard.runtime.state.weight_witness import TensorSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from spotguard.errors import StateMismatch
    from spotguard.runtime.checkpoint.training_state import Keeper
    from spotguard.runtime.checks.dataset_state import DatasetSettings
    from spotguard.runtime.state.tracked import Reading, Tracked

_RANDOM = "$random"
"""Stands for the global generators among the names of what is tracked."""
DATASET = "the dataset"
"""Stands for the dataset's settings among the names of what is tracked."""
_LARGEST_BYTES = 4 << 20
_LONGEST_KEPT = 1 << 16
"""Characters of a state that are put into a manifest, which each rank reads."""
_WEIGHTS = (
    "the script changes weights at the top of an epoch's body, before its first step: where an "
    "attempt resumes within the epoch, it changes them once more, unless it asks something tracked "
    "whether it has; else do so after the epoch's steps"
)
_VALUES = (
    "weights are written to at the top of an epoch's body, where it changes {names}, too: an "
    "attempt that resumes within the epoch comes there with {names} as changed already"
)
_NOT_SETTINGS = ("params", "param_names")


class _Part(Protocol):
    """A part of the small state, read and written as text."""

    def read(self) -> str | None:
        """Return its state; None if it cannot be had, or is too large."""
        ...

    def write(self, text: str) -> None:
        """Give it the state that was read."""
        ...


class EpochTop:
    """What the top of an epoch's body changes of the small state, and how it was before."""

    def __init__(
        self,
        keeper: Keeper,
        tell: Callable[[str], None],
        *,
        with_random: bool = False,
        settings: DatasetSettings | None = None,
    ) -> None:
        """Take the state of `keeper` for what it has restored; `tell` hears of the script, once.

        `with_random`: the global generators belong to it, as nothing seeds them at an epoch's top.
        `settings`: of the dataset, which the script may change there.
        """
        self._keeper = keeper
        self._tell = tell
        self._own = {*keeper.saver.generators.names, _RANDOM}
        """The names of what is another one on each rank."""
        self._parts = _parts_of(keeper.objects)
        if with_random:
            self._parts[_RANDOM] = _GlobalGenerators()
        if settings is not None:
            self._parts[DATASET] = _OfDataset(settings)
        self._draws = {n for n, item in keeper.objects.items() if isinstance(item, RandomGenerator)}
        self._draws.add(_RANDOM)
        self._optimizers = _optimizers_of(keeper.objects)
        self._flags: list[dict[str, bool]] = []
        """Those of all optimizers, as they were when the epoch was to be yielded."""
        self._weights = TensorSample(())
        """Of what optimizers train, as it was by then."""
        self._begun = self._restored = keeper.at.epoch_begun
        self._held: dict[str, str] = {}
        """What the state was like when the epoch was to be yielded."""
        self._epoch = 0
        self._is_open = False
        """True while the script is at the top."""
        self._comes_again = False
        """True if an earlier attempt has come to this epoch's top, and its state counts."""
        self._told = False

    def begin(self, epoch: int) -> None:
        """Make the state ready for what the script does before the steps of an epoch."""
        before, self._restored = self._restored, None  # it is of this attempt's first epoch
        self._epoch, self._is_open = epoch, True
        self._flags = _flags(self._optimizers)
        self._weights = TensorSample(parameters_of(self._optimizers))
        self._weights.take()
        states = {name: part.read() for name, part in self._parts.items()}
        self._held = {name: state for name, state in states.items() if state is not None}
        # What is large is not asked again: to be asked may cost it much.
        self._parts = {name: self._parts[name] for name in self._held}
        self._comes_again = before is not None and before.epoch == epoch
        if before is not None and self._comes_again:
            self._put_before(before)

    def end(self) -> EpochBegun | None:
        """Take it that the script is done with the top; return what a checkpoint has of it.

        What it has changed a second time is put back as it was restored.
        """
        if not self._is_open:
            return self._begun
        self._is_open = False
        exchanged = self._keeper.weights_are_exchanged
        if exchanged:
            self._tell_of_weights()
        changed = {n: held for n, held in self._held.items() if self._parts[n].read() != held}
        if self._comes_again:
            self._put_back(changed)
        else:
            moved = exchanged or self._some_were_written_to()
            self._tell_of_values(changed.keys() - self._draws if moved else ())
            kept = {n: held for n, held in changed.items() if not moved or n in self._draws}
            self._begun = self._kept(kept)
        self._weights = TensorSample(())  # the script may drop weights that the old one holds
        return self._begun

    def _tell_of_weights(self) -> None:
        """Tell it once, unless an optimizer has moved them that knows by a flag that it has."""
        if not self._told and _flags(self._optimizers) == self._flags:
            self._told = True
            self._tell(_WEIGHTS)

    def _tell_of_values(self, names: Iterable[str]) -> None:
        """Tell it once of values that are not kept as they were before the top."""
        if not self._told and any(names):
            self._told = True
            self._tell(_VALUES.format(names=", ".join(sorted(names))))

    def _some_were_written_to(self) -> bool:
        """Return True if some weight was, of which the witness looks at a few only.

        One that was exchanged for a while was, too: then too little is kept, which is told.
        """
        return bool(self._weights.changed())

    def _put_before(self, begun: EpochBegun) -> None:
        states = {**begun.before, **begun.own}
        for name, part in self._parts.items():
            if name in states:
                try:
                    part.write(json.dumps(states[name]))
                except (*SENSELESS, SpotguardError):  # it comes from a store, and may be anything
                    part.write(self._held[name])

    def _put_back(self, changed: Mapping[str, str]) -> None:
        for name, held in changed.items():
            self._parts[name].write(held)
        best = self._keeper.best
        best.now = best.at_boundary  # `run.best` was told before

    def _kept(self, changed: Mapping[str, str]) -> EpochBegun:
        states = {n: json.loads(text) for n, text in changed.items() if len(text) <= _LONGEST_KEPT}
        of_rank = self._own | self._keeper.saver.parts.names
        own = {name: state for name, state in states.items() if name in of_rank}
        shared = {name: state for name, state in states.items() if name not in of_rank}
        return EpochBegun(self._epoch, shared, own)


def _parts_of(objects: Mapping[str, Tracked]) -> dict[str, _Part]:
    """Return the small parts; optimizers last, whose settings a schedule may set as it loads."""
    found: dict[str, _Part] = {}
    for name, item in objects.items():
        # A gradient scaler changes with the weights, and its state waits for the device.
        if isinstance(item, (TrackedValue, TrackedStateful)) and not isinstance(
            item.value, torch.amp.GradScaler
        ):
            found[name] = _Object(name, item, objects)
    for name, item in objects.items():
        if isinstance(item, TrackedOptimizer):
            found[name] = _Settings(name, item.value)
    return found


def _optimizers_of(objects: Mapping[str, Tracked]) -> list[torch.optim.Optimizer]:
    return [item.value for item in objects.values() if isinstance(item, TrackedOptimizer)]


def _memory_of(objects: Mapping[str, Tracked]) -> Claims:
    """Return where modules and optimizers have their tensors."""
    tensors: list[Any] = []
    for item in objects.values():
        if isinstance(item, TrackedModule):
            tensors += [*item.bare.parameters(), *item.bare.buffers()]
    for optimizer in _optimizers_of(objects):
        for entries in optimizer.state.values():
            tensors += entries.values() if isinstance(entries, dict) else ()
    memory = Claims()
    for tensor in filter(may_share, tensors):
        memory.add("training", tensor)
    return memory


class _Object:
    """A tracked object with a state of its own."""

    def __init__(self, name: str, item: Tracked, objects: Mapping[str, Tracked]) -> None:
        self._name = name
        self._item = item
        self._objects = objects
        """All that is tracked: what of it may be in this one for the time being."""

    def read(self) -> str | None:
        packed = Packed()
        try:
            tree = self._item.pack(self._name, packed)
        except UnsupportedState:  # which a save tells
            return None
        leaves = packed.leaves.values()
        in_parts = any(leaf.global_shape is not None for leaf in leaves)
        if in_parts or sum(leaf.size_bytes for leaf in leaves) > _LARGEST_BYTES:
            return None
        return json.dumps(inlined(tree, packed))

    def write(self, text: str) -> None:
        stored = json.loads(text)
        self._item.restore(
            self._name, stored["tree"], cast("Reading", _Inline(stored, self._objects))
        )()


class _Inline:
    """The tensors of a state that has them in its text, for a `restore` that asks for them."""

    def __init__(self, stored: dict[str, Any], objects: Mapping[str, Tracked]) -> None:
        self._stored = stored
        self._objects = objects

    def later(self, tree: Any, beside: Any = None, *, fills: bool = False) -> Callable[[], Any]:
        # The best weights may be the model's own until they are copied: to fill those would
        # change the model.
        memory = _memory_of(self._objects) if fills and tensor_names(tree) else Claims()

        def may_fill(present: torch.Tensor) -> bool:
            return fills and may_share(present) and memory.are_one("state", present)

        return lambda: from_inline({**self._stored, "tree": tree}, beside, fills=may_fill)

    def claims(self, name: str, target: torch.Tensor) -> None:
        pass  # of one object only: what shares memory with another one is as it was before

    def differs(self, problem: StateMismatch) -> None:
        raise problem


class _Settings:
    """The parameter groups of an optimizer: rates, decays, and how many there are."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name = name
        self._optimizer = optimizer
        self._aside: list[dict[str, Any]] = []
        """Groups that were not there yet before the top: it adds them, or knows that it has."""

    def read(self) -> str | None:
        groups = [_settings(group) for group in self._optimizer.param_groups]
        try:
            return json.dumps(to_inline(groups, self._name))
        except UnsupportedState:
            return None

    def write(self, text: str) -> None:
        kept = from_inline(json.loads(text))
        groups = self._optimizer.param_groups
        if len(groups) < len(kept):
            groups += self._aside[len(groups) - len(kept) :]
        elif len(groups) > len(kept):
            self._aside = groups[len(kept) :]
            del groups[len(kept) :]
        for group, values in zip(groups, kept, strict=False):
            _put(_settings(values), group)  # without the flags that another version has stored


class _OfDataset:
    """The plain values of the dataset that the loop has changed."""

    def __init__(self, settings: DatasetSettings) -> None:
        self._settings = settings

    def read(self) -> str:
        return json.dumps(self._settings.changes(), sort_keys=True)

    def write(self, text: str) -> None:
        self._settings.restore(json.loads(text))


class _GlobalGenerators:
    """The global random generators of this rank."""

    def read(self) -> str:
        return json.dumps(random_tree(None))

    def write(self, text: str) -> None:
        put_random_back(json.loads(text))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in group.items()
        if key not in _NOT_SETTINGS and not isinstance(value, bool)
    }


def _flags(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, bool]]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [
        {k: value for k, value in group.items() if value is True or value is False}
        for group in groups
    ]


def _put(values: Mapping[str, Any], group: dict[str, Any]) -> None:
    """Give a group its settings; a rate that is a tensor stays the one that kernels know."""
    for key, value in values.items():
        held = group.get(key)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
            held.detach().copy_(value)
        else:
            group[key] = value
