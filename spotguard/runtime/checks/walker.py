"""The walker: finds every piece of state that can be reached from some objects, each by its path.

It follows attributes, slots, containers, closures' variables, bound methods' objects, partials and
the frames of generators. It runs no code of the script's: it reads an object's `__dict__` and its
slots, never a property, a `__getattr__`, an `__iter__` or an `__eq__`. It stops at code, modules of
Python, types, threads, files and spotguard's own objects. It is never complete: state in C++, in
other processes and in files stays unseen.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import random
import sys
import sysconfig
import time
import types
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spotguard.runtime.checks.hashes import PLAIN, SAMPLED, Hasher, by_key, hash_of, hash_tensor
from spotguard.runtime.state.tracked import Box, random_accessors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_NUMBERS = (bool, int, float, complex, type(None))
_MOST_ITEMS = 10_000
_LONGEST_NAME = 40
_DEEPEST = 12
_CLOCK = 64
"""Objects between two looks at the clock."""
_OPAQUE = {
    *("threading", "_thread", "logging", "_io", "io", "socket", "_socket", "subprocess", "re"),
    *("multiprocessing", "concurrent", "asyncio", "importlib", "pathlib", "weakref", "_weakref"),
    *("ctypes", "_ctypes", "traceback", "inspect", "argparse", "tqdm", "wandb", "mlflow", "queue"),
    *("tensorboard", "pyarrow", "pandas", "datetime", "uuid", "contextvars", "_contextvars"),
}
"""Packages whose objects hold no state of a training."""
_OPAQUE_MODULES = (
    "spotguard.", "torch._C", "torch._dynamo", "torch._inductor", "torch.distributed",
    "torch.fx", "torch.utils.tensorboard", "torch.profiler", "torch.cuda",
)  # fmt: skip
_FROM_C = frozenset({"itertools", "functools", "builtins", "collections", "_functools", "operator"})
"""Where types come from whose objects Python's garbage collector may be asked for their parts."""
_OF_MODULES = frozenset(vars(torch.nn.Module())) | {"_is_full_backward_hook", "_compiled_call_impl"}
_OF_OPTIMIZERS = frozenset(
    {
        *("_zero_grad_profile_name", "_patch_step_function"),
        "_warned_capturable_if_run_uncaptured",
        *("defaults", "profile_hook_step", "_opt_called", "step", "_step_count"),
    }
)
_OURS = str(Path(__file__).parents[2])
_INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib"))


class StateLeaf(NamedTuple):
    """One piece of state."""

    path: str
    kind: str
    """`value`, `tensor`, `random` (a generator), or `position` (of an iterator)."""
    type: str
    mark: int
    """A hash of its value."""
    of: str
    """The path of the outermost object or container on the way that could be tracked by itself."""
    of_kind: str
    """`module`, `optimizer`, `stateful`, `random`, `position`, `tensors`, or that of the leaf."""
    of_type: str
    where: Callable[[], Any] | None
    """The tensor or generator itself, while it lives; None for what cannot change in place."""
    owner: Any
    """The nearest object on the way that has attributes, or the function that has the variable."""
    name: str
    """Which attribute of it."""
    slot: Any
    """The dict that holds it, if one does."""
    key: Any
    """Its key there."""
    seed: int | None = None
    """Of a generator of torch's: what it was seeded with last."""

    @property
    def is_length(self) -> bool:
        """True if it is the length of a container, whose items are leaves of their own."""
        return self.path.startswith("len(")


class _Way(NamedTuple):
    """How the walker came to a value."""

    path: str
    depth: int
    of: str = ""
    of_kind: str = ""
    of_type: str = ""
    owner: Any = None
    name: str = ""
    slot: Any = None
    key: Any = None


class Walker:
    """Walks from some roots; stops after `most` values, and `most_s` seconds of its own work.

    Args:
        known: The ids of objects that are saved, or must not be entered.
        whole: Hash all of each tensor and list, for a comparison between two runs; otherwise some
            elements of each are sampled.
        follows_globals: Also look at the variables of a module that its functions read, and of
            classes.
    """

    def __init__(
        self,
        known: Iterable[int] = (),
        *,
        whole: bool = False,
        most: int = 20_000,
        most_s: float | None = None,
        follows_globals: bool = False,
    ) -> None:
        self._seen = set(known)
        self._whole = whole
        self._most = most
        self._end = None if most_s is None else time.thread_time() + most_s
        self._follows_globals = follows_globals
        self._alive: list[Any] = []
        """What was visited: an id is unique only while its object lives."""
        self._waiting: collections.deque[tuple[_Way, Any]] = collections.deque()
        self._types: set[type] = set()
        self.was_cut = False
        """True if a limit was reached, so that something may have been left out."""

    def walk(self, roots: Iterable[tuple[str, Any]]) -> dict[str, StateLeaf]:
        """Return all leaves by their paths, the shortest path of each."""
        for name, value in roots:
            self._waiting.append((_Way(shown(name), 0), value))
        found: dict[str, StateLeaf] = {}
        for count in itertools.count():
            if not self._waiting:
                break
            if count >= self._most or (count % _CLOCK == 0 and self._is_late()):
                self.was_cut = True
                break
            way, value = self._waiting.popleft()
            try:
                leaf = self._visit(way, value)
            except Exception:  # noqa: BLE001 - an object may be of any make, and half made
                continue
            if leaf is not None:
                found.setdefault(leaf.path, leaf)
        self._alive.clear()
        self._waiting.clear()
        return found

    @property
    def seen(self) -> set[int]:
        """Return the ids of what was visited, while that lives, and of what was known before."""
        return self._seen

    def _is_late(self) -> bool:
        return self._end is not None and time.thread_time() > self._end

    # ------------------------------------------------------------------ one value

    def _visit(self, way: _Way, value: Any) -> StateLeaf | None:
        kind: Any = type(value)
        if kind in PLAIN:
            return self._leaf(way, "value", value, hash_of(value))
        if id(value) in self._seen or way.depth > _DEEPEST:
            return None
        if isinstance(value, type) and self._follows_globals:
            self._of_class(way, value)
            return None
        accessors = random_accessors(value)
        if accessors is None and _is_opaque(kind):
            return None
        self._seen.add(id(value))
        self._alive.append(value)
        if accessors is not None:
            mark = Hasher(whole=True).add(accessors[0](value)).digest()
            return self._leaf(_anchored(way, "random", value), "random", value, mark)
        if isinstance(value, torch.Tensor):
            self._attributes(way, value)
            return self._leaf(way, "tensor", value, self._hash_tensor(value))
        if kind.__module__ == "numpy":
            return self._array(way, value)
        if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinMethodType)):
            self._function(way, value)
            return None
        if isinstance(value, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
            return self._generator(way, value)
        if kind.__name__.endswith("DataLoaderIter"):
            held = object_dict(value) or {}
            way = _anchored(way, "position", value)
            return self._leaf(way, "position", value, hash_of(held.get("_num_yielded")))
        if isinstance(value, (dict, types.MappingProxyType)):
            return self._dict(way, value)
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            return self._sequence(way, value)
        if kind.__module__ in _FROM_C:
            return self._from_c(way, value)
        if isinstance(value, torch.nn.Module):
            self._module(_anchored(way, "module", value), value)
        elif isinstance(value, torch.optim.Optimizer):
            # Torch saves nothing of an optimizer within another one.
            self._optimizer(_anchored(way._replace(of=""), "optimizer", value), value)
        else:
            if _is_stateful(kind):
                way = _anchored(way, "stateful", value)
            self._attributes(way, value)
        if self._follows_globals:
            self._of_class(way, kind)
        return None

    def _leaf(self, way: _Way, kind: str, value: Any, mark: int) -> StateLeaf:
        where: Callable[[], Any] | None = None
        if kind == "tensor":
            where = weakref.ref(value)  # it may be large, and not be needed any more
        elif kind == "random":
            where = _Strong(value)
        return StateLeaf(
            way.path,
            kind,
            type(value).__name__,
            mark,
            way.of or way.path,
            way.of_kind or kind,
            way.of_type or type(value).__name__,
            where,
            way.owner,
            way.name,
            way.slot,
            way.key,
            value.initial_seed() if isinstance(value, torch.Generator) else None,
        )

    def _enter(self, way: _Way, step: str, value: Any, **changes: Any) -> None:
        way = way._replace(path=way.path + step, depth=way.depth + 1, **changes)
        self._waiting.append((way, value))

    # ------------------------------------------------------------------ kinds of objects

    def _attributes(self, way: _Way, value: Any, leaves_out: frozenset[str] = frozenset()) -> None:
        held = object_dict(value)
        for name, item in list(held.items()) if held else ():
            if name not in leaves_out and isinstance(name, str):
                self._enter(way, f".{name}", item, owner=value, name=name, slot=held, key=name)
        for name, member in _members(_type_of(value)):
            try:
                item = member.__get__(value)
            except (AttributeError, TypeError):
                continue
            self._enter(way, f".{name}", item, owner=value, name=name, slot=None, key=None)

    def _module(self, way: _Way, module: torch.nn.Module) -> None:
        held = object_dict(module) or {}
        for name, part in {**held.get("_parameters", {}), **held.get("_buffers", {})}.items():
            self._enter(way, f".{name}", part, owner=module, name=name, slot=None, key=None)
        for name, part in held.get("_modules", {}).items():
            self._enter(way, f".{name}", part, owner=module, name=name, slot=None, key=None)
        self._attributes(way, module, _OF_MODULES)

    def _optimizer(self, way: _Way, optimizer: torch.optim.Optimizer) -> None:
        held = object_dict(optimizer) or {}
        hooks = {name for name in held if name.endswith("_hooks")}
        hidden = _OF_OPTIMIZERS | hooks | {"state", "param_groups"}
        for number, state in enumerate(list(held.get("state", {}).values())):
            self._enter(way, f".state[{number}]", state)
        for number, group in enumerate(held.get("param_groups", ())):
            rest = {key: item for key, item in group.items() if key != "params"}
            self._enter(way, f".param_groups[{number}]", rest)
        self._attributes(way, optimizer, frozenset(hidden))

    def _dict(self, way: _Way, value: Any) -> StateLeaf | None:
        items = list(dict.items(value)) if isinstance(value, dict) else list(value.items())
        way = _anchored(way, "tensors" if _holds_tensors(value) else "value", value)
        if len(items) > SAMPLED and all(type(item) in PLAIN for _, item in items[:_MOST_ITEMS]):
            return self._leaf(way, "value", value, self._hash_items(value, items))
        for number, (key, item) in enumerate(self._some(items)):
            step = f"[{shown(key)!r}]" if isinstance(key, str) else f"[{key}]"
            if type(key) not in _NUMBERS and not isinstance(key, str):
                step = f"[{number}]"
            self._enter(way, step, item, slot=value, key=key)
        self._attributes(way, value)
        return self._leaf(way._replace(path=f"len({way.path})"), "value", value, len(items))

    def _sequence(self, way: _Way, value: Any) -> StateLeaf | None:
        if isinstance(value, (set, frozenset)):
            of_set: Any = set if isinstance(value, set) else frozenset
            items = list(of_set.__iter__(value))
            mark = sum(hash_of(item) for item in items[:_MOST_ITEMS] if type(item) in PLAIN)
            return self._leaf(way, "value", value, hash_of((len(items), mark)))
        base: Any = next(b for b in (list, tuple, collections.deque) if isinstance(value, b))
        items = list(base.__iter__(value))
        way = _anchored(way, "tensors" if _holds_tensors(value) else "value", value)
        if all(type(item) in PLAIN for item in (items if self._whole else items[:SAMPLED])):
            return self._leaf(way, "value", value, self._hash_items(value, items))
        for number, item in enumerate(self._some(items)):
            self._enter(way, f"[{number}]", item, slot=None, key=None)
        self._attributes(way, value)
        return self._leaf(way._replace(path=f"len({way.path})"), "value", value, len(items))

    def _some(self, items: list[Any]) -> list[Any]:
        """Return the items to enter: of a long list the first and the last ones."""
        most = _MOST_ITEMS if self._whole else 4 * SAMPLED
        return items if len(items) <= most else items[: most // 2] + items[-most // 2 :]

    def _hash_items(self, value: Any, items: list[Any]) -> int:
        some = items[:_MOST_ITEMS] if self._whole else [*items[:SAMPLED], *items[-SAMPLED:]]
        hasher = Hasher(whole=self._whole).add(len(items))
        if isinstance(value, dict):  # loading a state may reorder a dict that means the same
            some = sorted(some, key=by_key)
        return hasher.add(some).digest()

    def _array(self, way: _Way, value: Any) -> StateLeaf | None:
        numpy: Any = sys.modules["numpy"]
        if isinstance(value, numpy.generic):
            return self._leaf(way, "value", value, hash_of(value.tobytes()))
        if not isinstance(value, numpy.ndarray):
            return None
        if isinstance(value, numpy.memmap) or value.dtype.hasobject:
            return None
        flat = value.reshape(-1) if value.flags.c_contiguous else value.flat
        if not self._whole and value.size > SAMPLED:
            flat = flat[:: max(1, value.size // SAMPLED)]
        mark = hash_of((value.shape, numpy.asarray(flat).tobytes()))
        return self._leaf(way, "tensor", value, mark)

    def _hash_tensor(self, value: torch.Tensor) -> int:
        return hash_tensor(value, whole=self._whole)

    def _function(self, way: _Way, value: Any) -> None:
        if isinstance(value, types.MethodType):
            self._enter(way, ".__self__", value.__self__, slot=None, key=None)
            self._enter(way, "", value.__func__, slot=None, key=None)
            return
        if isinstance(value, types.BuiltinMethodType):
            bound = value.__self__
            if bound is not None and not isinstance(bound, types.ModuleType):
                self._enter(way, ".__self__", bound, slot=None, key=None)
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                item = cell.cell_contents
            except ValueError:  # empty
                continue
            # `self` and `__class__` lead to what the function is a method of.
            self._enter(way, f".<{name}>", item, owner=value, name=name, slot=None, key=None)
        for number, item in enumerate(value.__defaults__ or ()):
            self._enter(way, f".<default {number}>", item, owner=value, name="", slot=None)
        for name, item in (value.__kwdefaults__ or {}).items():
            self._enter(way, f".<{name}>", item, owner=value, name=name, slot=None, key=None)
        for name, item in vars(value).items():
            held = vars(value)
            self._enter(way, f".{name}", item, owner=value, name=name, slot=held, key=name)
        if self._follows_globals:
            self._globals_of(way, value)

    def _generator(self, way: _Way, value: Any) -> StateLeaf | None:
        frame = next(
            filter(None, (getattr(value, f"{k}_frame", None) for k in ("gi", "cr", "ag"))), None
        )
        if frame is not None and _is_of_our_loop(value, frame):
            return None
        way = _anchored(way, "position", value)
        if frame is not None:
            for name, item in dict(frame.f_locals).items():
                self._enter(way, f".<{name}>", item, owner=value, name=name, slot=None, key=None)
            for number, part in enumerate(gc.get_referents(value)):
                if hasattr(type(part), "__next__"):  # what a `for` in it is at
                    self._enter(way, f".<loop {number}>", part, slot=None, key=None)
        return self._leaf(way, "position", value, -1 if frame is None else frame.f_lasti)

    def _from_c(self, way: _Way, value: Any) -> StateLeaf | None:
        """Enter what an object written in C refers to: a partial, a cache, an iterator."""
        if isinstance(value, functools.partial):
            self._enter(way, ".func", value.func, slot=None, key=None)
            self._enter(way, ".args", value.args, slot=None, key=None)
            self._enter(way, ".keywords", value.keywords, slot=None, key=None)
            self._attributes(way, value)
            return None
        if isinstance(value, functools._lru_cache_wrapper):
            self._enter(way, ".__wrapped__", value.__wrapped__, slot=None, key=None)
            return self._leaf(way, "value", value, hash_of(tuple(value.cache_info())))
        if isinstance(value, itertools.count):
            return self._leaf(
                _anchored(way, "position", value), "position", value, hash_of(repr(value))
            )
        is_iterator = hasattr(type(value), "__next__")
        if is_iterator and any(map(_is_ours, gc.get_referents(value))):
            return None
        if is_iterator:
            way = _anchored(way, "position", value)
        for number, part in enumerate(gc.get_referents(value)):
            if part is not type(value):
                self._enter(way, f".<{number}>", part, slot=None, key=None)
        self._attributes(way, value)
        if is_iterator:
            left = getattr(type(value), "__length_hint__", None)
            return self._leaf(way, "position", value, hash_of(left(value)) if left else 0)
        return None

    # ------------------------------------------------------------------ variables of modules

    def _of_class(self, way: _Way, kind: type) -> None:
        """Enter what a class of the script's has itself, and the variables its methods read."""
        for each in kind.__mro__:
            if each in self._types or each is object or is_installed(each.__module__):
                continue
            self._types.add(each)
            here = way._replace(path=each.__name__)
            for name, item in list(vars(each).items()):
                function = getattr(item, "__func__", item)
                if isinstance(function, types.FunctionType):
                    self._function(here, function)
                elif not name.startswith(("__", "_abc_")) and not hasattr(type(item), "__get__"):
                    self._enter(here, f".{name}", item, owner=each, name=name, slot=None, key=None)

    def _globals_of(self, way: _Way, function: types.FunctionType) -> None:
        if is_installed(function.__module__):
            return
        scope = function.__globals__
        # In one order in all processes: generators are seeded by their place in it.
        for name in sorted(names_in(function.__code__) & scope.keys()):
            at = _Way(shown(name), way.depth + 1, "", "", "", function, name, scope, name)
            self._waiting.append((at, scope[name]))
            for part, item in of_module(scope[name], function.__code__):
                path = f"{at.path}.{shown(part)}"
                inner = at._replace(path=path, owner=scope[name], name=part, slot=None, key=None)
                self._waiting.append((inner, item))


def of_module(module: Any, code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a module of the script's that a function may use: `part.counter`."""
    if isinstance(module, types.ModuleType) and not is_installed(module.__name__):
        for name in sorted(names_in(code) & vars(module).keys()):
            yield name, vars(module)[name]


def _is_of_our_loop(generator: Any, frame: types.FrameType) -> bool:
    """Return whether a generator is our loop over steps, or one of the script's around it."""
    if frame.f_code.co_filename.startswith(_OURS):
        return True
    return any(map(_is_ours, [*frame.f_locals.values(), *gc.get_referents(generator)]))


def _is_ours(value: Any) -> bool:
    if isinstance(value, types.GeneratorType):
        return value.gi_code.co_filename.startswith(_OURS)
    return (type(value).__module__ or "").startswith("spotguard.")


class _Strong:
    """Gives an object that no weak reference can be had of."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


def _anchored(way: _Way, kind: str, value: Any) -> _Way:
    """Return the way with what could be tracked by itself, if it is the outermost such."""
    if way.of and way.of_kind not in ("", "value"):
        return way
    return way._replace(of=way.path, of_kind=kind, of_type=type(value).__name__)


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return True
    if depth > 3:
        return False
    if isinstance(value, dict):
        return any(_holds_tensors(v, depth + 1) for v in itertools.islice(dict.values(value), 64))
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(v, depth + 1) for v in itertools.islice(iter(value), 64))
    return False


@functools.cache
def is_installed(module: str) -> bool:
    """Return whether a module is of the standard library, of an installed package, or of ours."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module != "__main__" and module in sys.builtin_module_names
    if module.startswith("spotguard."):
        return True
    path = str(Path(file).resolve())
    return any(path.startswith((folder, str(Path(folder).resolve()))) for folder in _INSTALLED)


@functools.cache
def _is_opaque(kind: Any) -> bool:
    """Return whether objects of this type are not entered."""
    if issubclass(kind, (types.ModuleType, type, types.CodeType, types.FrameType, BaseException)):
        return True
    if issubclass(kind, (random.Random, Box)):
        return False
    module = kind.__module__ or ""
    return module.partition(".")[0] in _OPAQUE or module.startswith(_OPAQUE_MODULES)


@functools.cache
def _is_stateful(kind: Any) -> bool:
    return all(
        any(name in vars(each) for each in kind.__mro__)
        for name in ("state_dict", "load_state_dict")
    )


@functools.cache
def _dict_getter(kind: Any) -> Callable[[Any], dict[str, Any]] | None:
    """Return what reads an object's `__dict__` without any code of its class."""
    for each in kind.__mro__:
        found = vars(each).get("__dict__")
        if found is not None:
            plain = (types.GetSetDescriptorType, types.MemberDescriptorType)
            return found.__get__ if isinstance(found, plain) else None
    return None


def _type_of(value: Any) -> Any:
    return type(value)


def object_dict(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object, whatever its class makes of attributes."""
    getter = _dict_getter(_type_of(value))
    return getter(value) if getter is not None else None


@functools.cache
def _members(kind: Any) -> list[tuple[str, Any]]:
    """Return the slots of a class."""
    if is_installed(kind.__module__) and kind.__module__.partition(".")[0] in _FROM_C:
        return []
    return [
        (name, member)
        for each in kind.__mro__
        for name, member in vars(each).items()
        if isinstance(member, types.MemberDescriptorType) and not name.startswith("__")
    ]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of variables and attributes that a function, and those in it, use."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return frozenset(found)


def shown(name: object) -> str:
    """Return a name as it may be shown: keys of a dict may be anything, secrets too."""
    text = str(name) if isinstance(name, (str, int)) else type(name).__name__
    plain = text.replace("_", "").replace(".", "").replace("/", "").replace("-", "")
    return text if len(text) <= _LONGEST_NAME and (plain.isalnum() or not plain) else "…"


def changed(
    before: dict[str, StateLeaf], after: dict[str, StateLeaf]
) -> Iterator[tuple[StateLeaf, StateLeaf]]:
    """Yield the leaves that are other ones in `after`, each with what it was before."""
    for path, leaf in after.items():
        old = before.get(path)
        if old is not None and old.mark != leaf.mark:
            yield old, leaf
