"""Training state as plain data: a JSON tree that names tensors, and the tensors.

Nothing here is a pickle. What has no safe plain form is refused by name when it is tracked, not
when a machine is about to vanish.
"""

from __future__ import annotations

import base64
import collections
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from spotguard.errors import UnsupportedState
from spotguard.runtime.state.sharding import is_dtensor, local_part

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The safetensors name of each dtype that can be stored."""
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    DTYPES[torch.float8_e8m0fnu] = "F8_E8M0"
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

QUANTIZED = frozenset(
    {
        "torchao.optim.subclass_8bit.OptimState8bit",
        "torchao.optim.subclass_4bit.OptimState4bit",
        "torchao.optim.subclass_fp8.OptimStateFp8",
    }
)
"""Tensor subclasses that are stored as the plain tensors in them: codes and scales."""

_MOST_BITS = 1328  # of an integer: what a manifest may hold, about 400 digits

_TAG = "$"
"""The key that marks an encoded value in the tree; user dicts with it are encoded as pairs."""


@dataclass
class Leaf:
    """One tensor to store: this rank's part and where that lies in the whole."""

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor when it is sharded over ranks, else None."""
    offsets: tuple[int, ...] | None = None
    steady: bool = False
    """True if nothing but a tracked optimizer's step changes it."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of this rank's part."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass
class Packed:
    """A JSON tree and the tensors that it names."""

    leaves: dict[str, Leaf] = field(default_factory=dict)
    steady: frozenset[int] = frozenset()
    """Addresses of tensors that only a tracked optimizer's step changes."""
    all_steady: bool = False
    """True while an optimizer's own state is packed."""
    _seen: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def copy(self) -> Packed:
        """Return a copy that can be added to; the leaves are the same."""
        return Packed(dict(self.leaves), self.steady, self.all_steady, dict(self._seen))

    def add(self, path: str, value: torch.Tensor) -> str:
        """Take a tensor in under `path` and return the name it is stored by.

        Tensors that share their memory (tied weights) are stored once.
        """
        leaf = _leaf(path, value)
        local = leaf.tensor
        key = (local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), local.device)
        if local.numel() and key in self._seen:
            return self._seen[key]
        name, count = path, 1
        while name in self.leaves:
            count += 1
            name = f"{path}#{count}"
        leaf.name = name
        leaf.steady = self.all_steady or local.data_ptr() in self.steady
        self.leaves[name] = leaf
        self._seen[key] = name
        return name


class Bulk(NamedTuple):
    """The part of an object's state that is tensors and nothing else."""

    tensors: list[torch.Tensor]
    pack: Callable[[Packed], Any]
    """Return the part's tree."""
    complete: Callable[[Any, Packed], Any]
    """Return the object's tree, given that of the part."""


def _leaf(path: str, value: torch.Tensor) -> Leaf:
    value = value.detach()
    if is_dtensor(value):
        _, offsets = local_part(value)
        return Leaf(path, plain_tensor(path, value.to_local()), tuple(value.shape), offsets)
    return Leaf(path, plain_tensor(path, value))


def plain_tensor(path: str, value: torch.Tensor) -> torch.Tensor:
    """Return `value` as it can be stored: itself, unless it is a lazy view.

    Raises:
        UnsupportedState: it cannot be stored; the message names `path`.
    """
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise _unsupported(path, value, "this tensor subclass has no plain form")
    if value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized"
        raise _unsupported(path, value, f"a {kind} tensor cannot be stored")
    if value.layout is not torch.strided or value.device.type == "meta":
        raise _unsupported(path, value, f"{value.layout} on {value.device} cannot be stored")
    if value.dtype not in DTYPES:
        raise _unsupported(path, value, f"dtype {value.dtype} cannot be stored")
    return value.resolve_conj().resolve_neg()


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _unsupported(path: str, value: object, why: str) -> UnsupportedState:
    return UnsupportedState(
        f"cannot store {path} ({_kind(value)}): {why}",
        hint="keep it out of the tracked state, or give it a plain state_dict()",
    )


def pack(value: Any, path: str, into: Packed) -> Any:
    """Return the JSON tree of `value`; its tensors go into `into`.

    Raises:
        UnsupportedState: something inside has no safe plain form; the message says where.
    """
    try:
        return _pack(value, path, into)
    except RecursionError:
        raise _unsupported(path, value, "it is nested too deeply, or holds itself") from None


def pack_steady(value: Any, path: str, into: Packed) -> Any:
    """Return the tree of what nothing but an optimizer's step changes, as `pack` does."""
    into.all_steady = True
    try:
        return pack(value, path, into)
    finally:
        into.all_steady = False


def _pack(value: Any, path: str, into: Packed) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if value.bit_length() > _MOST_BITS:
            raise _unsupported(path, value, "an integer of so many digits cannot be stored")
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, torch.Tensor):
        if _kind(value) in QUANTIZED:
            return _pack_quantized(value, path, into)
        name = into.add(path, value)
        sharded = into.leaves[name].global_shape is not None
        return {_TAG: "tensor", "name": name, **({"sharded": True} if sharded else {})}
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        return _pack_dict(value, path, into)
    if type(value) in (list, tuple, torch.Size, set, frozenset):
        items = [_pack(item, f"{path}.{i}", into) for i, item in enumerate(value)]
        return items if type(value) is list else {_TAG: type(value).__name__, "items": items}
    return _pack_other(value, path, into)


def _pack_quantized(value: Any, path: str, into: Packed) -> Any:
    """Return the tree of a tensor that is made of plain ones, by torch's own protocol for those."""
    names, made_by = value.__tensor_flatten__()
    parts = {name: _pack(getattr(value, name), f"{path}.{name}", into) for name in names}
    made = _pack(made_by, f"{path}.made_by", into)
    return {_TAG: "quantized", "kind": _kind(value), "parts": parts, "made_by": made}


def _pack_dict(value: dict[Any, Any], path: str, into: Packed) -> Any:
    if type(value) is not collections.Counter and all(
        type(key) is str and key != _TAG for key in value
    ):
        return {key: _pack(item, f"{path}.{key}", into) for key, item in value.items()}
    pairs = [
        [_pack(key, f"{path}.key", into), _pack(item, f"{path}.{key}", into)]
        for key, item in value.items()
    ]
    return {_TAG: "Counter" if type(value) is collections.Counter else "dict", "items": pairs}


def _pack_other(value: Any, path: str, into: Packed) -> Any:
    if type(value) is bytes:
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {_TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_TAG: "device", "value": str(value)}
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        return _pack_numpy(value, path, into)
    raise _unsupported(path, value, "it is neither a tensor nor a plain value")


def _pack_numpy(value: Any, path: str, into: Packed) -> Any:
    import numpy as np

    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        raise _unsupported(path, value, "this array subclass has no plain form")
    array = np.ascontiguousarray(value)
    try:
        tensor = torch.from_numpy(array.copy())
    except (TypeError, ValueError) as problem:
        raise _unsupported(path, value, str(problem)) from None
    name = into.add(path, tensor)
    shape = list(value.shape)  # ascontiguousarray makes a 0-d array 1-d
    return {_TAG: "ndarray", "name": name, "shape": shape, "scalar": isinstance(value, np.generic)}


Fetch = Callable[[str], torch.Tensor]
"""Gives the stored tensor of a name, in memory of its own."""


def unpack(tree: Any, fetch: Fetch) -> Any:
    """Return the value whose tree `pack` returned; `fetch` supplies the tensors.

    Raises:
        ValueError: it is not such a tree.
    """
    if isinstance(tree, list):
        return [unpack(item, fetch) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TAG not in tree:
        return {key: unpack(item, fetch) for key, item in tree.items()}
    decode = _DECODERS.get(str(tree[_TAG]))
    if decode is None:
        raise ValueError(f"unknown tag {tree[_TAG]!r} in a state tree")
    with _one_sentence():
        return decode(tree, fetch)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Have a forged tree end in `ValueError`, whatever is missing in it or of another type."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError) as problem:
        what = f"{type(problem).__name__}: {problem}"
        raise ValueError(f"a state tree makes no sense ({what})") from problem


def _unpack_quantized(tree: dict[str, Any], fetch: Fetch) -> torch.Tensor:
    kind = str(tree["kind"])
    module, _, name = kind.rpartition(".")
    # Only those that are known to hold nothing but numbers, and nothing is imported for a file.
    if kind not in QUANTIZED or module not in sys.modules:
        raise ValueError(f"there is no tensor class {kind!r} in this process")
    parts, made_by = unpack(tree["parts"], fetch), unpack(tree["made_by"], fetch)
    made: torch.Tensor = getattr(sys.modules[module], name).__tensor_unflatten__(
        parts, made_by, None, None
    )
    return made


def _unpack_items(tree: dict[str, Any], fetch: Fetch) -> list[Any]:
    return [unpack(item, fetch) for item in tree["items"]]


def _unpack_dtype(tree: dict[str, Any], _: Fetch) -> torch.dtype:
    found = getattr(torch, str(tree["value"]), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {tree['value']!r}")
    return found


def _unpack_ndarray(tree: dict[str, Any], fetch: Fetch) -> Any:
    array = fetch(tree["name"]).numpy().reshape(tree["shape"])
    return array[()] if tree["scalar"] else array


_DECODERS: dict[str, Callable[[dict[str, Any], Fetch], Any]] = {
    "tensor": lambda tree, fetch: fetch(tree["name"]),
    "float": lambda tree, _: float(tree["value"]),
    "complex": lambda tree, _: complex(float(tree["value"][0]), float(tree["value"][1])),
    "bytes": lambda tree, _: base64.b64decode(tree["value"], validate=True),
    "dtype": _unpack_dtype,
    "device": lambda tree, _: torch.device(tree["value"]),
    "tuple": lambda tree, fetch: tuple(_unpack_items(tree, fetch)),
    "Size": lambda tree, fetch: torch.Size(_unpack_items(tree, fetch)),
    "set": lambda tree, fetch: set(_unpack_items(tree, fetch)),
    "frozenset": lambda tree, fetch: frozenset(_unpack_items(tree, fetch)),
    "dict": lambda tree, fetch: {k: v for k, v in _unpack_items(tree, fetch)},
    "Counter": lambda tree, fetch: collections.Counter(dict(_unpack_items(tree, fetch))),
    "ndarray": _unpack_ndarray,
    "quantized": _unpack_quantized,
}


def is_tensor(tree: Any) -> bool:
    """Return True if a tree is that of one tensor."""
    return isinstance(tree, dict) and tree.get(_TAG) == "tensor"


def items_of(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys of a packed dict, as they were, and the trees of its values."""
    if _TAG not in tree:
        yield from tree.items()
        return
    for key, item in _pairs_of(tree):
        yield (None if tensor_names(key) else unpack(key, _no_tensor)), item


def _pairs_of(tree: dict[str, Any]) -> list[tuple[Any, Any]]:
    with _one_sentence():
        return [(key, item) for key, item in tree["items"]]


def _no_tensor(name: str) -> torch.Tensor:
    raise ValueError(f"a key names the tensor {name!r}")


def leaves_beside(tree: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each tensor in a tree, and what `value` has in its place now.

    That is None where `value` is of another form, and for an array, which is never on a device.
    """
    if isinstance(tree, list):
        yield from _items_beside(tree, value)
    elif isinstance(tree, dict):
        with _one_sentence():
            found = list(_LEAVES.get(str(tree.get(_TAG, "dict")), _no_leaves)(tree, value))
        yield from found


def _items_beside(items: list[Any], value: Any) -> Iterator[tuple[str, Any]]:
    held = list(value) if isinstance(value, (list, tuple)) else []
    for item, beside in zip(items, held + [None] * len(items), strict=False):
        yield from leaves_beside(item, beside)


def _values_beside(tree: Any, value: Any) -> Iterator[tuple[str, Any]]:
    held = value if isinstance(value, dict) else {}
    if _TAG in tree:
        yield from _items_beside([key for key, _ in _pairs_of(tree)], None)
    for key, item in items_of(tree):
        yield from leaves_beside(item, held.get(key))


def _parts_beside(tree: Any, value: Any) -> Iterator[tuple[str, Any]]:
    for name, part in tree["parts"].items():
        yield from leaves_beside(part, getattr(value, name, None))
    yield from leaves_beside(tree["made_by"], None)


def _no_leaves(tree: Any, value: Any) -> Iterator[tuple[str, Any]]:
    return iter(())


_LEAVES: dict[str, Callable[[Any, Any], Iterator[tuple[str, Any]]]] = {
    "tensor": lambda tree, value: iter([(tree["name"], value)]),
    "ndarray": lambda tree, value: iter([(tree["name"], None)]),
    "quantized": _parts_beside,
    **dict.fromkeys(("dict", "Counter"), _values_beside),
    **dict.fromkeys(("tuple", "Size"), lambda tree, value: _items_beside(tree["items"], value)),
    **dict.fromkeys(("set", "frozenset"), lambda tree, value: _items_beside(tree["items"], None)),
}


def tensor_names(tree: Any) -> list[str]:
    """Return the names of all tensors in a tree, in order."""
    if isinstance(tree, list):
        return [name for item in tree for name in tensor_names(item)]
    if not isinstance(tree, dict):
        return []
    if tree.get(_TAG) in ("tensor", "ndarray"):
        with _one_sentence():
            return [str(tree["name"])]
    return [name for item in tree.values() for name in tensor_names(item)]
