"""Refuse what makes several ranks one model: each rank is given samples of its own here.

With tensor, sequence, context, pipeline or expert parallelism the ranks of one model group have to
be given the same samples, and gradients are the mean over the groups, not over the ranks. FSDP2 and
HSDP over all ranks, and DDP over all ranks, are data parallel, and supported.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from spotguard.errors import UsageError
from spotguard.runtime.state.sharding import is_dtensor, is_fsdp_module

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.nn.parallel import DistributedDataParallel

HINT = (
    "use DDP, or fully_shard (FSDP2, also with a mesh of two dimensions, HSDP) over all ranks; "
    "tensor, pipeline, sequence, context and expert parallelism are not supported"
)


def refuse_model_parallel(
    parameters: Iterable[torch.Tensor],
    ddp: Iterable[DistributedDataParallel],
    fsdp: Sequence[Any],
) -> None:
    """Raise unless all ranks are data parallel.

    Args:
        parameters: All that is tracked.
        ddp: The DDP modules that hold some of them.
        fsdp: The modules of FSDP2 that do.

    Raises:
        UsageError: several ranks hold one model together.
    """
    if not dist.is_initialized() or (world := dist.get_world_size()) == 1:
        return
    for module in ddp:
        size = dist.get_world_size(getattr(module, "process_group", None))
        if size != world:
            raise _refusal(f"a DistributedDataParallel is over {size} of {world} ranks")
    managed: set[int] = set()
    for module in fsdp:
        managed.update(map(id, module.parameters()))
        for size in _sizes(module):
            if size != world:
                raise _refusal(f"fully_shard is over {size} of {world} ranks")
    for parameter in parameters:
        if is_dtensor(parameter) and id(parameter) not in managed:
            placed = ", ".join(map(str, parameter.placements))
            raise _refusal(f"a parameter is a DTensor placed ({placed}), and not by fully_shard")


def groups_of_some_ranks(modules: Iterable[torch.nn.Module]) -> list[list[int]]:
    """Return the ranks of this rank's process groups that neither are all ranks nor FSDP2's."""
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    known: dict[Any, dict[int, int]] = getattr(world, "pg_group_ranks", {})
    if not dist.is_initialized() or not known:
        return []
    of_fsdp = {
        id(group)
        for module in modules
        for part in filter(is_fsdp_module, module.modules())
        for info in _meshes(part)
        for name in ("shard_process_group", "replicate_process_group")
        if (group := getattr(info, name, None)) is not None
    }
    me, world_size = dist.get_rank(), dist.get_world_size()
    found = [sorted(ranks) for group, ranks in known.items() if id(group) not in of_fsdp]
    return [ranks for ranks in found if me in ranks and 1 < len(ranks) < world_size]


def words_on_groups(groups: Sequence[Sequence[int]]) -> str:
    """Return what to say of process groups of some ranks only."""
    shown = "; ".join(", ".join(map(str, ranks[:8])) for ranks in groups[:4])
    return (
        f"the script has made process groups of some ranks only (ranks {shown}). Each rank is given"
        " samples of its own: ranks that hold one model together, or share out its experts, would "
        "train wrongly. Groups for anything else do no harm"
    )


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"{what}: ranks that hold one model together need the same samples, and each rank is given "
        "its own",
        hint=HINT,
    )


def _sizes(module: Any) -> list[int]:
    """Return over how many ranks a module of FSDP2 is data parallel; nothing if it is not known."""
    sizes = ("shard_mesh_size", "replicate_mesh_size")
    return [math.prod(getattr(info, size, 1) for size in sizes) for info in _meshes(module)]


def _meshes(module: Any) -> list[Any]:
    """Return what FSDP2 knows of the meshes of a module's own parameters (torch 2.6 to 2.13)."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    return [info for group in groups if (info := getattr(group, "mesh_info", None)) is not None]
