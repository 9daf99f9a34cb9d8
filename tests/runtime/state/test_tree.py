from __future__ import annotations

import collections
import contextlib
import enum
import json
import math
import random
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotguard.errors import UnsupportedState
from spotguard.runtime.state.tree import (
    DTYPES,
    Packed,
    leaves_beside,
    pack,
    tensor_names,
    unpack,
)
from tests.runtime.harness.lab import raw, same, through_a_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

BIG = 10**380
KEYS = st.one_of(st.integers(-BIG, BIG), st.text(max_size=5), st.booleans(), st.none())
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-BIG, BIG),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec="utf-16-le"), max_size=8),
    st.binary(max_size=20),
    st.sampled_from(["$", "$float", "$$float", "items", "\ud800", "\x00"]),
    st.sampled_from(list(DTYPES)),
    st.frozensets(st.integers(0, 9)),
    st.sets(st.text(max_size=3)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "$float", "name", "items", "a"]), inner, max_size=3),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@pytest.mark.same_everywhere
@settings(max_examples=300)
@given(VALUES)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    """Nan, infinities, -0.0, huge integers, any keys, nesting: equal in type, order and bits."""
    assert same(through_a_checkpoint(value), value)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.nan,
        -math.inf,
        5e-324,
        complex(-0.0, math.inf),
        2**127 + 1,
        {"$": "tensor", "name": "x"},
        {"$float": "nan"},
        {1: "one", "1": "text", 1.5: None, b"1": True},
        {(1, (2, "a")): {None: frozenset({1})}},
        collections.Counter({3: 2, 1: 5}),
        collections.Counter(),
        torch.Size([2, 3]),
        torch.device("cuda", 3),
        torch.complex128,
        {},
        [],
        (),
        set(),
        b"",
        "",
    ],
    ids=repr,
)
def test_odd_values_come_back_as_they_were(value: Any) -> None:
    """The values that formats like JSON lose or confuse."""
    assert same(through_a_checkpoint(value), value)


def bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bits: all kinds of nan and denormals included."""
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).to(torch.bool)
    size = torch.empty((), dtype=dtype).element_size()
    return (
        torch.frombuffer(bytearray(random.Random(count).randbytes(count * size)), dtype=dtype).view(
            shape
        )
        if count
        else torch.empty(shape, dtype=dtype)
    )


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (2, 0, 3)], ids=str)
def test_tensors_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every dtype and shape, also of no elements, with any bits: fp8, bf16 and nan payloads."""
    value = bits(dtype, shape)

    assert same(through_a_checkpoint({"t": value, "after": torch.ones(3)})["t"], value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.ones(1).expand(4, 5),
        torch.arange(6.0).view(2, 3)[:, 1:],
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Buffer(torch.ones(3)),
        torch.ones(3, requires_grad=True) * 2,
    ],
    ids=["transposed", "strided", "expanded", "sliced", "conjugate", "negative", "channels last",
         "parameter", "buffer", "with a graph"],
)  # fmt: skip
def test_views_come_back_by_value(value: torch.Tensor) -> None:
    """Strides, offsets and lazy conjugation are no part of the value; nothing needs a graph."""
    back = through_a_checkpoint(value)

    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert raw(back) == raw(value)
    assert type(back) is torch.Tensor
    assert not back.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.array(5, dtype=np.uint64),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(10)[::-2],
        np.zeros((0, 3), dtype=np.float16),
        np.array([True, False]),
        np.array([1 + 2j], dtype=np.complex64),
        np.array([math.nan, -0.0]),
        np.float64(-0.0),
        np.float32(math.nan),
        np.int8(-3),
        np.bool_(True),
        np.uint64(2**64 - 1),
    ],
    ids=repr,
)
def test_numpy_comes_back_as_it_was(value: Any) -> None:
    """Arrays of any layout and scalars, also 0-dimensional ones, keep dtype, shape and bits."""
    back = through_a_checkpoint({"v": value})["v"]

    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert back.tobytes() == value.tobytes()


def test_read_only_memory_can_be_stored() -> None:
    """An array that nobody may write comes back as one that can be written."""
    value = np.arange(3)
    value.flags.writeable = False
    back = through_a_checkpoint(value)
    back[0] = 9

    assert back.tolist() == [9, 1, 2]


def test_what_comes_back_has_memory_of_its_own() -> None:
    """Restored tensors share nothing with each other nor with a read buffer."""
    one = torch.arange(4.0)
    back = through_a_checkpoint({"a": one, "b": [one]})
    back["a"][0] = 7

    assert back["b"][0].tolist() == [0, 1, 2, 3]


def test_tied_tensors_are_stored_once() -> None:
    """Memory that has two names is written once; another view of it is another value."""
    weight = torch.arange(6.0).view(2, 3)
    packed = Packed()
    tree = pack(
        {"in": weight, "out": weight, "row": weight[0], "view": weight.view(3, 2)}, "m", packed
    )

    assert tree["in"] == tree["out"]
    assert list(packed.leaves) == ["m.in", "m.row", "m.view"]
    assert tensor_names(tree) == ["m.in", "m.in", "m.row", "m.view"]
    assert packed.leaves["m.in"].size_bytes == 24


def test_empty_tensors_are_never_taken_for_tied() -> None:
    """Tensors without elements may share an address by chance and still differ."""
    packed = Packed()
    pack([torch.empty(0), torch.empty(0, 3)], "m", packed)

    assert len(packed.leaves) == 2


def test_colliding_paths_stay_apart() -> None:
    """`{"a.b": t}` and `{"a": {"b": u}}` have one path; both are stored."""
    value = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}, "a.b#2": torch.full((2,), 2.0)}

    assert same(through_a_checkpoint(value), value)


class Custom:
    """Has no plain form."""


class Point(NamedTuple):
    """Would come back as a bare tuple."""

    x: int


class Colour(enum.IntEnum):
    """Would come back as a bare int."""

    RED = 1


class Labelled(torch.Tensor):
    """A tensor subclass: what it adds would be lost."""


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: lambda: 1, "builtins.function"),
        (lambda: Custom(), "Custom"),
        (lambda: Custom, "builtins.type"),
        (lambda: Point(1), "Point"),
        (lambda: Colour.RED, "Colour"),
        (lambda: collections.defaultdict(list), "collections.defaultdict"),
        (lambda: collections.deque([1]), "collections.deque"),
        (lambda: bytearray(b"x"), "builtins.bytearray"),
        (lambda: range(3), "builtins.range"),
        (lambda: types.SimpleNamespace(a=1), "types.SimpleNamespace"),
        (lambda: iter([1]), "list_iterator"),
        (lambda: torch.ones(2).as_subclass(Labelled), "Labelled"),
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.zeros(2, dtype=torch.complex128), "complex128"),
        (lambda: np.array([object()]), "numpy.object_"),
        (lambda: np.array(["text"]), "numpy.str_"),
        (lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]), "numpy.void"),
        (lambda: np.arange(3, dtype=">i4"), "byte order"),
        (lambda: np.datetime64("2030-01-01"), "numpy.datetime64"),
        (lambda: np.longdouble(1), "numpy.longdouble"),
        (lambda: np.ma.array([1], mask=[True]), "MaskedArray"),
        (lambda: np.rec.array([(1,)], dtype=[("a", "i4")]), "recarray"),
        (lambda: np.asmatrix([[1, 2]]), "matrix"),
        (lambda: 10**500, "digits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # of torch and numpy, about making such things
def test_what_has_no_plain_form_is_refused_by_name(make: Callable[[], Any], kind: str) -> None:
    """The message says where it is and what it is; it is never pickled, never half stored."""
    packed = Packed()
    with pytest.raises(UnsupportedState, match=kind) as problem:
        pack({"deep": [1, {"er": make()}]}, "model", packed)

    assert "model.deep.1.er" in problem.value.message
    assert "\n" not in problem.value.message
    assert problem.value.hint


def test_what_holds_itself_is_refused() -> None:
    """A cycle has no end to store; it gives a sentence, no recursion error."""
    cycle: list[Any] = []
    cycle.append(cycle)

    with pytest.raises(UnsupportedState, match="holds itself"):
        pack(cycle, "counters", Packed())


def test_a_tree_is_plain_json() -> None:
    """Nothing in a tree needs Python to be read, and no tag names code."""
    value = {1: (torch.ones(2), {"$": {b"x": 1.5}}), "s": {math.nan}, "n": np.ones(2)}
    tree = pack(value, "m", Packed())

    assert json.loads(json.dumps(tree, allow_nan=False)) == tree


@pytest.mark.parametrize(
    "tree", [{"$": "pickle", "value": "gASVAAAA"}, {"$": "os.system"}, {"$": None}, {"$": []}]
)
def test_an_unknown_tag_is_refused(tree: Any) -> None:
    """A forged tree can only name what the decoder knows."""
    with pytest.raises(ValueError, match="unknown tag"):
        unpack([tree], lambda name: torch.empty(0))


@pytest.mark.parametrize("name", ["load", "os", "__name__", "nothing"])
def test_a_forged_dtype_reaches_nothing_of_torch(name: str) -> None:
    """A dtype's name is looked up among dtypes only."""
    with pytest.raises(ValueError, match="dtype"):
        unpack({"$": "dtype", "value": name}, lambda name: torch.empty(0))


@pytest.mark.parametrize(
    "forged",
    [
        {"$": "tensor"},
        {"$": "float"},
        {"$": "complex", "value": []},
        {"$": "bytes", "value": 5},
        {"$": "device", "value": []},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": 3},
        {"$": "Counter", "items": [1]},
        {"$": "set", "items": [[]]},
        {"$": "ndarray", "name": 1, "shape": "x", "scalar": 0},
        {"$": "quantized", "kind": 1},
        {"$": "tuple"},
        {"$": ["tensor"]},
        {"$": "Size", "items": ["a"]},
    ],
)
def test_a_forged_tree_ends_in_one_sentence(forged: dict[str, object]) -> None:
    """Whatever is missing in it or of another type: never a KeyError or TypeError of ours."""

    def fetch(name: str) -> torch.Tensor:
        if not isinstance(name, str):
            raise ValueError("no name")
        return torch.zeros(1)

    with pytest.raises(ValueError, match=r"\S"):
        unpack({"state": [forged]}, fetch)
    for read in (tensor_names, lambda tree: list(leaves_beside(tree, None))):
        with contextlib.suppress(ValueError):
            read([forged])
