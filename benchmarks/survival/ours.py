"""spotguard in the survival matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.survival.contestant import GRACE_S, Contestant, Found
from spotguard.checkpoint.lineage import latest_valid
from spotguard.checkpoint.manifest import check_shards_intact
from spotguard.events import env, keys
from spotguard.events.event import Event, JobEvent
from spotguard.storage import FileStore, PrefixedStore

if TYPE_CHECKING:
    from pathlib import Path

_RUN = "try"


class Spotguard(Contestant):
    """`run.steps` with the grace that the matrix gives."""

    name = "spotguard"
    package = "spotguard"
    settings = "`SPOTGUARD_GRACE_S` is the grace; no periodic saves"
    job = "benchmarks.survival.job"

    def variables(self, output: Path) -> dict[str, str]:
        """Name the run and its store."""
        return {
            env.STORE: str(output),
            env.RUN_ID: _RUN,
            env.ATTEMPT: "1",
            env.GRACE_S: f"{GRACE_S:g}",
            env.SAVE_EVERY: "100000 steps",
            env.METADATA: "none",
        }

    def resume_variables(self, output: Path, found: Found) -> dict[str, str]:
        """Go on as the next attempt, which finds the checkpoint by itself."""
        return {**super().resume_variables(output, found), env.ATTEMPT: "2"}

    def find(self, output: Path) -> Found:
        """Return the newest checkpoint if every byte of it verifies and the job said its end."""
        store = PrefixedStore(FileStore(output), _RUN)
        manifest, skipped = latest_valid(store, verify=check_shards_intact)
        events = [Event.from_json(store.get(info.key)) for info in store.list(keys.events(1))]
        ended = next((event for event in events if event.kind == JobEvent.ENDED), None)
        if skipped:
            return Found(problem=f"damaged: {skipped}")
        if manifest is None:
            return Found(problem=f"nothing was saved; events: {[e.kind for e in events]}")
        if ended is None:
            return Found(problem=f"saved step {manifest.step}, but no word of the end")
        if ended.data["step"] != manifest.step:
            return Found(problem=f"saved {manifest.step}, but ended at {ended.data['step']}")
        return Found(step=manifest.step, where=str(output))
