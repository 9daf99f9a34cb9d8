"""A frozen base that lies in files of its own is referred to by hash, and read from there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spotguard.checkpoint.manifest import check_shards_intact, load_manifest
from spotguard.checkpoint.outside import BaseFiles
from spotguard.errors import BaseNotFound, CheckpointError, UsageError
from spotguard.events import keys
from spotguard.runtime.checkpoint.frozen_base import FrozenBase
from spotguard.runtime.checkpoint.tensor_reader import StoredTensors
from spotguard.runtime.state.tracked import words_on_frozen
from spotguard.runtime.state.tree import Leaf
from spotguard.testing import FakeRendezvous, FaultyStore, MemoryStore
from tests.checkpoint.crashes.savings import flip, make_manifest
from tests.runtime.checkpoint.test_frozen_base import (
    Adapted,
    Attempt,
    attempt,
    frozen,
    own_bytes,
    same_weights,
)
from tests.runtime.harness.lab import together

if TYPE_CHECKING:
    from spotguard.checkpoint.tensors import ShardInfo
    from spotguard.storage.base import ObjectStore


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with what `Adapted(0).base` has, under names of its own, and more."""
    base = Adapted(0).base
    others = {f"other{i}": torch.full((40, 40), float(i)) for i in range(3)}
    path = tmp_path / "base.safetensors"
    save_file({**others, "w": base.weight.detach(), "b": base.bias.detach()}, path)
    return path


def stored_bytes(store: ObjectStore) -> int:
    """Return what the bases take in the store."""
    return sum(info.size_bytes for info in store.list(keys.FROZEN))


def test_what_is_in_the_file_is_not_stored_and_comes_back_from_there(file: Path) -> None:
    """Whatever its name there; only a header is in the store, and the manifest proves the data."""
    store = MemoryStore()
    first = attempt(store, 1, file)
    first.save(10)
    manifest = load_manifest(store, keys.checkpoint(10, 1))
    [base] = manifest.bases
    assert (manifest.schema, base.outside, stored_bytes(store)) == (3, True, base.header_bytes)
    assert own_bytes(store, 10) == (40 * 2 + 2) * 4
    check_shards_intact(store, manifest)

    second = attempt(store, 2, file, seed=1)  # whose own weights are others
    assert same_weights(second.model, first.model)
    second.save(20)
    assert same_weights(attempt(store, 3, seed=2).model, second.model), "named by nobody"


def test_the_file_may_lie_elsewhere_later(file: Path) -> None:
    """On another node it has another path: the contents count."""
    store = MemoryStore()
    first = attempt(store, 1, file)
    first.save(10)
    moved = file.rename(file.with_name("moved.safetensors"))
    assert same_weights(attempt(store, 2, moved, seed=1).model, first.model)


@pytest.mark.parametrize("how", ["missing", "changed", "cut short"])
def test_a_file_that_is_not_what_it_was_is_said_in_one_sentence(file: Path, how: str) -> None:
    """And no older checkpoint is restored in its place; a script that has the bytes goes on."""
    store = MemoryStore()
    attempt(store, 1, file).save(10)
    named: list[Path] = []
    if how == "missing":
        file.unlink()
    elif how == "changed":
        changed = load_file(file)
        changed["w"][39, 39] += 1
        save_file(changed, file)
        named = [file]
    else:
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BaseNotFound, match=r"base\.safetensors for the frozen tensor") as told:
        attempt(store, 2, *named, seed=1)
    assert "base=" in told.value.hint
    loose = Attempt(store, 2, *named)
    found = loose.rank.restore(loose.objects, strict=False)
    assert found.prefix == keys.checkpoint(10, 1), "also where all need not fit"
    again = attempt(store, 2, *named)
    again.save(20)
    assert stored_bytes(store) > 40 * 40 * 4, "what is in no file now is stored"
    assert same_weights(attempt(store, 3, seed=2).model, again.model)


def test_what_is_not_equal_to_the_file_is_stored_as_without(file: Path) -> None:
    """Each parameter by itself; and one that changes later is saved from then on."""
    store = MemoryStore()
    first = Attempt(store, 1, file)
    with torch.no_grad():
        first.model.base.bias[0] += 1
    first.begin()
    first.save(10)
    assert {base.outside for base in load_manifest(store, keys.checkpoint(10, 1)).bases} == {
        True,
        False,
    }
    again = attempt(store, 2, file, seed=1)
    assert same_weights(again.model, first.model)
    with torch.no_grad():
        again.model.base.weight.mul_(2)
    again.save(20)
    assert own_bytes(store, 20, 2) == (40 * 40 + 40 * 2 + 2) * 4
    assert same_weights(attempt(store, 3, file, seed=2).model, again.model)


def test_a_base_that_changes_while_it_is_referred_to_does_not_count(file: Path) -> None:
    """Its hash must be that of what the model has."""
    store = FaultyStore(MemoryStore())
    first = attempt(store, 1, file)

    def meanwhile(_key: str) -> None:
        with torch.no_grad():
            first.model.base.weight.add_(1)

    store.before("put", meanwhile, key_contains="outside")
    with pytest.raises(CheckpointError, match="was changed while it was stored"):
        first.save(10)
    store.before("put", lambda _key: None, key_contains="outside")
    first.save(20)
    assert same_weights(attempt(store.inner, 2, file, seed=1).model, first.model)


@pytest.mark.parametrize("was_saved", [True, False])
def test_of_three_ranks_a_replica_that_is_left_alone_refers_to_it_too(
    file: Path, was_saved: bool
) -> None:
    """To what the first rank wrote, or anew; and two ranks go on with it."""
    store, words = MemoryStore(), FakeRendezvous()
    three = [
        Attempt(store, 1, file, rank=rank, world_size=3, coordinator=words.rank(rank))
        for rank in range(3)
    ]
    assert not any(isinstance(r, Exception) for r in together(*(each.begin for each in three)))
    if was_saved:
        assert together(*((lambda e=each: e.save(10)) for each in three)) == [None] * 3
    three[1].save(20, solo=True)
    [base] = load_manifest(store, keys.checkpoint(20, 1)).bases
    assert base.outside
    assert base.file.startswith("rank-00000" if was_saved else "rank-00001")
    words = FakeRendezvous()
    two = [
        Attempt(store, 2, file, seed=r + 1, rank=r, world_size=2, coordinator=words.rank(r))
        for r in range(2)
    ]
    assert not any(isinstance(r, Exception) for r in together(*(each.begin for each in two)))
    assert all(same_weights(each.model, three[1].model) for each in two)


@pytest.mark.parametrize("how", ["not to be read", "damaged"])
def test_left_alone_it_saves_also_where_the_base_cannot_be_read(file: Path, how: str) -> None:
    """What another rank referred to counts as not there: this one refers to it anew."""
    inner, words = MemoryStore(), FakeRendezvous()
    store = FaultyStore(inner)
    two = [
        Attempt(store, 1, file, rank=rank, world_size=2, coordinator=words.rank(rank))
        for rank in range(2)
    ]
    assert not any(isinstance(r, Exception) for r in together(*(each.begin for each in two)))
    assert together(*((lambda e=each: e.save(10)) for each in two)) == [None] * 2
    if how == "damaged":
        [key] = frozen(inner)
        flip(inner, key, 90)
    else:
        store.fail("get_into", times=1, key_contains="outside")
    two[1].save(20, solo=True)
    [base] = load_manifest(inner, keys.checkpoint(20, 1)).bases
    assert base.file.startswith("rank-00001")
    assert same_weights(attempt(inner, 2, file, seed=1).model, two[1].model)


def test_rows_of_a_sharded_tensor_are_found_within_the_whole_one(file: Path) -> None:
    """Three ranks with uneven parts refer to theirs, columns are stored, and one rank reads all."""
    store, whole = MemoryStore(), Adapted(0).base.weight.detach()
    shards: list[ShardInfo] = []
    for rank, cut in enumerate((slice(0, 14), slice(14, 28), slice(28, 40))):
        leaves = [
            Leaf("rows", whole[cut].clone(), (40, 40), (cut.start, 0)),
            Leaf("columns", whole[:, cut].clone(), (40, 40), (0, cut.start)),
        ]
        base = FrozenBase(
            store, run_id="a-run", attempt=1, rank=rank, world_size=3, files=BaseFiles([file])
        )
        base.take(leaves, leaves, {leaf.tensor.data_ptr() for leaf in leaves})
        shards += base.stored()
    assert [shard.outside for shard in shards] == [True, False] * 3
    tensors = StoredTensors(store, make_manifest(shards=tuple(shards)), named=BaseFiles([file]))
    read = {name: torch.zeros(40, 40) for name in ("rows", "columns")}
    for name, target in read.items():
        tensors.into(name, target)
    tensors.read()
    assert all(torch.equal(target, whole) for target in read.values())


def test_runs_change_from_one_way_to_the_other(file: Path) -> None:
    """Without the name what was referred to is stored; what is stored stays so with the name."""
    store = MemoryStore()
    for number, paths, schema in ((1, [file], 3), (2, [], 2), (3, [file], 2)):
        one = attempt(store, number, *paths)
        one.save(10 * number)
        assert load_manifest(store, keys.checkpoint(10 * number, number)).schema == schema
    assert len(frozen(store)) == 2


def test_files_imply_that_what_is_frozen_is_skipped(file: Path) -> None:
    """And an object that is called `base`, or a list of such, is tracked as one."""
    objects: dict[str, Any] = {}
    skips, files = words_on_frozen(objects, None, [str(file), file.parent])
    assert (skips, files and files.paths, objects) == (True, [file], {})
    layers = [torch.nn.Linear(2, 2)]
    assert words_on_frozen(objects, None, layers) == (False, None)
    assert objects == {"base": layers}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file"),
        (b"PK\3\4 a pickle of torch.save, long enough", "is no safetensors file"),
        (b"", "is no safetensors file"),
    ],
)
def test_a_file_that_is_no_base_is_refused_when_it_is_named(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    """Not at the first save; a folder is all its files, and one without any is refused."""
    path = tmp_path / "base.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=told):
        BaseFiles([path])
    with pytest.raises(UsageError):
        BaseFiles(["~nobody-of-this-name/base.safetensors"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match=r"holds no \*\.safetensors"):
        BaseFiles([empty])


@pytest.mark.parametrize("make", [str, Path])
def test_a_url_is_refused_and_not_repeated(make: type) -> None:
    """It may hold a password, which would stand in logs."""
    with pytest.raises(UsageError) as told:
        BaseFiles([make("https://user:SECRET@host/base.safetensors")])
    assert "SECRET" not in f"{told.value}{told.value.hint}{told.value.__cause__}"
