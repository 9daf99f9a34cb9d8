"""Torch's own distributed checkpoint reads our shards: nobody needs us to get their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from spotguard.checkpoint.shard import shard_file, write_shard
from spotguard.storage import FileStore
from tests.control.checkpoints.saved_models import TiedNet, block, raw, save_objects

hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage", reason="an old torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

if TYPE_CHECKING:
    from pathlib import Path

    from tests.control.checkpoints.saved_models import Cut


def load(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Fill `wanted` from the folder of a checkpoint, as a script without us would."""
    reader = hf_storage.HuggingFaceStorageReader(path=str(folder))
    dcp_load(wanted, storage_reader=reader, no_dist=True)


def by_rows(name: str, tensor: torch.Tensor) -> Cut | None:
    """Cut matrices for two ranks, unevenly."""
    return (0, [4, len(tensor) - 4]) if tensor.ndim == 2 else None


def by_columns(name: str, tensor: torch.Tensor) -> Cut | None:
    """Cut matrices for two ranks along the other dimension."""
    return (1, [2, tensor.shape[1] - 2]) if tensor.ndim == 2 else None


@pytest.mark.parametrize("cut", [None, by_rows, by_columns])
def test_torch_reads_whole_tensors_from_our_shards(cut: object, tmp_path: Path) -> None:
    """One shard or two: every tensor of the model, bit by bit, under its stored name."""
    store, model = FileStore(tmp_path), TiedNet()
    how = {"world_size": 2, "cut": cut} if cut else {}
    prefix = save_objects(store, model=model, **how)  # type: ignore[arg-type]
    expected = {f"model.{key}": value for key, value in model.state_dict().items()}
    del expected["model.head.weight"]  # tied: stored once, under the first name
    wanted = {key: torch.full_like(value, 7) for key, value in expected.items()}
    load(tmp_path / prefix, wanted)

    assert {key: raw(value) for key, value in wanted.items()} == {
        key: raw(value) for key, value in expected.items()
    }


def test_torch_reads_parts_of_ranks_of_which_one_has_nothing(tmp_path: Path) -> None:
    """Three rows over four ranks, in every float type."""
    store = FileStore(tmp_path)
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64)
    whole = {str(dtype): torch.randn(3, 4).to(dtype) for dtype in types}
    for rank in range(4):
        blocks = [
            block(name, value[rank : rank + 1], global_shape=(3, 4), offsets=(rank, 0))
            for name, value in whole.items()
        ]
        write_shard(store, "x/", shard_file(rank, 4), blocks)
    wanted = {name: torch.zeros_like(value) for name, value in whole.items()}
    load(tmp_path / "x", wanted)

    assert {key: raw(value) for key, value in wanted.items()} == {
        key: raw(value) for key, value in whole.items()
    }
