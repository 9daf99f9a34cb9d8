"""Tells of state that a training carries from step to step, and that no checkpoint has.

`run.track(model=model)` saves what `model.state_dict()` says. A metric whose states are not
persistent, a buffer of `persistent=False`, a tensor or a count in an attribute is lost in a resume,
and nothing fails. So after each of the first steps of an attempt, and of the first epoch that
begins in it, the first rank looks at all that it can reach from what is tracked, and from the
variables of the loop. What has changed in both of two steps, is carried on, and lies under no saved
part is told, once, by its path. After these steps the check costs nothing.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any

import torch

from spotguard.runtime.checks.carried import is_carried
from spotguard.runtime.checks.hashes import PLAIN
from spotguard.runtime.checks.reachable import (
    Averages,
    code_around,
    is_of_torch,
    module_of,
    name_of,
    saved_whole,
    tracked_roots,
)
from spotguard.runtime.checks.schedules_beside import schedules_beside
from spotguard.runtime.checks.script import frame_of_script, has_loop_of_its_own, visible
from spotguard.runtime.checks.walker import (
    StateLeaf,
    Walker,
    changed,
    is_installed,
    object_dict,
)
from spotguard.runtime.state.tracked import TrackedModule, TrackedStateful
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from spotguard.runtime.state.tracked import Tracked

_LOOKS = 3
_MOST = 20_000
_MOST_S = 0.1
"""For one look: at a model of many thousand modules it sees a part."""
_MOST_NAMED = 4


class UntrackedState:
    """Looks after the first steps; for the loop's thread."""

    def __init__(
        self,
        objects: Mapping[str, Tracked],
        tell: Callable[[str], None],
        data: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """`data`: what samples are read from, which `dataset_state` looks after."""
        self._data = data
        self._objects = objects
        self._tell = tell
        self._left = _LOOKS
        self._again = True
        """True until the first epoch that begins in this attempt was looked at, too."""
        self._epoch = 0
        self._frame: types.FrameType | None = None
        self._holders: set[str] = set()
        self._tracked: list[dict[str, StateLeaf]] = []
        self._script: list[dict[str, StateLeaf]] = []

    def after_step(self, epoch: int) -> bool:
        """Look, if this is one of the first steps; return whether there is anything left to do."""
        if not self._left:
            if epoch == self._epoch:
                return True
            self._left, self._again = _LOOKS, False
        self._epoch = epoch
        self._look()
        self._left -= 1
        if self._left:
            return True
        told = self._judge()
        self._tracked, self._script, self._frame = [], [], None
        return self._again and not told

    def _look(self) -> None:
        frame = self._frame = frame_of_script()
        walker = Walker(saved_whole(self._objects), most=_MOST, most_s=_MOST_S)
        self._tracked.append(walker.walk(tracked_roots(self._objects)))
        if frame is None or not has_loop_of_its_own(frame):
            self._script.append({})
            return
        # A loop's variable may be one tensor of an average, which is looked for as a whole.
        passed_over = (torch.Tensor, *PLAIN)
        roots = [(n, value) for n, value in visible(frame) if not isinstance(value, passed_over)]
        if self._again and self._left == _LOOKS:
            self._tell_of_schedules(roots, walker.seen)
        self._holders = {name for name, value in roots if self._holds_tracked(value)}
        of_data = Walker(walker.seen, most=_MOST, most_s=_MOST_S, follows_globals=True)
        of_data.walk(self._data)
        beside = Walker(of_data.seen, most=_MOST, most_s=_MOST_S)
        self._script.append(beside.walk(roots))

    def _tell_of_schedules(self, variables: list[tuple[str, Any]], saved: set[int]) -> None:
        """Tell of schedules that are not tracked: one may be stepped once an epoch only."""
        values = [item.value for item in self._objects.values()]
        optimizers = [value for value in values if isinstance(value, torch.optim.Optimizer)]
        for schedule in schedules_beside(optimizers, values):
            if id(schedule) in saved:  # a tracked object holds it
                continue
            names = [name for name, value in variables if value is schedule]
            self._tell(
                f"{names[0] if names else 'a schedule'}, the {type(schedule).__name__} of a "
                "tracked optimizer, is not tracked, and no checkpoint has it: a resume begins its "
                "learning rates anew; track it: run.track("
                f"schedule={names[0] if names else 'schedule'})"
            )

    # ------------------------------------------------------------------ what is saved

    def _saved(self) -> tuple[set[str], set[int]]:
        """Return the paths that states name, and the hashes of what is in them."""
        paths: set[str] = set()
        marks: set[int] = set()
        for name, item in self._objects.items():
            state: Any = None
            if isinstance(item, TrackedModule):
                state = item.bare.state_dict()
                owners = (key.rpartition(".")[0] for key in state if key.endswith("_extra_state"))
                paths |= {f"{name}.{owner}" if owner else name for owner in owners}
            elif isinstance(item, TrackedStateful):
                state = item.read()
            elif isinstance(item, TrackedOptimizer):
                state = item.value.state_dict()
                paths |= {f"{name}.state", f"{name}.param_groups"}
            if not isinstance(state, dict):
                continue
            for key in state:
                paths |= {f"{name}.{key}", f"{name}._{key}"}
            found = Walker(most=_MOST, most_s=_MOST_S).walk([("", state)])
            marks |= {each.mark for each in found.values() if each.kind in ("tensor", "random")}
        return paths, marks

    # ------------------------------------------------------------------ what is told

    def _judge(self) -> bool:
        code = code_around(self._frame)
        paths, marks = self._saved()
        found = [
            leaf
            for leaf in _carried(self._tracked, code)
            if not _is_under(leaf.path, paths)
            and leaf.mark not in marks
            and not is_of_torch(leaf.owner, leaf.kind)
        ]
        beside = [leaf for leaf in _carried(self._script, code) if self._is_lost(leaf)]
        named = list(dict.fromkeys(map(name_of, [*found, *self._mirrors(), *beside])))
        if named:
            self._tell(_told(named, found[0] if found else None))
        return bool(named)

    def _is_lost(self, leaf: StateLeaf) -> bool:
        """Return whether a leaf that only a variable of the script leads to is state for sure.

        Counts and sums of a loop's own are mostly for its log. So are metrics that nobody tracks.
        """
        if leaf.kind == "random" or leaf.of_kind == "position":
            return True
        owner = leaf.owner
        root = leaf.path.partition(".")[0].partition("[")[0].removeprefix("len(")
        return root in self._holders and owner is not None and not is_installed(module_of(owner))

    def _holds_tracked(self, value: Any) -> bool:
        """Return whether a script's own object trains: it has a tracked object, or is a module."""
        if is_installed(type(value).__module__) or isinstance(value, type):
            return False
        held = object_dict(value)
        if held is None:
            return False
        if isinstance(value, torch.nn.Module):
            return True
        ids = {id(item.value) for item in self._objects.values()}
        ids |= {id(item.bare) for item in self._objects.values() if isinstance(item, TrackedModule)}
        return any(id(part) in ids for part in itertools.islice(held.values(), 1000))

    def _mirrors(self) -> list[StateLeaf]:
        """Return collections of tensors like a model's that follow it: averages of weights."""
        averages = Averages(self._objects)
        groups: dict[str, list[StateLeaf]] = collections.defaultdict(list)
        for leaf in _changed_twice(self._script):
            if leaf.kind == "tensor" and leaf.of_kind in ("tensors", "module", "stateful"):
                groups[leaf.of].append(leaf)
        found = [leaves[0] for leaves in groups.values() if averages.may_be(leaves)]
        return [leaf._replace(path=leaf.of) for leaf in found]


def _changed_twice(looks: list[dict[str, StateLeaf]]) -> Iterator[StateLeaf]:
    """Yield the leaves that were other ones at each look."""
    first, second, third = looks
    before = {new.path for _, new in changed(first, second)}
    for _, new in changed(second, third):
        if new.path in before:
            yield new


def _carried(looks: list[dict[str, StateLeaf]], code: list[types.CodeType]) -> Iterator[StateLeaf]:
    for leaf in _changed_twice(looks):
        if is_carried(looks[1][leaf.path], leaf, code):
            yield leaf


def _is_under(path: str, saved: set[str]) -> bool:
    """Return whether a path is one of those that are saved, or leads through one."""
    path = path.removeprefix("len(").rstrip(")")
    while path:
        if path in saved:
            return True
        cut = max(path.rfind("."), path.rfind("["))
        path = path[:cut] if cut > 0 else ""
    return False


def _told(names: list[str], first: StateLeaf | None) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    way_out = "track it: run.track(...), or run.track_values(object, name) for plain values"
    if first is not None and isinstance(first.owner, torch.nn.Module):
        way_out = "make it a part of state_dict()"
        if first.kind == "tensor":
            way_out += ": a buffer with persistent=True"
        if hasattr(type(first.owner), "persistent"):
            way_out = "call persistent(True) on it before run.track()"
        way_out += "; plain values: run.track_values(module, name)"
    return (
        f"{', '.join(names[:_MOST_NAMED])}{more} changes in each step, and no checkpoint has it: a "
        f"resume begins it anew; {way_out}; or make it of step.number"
    )
