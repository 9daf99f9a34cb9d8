"""Which run this process belongs to, and which attempt of it: the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.checkpoint.lineage import highest_claim
from spotguard.runtime.distributed.rendezvous import LostContact
from spotguard.runtime.process.settings import Settings, fresh_run_id
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from spotguard.runtime.distributed.rendezvous import Coordinator

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
