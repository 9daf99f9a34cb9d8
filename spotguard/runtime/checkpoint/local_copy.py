"""The node's own copy of the newest shards: what it holds need not come from far away again.

It is a cache and nothing more: the manifest, which proves every byte, is always the store's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spotguard.checkpoint.shard import write_layout
from spotguard.errors import SpotguardError
from spotguard.events import keys
from spotguard.storage import FileStore, PrefixedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.checkpoint.shard import ShardLayout
    from spotguard.storage.base import Buffer, ObjectStore

log = logging.getLogger("spotguard")


class LocalCopy:
    """Keeps one shard of this rank in a folder of the node."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    @classmethod
    def at(cls, folder: str | None, run_id: str) -> LocalCopy | None:
        """Return the run's copy in a folder of the node; None without a folder."""
        return cls(PrefixedStore(FileStore(folder), run_id)) if folder else None

    def keep(
        self, prefix: str, file_name: str, layout: ShardLayout, data: Sequence[Buffer]
    ) -> None:
        """Write the shard of a committed checkpoint, and let go of this rank's older ones.

        Blocks while it writes. A folder that fails or is full costs the copy, nothing else.
        """
        try:
            for info in list(self.store.list(keys.CHECKPOINTS)):
                if info.key.endswith(f"/{file_name}") and not info.key.startswith(prefix):
                    self.store.delete(info.key)
            write_layout(self.store, prefix, file_name, layout, data)
        except SpotguardError as problem:
            log.warning("no local copy of %s: %s", prefix, problem)
