"""Which run this process belongs to, and which attempt of it: the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.checkpoint.lineage import highest_claim, read_claim
from spotguard.runtime.distributed.rendezvous import LostContact
from spotguard.runtime.process.settings import Settings, fresh_run_id
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.storage.base import ObjectStore

_PATIENCE_S = 120.0


def identify(settings: Settings, coordinator: Coordinator) -> tuple[str, int]:
    """Return run id and attempt; what the launcher did not say, the first rank decides.

    Raises:
        LostContact: the first rank did not answer.
    """
    if settings.run_id is not None and settings.attempt is not None:
        return settings.run_id, settings.attempt
    if settings.rank == 0:
        run_id = settings.run_id or fresh_run_id()
        attempt = settings.attempt or _next_attempt(settings.store_url, run_id)
        coordinator.set("run", f"{run_id} {attempt}")
    word = coordinator.get("run", _PATIENCE_S)
    if word is None:
        raise LostContact("the first rank did not name the run")
    run_id, number = word.split(" ")
    return run_id, int(number)


def _next_attempt(store_url: str, run_id: str) -> int:
    claim = highest_claim(PrefixedStore(open_store(store_url), run_id))
    return claim.attempt + 1 if claim else 1


def first_world_size(
    store: ObjectStore, attempt: int, world_size: int, coordinator: Coordinator
) -> int:
    """Return how many ranks the first attempt of the run that trained had, as its claim tells.

    `world_size` is that of this `attempt`, which may be the first. All ranks get the same answer.

    Raises:
        DamagedCheckpoint: a claim cannot be read.
    """
    claims = (read_claim(store, number) for number in range(1, attempt))
    sizes = (claim.extra.get("world_size") for claim in claims if claim is not None)
    first = next((size for size in sizes if isinstance(size, int) and size > 0), world_size)
    return int(coordinator.first("first_world_size", str(first)))
