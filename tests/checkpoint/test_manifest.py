"""The manifest: the commit, and the proof of everything else."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from typing import Any

import pytest

from spotguard.checkpoint.manifest import (
    Manifest,
    check_shards_intact,
    check_shards_present,
    commit,
    load_manifest,
    shard_readers,
    tensors_that_count,
)
from spotguard.checkpoint.shard import Block, shard_file, write_shard
from spotguard.errors import (
    AlreadyExists,
    DamagedCheckpoint,
    StateMismatch,
    StoreUnavailable,
    UnsupportedState,
)
from spotguard.events import keys
from spotguard.testing.stores import FaultyStore, MemoryStore
from tests.checkpoint.crashes.savings import body_of, flip, make_manifest, save, sealed

PREFIX = keys.checkpoint(10, 1)


def saved_manifest() -> Manifest:
    """Return a manifest with two real shards."""
    store = MemoryStore()
    return load_manifest(store, save(store, 10))


def test_a_manifest_comes_back_as_it_was() -> None:
    """Every field survives, shards and all."""
    store = MemoryStore()
    prefix = save(store, 10, parent=keys.checkpoint(5, 1))
    manifest = load_manifest(store, prefix)

    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.prefix == prefix == PREFIX
    assert manifest.parent == keys.checkpoint(5, 1)
    assert [shard.file for shard in manifest.shards] == [
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]
    assert shard_readers(store, manifest)[0].tensors["part"].global_shape == (4, 3)
    assert manifest.size_bytes == 2 * manifest.shards[0].size_bytes
    check_shards_intact(store, manifest)


def test_state_of_any_json_form_survives_exactly() -> None:
    """Floats to the last bit, infinities, NaN, big integers, odd keys: all come back."""
    state = {
        "tiny": 5e-324,
        "third": 1 / 3,
        "big": 2**128 + 1,
        "best": math.inf,
        "worst": -math.inf,
        "text": "é\ud800\0\n",
        "": [None, True, [], {}],
        "$float": "nan",
        "$$float": {"$float": 1.0},
        "$other": {"$": "x"},
    }
    back = Manifest.from_json(make_manifest(state=state).to_json())
    assert back.state == state

    nan = Manifest.from_json(make_manifest(state=[math.nan]).to_json()).state[0]
    assert math.isnan(nan)


def test_the_file_is_standard_json() -> None:
    """No NaN literal: any parser in any language reads it."""
    raw = make_manifest(state=[math.nan, math.inf]).to_json()

    def refuse(text: str) -> None:
        raise AssertionError(text)

    assert json.loads(raw, parse_constant=refuse)["manifest"]["state"][0] == {"$float": "nan"}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({1: "int key"}, "key 1"),
        ({"a": {"b": b"bytes"}}, "a.b holds a bytes"),
        ([object()], "object"),
        (10**500, "digits"),
    ],
)
def test_what_json_cannot_say_is_refused_by_name(state: Any, problem: str) -> None:
    """Nothing is silently turned into something else; the sentence says where it is."""
    with pytest.raises(UnsupportedState, match=problem):
        make_manifest(state=state).to_json()


def test_a_state_that_holds_itself_is_refused() -> None:
    """Endless nesting ends in our own error."""
    state: list[Any] = []
    state.append(state)
    with pytest.raises(UnsupportedState, match="too deeply"):
        make_manifest(state=state).to_json()


def test_every_flipped_bit_and_every_truncation_is_found() -> None:
    """The manifest proves itself: each bit and each length is checked."""
    store = MemoryStore()
    save(store, 10)
    raw = store.get(keys.manifest(PREFIX))
    for bit in range(0, len(raw) * 8, 3):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedCheckpoint, match="damaged"):
            Manifest.from_json(bytes(damaged))
    for kept in range(len(raw)):
        with pytest.raises(DamagedCheckpoint):
            Manifest.from_json(raw[:kept])
    with pytest.raises(DamagedCheckpoint):
        Manifest.from_json(raw + b" ")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("run_id", 5, "run_id is 5, expected a string"),
        ("attempt", 0, "attempt is 0, expected an integer from 1"),
        ("attempt", True, "attempt is True"),
        ("step", -1, "step is -1"),
        ("step", 10**12, "step is 1000000000000"),
        ("step", 1.0, "step is 1.0"),
        ("kind", "weekly", "kind is 'weekly', expected like periodic|emergency"),
        ("created_at", "yesterday", "created_at is 'yesterday', expected an ISO"),
        ("created_at", "2024-01-01T00:00:00", "zone"),
        ("created_at", "0001-01-01T00:00:00+23:59", "expected an ISO"),
        ("created_at", "9999-12-31T23:59:59.9999999-00:01", "expected an ISO"),
        ("parent", "../../etc", "parent"),
        ("world_size", 0, "world_size"),
        ("shards", {}, "shards is an object, expected a list"),
        ("shards", [5], "shard 0 is 5, expected an object"),
        ("ranks", [], "ranks is a list, expected an object"),
        ("counters", None, "counters is None"),
        ("versions", {"torch": 2}, "versions is an object, expected an object of strings"),
        ("schema", "1", "schema is '1'"),
    ],
)
def test_a_forged_field_is_named(field: str, value: Any, problem: str) -> None:
    """Bad values give one sentence with the field, what was given and what is expected."""
    body = body_of(make_manifest()) | {field: value}
    with pytest.raises(DamagedCheckpoint) as caught:
        Manifest.from_json(sealed(body))
    assert problem in str(caught.value)


@pytest.mark.parametrize("field", sorted(body_of(make_manifest())))
def test_a_missing_field_is_named(field: str) -> None:
    """No field is optional, and none makes the reader fall over."""
    body = body_of(make_manifest())
    del body[field]
    with pytest.raises(DamagedCheckpoint, match=f"lacks the field '{field}'"):
        Manifest.from_json(sealed(body))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"file": "../../x.safetensors"}, "file is"),
        ({"file": "a/b.safetensors"}, "file is"),
        ({"file": "manifest.json"}, "file is"),
        ({"size_bytes": 4000}, "header_bytes is 4096, expected at most size_bytes"),
        ({"size_bytes": 2**62}, r"piece_hashes is a list, expected a list of \d{13} hashes"),
        ({"size_bytes": 0}, "size_bytes is 0"),
        ({"size_bytes": 2**63}, "size_bytes is 9223372036854775808"),
        ({"hash": "md5"}, "hash is 'md5'"),
        ({"header_bytes": 4097}, "header_bytes is 4097, expected a multiple of 4096"),
        ({"header_bytes": 2**40}, "header_bytes is 1099511627776"),
        ({"header_hash": "0" * 31}, "header_hash is"),
        ({"header_hash": "G" * 32}, "header_hash is"),
        ({"piece_bytes": 0}, "piece_bytes is 0"),
        ({"piece_bytes": 5000}, "piece_bytes is 5000, expected a multiple of 4096"),
        ({"piece_bytes": 2**40}, "piece_bytes is 1099511627776"),
        ({"piece_hashes": {}}, "piece_hashes is an object, expected a list"),
        ({"piece_hashes": []}, "a list of 1 hashes, one for each piece of data"),
        ({"piece_hashes": ["0" * 32] * 2}, "a list of 1 hashes"),
        ({"piece_hashes": [5]}, "a list of strings"),
        ({"piece_hashes": ["0" * 33]}, "a list of strings"),
    ],
)
def test_a_forged_shard_is_refused(change: dict[str, Any], problem: str) -> None:
    """A shard's file is a plain name in its own folder; every byte of it has one hash."""
    body = body_of(saved_manifest())
    body["shards"][0] |= change
    with pytest.raises(DamagedCheckpoint, match=problem):
        Manifest.from_json(sealed(body))


@pytest.mark.parametrize("field", sorted(body_of(saved_manifest())["shards"][0]))
def test_a_missing_field_of_a_shard_is_named(field: str) -> None:
    """No field of a shard is optional."""
    body = body_of(saved_manifest())
    del body["shards"][1][field]
    with pytest.raises(DamagedCheckpoint, match=f"shard 1.* lacks the field '{field}'"):
        Manifest.from_json(sealed(body))


def test_two_shards_in_one_file_are_refused() -> None:
    """Each shard has a file of its own."""
    body = body_of(saved_manifest())
    body["shards"][1]["file"] = body["shards"][0]["file"]
    with pytest.raises(DamagedCheckpoint, match="different files"):
        Manifest.from_json(sealed(body))


@pytest.mark.parametrize(
    "text",
    [
        *[b"[" * 200_000, b'{"a":' * 100_000, b"1" * 5000, b"-" + b"9" * 10_000],
        *[b"NaN", b"\xff", b"", b'{"a":1,"a":2}', b'{"$float":"no"}', b"5"],
    ],
)
def test_hostile_json_ends_in_our_own_error(text: bytes) -> None:
    """Deep nesting, huge numbers, doubled keys: one clear error, no crash and no hang."""
    digest = hashlib.sha256(text).hexdigest().encode()
    with pytest.raises(DamagedCheckpoint):
        Manifest.from_json(b'{"checksum":"sha256:%s","manifest":%s}' % (digest, text))


def test_a_newer_schema_is_not_taken_for_damage() -> None:
    """An old spotguard must stop, not fall back to an older checkpoint in silence."""
    with pytest.raises(StateMismatch, match="schema 4") as caught:
        Manifest.from_json(sealed(body_of(make_manifest()) | {"schema": 4}))
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize("fields", [{"step": -1}, {"step": 10**12}, {"attempt": 0}])
def test_numbers_that_no_key_can_hold_are_refused(fields: dict[str, Any]) -> None:
    """Nothing is written that would not be found again."""
    with pytest.raises(ValueError, match=r"Manifest\.(step|attempt) is"):
        make_manifest(**fields)


def test_a_manifest_belongs_to_its_place() -> None:
    """A manifest copied to another checkpoint's folder is refused."""
    store = MemoryStore()
    save(store, 10)
    other = keys.checkpoint(20, 1)
    store.put(keys.manifest(other), store.get(keys.manifest(PREFIX)))
    with pytest.raises(DamagedCheckpoint, match="belongs to"):
        load_manifest(store, other)


def test_a_missing_or_vanishing_manifest_is_damage() -> None:
    """What another process prunes at this moment is passed over, not a crash."""
    store = FaultyStore(MemoryStore())
    with pytest.raises(DamagedCheckpoint, match="missing"):
        load_manifest(store, PREFIX)
    save(store, 10)
    store.before("get", store.inner.delete)
    with pytest.raises(DamagedCheckpoint, match="missing"):
        load_manifest(store, PREFIX)


def test_of_racing_commits_one_wins() -> None:
    """Two writers of one checkpoint: exactly one commit, and its bytes stay."""
    for _ in range(10):
        store = MemoryStore()
        won: list[str] = []
        start = threading.Barrier(4)

        def race(name: str) -> None:
            start.wait()  # noqa: B023  the threads end within the round
            try:
                commit(store, make_manifest(run_id=name))  # noqa: B023
            except AlreadyExists:
                return
            won.append(name)  # noqa: B023

        threads = [threading.Thread(target=race, args=(f"run-{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [load_manifest(store, PREFIX).run_id]


def test_a_commit_whose_answer_was_lost_can_be_repeated() -> None:
    """The same manifest again is a success; another one is not."""

    def lost(_key: str) -> None:
        raise StoreUnavailable("the answer was lost")

    store = FaultyStore(MemoryStore()).after("put", lost)
    with pytest.raises(StoreUnavailable):
        commit(store, make_manifest())
    assert commit(store, make_manifest()) == PREFIX
    with pytest.raises(AlreadyExists):
        commit(store, make_manifest(run_id="other"))


def test_the_two_checks_see_what_they_promise() -> None:
    """Presence compares sizes only; intactness reads every byte."""
    store = FaultyStore(MemoryStore())
    manifest = load_manifest(store, save(store, 10))
    key = PREFIX + manifest.shards[1].file
    flip(store, key, -1)

    check_shards_present(store, manifest)
    assert store.calls["get_into"] == 0
    with pytest.raises(DamagedCheckpoint, match="hash"):
        check_shards_intact(store, manifest)
    store.delete(key)
    with pytest.raises(DamagedCheckpoint, match="missing"):
        check_shards_present(store, manifest)


@pytest.mark.parametrize("anew", ["a part", "the whole"])
def test_a_base_counts_but_for_what_was_stored_anew(anew: str) -> None:
    """Of a tensor that is spread over ranks one rank may store its part anew, and only that."""

    def part(row: int, value: int) -> Block:
        return Block(
            name="w", dtype="U8", shape=(1, 2), data=bytes([value] * 2),
            global_shape=(3, 2), offsets=(row, 0),
        )  # fmt: skip

    store, folder = MemoryStore(), keys.frozen(1)
    bases = [
        write_shard(store, folder, shard_file(rank, 3), [part(rank, rank)]).within(folder)
        for rank in range(3)
    ]
    newer = part(1, 9) if anew == "a part" else Block(name="w", dtype="U8", shape=(1,), data=b"9")
    own = write_shard(store, keys.checkpoint(10, 1), shard_file(1, 3), [newer])
    prefix = commit(store, make_manifest(shards=(own, *bases)))
    readers = shard_readers(store, load_manifest(store, prefix))

    counted = [len(tensors) for tensors in tensors_that_count(readers)]
    assert counted == ([1, 1, 0, 1] if anew == "a part" else [1, 0, 0, 0])
