"""The format's page tells the truth: its reader reads what we write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spotguard.checkpoint.manifest import commit, load_manifest
from spotguard.checkpoint.shard import Block, write_shard
from spotguard.checkpoint.tensors import DTYPE_BYTES
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.storage import FileStore
from spotguard.testing import MemoryStore
from tests.checkpoint.crashes.savings import (
    blocks,
    body_of,
    cut_into_pieces,
    flip,
    make_manifest,
    save,
)

PAGE = (Path(__file__).parents[2] / "docs" / "inside" / "format.md").read_text()


def reader() -> Any:
    """Return the page's `read_checkpoint`."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    table = re.search(r"DTYPES = \{.*?\n\}", code, re.DOTALL)
    assert table
    assert len([line for line in code.replace(table[0], "").splitlines() if line.strip()]) <= 33
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope["read_checkpoint"]


def test_the_pages_reader_reads_a_checkpoint(tmp_path: Path) -> None:
    """A stranger with numpy gets every tensor and the manifest's fields."""
    store = FileStore(tmp_path)
    prefix = save(store, 10)
    manifest, tensors = reader()(tmp_path / prefix)

    assert manifest["step"] == 10
    assert manifest["state"] == {"model": {"weight": "weight"}}
    assert tensors["bias"].tolist() == [10.0, 1.0, 2.0]
    assert tensors["flag"].tolist() is True
    assert tensors["weight"].shape == (8, 16)
    assert tensors["empty"].shape == (0, 4)
    assert "part" not in tensors


def test_the_pages_reader_finds_damage(tmp_path: Path) -> None:
    """It proves what it reads: manifest and shards."""
    store = FileStore(tmp_path)
    prefix = save(store, 10)
    key = prefix + load_manifest(store, prefix).shards[0].file
    for bit in (-1, 4096 * 8, 4000 * 8):
        flip(store, key, bit)
        with pytest.raises(ValueError, match=r"rank-00000-of-00002\.safetensors is damaged"):
            reader()(tmp_path / prefix)
        flip(store, key, bit)
    flip(store, prefix + "manifest.json", 8 * 200)
    with pytest.raises(ValueError, match=r"damaged|Expecting"):
        reader()(tmp_path / prefix)


def test_the_pages_reader_reads_many_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is proven at its place, also where a tensor spans several."""
    cut_into_pieces(monkeypatch)
    store, data = FileStore(tmp_path), bytes(i % 251 for i in range(10_000))
    block = Block(name="w", dtype="U8", shape=(10_000,), data=data)
    shard = write_shard(store, keys.checkpoint(10, 1), "w.safetensors", [block])
    commit(store, make_manifest(10, shards=(shard,)))
    _, tensors = reader()(tmp_path / keys.checkpoint(10, 1))
    assert tensors["w"].tobytes() == data
    flip(store, keys.checkpoint(10, 1) + "w.safetensors", 9000 * 8)
    with pytest.raises(ValueError, match="is damaged"):
        reader()(tmp_path / keys.checkpoint(10, 1))


def test_the_page_names_all_there_is() -> None:
    """Every field, dtype and kind is on the page."""
    shard = write_shard(MemoryStore(), "", "x.safetensors", blocks(1))
    words = set(re.findall(r"[A-Za-z0-9_]+", PAGE))
    assert set(body_of(make_manifest())) <= words
    assert set(shard.to_json()) <= words
    assert set(DTYPE_BYTES) <= words
    assert {kind.value for kind in CheckpointKind} <= words


def test_the_pages_reader_reads_a_base(tmp_path: Path) -> None:
    """What no step changes lies in a folder of its own; what did change supersedes it."""
    store = FileStore(tmp_path)
    prefix = keys.checkpoint(10, 1)
    base = write_shard(
        store,
        keys.frozen(1),
        "rank-00000-of-00001.safetensors",
        [
            Block(name="frozen", dtype="U8", shape=(2,), data=b"\1\2"),
            Block(name="unfrozen", dtype="U8", shape=(1,), data=b"\3"),
        ],
    )
    own = write_shard(
        store,
        prefix,
        "rank-00000-of-00001.safetensors",
        [Block(name="unfrozen", dtype="U8", shape=(1,), data=b"\4")],
    )
    commit(store, make_manifest(shards=(own, base.within(keys.frozen(1)))))
    manifest, tensors = reader()(tmp_path / prefix)
    assert manifest["schema"] == 2
    assert tensors["frozen"].tolist() == [1, 2]
    assert tensors["unfrozen"].tolist() == [4]
