"""Readers against bytes nobody wrote: our own errors only, quickly, whatever comes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotguard.checkpoint import strict_json
from spotguard.checkpoint.header import parse_header
from spotguard.checkpoint.lineage import CheckpointRef, Claim
from spotguard.checkpoint.manifest import Manifest, load_manifest
from spotguard.checkpoint.shard import write_shard
from spotguard.errors import DamagedCheckpoint, StateMismatch
from spotguard.events import keys
from spotguard.events.checksummed import with_checksum
from spotguard.shared.units import to_iso
from spotguard.testing.stores import MemoryStore
from tests.checkpoint.crashes.mutation import mutants, survive
from tests.checkpoint.crashes.savings import blocks, body_of, make_manifest, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.checkpoint.tensors import TensorInfo

REFUSED = (DamagedCheckpoint,)

QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["$float", "$$float"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from(["$float", "$$float"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@pytest.mark.same_everywhere
@QUICK
@given(JSON)
def test_any_json_value_survives(value: Any) -> None:
    """What `dumps` writes, `loads` reads, and the bytes are the same every time."""
    raw = strict_json.dumps(value, what="x")
    assert strict_json.loads(raw, what="x") == value
    assert strict_json.dumps(strict_json.loads(raw, what="x"), what="x") == raw


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a":2}', "1" * 402, "[" * 10**5, "NaN", "-Infinity", '{"$float":[]}', "\ufeff1"],
)
def test_json_that_means_two_things_or_costs_too_much_is_refused(text: str) -> None:
    """Doubled keys, huge integers, deep nesting, words outside the standard."""
    with pytest.raises(DamagedCheckpoint, match="x is not valid JSON"):
        strict_json.loads(text.encode(), what="x")


@QUICK
@given(st.binary(max_size=200))
def test_random_bytes_are_no_checkpoint(raw: bytes) -> None:
    """No bytes crash a reader."""
    for read in (Manifest.from_json, Claim.from_json, parse):
        try:
            read(raw)
        except DamagedCheckpoint:
            continue
        raise AssertionError("random bytes were accepted")


@QUICK
@given(JSON)
def test_any_json_in_place_of_a_claim_is_refused(value: Any) -> None:
    """Right JSON, wrong content."""
    try:
        Claim.from_json(json.dumps(value).encode())
    except DamagedCheckpoint:
        return
    raise AssertionError("nonsense was accepted as a claim")


FORGED = ((23, 47), (277, 301))
"""Of 300 bytes of data: spans that overlap with another tensor, or end behind the file."""


def headers() -> list[bytes]:
    """Return headers of ours with and without parts, a plain one, and two that lie by one digit."""
    store = MemoryStore()
    parts = write_shard(store, "", "p.safetensors", blocks(3), metadata={"a": "b"})
    whole = write_shard(store, "", "w.safetensors", blocks(3)[:4])
    ours = [store.get(info.file)[: info.header_bytes].rstrip() for info in (parts, whole)]
    plain = b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    more = b'{"a":{"dtype":"U8","shape":[24],"data_offsets":[%d,%d]},%s'
    overlapping, outside = (more % (*span, plain[1:].replace(b"a", b"b", 1)) for span in FORGED)
    return [head[8:] for head in ours] + [plain, overlapping, outside]


@pytest.mark.slow
@pytest.mark.same_everywhere
def test_a_mutated_header_is_refused_or_stays_inside_the_file() -> None:
    """60 000 headers: each is refused, or all its tensors lie in the file, side by side."""

    def read(text: bytes) -> dict[str, TensorInfo]:
        padded = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
        return parse(len(padded).to_bytes(8, "little") + padded + bytes(300))

    def check(text: bytes, found: dict[str, TensorInfo]) -> None:
        size = -(-(len(text) + 8) // 4096) * 4096 + 300
        filled = sorted((t.start, t.end) for t in found.values() if t.size_bytes)
        assert all(4096 <= start < end <= size for start, end in filled)
        assert all(one[1] <= other[0] for one, other in pairwise(filled))
        for info in found.values():
            assert info.end - info.start == info.size_bytes
            assert len(info.offsets or info.shape) == len(info.global_shape or info.shape)

    accepted, number = survive(read, mutants(headers(), 60_000, seed=7), REFUSED, check)
    assert number == 60_000
    assert accepted > 1000  # a changed letter in a name is still a file


def test_a_header_mutated_with_its_length_is_refused_or_sound() -> None:
    """10 000 files whose length, padding and data are hit too."""
    store = MemoryStore()
    info = write_shard(store, "", "x.safetensors", [blocks(3)[0]])
    raw = store.get(info.file)
    text = raw[8:4096].rstrip()
    small = len(text).to_bytes(8, "little") + text + raw[4096:]

    def check(mutant: bytes, found: dict[str, TensorInfo]) -> None:
        assert all(0 <= t.start <= t.end <= len(mutant) for t in found.values())

    survive(parse, mutants([small], 10_000, seed=8), REFUSED, check)


@pytest.mark.slow
@pytest.mark.same_everywhere
def test_a_mutated_manifest_with_a_right_checksum_is_refused_or_sound() -> None:
    """60 000 forged manifests: each is refused by name, or is a sound manifest."""
    store = MemoryStore()
    saved = load_manifest(store, save(store, 10))
    small = make_manifest(state={"a": [1.5, {"$": "x"}], "$float": {}}, ranks={}, counters={})
    originals = [json.dumps(body_of(manifest)).encode() for manifest in (saved, small, small)]

    def check(_: bytes, found: Manifest) -> None:
        assert found.prefix.startswith("checkpoints/")
        for shard in found.shards:
            assert "/" not in shard.file
            spans = [shard.piece(index) for index in range(len(shard.piece_hashes))]
            ends = [shard.header_bytes, *(end for _, end in spans)]
            assert [start for start, _ in spans] == ends[:-1]
            assert ends[-1] == shard.size_bytes
        to_iso(found.created_at)

    accepted, number = survive(
        lambda text: Manifest.from_json(seal(text)),
        mutants(originals, 60_000, seed=9),
        (DamagedCheckpoint, StateMismatch),
        check,
    )
    assert number == 60_000
    assert accepted > 1000


def test_a_manifest_mutated_as_it_stands_is_refused() -> None:
    """5 000 whole files: none is taken for what was written."""
    raw = make_manifest().to_json()

    def check(mutant: bytes, found: Manifest) -> None:
        assert mutant == raw

    survive(Manifest.from_json, mutants([raw], 5000, seed=10), REFUSED, check)


@pytest.mark.slow
def test_a_mutated_claim_is_refused_or_sound() -> None:
    """30 000 claims whose checksum is right: each is refused, or says what makes sense."""
    base = Claim(attempt=3, claimed_at=1.7e9, resumed_from=None, writer="a/1/x", extra={"n": 1})
    onward = replace(base, resumed_from=keys.checkpoint(10, 2))

    def check(_: bytes, found: Claim) -> None:
        source = CheckpointRef.of(found.resumed_from or "")
        assert source is None or source.attempt < found.attempt
        to_iso(found.claimed_at)

    accepted, number = survive(
        Claim.from_json,
        map(with_checksum, filter(None, mutants([bare(base), bare(onward)], 30_000, seed=11))),
        REFUSED,
        check,
    )
    assert number == 30_000
    assert accepted > 500


def bare(claim: Claim) -> bytes:
    """Return a claim's bytes without the checksum."""
    raw = claim.to_json()
    return raw[: raw.index(b',"checksum"')] + b"}"


ODD: list[Any] = [
    *(None, True, -1, 0, 1.5, 2**64, 10**300, "", "x", "../x"),
    *([], [[]], {}, {"": 0}),
]


def test_any_field_replaced_by_anything_is_refused_or_sound() -> None:
    """Each field of manifest, shard and header, replaced by values of other kinds."""
    store = MemoryStore()
    saved = load_manifest(store, save(store, 10))
    parts = json.dumps({"w": {"saved_offsets": [0, 0], "global_shape": [4, 3]}})
    header = {
        "__metadata__": {"DCP_SHARDING_INFO": parts},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    }
    kinds: list[tuple[Any, Callable[[bytes], Any]]] = [
        (body_of(saved), lambda text: Manifest.from_json(seal(text))),
        (header, lambda text: parse(len(text).to_bytes(8, "little") + text + bytes(24))),
        ({"w": {"saved_offsets": [0, 0], "global_shape": [4, 3]}}, parse_parts),
    ]
    for original, read in kinds:
        tried = refused = 0
        for path in paths_in(original):
            for value in ODD:
                body = json.loads(json.dumps(original))
                parent = body
                for part in path[:-1]:
                    parent = parent[part]
                parent[path[-1]] = value
                tried += 1
                try:
                    read(json.dumps(body).encode())
                except (DamagedCheckpoint, StateMismatch):
                    refused += 1
        assert refused > tried / 2


def parse_parts(text: bytes) -> Any:
    """Parse a header whose entry of parts is this."""
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    body = {"__metadata__": {"DCP_SHARDING_INFO": text.decode()}, "w": tensor}
    head = json.dumps(body).ljust(4088).encode()
    return parse(len(head).to_bytes(8, "little") + head + bytes(24))


def test_a_manifest_is_written_the_same_way_twice() -> None:
    """Equal manifests have equal bytes, so a repeated commit can be told from another one.

    The order of a dict is part of it: a restored state iterates as the saved one did.
    """
    first = make_manifest(state={"b": 1, "a": [2]}).to_json()
    assert first == make_manifest(state={"b": 1, "a": [2]}).to_json()
    again = Manifest.from_json(first)
    assert again.to_json() == first
    assert list(again.state) == ["b", "a"]


def parse(raw: bytes) -> dict[str, TensorInfo]:
    """Parse a safetensors header."""
    return parse_header(memoryview(raw), len(raw), what="x")


def seal(text: bytes) -> bytes:
    """Return a manifest of any bytes whose checksum is right."""
    digest = hashlib.sha256(text).hexdigest().encode()
    return b'{"checksum":"sha256:%s","manifest":%s}' % (digest, text)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value below the top."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [found for key, item in items for found in [(*path, key), *paths_in(item, (*path, key))]]
