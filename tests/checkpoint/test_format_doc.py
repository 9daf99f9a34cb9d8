"""The format's page tells the truth: its reader reads what we write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spotguard.checkpoint.manifest import load_manifest
from spotguard.checkpoint.tensors import DTYPE_BYTES
from spotguard.events.states import CheckpointKind
from spotguard.storage import FileStore
from tests.checkpoint.savings import body_of, flip, make_manifest, save

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def reader() -> Any:
    """Return the page's `read_checkpoint`."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
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
    flip(store, key, -1)
    with pytest.raises(ValueError, match=r"rank-00000-of-00002\.safetensors is damaged"):
        reader()(tmp_path / prefix)
    flip(store, key, -1)
    flip(store, prefix + "manifest.json", 8 * 200)
    with pytest.raises(ValueError, match=r"damaged|Expecting"):
        reader()(tmp_path / prefix)


def test_the_page_names_all_there_is() -> None:
    """Every field, dtype and kind is on the page."""
    words = set(re.findall(r"[A-Za-z0-9_]+", PAGE))
    assert set(body_of(make_manifest())) <= words
    assert set(DTYPE_BYTES) <= words
    assert {kind.value for kind in CheckpointKind} <= words
