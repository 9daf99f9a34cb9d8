"""The head of a shard: a safetensors header, padded so that the data begins on a page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from spotguard.checkpoint.fields import LARGEST, MAX_DIMENSIONS
from spotguard.checkpoint.strict_json import loads_plain
from spotguard.checkpoint.tensors import (
    MAX_HEADER_BYTES,
    PAGE_BYTES,
    TensorInfo,
    check_placement,
    check_tensor,
)
from spotguard.errors import DamagedCheckpoint, UnsupportedState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.checkpoint.strict_json import Json

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_PARTS = "DCP_SHARDING_INFO"
"""Where torch's distributed checkpoint reader looks for the offsets of parts."""


def build_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the JSON, padded with spaces to whole pages.

    `tensors` have their offsets from the start of the data.

    Raises:
        UnsupportedState: there are too many for one shard.
    """
    parts = _parts_text(tensors)
    metadata = {**metadata, **({_PARTS: parts} if parts else {})}
    body: dict[str, object] = {_METADATA: metadata} if metadata else {}
    for name, info in tensors.items():
        span = [info.start, info.end]
        body[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": span}
    text = json.dumps(body, separators=(",", ":")).encode()
    padded = text.ljust(-(-(len(text) + _LENGTH_BYTES) // PAGE_BYTES) * PAGE_BYTES - _LENGTH_BYTES)
    if len(padded) > MAX_HEADER_BYTES:
        raise UnsupportedState(f"{len(tensors)} tensors are too many for one shard's header")
    return len(padded).to_bytes(_LENGTH_BYTES, "little") + padded


def parse_metadata(head: memoryview, *, what: str) -> dict[str, str]:
    """Return what a header says beside its tensors; raises as `parse_header`."""
    body, _ = _read(head, what)
    metadata = body.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedCheckpoint(f"{what}: {_METADATA} is not an object of strings")
    return metadata


def parse_header(head: memoryview, size_bytes: int, *, what: str) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file, their offsets counted from the file's start.

    Args:
        head: The file's first bytes, up to its data or beyond.
        size_bytes: Of the whole file.
        what: Names the file in messages.

    Raises:
        DamagedCheckpoint: it is not a well-formed safetensors file, or a tensor is not aligned.
    """
    body, data_start = _read(head, what)
    parts = _parts(body.pop(_METADATA, None), what)
    tensors = {}
    for name, value in body.items():
        where = f"{what}: tensor {ascii(name)[:80]}"
        tensors[name] = _tensor(value, parts.get(name), data_start, where)
    check_placement(tensors, size_bytes, what)
    return tensors


def _read(head: memoryview, what: str) -> tuple[dict[str, object], int]:
    """Return what the header holds, and where the data begins."""
    if len(head) < _LENGTH_BYTES:
        raise DamagedCheckpoint(f"{what} is too short for a safetensors file")
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    data_start = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or data_start > len(head):
        raise DamagedCheckpoint(f"{what} has an impossible header length ({length} bytes)")
    body = loads_plain(head[_LENGTH_BYTES:data_start], what=f"{what}: header")
    if not isinstance(body, dict):
        raise DamagedCheckpoint(f"{what}: header is not an object")
    return body, data_start


def _parts_text(tensors: Mapping[str, TensorInfo]) -> str:
    """Return where each tensor lies in its whole, if any is a part, in the words of torch's DCP."""
    if all(info.global_shape is None for info in tensors.values()):
        return ""
    parts = {}
    for name, info in tensors.items():
        # DCP wants offsets of all tensors of such a file; the whole shape is our addition.
        parts[name] = {"saved_offsets": info.offsets or (0,) * len(info.shape)}
        if info.global_shape is not None:
            parts[name]["global_shape"] = info.global_shape
    return json.dumps(parts, separators=(",", ":"))


def _parts(metadata: Json, what: str) -> dict[str, Json]:
    """Return {tensor: {"saved_offsets", "global_shape"}} of the tensors that are parts."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not isinstance(text := metadata.get(_PARTS, "{}"), str):
        raise DamagedCheckpoint(f"{what}: {_METADATA} is not an object of strings")
    parts = loads_plain(text.encode("utf-8", "replace"), what=f"{what}: {_PARTS}")
    if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
        raise DamagedCheckpoint(f"{what}: {_PARTS} is not an object of objects")
    return {name: part for name, part in parts.items() if "global_shape" in part}


def _tensor(value: Json, part: Json, data_start: int, where: str) -> TensorInfo:
    # Written out, not by `Fields`: a header may hold many thousands of them.
    if not isinstance(value, dict):
        raise DamagedCheckpoint(f"{where} is not an object")
    dtype, span = value.get("dtype"), _sizes(value, "data_offsets", where)
    if not isinstance(dtype, str):
        raise DamagedCheckpoint(f"{where}: dtype is not a string")
    if len(span) != 2:
        raise DamagedCheckpoint(f"{where}: data_offsets are not two offsets")
    info = TensorInfo(
        dtype=dtype,
        shape=_sizes(value, "shape", where),
        start=data_start + span[0],
        end=data_start + span[1],
        global_shape=_sizes(part, "global_shape", where) if part else None,
        offsets=_sizes(part, "saved_offsets", where) if part else None,
    )
    check_tensor(info, where)
    return info


def _sizes(value: dict[str, Json], name: str, where: str) -> tuple[int, ...]:
    found = value.get(name)
    if not isinstance(found, list) or len(found) > MAX_DIMENSIONS:
        raise DamagedCheckpoint(f"{where}: {name} is not a list of at most {MAX_DIMENSIONS} sizes")
    for item in found:
        if type(item) is not int or not 0 <= item <= LARGEST:
            raise DamagedCheckpoint(f"{where}: {name} holds something other than a size")
    return tuple(found)
