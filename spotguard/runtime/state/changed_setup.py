"""What the loop changed of what the script had set up: thawed parameters, groups, layers.

A script that thaws its backbone in the third epoch does so once. An attempt that begins after it
runs the set-up again, in which the backbone is frozen, and never comes to that line: it would go on
with other gradients, and nothing would say so. So a checkpoint tells what the loop had changed, and
a resume repeats it, if the set-up is still the same. Layers that the loop adds or reshapes it
cannot make; so it is told, at the first save that has them, that no attempt takes that checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from spotguard.runtime.state.module_wrappers import key_before, plain_keys
from spotguard.runtime.state.tracked import TrackedModule
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from spotguard.runtime.state.tracked import Tracked

log = logging.getLogger("spotguard")

_Place = tuple[str, str]
"""A tracked module's name, and a parameter's in it."""
_Shape = tuple[int, ...] | None
_MOST_NAMED = 4


class SetUp:
    """What the tracked modules and optimizers were like when the loop was to begin."""

    def __init__(
        self, objects: Mapping[str, Tracked], tell: Callable[[str], None] = log.warning
    ) -> None:
        """Take the objects as they are now for what the script has set up.

        `tell` hears what no resume can repeat, once for each object.
        """
        self._modules = {n: i.bare for n, i in objects.items() if isinstance(i, TrackedModule)}
        self._optimizers = {
            n: i.value for n, i in objects.items() if isinstance(i, TrackedOptimizer)
        }
        self._trained = {name: _trained(module) for name, module in self._modules.items()}
        self._groups = {name: _counts(optimizer) for name, optimizer in self._optimizers.items()}
        self._shapes = {name: _shapes(module) for name, module in self._modules.items()}
        self.values: Callable[[], Any] = dict
        """Returns the plain values that the script has set up, as far as they are in effect."""
        self.data: Callable[[], Any] = lambda: None
        """Returns what a resume compares its data with; on the first rank."""
        self._tell_all = tell
        self._told: set[str] = set()
        self._known = {name: list(_named(module)) for name, module in self._modules.items()}
        self.take()

    def take(self) -> None:
        """Keep which parameters are trained and grouped now: at a boundary. Costs microseconds."""
        self._flags = {
            name: [parameter.requires_grad for _, parameter in known]
            for name, known in self._known.items()
        }
        self._sizes = {name: _counts(optimizer) for name, optimizer in self._optimizers.items()}

    @property
    def shapes(self) -> Mapping[str, Mapping[str, _Shape]]:
        """The shapes of the tracked modules as they were set up, by the modules' names."""
        return self._shapes

    def counters(self, *, halfway: bool = False) -> dict[str, Any]:
        """Return what a checkpoint keeps of it: `changes`, and the values of the set-up."""
        changes = self.changes(halfway=halfway)
        return {"changed_in_loop": changes, "set_up": self.values(), "data": self.data()}

    def changes(self, *, halfway: bool = False) -> dict[str, Any]:
        """Return what has changed since, as JSON; empty if nothing has, as in most runs.

        `halfway` through a step it is what had changed at the last `take`: the step is done again,
        and with it what it has frozen for a while, or added. A save asks, and hardly anyone else.
        """
        for name in self._modules:
            self._look_at_shapes(name)
        found = {
            **{f"module {name}": self._thawed(name, halfway) for name in self._modules},
            **{f"optimizer {name}": self._added(name, halfway) for name in self._optimizers},
        }
        return {name: change for name, change in found.items() if change}

    def follow(self, changes: Any) -> None:
        """Change the objects as a checkpoint says that the loop had, from the set-up on.

        Called again with another checkpoint's, it begins from the set-up again. Where the script
        sets up something else today, the script's word counts, and the difference is told.
        """
        told = changes if isinstance(changes, dict) else {}
        for name in self._modules:
            self._follow_module(name, self._by_todays_keys(name, told.get(f"module {name}")))
        for name in self._optimizers:
            self._follow_optimizer(name, told.get(f"optimizer {name}"))

    # ------------------------------------------------------------------ which are trained

    def _thawed(self, name: str, halfway: bool) -> dict[str, Any]:
        begun, now = self._trained[name], _trained(self._modules[name])
        if halfway:
            known = zip(self._known[name], self._flags[name], strict=True)
            now = {key: flag for (key, _), flag in known}
        switched = {key: now[key] for key in now if now[key] is not begun.get(key)}
        return {"set_up": _digest(begun), "trained": switched} if switched else {}

    def _by_todays_keys(self, name: str, change: Any) -> Any:
        """Return a change as it would be told today; versions before this one had other keys."""
        begun, keys = self._trained[name], _keys_before(self._modules[name])
        before = {old: begun[key] for old, key in keys.items() if key in begun}
        if before == begun or not _is_of(change, _digest(before)):
            return change
        trained = {keys.get(old, old): on for old, on in _switched_in(change).items()}
        return {"set_up": _digest(begun), "trained": trained}

    def _follow_module(self, name: str, change: Any) -> None:
        begun = self._trained[name]
        wanted = dict(begun)
        switched = _switched_in(change)
        if _is_of(change, _digest(begun)):
            wanted.update({key: on for key, on in switched.items() if key in begun})
        elif any(begun.get(key) is not on for key, on in switched.items()):
            self._tell(
                name,
                f"{name}: the script sets up other parameters to be trained than in the attempt "
                "before; what the loop froze or thawed there is not repeated",
            )
        for key, parameter in _named(self._modules[name]):
            if parameter.requires_grad is not wanted.get(key, parameter.requires_grad):
                parameter.requires_grad_(wanted[key])

    # ------------------------------------------------------------------ groups of optimizers

    def _added(self, name: str, halfway: bool) -> dict[str, Any]:
        begun, optimizer = self._groups[name], self._optimizers[name]
        now = self._sizes[name] if halfway else _counts(optimizer)
        if now == begun:
            return {}
        new = optimizer.param_groups[len(begun) : len(now)]
        added = [self._places(group["params"]) for group in new]
        if now[: len(begun)] != begun or not all(added):
            self._tell(
                name,
                f"{name}: its parameter groups were changed in the loop in a way that a resume "
                "cannot repeat, and will refuse: add whole groups, of tracked modules' parameters",
            )
            return {}
        return {"set_up": begun, "added": added}

    def _places(self, parameters: list[torch.Tensor]) -> list[_Place]:
        """Return where parameters are in the tracked modules; nothing if one is nowhere."""
        places = {id(p): (n, key) for n, m in self._modules.items() for key, p in _named(m)}
        found = [places[id(p)] for p in parameters if id(p) in places]
        return found if len(found) == len(parameters) else []

    def _follow_optimizer(self, name: str, change: Any) -> None:
        begun, optimizer = self._groups[name], self._optimizers[name]
        del optimizer.param_groups[len(begun) :]
        if not _is_of(change, begun):  # a difference is told when the state does not fit
            return
        parameters = {(n, key): p for n, m in self._modules.items() for key, p in _named(m)}
        for module_name, module in self._modules.items():
            for old, key in _keys_before(module).items():
                parameters.setdefault((module_name, old), parameters[module_name, key])
        for group in _groups_of(change.get("added")):
            grouped = {id(p) for each in optimizer.param_groups for p in each["params"]}
            found = [parameters[place] for place in group if place in parameters]
            if len(found) == len(group) and grouped.isdisjoint(map(id, found)):
                optimizer.add_param_group({"params": found})

    # ------------------------------------------------------------------ layers

    def _look_at_shapes(self, name: str) -> None:
        begun, now = self._shapes[name], _shapes(self._modules[name])
        changed = sorted(key for key in {**begun, **now} if not _as_it_was(key, begun, now))
        if changed:
            more = " …" if len(changed) > _MOST_NAMED else ""
            self._tell(
                f"layers of {name}",
                f"{name}: the loop added, removed or reshaped {', '.join(changed[:_MOST_NAMED])}"
                f"{more}; the next attempt sets the model up without that, and refuses the "
                "checkpoint: make all layers before the loop, and use them when they are due",
            )

    def _tell(self, about: str, words: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self._tell_all(words)


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    key_of = plain_keys(module)
    return ((key_of(key), parameter) for key, parameter in module.named_parameters())


def _keys_before(module: torch.nn.Module) -> dict[str, str]:
    """Return the parameters' keys of today by those that versions before this one stored."""
    key_of = plain_keys(module)
    return {key_before(key): key_of(key) for key, _ in module.named_parameters()}


def _shapes(module: torch.nn.Module) -> dict[str, _Shape]:
    """Return what a checkpoint holds of a module, by name, without asking for any value."""
    key_of = plain_keys(module)
    shapes = {key: _shape(parameter) for key, parameter in _named(module)}
    for path, each in module.named_modules():
        prefix = f"{path}." if path else ""
        for key, buffer in each.named_buffers(recurse=False):
            if key not in each._non_persistent_buffers_set:
                shapes[key_of(prefix + key)] = _shape(buffer)
    return shapes


def _shape(tensor: torch.Tensor) -> _Shape:
    """Return a tensor's shape; None of a lazy one, which its first forward pass gives one."""
    return None if is_lazy(tensor) else tuple(tensor.shape)


def _as_it_was(key: str, begun: Mapping[str, _Shape], now: Mapping[str, _Shape]) -> bool:
    if key not in begun or key not in now:
        return False
    return begun[key] == now[key] or None in (begun[key], now[key])


def _trained(module: torch.nn.Module) -> dict[str, bool]:
    return {key: parameter.requires_grad for key, parameter in _named(module)}


def _counts(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _digest(trained: Mapping[str, bool]) -> str:
    text = "\n".join(f"{key} {value}" for key, value in sorted(trained.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _is_of(change: Any, set_up: Any) -> bool:
    """Return whether a change was made to what the script sets up today, too."""
    return isinstance(change, dict) and change.get("set_up") == set_up


def _switched_in(change: Any) -> dict[str, bool]:
    """Return which parameters the loop froze or thawed, as far as it makes sense."""
    switched = change.get("trained") if isinstance(change, dict) else None
    return {k: on is True for k, on in switched.items()} if isinstance(switched, dict) else {}


def _groups_of(added: Any) -> Iterator[list[_Place]]:
    """Yield the groups of a checkpoint, as far as they make sense."""
    for group in added if isinstance(added, list) else ():
        if isinstance(group, list) and all(isinstance(p, list) and len(p) == 2 for p in group):
            yield [(str(module), str(key)) for module, key in group]
