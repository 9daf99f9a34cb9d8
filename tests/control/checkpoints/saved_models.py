"""Checkpoints of real torch modules, packed as the runtime packs them, cut into shards by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from spotguard.checkpoint.lineage import claim_attempt, read_claim
from spotguard.checkpoint.manifest import commit
from spotguard.checkpoint.shard import Block, shard_file, write_shard
from spotguard.events import keys
from spotguard.runtime.state.tracked import tracked
from spotguard.runtime.state.tree import DTYPES, Packed
from tests.checkpoint.crashes.savings import make_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.storage.base import ObjectStore

    Cut = tuple[int, list[int]]
    """Along which dimension, and how many rows each rank gets."""


class TiedNet(torch.nn.Module):
    """An embedding whose weight is also the head's, batch norm's buffers, and a table in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(9, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.randn(5, 7).to(torch.bfloat16))


def raw(tensor: torch.Tensor) -> bytes:
    """Return the tensor's bytes, row by row."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def block(name: str, tensor: torch.Tensor, **part: Any) -> Block:
    """Return a tensor as it is written into a shard."""
    dtype = DTYPES[tensor.dtype]
    return Block(name=name, dtype=dtype, shape=tuple(tensor.shape), data=raw(tensor), **part)


def save_objects(
    store: ObjectStore,
    step: int = 10,
    attempt: int = 1,
    *,
    world_size: int = 1,
    run_id: str = "a-run",
    cut: Callable[[str, torch.Tensor], Cut | None] = lambda name, tensor: None,
    **objects: Any,
) -> str:
    """Save the objects, claiming the attempt if need be; return the checkpoint's prefix.

    `cut` says how a tensor is spread over the ranks; the first rank stores all that is not.
    """
    if read_claim(store, attempt) is None:
        claim_attempt(store, attempt, None)
    packed = Packed()
    tree = {name: tracked(name, value).pack(name, packed) for name, value in objects.items()}
    of_rank: list[list[Block]] = [[] for _ in range(world_size)]
    for name, leaf in packed.leaves.items():
        how = cut(name, leaf.tensor)
        if how is None:
            of_rank[0].append(block(name, leaf.tensor))
            continue
        axis, rows = how
        begin = 0
        for rank, part in enumerate(torch.split(leaf.tensor, rows, axis)):
            offsets = tuple(begin if i == axis else 0 for i in range(leaf.tensor.ndim))
            whole = tuple(leaf.tensor.shape)
            of_rank[rank].append(block(name, part, global_shape=whole, offsets=offsets))
            begin += rows[rank]
    prefix = keys.checkpoint(step, attempt)
    shards = tuple(
        write_shard(store, prefix, shard_file(rank, world_size), blocks)
        for rank, blocks in enumerate(of_rank)
    )
    manifest = make_manifest(
        step, attempt, run_id=run_id, shards=shards, state=tree, world_size=world_size
    )
    return commit(store, manifest)
