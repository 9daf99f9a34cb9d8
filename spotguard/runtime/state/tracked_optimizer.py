"""A tracked optimizer: parameter groups, the state of each parameter, and what else it keeps.

Not all keep their state as torch's own do. Some have values beside those of parameters (MADGRAD's
count), some have all of it in another optimizer (Lookahead), some add parts to `state_dict()`.
Whatever it holds goes back to `load_state_dict`; what could not is refused before it is saved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import StateMismatch, UnsupportedState
from spotguard.runtime.state.sharding import address, is_dtensor
from spotguard.runtime.state.tree import Bulk, Packed, is_tensor, items_of, pack_steady

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.runtime.state.tracked import Finish, Reading


class TrackedOptimizer:
    """An optimizer: parameter groups and per-parameter state, dtype-exact."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.value = optimizer

    def pack(self, name: str, into: Packed) -> Any:
        """Return the tree of the optimizer's state dict.

        Raises:
            UnsupportedState: no restore could take it back.
        """
        state: Any = self.value.state_dict()
        oddity = _oddity(state, _sizes(self.value.param_groups))
        if oddity:
            raise UnsupportedState(
                f"{name} ({type(self.value).__name__}) cannot be restored: its state_dict() "
                f"{oddity}",
                hint="a state_dict() of an optimizer has the form of torch's: state, by the "
                "parameters' numbers, and param_groups; track what it keeps besides by itself",
            )
        return pack_steady(state, name, into)

    def bulk(self, name: str) -> Bulk | None:
        """Return the per-parameter state as it is now, if it holds nothing but tensors."""
        rest = dict(self.value.state_dict())
        state = rest.pop("state", None)
        if not isinstance(state, dict) or not all(isinstance(e, dict) for e in state.values()):
            return None
        tensors = [value for entries in state.values() for value in entries.values()]
        if not all(isinstance(value, torch.Tensor) for value in tensors):
            return None
        return Bulk(
            tensors,
            partial(pack_steady, state, f"{name}.state"),
            lambda tree, into: {"state": tree, **pack_steady(rest, name, into)},
        )

    def addresses(self) -> Iterator[int]:
        """Yield the addresses of the parameters that its step changes."""
        return map(address, self.parameters())

    def restore(self, name: str, tree: Any, reading: Reading) -> Finish:
        """Have the state read, into the optimizer's own tensors where it has them already.

        Each tensor keeps the dtype that it was saved with.
        """
        stored = dict(items_of(tree))
        problem = self._difference(name, stored["param_groups"])
        if problem is not None:
            reading.differs(problem)
            return lambda: None  # it begins anew
        held: dict[Any, Any] = {**self.value.state_dict()}
        state = self._entries(stored["state"], held["state"], reading)
        others = {key: part for key, part in stored.items() if key != "state"}
        parts = {key: reading.later(part, held.get(key)) for key, part in others.items()}

        def finish() -> None:
            values = {key: value() for key, value in state.items()}
            self._load({k: values if k == "state" else parts[k]() for k in stored}, values)

        return finish

    def parameters(self) -> list[torch.Tensor]:
        """Return what it trains, in the order of its groups."""
        return [p for group in self.value.param_groups for p in group["params"]]

    def _difference(self, name: str, groups: Any) -> StateMismatch | None:
        stored, mine = _sizes(groups), _sizes(self.value.param_groups)
        if stored == mine:
            return None
        return StateMismatch(
            f"{name}: parameter groups of {stored} tensors are stored, the script has {mine}",
            hint="build the optimizer over the same parameters, in the same order",
        )

    def _entries(
        self, tree: Any, held: dict[Any, Any], reading: Reading
    ) -> dict[Any, Callable[[], Any]]:
        """Have the state read, into what is `held`; return what gives each of its entries then."""
        parameters = self.parameters()
        entries: dict[Any, Callable[[], Any]] = {}
        for key, part in items_of(tree):
            if not _is_number(key) or key >= len(parameters):  # a value of no parameter
                entries[key] = reading.later(part, held.get(key))
            elif address(parameters[key]) not in reading.left_out:
                entries[key] = _entry(part, held.get(key), parameters[key], reading)
        return entries

    def _held(self) -> dict[Any, Any]:
        """Return the state as it is now: its own dicts, also where they lie in another one."""
        state: dict[Any, Any] = self.value.state_dict()["state"]
        return state

    def _load(self, state: dict[str, Any], values: dict[Any, Any]) -> None:
        """Have the optimizer take a state, of which its own hooks see the exact `values`."""
        exact = partial(_put_exact, self._held, values)
        if type(self.value).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            self.value.load_state_dict(state)  # who knows where that calls hooks
            exact()
            return
        handle = self.value.register_load_state_dict_post_hook(lambda _: exact(), prepend=True)
        try:
            self.value.load_state_dict(state)
        finally:
            handle.remove()


def _oddity(state: Any, sizes: list[int]) -> str | None:
    """Return what is such in a state dict that no restore could take it back; None if nothing."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return 'has no dict "state"'
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        return 'has no list "param_groups" of which each has its "params"'
    if _sizes(groups) != sizes:
        return f"has parameter groups of {_sizes(groups)} tensors, and the optimizer of {sizes}"
    lost = [key for key in state["state"] if _is_number(key) and not 0 <= key < sum(sizes)]
    if lost:
        return f"has something of a parameter number {lost[0]}, and there are {sum(sizes)}"
    return None


def _entry(tree: Any, held: Any, parameter: torch.Tensor, reading: Reading) -> Callable[[], Any]:
    """Have a parameter's state read, into what is `held` of it; return what gives it then."""
    if not isinstance(tree, dict) or "$" in tree:  # no dict with names as keys
        return reading.later(tree, held)
    known = held if isinstance(held, dict) else {}
    parts = {key: _value(part, known.get(key), parameter, reading) for key, part in items_of(tree)}
    return lambda: {key: value() for key, value in parts.items()}


def _value(tree: Any, value: Any, parameter: torch.Tensor, reading: Reading) -> Callable[[], Any]:
    """Have one value of a parameter's state read; return what gives it then."""
    if not is_tensor(tree):
        return reading.later(tree, value)
    stored = tree["name"]
    if reading.in_place(stored) and reading.fits(stored, value):
        reading.into(stored, value)
    else:  # a sharded parameter has sharded moments
        like_it = is_dtensor(parameter) and reading.shape(stored) == tuple(parameter.shape)
        value = reading.new(stored, parameter if like_it else None)
    return lambda: value


def _put_exact(held_now: Callable[[], dict[Any, Any]], values: dict[Any, Any]) -> None:
    """Put back tensors that torch has cast.

    Its `load_state_dict` casts floating state to the parameter's dtype: fp32 moments of bf16
    parameters would come back rounded.
    """
    held = held_now()
    for key, entries in values.items():
        mine = held.get(key)
        if not isinstance(entries, dict) or not isinstance(mine, dict):
            continue
        for name, exact in entries.items():
            cast = mine.get(name)
            if not isinstance(exact, torch.Tensor) or not isinstance(cast, torch.Tensor):
                continue
            if cast.dtype != exact.dtype:
                mine[name] = exact.to(cast.device)


def _is_number(key: Any) -> bool:
    return type(key) is int


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list)


def _sizes(groups: Any) -> list[int]:
    return [len(group["params"]) for group in groups]
