"""What a dataset has beside its samples: settings that a script changes, and what reading changes.

A script may change its dataset as it trains (`data.mosaic = False`, `data.set_epoch(e)`), and a
sample may depend on more than its index. Three things make that exact, or tell it:

- Its settings (plain values) that the loop has changed are stored with each checkpoint, and
  set again by a resume. So what a script does at the top of an epoch counts once.
- Random generators that a dataset, its transforms or its collator hold are seeded for each
  micro-batch, as the global ones are: a sample is the same on any rank, in any worker, after any
  resume.
- Whatever else changes as samples are read is told, once. Each rank and worker has its own.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from spotguard.runtime.checks.carried import is_carried
from spotguard.runtime.checks.walker import StateLeaf, Walker, changed
from spotguard.runtime.state.rng import mix
from spotguard.runtime.state.tracked import RandomGenerator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

log = logging.getLogger("spotguard")

_MOST_VALUES = 2_000
"""For one look at a dataset: milliseconds. No clock decides, since all ranks must find the same."""
_MOST_SETTINGS = 64
_LONGEST_TEXT = 200
_READS_WATCHED = 3
_PLAIN = (bool, int, float, str, type(None))
_SECRET = ("token", "secret", "password", "passwd", "key", "auth", "credential")
_MISSING = object()


class DatasetSettings:
    """The plain values of a dataset, its transforms and its collator; reads a few of them fast."""

    def __init__(self, roots: Sequence[tuple[str, Any]] = ()) -> None:
        """Take them as they are now for what the script has set up."""
        self._roots = roots
        self._slots: dict[str, tuple[Any, Any]] = {}
        for leaf in _walked(roots).values() if roots else ():
            if _is_setting(leaf) and len(self._slots) < _MOST_SETTINGS:
                self._slots[leaf.path] = (leaf.slot, leaf.key)
        self._places = list(self._slots.values())
        self._set_up = self.now()
        self._at_boundary = self._set_up

    def now(self) -> list[Any]:
        """Return the values as they are."""
        return [slot.get(key) for slot, key in self._places]

    def differ(self, values: list[Any]) -> bool:
        """Return whether some value is another one than in what `now` has returned."""
        now = self.now()
        return any(a is not b and not _is_same(a, b) for a, b in zip(now, values, strict=True))

    def take(self) -> None:
        """Keep the values as they are, at a boundary."""
        if self._places:
            self._at_boundary = self.now()

    def changes(self, *, halfway: bool = False) -> dict[str, Any]:
        """Return which values the loop has changed, by their paths; JSON.

        `halfway` through a step, what was changed at the last `take`: the step is done again.
        """
        values = self._at_boundary if halfway else self.now()
        return {
            path: value
            for path, value, first in zip(self._slots, values, self._set_up, strict=True)
            if not _is_same(value, first) and _is_storable(value)
        }

    def restore(self, stored: Any) -> None:
        """Set the values that a checkpoint had, and all others as the script has set them up."""
        if not isinstance(stored, dict) or not self._places:
            return
        for path, first in zip(self._slots, self._set_up, strict=True):
            value = stored.get(path, first)
            slot, key = self._slots[path]
            if key in slot and _is_storable(value):
                slot[key] = value

    def hash(self) -> dict[str, int]:
        """Return hashes of all that the dataset has, but generators and what processes share."""
        return {
            leaf.path: leaf.mark
            for leaf in _walked(self._roots).values()
            if leaf.kind in ("value", "tensor") and not _is_shared(leaf)
        }


class SampleReading:
    """Stands around the reading of each micro-batch: seeds own generators, and watches the first.

    It goes into worker processes, where it finds their own copies of the generators.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, Any]],
        *,
        reseeds: bool,
        leaves_alone: Iterable[int] = (),
        watches: bool = False,
    ) -> None:
        self._roots = roots
        self._reseeds = reseeds
        self._leaves_alone = frozenset(leaves_alone)
        self._left = _READS_WATCHED if watches else 1
        self._watches = watches
        self._generators: list[RandomGenerator] = []
        self._before: dict[str, StateLeaf] = {}
        self._suspects: set[str] = set()
        self._told = False

    def begin(self, seed: int) -> None:
        """Seed the generators for a micro-batch that is about to be read."""
        if self._left:
            self._before = _walked(self._roots, self._leaves_alone)
            self._find(self._before)
        for number, generator in enumerate(self._generators):
            generator.reseed(mix(seed, number))

    def end(self, tell: Callable[[str], None] | None) -> None:
        """See what the reading has changed; `tell` hears of it, the log if there is none."""
        if not self._left:
            return
        self._left -= 1
        after = _walked(self._roots, self._leaves_alone)
        self._find(after)
        if self._watches:
            found = {
                new.path
                for old, new in changed(self._before, after)
                if self._is_lost(new) and is_carried(old, new)
            }
            if found & self._suspects and not self._told:  # in two of the reads, not only the first
                self._told = True
                (tell or log.warning)(_told(sorted(found & self._suspects)))
            self._suspects |= found
        self._before = {}

    def _is_lost(self, leaf: StateLeaf) -> bool:
        if leaf.kind == "random":
            return not self._reseeds
        return not _is_shared(leaf)

    def _find(self, leaves: Mapping[str, StateLeaf]) -> None:
        """Find the generators; some are made as the first sample is read."""
        if not self._reseeds:
            return
        values = [leaf.where() for leaf in leaves.values() if leaf.kind == "random" and leaf.where]
        own = [v for v in values if v is not None and not _is_global(v)]
        self._generators = [RandomGenerator(value) for value in own]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_before": {}, "_generators": []}


def _walked(roots: Sequence[tuple[str, Any]], known: Iterable[int] = ()) -> dict[str, StateLeaf]:
    walker = Walker(known, most=_MOST_VALUES, follows_globals=True)
    return walker.walk(roots)


def _is_setting(leaf: StateLeaf) -> bool:
    name = str(leaf.key).lower()
    return (
        leaf.kind == "value"
        and leaf.slot is not None
        and type(leaf.slot) is dict
        and leaf.type in ("bool", "int", "float", "str", "NoneType")
        and not leaf.is_length
        and name != "training"
        and not any(word in name for word in _SECRET)
    )


def _is_storable(value: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return False
    return type(value) in _PLAIN


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal; what a script puts there may be no such."""
    if type(one) not in _PLAIN or type(other) not in _PLAIN:
        return one is other
    return type(one) is type(other) and one == other


def _is_shared(leaf: StateLeaf) -> bool:
    """Return whether a tensor is in memory that worker processes share."""
    value: Any = leaf.where() if leaf.where is not None else None
    return isinstance(value, torch.Tensor) and not value.is_cuda and _shares_memory(value)


def _shares_memory(value: Any) -> bool:
    return bool(value.is_shared())


def _is_global(generator: Any) -> bool:
    """Return whether it is one of the generators that are seeded for each micro-batch anyway."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy.random.mtrand._rand if numpy is not None else None
    of_python = random.seed.__self__  # type: ignore[attr-defined]
    return any(generator is each for each in (torch.default_generator, of_numpy, of_python))


def _told(paths: list[str]) -> str:
    named = ", ".join(paths[:3]) + (" …" if len(paths) > 3 else "")
    return (
        f"{named} changes as samples are read: each rank and each worker process has its own, and "
        "a resume begins it anew; let a sample depend on its index and the seeded random "
        "generators alone"
    )
