"""What has to agree before an attempt begins: its ranks with each other and with its checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.manifest import check_run
from spotguard.errors import Fenced, UsageError
from spotguard.runtime.distributed.model_parallel import HINT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.runtime.distributed.rendezvous import Coordinator


def check_ranks_track_the_same(coordinator: Coordinator, rank: int, names: Iterable[str]) -> None:
    """Raise unless they do; the values of what only one of them has would be waited for."""
    tracked = " ".join(sorted(names))
    if coordinator.first("tracked", tracked) != tracked:
        raise UsageError(
            f"run.track: rank {rank} tracks other names than another rank: {tracked}",
            hint="track the same on all ranks, also what only the first one uses: any of them "
            "may be the one that saves, and all of them restore",
        )


def check_ranks_have_one_model(coordinator: Coordinator, rank: int, shapes: Any) -> None:
    """Raise unless the tracked modules have parameters of the same names and shapes on all ranks.

    `shapes` are those of each module, by its name.
    """
    brief: dict[str, list[Any]] = {
        name: [
            len(of),
            sum(math.prod(shape or ()) for shape in of.values()),
            hashlib.sha256(repr(of).encode()).hexdigest(),
        ]
        for name, of in shapes.items()
    }
    theirs = json.loads(coordinator.first("shapes", json.dumps(brief)))
    for name, (tensors, numbers, digest) in brief.items():
        if theirs.get(name) != [tensors, numbers, digest]:
            other = "{} tensors of {} numbers".format(*theirs.get(name, (0, 0)))
            raise UsageError(
                f"run.track: {name} has {tensors} tensors of {numbers} numbers on rank {rank}, and "
                f"others on another rank ({other}): one model must be the same on all ranks",
                hint=HINT,
            )


def check_ranks_read_the_same(coordinator: Coordinator, rank: int, mine: object) -> None:
    """Raise unless a sampler, if there is one, gives all ranks the same order to begin with."""
    if mine is not None and coordinator.first("order", str(mine)) != str(mine):
        raise UsageError(
            f"run.loader: the sampler gives rank {rank} another order than another rank",
            hint="it must not depend on the rank, nor on the order of a set: pass one sampler "
            "of the whole dataset",
        )


def check_fits(manifest: Manifest, mine: Mapping[str, Any], run_id: str, attempt: int) -> None:
    """Raise unless this attempt may go on from the checkpoint, with this loader."""
    check_run(manifest, run_id)
    if manifest.attempt >= attempt:
        raise Fenced(
            f"attempt {attempt} is already claimed",
            hint="each start of the job needs an attempt number of its own",
        )
    stored = manifest.counters.get("loader")
    if stored is not None and stored != mine:
        changed = [
            f"{key} was {stored.get(key)!r} and is {mine.get(key)!r}"
            for key in {**stored, **mine}
            if stored.get(key) != mine.get(key)
        ]
        raise UsageError(
            f"run.loader changed since the checkpoint: {'; '.join(changed)}",
            hint="use the same values to resume, or start a new run",
        )
