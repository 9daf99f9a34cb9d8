"""A shard's header: what other programs believe, and what we refuse to believe."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotguard.checkpoint.header import build_header, parse_header
from spotguard.checkpoint.tensors import TensorInfo
from spotguard.errors import DamagedCheckpoint, UnsupportedState

WHOLE = TensorInfo(dtype="F32", shape=(2, 3), start=0, end=24)
PART = TensorInfo(dtype="BF16", shape=(2, 3), start=24, end=36, global_shape=(4, 3), offsets=(2, 0))


def head_of(body: Any) -> bytes:
    """Return a header of any content, its length in front."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return len(text).to_bytes(8, "little") + text


def parse(head: bytes, data_bytes: int = 36) -> dict[str, TensorInfo]:
    """Read a header that `data_bytes` of data follow."""
    return parse_header(memoryview(head), len(head) + data_bytes, what="x")


def body_of(head: bytes) -> Any:
    """Return the JSON of a header."""
    return json.loads(head[8:])


def test_a_header_comes_back_as_it_was() -> None:
    """Wholes and parts, offsets counted from the start of the file; it fills whole pages."""
    head = build_header({"w": WHOLE, "p": PART}, {"step": "1"})
    assert len(head) == 4096
    found = parse(head)
    assert (found["w"].start, found["w"].end, found["w"].global_shape) == (4096, 4120, None)
    assert (found["p"].global_shape, found["p"].offsets) == ((4, 3), (2, 0))


def test_parts_stand_where_torch_looks_for_them() -> None:
    """Its DCP wants offsets of every tensor of a file with parts, as a JSON text."""
    head = build_header({"w": WHOLE, "p": PART}, {"step": "1"})
    metadata = body_of(head)["__metadata__"]
    assert metadata["step"] == "1"
    assert json.loads(metadata["DCP_SHARDING_INFO"]) == {
        "w": {"saved_offsets": [0, 0]},
        "p": {"saved_offsets": [2, 0], "global_shape": [4, 3]},
    }


def test_without_parts_nothing_is_said_of_them() -> None:
    """A file of whole tensors is one that any program can have written."""
    assert "__metadata__" not in body_of(build_header({"w": WHOLE}, {}))


def test_too_many_tensors_for_any_reader_are_refused() -> None:
    """Nothing is written that `safetensors` would not open."""
    long = {"n" * 1_000_000 + str(i): WHOLE for i in range(100)}
    with pytest.raises(UnsupportedState, match="100 tensors are too many"):
        build_header(long, {})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dtype": "PICKLE"}, "unknown dtype 'PICKLE'"),
        ({"dtype": 5}, "dtype is not a string"),
        ({"shape": [-3]}, "shape holds something other than a size"),
        ({"shape": [2.0, 3]}, "shape holds something other than a size"),
        ({"shape": [True, 6]}, "shape holds something other than a size"),
        ({"shape": [2**63]}, "shape holds something other than a size"),
        ({"shape": [1] * 65}, "shape is not a list of at most 64"),
        ({"shape": None}, "shape is not a list"),
        ({"shape": [2**62] * 64}, "needs far more"),
        ({"shape": [4]}, "needs 16"),
        ({"data_offsets": [0]}, "not two offsets"),
        ({"data_offsets": [-4, 20]}, "data_offsets holds something other than a size"),
        ({"data_offsets": [24, 0]}, "has -24 bytes"),
        ({"data_offsets": [12, 36]}, "tensors .* overlap"),
        ({"data_offsets": [36, 60]}, "is shorter"),
        ({"data_offsets": [2**62, 2**62 + 24]}, "is shorter"),
        ({"data_offsets": [37, 61]}, "is not aligned for its dtype"),
    ],
)
def test_a_forged_tensor_is_refused(change: dict[str, Any], problem: str) -> None:
    """Dtype, shape and bytes must agree and lie in the file, whatever the numbers."""
    body = body_of(build_header({"w": WHOLE, "p": PART}, {}))
    body["w"] |= change
    text = json.dumps(body)
    head = head_of(text.ljust(4088).encode())
    with pytest.raises(DamagedCheckpoint, match=problem):
        parse(head)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"global_shape": [4, 3]}, "saved_offsets is not a list"),
        ({"global_shape": [4, 3], "saved_offsets": [2]}, "inside its global_shape"),
        ({"global_shape": [4, 3], "saved_offsets": [3, 0]}, "inside its global_shape"),
        ({"global_shape": [4], "saved_offsets": [2, 0]}, "inside its global_shape"),
        ({"global_shape": [4, 3], "saved_offsets": [-1, 0]}, "other than a size"),
        ({"global_shape": "4x3", "saved_offsets": [2, 0]}, "global_shape is not a list"),
        (5, "not an object of objects"),
    ],
)
def test_a_forged_part_is_refused(part: Any, problem: str) -> None:
    """A part lies inside its whole."""
    body = body_of(build_header({"p": PART}, {}))
    body["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps({"p": part})
    with pytest.raises(DamagedCheckpoint, match=problem):
        parse(head_of(json.dumps(body).ljust(4088).encode()))


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        (b"\xff" * 8, "impossible header length"),
        ((100).to_bytes(8, "little") + b"{}", "impossible header length"),
        (head_of(b"[]"), "not an object"),
        (head_of(b"{"), "not valid JSON"),
        (head_of(b"\xff\xff"), "not valid JSON"),
        (head_of(b"[" * 100_000), "not valid JSON"),
        (head_of(b'{"a":1,"a":2}'), "a key stands twice"),
        (head_of({"a": 5}), "'a' is not an object"),
        (head_of({"__metadata__": 5}), "not an object of strings"),
        (head_of({"__metadata__": {"DCP_SHARDING_INFO": 5}}), "not an object of strings"),
        (head_of({"__metadata__": {"DCP_SHARDING_INFO": "["}}), "not valid JSON"),
        (head_of({"__metadata__": {"DCP_SHARDING_INFO": "[]"}}), "not an object of objects"),
    ],
)
def test_what_is_no_header_is_refused(head: bytes, problem: str) -> None:
    """One sentence for each, and nothing falls over."""
    with pytest.raises(DamagedCheckpoint, match=problem):
        parse(head)


def test_parts_as_torch_itself_writes_them_are_read() -> None:
    """Its files do not give the whole's shape: such a tensor is taken as it stands."""
    body = body_of(build_header({"w": WHOLE}, {}))
    body["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2, 0]}})}
    found = parse(head_of(json.dumps(body).ljust(4088).encode()))
    assert found["w"].global_shape is None
