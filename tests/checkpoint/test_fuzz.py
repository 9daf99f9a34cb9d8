"""Readers against bytes nobody wrote: our own errors only, quickly, whatever comes."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotguard.checkpoint import strict_json
from spotguard.checkpoint.lineage import Claim
from spotguard.checkpoint.manifest import Manifest, load_manifest
from spotguard.checkpoint.shard import parse_header, write_shard
from spotguard.errors import DamagedCheckpoint, StateMismatch
from spotguard.testing.stores import MemoryStore
from tests.checkpoint.savings import blocks, make_manifest, save

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


def test_a_mutated_header_is_refused_or_stays_inside_the_file() -> None:
    """Thousands of mutated headers: each is refused, or all its tensors lie in the file."""
    store = MemoryStore()
    write_shard(store, "", "x.safetensors", blocks(3), metadata={"a": "b"})
    whole = store.get("x.safetensors")
    text = whole[8:4096].rstrip()
    whole = (len(text)).to_bytes(8, "little") + text + whole[4096:]
    chance = random.Random(7)
    accepted = 0
    for _ in range(4000):
        raw = mutated(whole, chance, upto=8 + len(text))
        try:
            tensors = parse(raw)
        except DamagedCheckpoint:
            continue
        accepted += 1
        assert all(0 <= t.start <= t.end <= len(raw) for t in tensors.values())
    assert accepted  # a changed letter in a name is still a file


def test_a_mutated_manifest_with_a_right_checksum_is_refused_or_sound() -> None:
    """Thousands of forged manifests: each is refused by name, or is a sound manifest."""
    store = MemoryStore()
    manifest = load_manifest(store, save(store, 10))
    body = json.dumps(json.loads(manifest.to_json())["manifest"]).encode()
    chance = random.Random(7)
    for _ in range(4000):
        forged = mutated(body, chance, upto=len(body))
        digest = hashlib.sha256(forged).hexdigest().encode()
        raw = b'{"checksum":"sha256:%s","manifest":%s}' % (digest, forged)
        try:
            found = Manifest.from_json(raw)
        except (DamagedCheckpoint, StateMismatch):
            continue
        for shard in found.shards:
            assert "/" not in shard.file
            assert all(0 <= t.start <= t.end <= shard.size_bytes for t in shard.tensors.values())


def test_any_field_replaced_by_anything_is_refused_or_sound() -> None:
    """Each field of manifest, shard and tensor, replaced by values of other kinds."""
    store = MemoryStore()
    manifest = load_manifest(store, save(store, 10))
    original = json.loads(manifest.to_json())["manifest"]
    refused = 0
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        1.5,
        2**64,
        10**300,
        "",
        "x",
        "../x",
        [],
        [[]],
        {},
        {"": 0},
    ]
    for path in paths_in(original):
        for value in odd:
            body = json.loads(json.dumps(original))
            parent = body
            for part in path[:-1]:
                parent = parent[part]
            parent[path[-1]] = value
            text = json.dumps(body).encode()
            digest = hashlib.sha256(text).hexdigest().encode()
            try:
                Manifest.from_json(b'{"checksum":"sha256:%s","manifest":%s}' % (digest, text))
            except (DamagedCheckpoint, StateMismatch):
                refused += 1
    assert refused > 500


def test_a_manifest_is_written_the_same_way_twice() -> None:
    """Equal manifests have equal bytes, so a repeated commit can be told from another one.

    The order of a dict is part of it: a restored state iterates as the saved one did.
    """
    first = make_manifest(state={"b": 1, "a": [2]}).to_json()
    assert first == make_manifest(state={"b": 1, "a": [2]}).to_json()
    again = Manifest.from_json(first)
    assert again.to_json() == first
    assert list(again.state) == ["b", "a"]


def parse(raw: bytes) -> Any:
    """Parse a safetensors header."""
    return parse_header(memoryview(raw), what="x")


def mutated(raw: bytes, chance: random.Random, *, upto: int) -> bytes:
    """Return `raw` with a few bytes flipped, removed, doubled or replaced by JSON's own."""
    out = bytearray(raw)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(min(upto, len(out)))
        match chance.randrange(4):
            case 0:
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at : at + chance.randint(1, 8)]
            case 2:
                out[at:at] = out[at : at + chance.randint(1, 8)]
            case _:
                out[at] = chance.choice(b'0123456789-{}[]",:')
    return bytes(out)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value below the top."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [found for key, item in items for found in [(*path, key), *paths_in(item, (*path, key))]]
