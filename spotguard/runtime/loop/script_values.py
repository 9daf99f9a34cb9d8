"""The plain values that a script sets up, beside those that its checkpoint holds.

A resume gives optimizers, schedulers, scalers and counters the checkpoint's values. So a script
that sets up another learning rate today trains on with the old one. Each checkpoint keeps what the
script had set up; a resume compares, and says what differs. With `hyperparameters="script"` what
the script sets up otherwise than then counts, and its schedules are counted anew.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections import Counter
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    MultiplicativeLR,
    ReduceLROnPlateau,
)

from spotguard.errors import SpotguardError, UsageError
from spotguard.events.event import JobEvent
from spotguard.runtime.process.finite import FINITE
from spotguard.runtime.state.rng import kept_random_states
from spotguard.runtime.state.tracked import (
    RandomGenerator,
    TrackedModule,
    TrackedStateful,
    TrackedValue,
)
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer
from spotguard.runtime.state.tree import Packed, pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.job import Job
    from spotguard.runtime.state.tracked import Tracked

log = logging.getLogger("spotguard")

ARGUMENT: Final = 'spotguard.init(hyperparameters="script")'
_CLASS: Final = "class"
_TRAINED: Final = "trained parameters"
_PLACES = (0, 1, 10, 100, 1000, 10_000)
_FUNCTION: Final = "function at steps 0, 1, 10, 100, 1000, 10000"
_REFUSES = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""What a script's function raises at a step that its schedule does not have."""
_SCRIPTS_OWN = (_TRAINED, _FUNCTION)
"""What no checkpoint holds, so that the script's counts in any case."""
_MOST_VALUES = 64
"""Of an object: what has more of them keeps records, and no hyperparameters."""
_LONGEST = 16
_MOST_NAMED = 12
_PLACE_OF_SCHEDULE = (
    *("last_epoch", "base_lrs", "_last_lr", "_step_count", "_get_lr_called_within_step"),
    *("_is_initial", "_initial_step"),
)
"""What a schedule's state has of its place, and of the rates that its optimizer has, too."""

_Values = dict[str, Any]
"""Plain values as JSON, by their keys; of an optimizer's groups a list where they differ."""


class SetUpDifference(NamedTuple):
    """What a script sets up otherwise than it did in the checkpoint."""

    message: str
    differences: list[list[Any]]
    """Of each the object, the key, the old value and the new one."""
    counts: bool
    """True if the script's values count."""


class ScriptValues:
    """What the tracked objects were set up with, before anything was restored."""

    def __init__(self, objects: Mapping[str, Tracked], *, count: bool) -> None:
        """`count`: what the script sets up otherwise than before counts, not the checkpoint."""
        self._objects = objects
        self._count = count
        self._now = {name: _values_of(item) for name, item in objects.items()}
        self._groups = {
            name: [_without_parameters(group) for group in item.value.param_groups]
            for name, item in objects.items()
            if isinstance(item, TrackedOptimizer)
        }
        self._schedules = {
            name: (scheduler, copy.deepcopy(scheduler.state_dict()) if count else {})
            for name, item in objects.items()
            if (scheduler := _scheduler(item)) is not None
        }
        self.in_effect: dict[str, _Values] = self._now
        """The set-up whose values are those of the training: what checkpoints keep."""

    def check_ranks(self, coordinator: Coordinator, rank: int) -> None:
        """Raise `UsageError` if another rank sets up its optimizers or schedules otherwise."""
        kinds = (TrackedOptimizer, TrackedStateful)
        mine = {
            name: self._now[name]
            for name, item in self._objects.items()
            if isinstance(item, kinds)
            and (isinstance(item, TrackedOptimizer) or name in self._schedules)
        }
        told = coordinator.first("script_values", json.dumps(mine))
        for name, key, theirs, value in _differences(json.loads(told), mine):
            raise UsageError(
                f"run.track: rank {rank} sets up {name} with {key} {_shown(value)}, another rank "
                f"with {_shown(theirs)}",
                hint="give all ranks the same values: only the first one's would be saved",
            )

    def refuse_other_classes(self, manifest: Manifest) -> None:
        """Raise unless the classes of torch's optimizers and schedules are the checkpoint's.

        Raises:
            UsageError: their states mean something else.
        """
        for name, key, was, now in _differences(_stored(manifest), self._now):
            if key != _CLASS or (self._count and name in self._schedules):
                continue
            if not (_is_torchs(was) and _is_torchs(now)):
                continue
            way = (
                f"{ARGUMENT} begins it anew and brings it to where the training is"
                if name in self._schedules
                else "track it under another name and pass strict=False to run.steps(): it begins "
                "anew"
            )
            raise UsageError(
                f"{name} was a {_shown(was)} in the checkpoint at step {manifest.step}, and is a "
                f"{_shown(now)}: it cannot take that state",
                hint=f"use the class of the checkpoint to resume; {way}",
            )

    def apply(self, manifest: Manifest) -> SetUpDifference | None:
        """Return what the script sets up otherwise than before.

        Call it once all is restored. What counts is in effect then. None if nothing differs.
        """
        stored = _stored(manifest)
        found = [
            difference
            for difference in _differences(stored, self._now)
            if difference[1] != "lr" or not self._differs(stored, difference[0], "initial_lr")
        ]
        self.in_effect = {
            name: {**values, **({} if self._count else stored.get(name, {}))}
            for name, values in self._now.items()
        }
        for name, values in self._now.items():
            self.in_effect[name] |= {key: values[key] for key in _SCRIPTS_OWN if key in values}
        if not found:
            return None
        if self._count:
            self._take_up(stored)
        said = ", ".join(_words(*difference) for difference in found[:_MOST_NAMED])
        said += f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        by_script = [difference for difference in found if difference[1] in _SCRIPTS_OWN]
        listed = [list(difference) for difference in found]
        begun = "the script sets up other values than before"
        if self._count or len(by_script) == len(found):
            return SetUpDifference(f"{begun}, which count now: {said}", listed, True)
        message = f"{begun}, but the checkpoint's count: {said}; {ARGUMENT} takes the script's"
        return SetUpDifference(message, listed, False)

    def _differs(self, stored: Mapping[str, _Values], name: str, key: str) -> bool:
        mine = self._now[name].get(key)
        return stored.get(name, {}).get(key, mine) != mine

    # ------------------------------------------------------------------ the script's count

    def _take_up(self, stored: Mapping[str, _Values]) -> None:
        changed: dict[str, set[str]] = {}
        for name, key, _, _ in _differences(stored, self._now):
            changed.setdefault(name, set()).add(key)
        for name, keys in changed.items():
            item = self._objects[name]
            if isinstance(item, TrackedOptimizer):
                self._change_groups(name, item.value, keys)
            elif name not in self._schedules and isinstance(item, (TrackedStateful, TrackedValue)):
                self._change(name, item, keys)
        for name, (scheduler, begun) in self._schedules.items():
            of = next((n for n in self._groups if self._is_of(n, scheduler)), None)
            rates = changed.get(of, set()) & {"lr", "initial_lr"} if of is not None else set()
            if name not in changed and not rates:
                continue
            if isinstance(scheduler, ReduceLROnPlateau):
                state = scheduler.state_dict()
                state.update({key: begun[key] for key in changed.get(name, ()) if key in begun})
                scheduler.load_state_dict(state)
            elif of is not None:
                self._count_anew(scheduler, begun, of)

    def _is_of(self, name: str, scheduler: Any) -> bool:
        optimizer = getattr(scheduler, "optimizer", None)
        value = self._objects[name].value
        return optimizer is value or getattr(optimizer, "optimizer", None) is value

    def _change_groups(self, name: str, optimizer: torch.optim.Optimizer, keys: set[str]) -> None:
        """Give the groups the script's values; a rate that a plateau has lowered stays so."""
        begun = self._groups[name]
        for group, script in zip(optimizer.param_groups, begun, strict=False):
            for key in keys & set(script):
                _put(group, key, script[key])

    def _change(self, name: str, item: TrackedStateful | TrackedValue, keys: set[str]) -> None:
        """Give an object the values that the script gave it."""
        state = copy.deepcopy(item.read())
        if not isinstance(state, dict):  # a plain value
            item.put(_from_json(self._now[name][""]))
            return
        for key in keys:
            *path, last = key.split("/")
            inner = state
            for part in path:
                inner = inner[part]
            inner[last] = _from_json(self._now[name][key])
        item.put(state)

    def _count_anew(self, scheduler: Any, begun: dict[str, Any], of: str) -> None:
        """Bring a schedule as the script sets it up to where the training is, step by step.

        Only so is it right for all of them: many get a rate from the one before.
        """
        optimizer = self._objects[of].value
        done = int(scheduler.last_epoch)
        groups = [_without_parameters(group) for group in optimizer.param_groups]
        for group, script in zip(optimizer.param_groups, self._groups[of], strict=False):
            for key, value in script.items():
                _put(group, key, copy.deepcopy(value))
        scheduler.load_state_dict(copy.deepcopy(begun))
        with kept_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer has stepped before it
            for _ in range(done):
                scheduler.step()
        before = self._groups[of]
        for group, script, was in zip(optimizer.param_groups, before, groups, strict=False):
            for key, value in was.items():
                by_schedule = key in ("lr", "initial_lr") or not _same(group[key], script.get(key))
                if not by_schedule:
                    _put(group, key, value)


def tell_of_resume(job: Job, values: ScriptValues, manifest: Manifest, total: int) -> None:
    """Take up what counts of the script's new values, and say all that a resume must not hide.

    Once all is restored; `total`: the steps in all that the script asks for.
    """
    if (found := values.apply(manifest)) is not None and job.rank == 0:
        log.log(logging.INFO if found.counts else logging.WARNING, "%s", found.message)
        job.reporter.event(
            JobEvent.HYPERPARAMETERS if found.counts else JobEvent.WARNING,
            message=found.message,
            differences=found.differences,
        )
    before = manifest.counters.get("total_steps")
    if climbs := climbing_again(job.keeper.objects, manifest.step, before, total):
        job.warn_of_script(climbs)
    if manifest.counters.get(FINITE) is False:
        job.warn_of_script(
            f"step {manifest.step} was saved with weights that are NaN or infinite, and training "
            "goes on with them; to go on from the checkpoint before, stop the run and delete "
            f"{manifest.prefix} from its store"
        )


def climbing_again(objects: Mapping[str, Tracked], first: int, before: Any, total: int) -> str:
    """Return what to say of cosine schedules that end before a run which was made longer; or "".

    Args:
        objects: The tracked objects, restored.
        first: Steps done.
        before: Steps in all, as the checkpoint knows.
        total: Steps in all, as the script asks for now.
    """
    if not isinstance(before, int) or total <= before or not first:
        return ""
    for name, item in objects.items():
        scheduler = _scheduler(item)
        for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
            if isinstance(each, CosineAnnealingLR) and each.T_max < total * each.last_epoch / first:
                return (
                    f"the run was {before} steps long and is {total} now, but {name} has T_max "
                    f"{each.T_max}: after it the rate climbs again. Set T_max up for all steps, "
                    f"and take it by {ARGUMENT}"
                )
    return ""


def _scheduler(item: Tracked) -> Any:
    """Return torch's scheduler that is tracked, also in what wraps it; None if it is none."""
    value = item.value
    if isinstance(item, TrackedStateful):
        inner = value if isinstance(value, LRScheduler) else value.__dict__.get("_scheduler")
        return inner if isinstance(inner, LRScheduler) else None
    return None


def _values_of(item: Tracked) -> _Values:
    """Return the plain values of an object as it is now."""
    if isinstance(item, TrackedModule):
        trained = sum(p.requires_grad for p in item.bare.parameters())
        return {_TRAINED: trained}
    kind = type(item.value)
    of = {_CLASS: f"{kind.__module__}.{kind.__qualname__}"}
    if isinstance(item, TrackedOptimizer):
        groups = [dict(_flat(_without_parameters(g))) for g in item.value.param_groups]
        keys = dict.fromkeys(key for group in groups for key in group)
        return {**of, **{key: _of_all([group.get(key) for group in groups]) for key in keys}}
    if isinstance(item, RandomGenerator):
        return {}
    try:
        state = item.read() if isinstance(item, (TrackedStateful, TrackedValue)) else {}
        schedule = _scheduler(item) is not None
        flat = dict(_flat(state if isinstance(state, dict) else {"": state}, schedule=schedule))
    except SpotguardError:
        return {}
    if len(flat) > _MOST_VALUES:
        return of if schedule else {}
    if isinstance(item.value, (LambdaLR, MultiplicativeLR)):
        flat[_FUNCTION] = _rates_of(item.value)
    return {**(of if isinstance(item, TrackedStateful) else {}), **flat}


def _rates_of(scheduler: LambdaLR | MultiplicativeLR) -> Any:
    """Return what the functions of a schedule, which are in no state, give at some places."""
    try:
        rates = [[float(f(n)) for n in _PLACES] for f in scheduler.lr_lambdas]
    except _REFUSES:
        return None
    return str([[f"{rate:.6g}" for rate in each] for each in rates]).replace("'", "")


def _of_all(values: list[Any]) -> Any:
    """Return what all groups have, or what each of them has."""
    return values[0] if all(value == values[0] for value in values) else {"each": values}


def _flat(
    state: Mapping[Any, Any], above: str = "", *, schedule: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a state as JSON, each with its path."""
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key or (schedule and key in _PLACE_OF_SCHEDULE):
            continue
        if schedule and isinstance(value, Counter):  # milestones
            yield f"{above}{key}", str(sorted(value.elements()))
        elif schedule and key == "_schedulers":
            for number, inner in enumerate(value):
                yield from _flat(inner, f"{above}{number}/", schedule=True)
        elif isinstance(value, dict):
            yield from _flat(value, f"{above}{key}/", schedule=schedule)
        elif isinstance(value, torch.Tensor):
            if value.numel() == 1 and above == "" and key == "lr":
                yield key, float(value)
        elif _is_plain(value):
            yield f"{above}{key}", pack(value, "", Packed())


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= _LONGEST and all(map(_is_number, value))
    return _is_number(value) or (isinstance(value, str) and len(value) <= 200)


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float)


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.copy(value) for key, value in group.items() if key != "params"}


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    """Give a group a value; a rate that is a tensor is filled, for others may hold it."""
    held = group.get(key)
    if isinstance(held, torch.Tensor):
        with torch.no_grad():
            held.fill_(float(value))
    else:
        group[key] = value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return float(one) == float(other) if other is not None else False
    return bool(one == other)


def _stored(manifest: Manifest) -> dict[str, _Values]:
    """Return the set-up that a checkpoint keeps; earlier versions did not."""
    told = manifest.counters.get("set_up")
    return {n: v for n, v in told.items() if isinstance(v, dict)} if isinstance(told, dict) else {}


def _differences(
    stored: Mapping[str, _Values], now: Mapping[str, _Values]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (object, key, old, new) of what both set-ups have, and have otherwise."""
    for name, values in now.items():
        was = stored.get(name, {})
        for key, value in values.items():
            if key in was and was[key] != value:
                yield name, key, was[key], value


def _words(name: str, key: str, was: Any, now: Any) -> str:
    before, after = _by_group(was), _by_group(now)
    key = "lr" if key == "initial_lr" else key
    if before is None and after is None:
        of = f"{name} {key}".rstrip()
        return f"{of} {_shown(was)} → {_shown(now)}"
    pairs = zip_longest(before or [was] * len(after or ()), after or [now] * len(before or ()))
    changed = [(number, a, b) for number, (a, b) in enumerate(pairs) if a != b]
    return ", ".join(f"{name} group {n} {key} {_shown(a)} → {_shown(b)}" for n, a, b in changed[:4])


def _by_group(value: Any) -> list[Any] | None:
    return (
        value["each"] if isinstance(value, dict) and isinstance(value.get("each"), list) else None
    )


def _shown(value: Any) -> str:
    """Return a stored value as a person wrote it."""
    plain = _from_json(value)
    if isinstance(plain, str) and _is_torchs(plain):
        return plain.rpartition(".")[2]
    return f"{plain:g}" if isinstance(plain, float) else str(plain)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and value.get("$") == "float":
        return float(value["value"])
    if isinstance(value, dict) and value.get("$") == "tuple":
        return tuple(map(_from_json, value["items"]))
    return list(map(_from_json, value)) if isinstance(value, list) else value


def _is_torchs(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("torch.optim.")
