"""The node's own copy of the newest shards: what it holds need not come from far away again.

It is a cache and nothing more: the manifest, which proves every byte, is always the store's.
"""

from __future__ import annotations

import logging
import sys
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

_BROKEN_OFF_AFTER_S = 600.0
"""A file that no writer has touched for so long is what a killed one left behind."""


class LocalCopy:
    """Keeps one shard of this rank in a folder of the node."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._before: tuple[int, int] | None = None
        """Attempt and step of what was kept last."""

    @classmethod
    def at(cls, folder: str | None, run_id: str) -> LocalCopy | None:
        """Return the run's copy in a folder of the node; None without a folder."""
        return cls(PrefixedStore(FileStore(folder), run_id)) if folder else None

    def keep(
        self, prefix: str, file_name: str, layout: ShardLayout, data: Sequence[Buffer]
    ) -> None:
        """Write the shard of a committed checkpoint, and let go of older ones.

        Other ranks of this node may still be at this save, and have none but the one before. What
        is older than that is nobody's any more: its ranks had other numbers, or were more or fewer.

        Blocks while it writes. A folder that fails or is full costs the copy, nothing else.
        """
        attempt, step = _age(prefix)
        oldest = self._before or (attempt, 0)
        try:
            self.store.clean_up(older_than_s=_BROKEN_OFF_AFTER_S)
            for info in list(self.store.list(keys.CHECKPOINTS)):
                mine = info.key.endswith(f"/{file_name}") and not info.key.startswith(prefix)
                if mine or _age(info.key) < oldest:
                    self.store.delete(info.key)
            self._before = attempt, step
            write_layout(self.store, prefix, file_name, layout, data)
        except SpotguardError as problem:
            log.warning("no local copy of %s: %s", prefix, problem)


def _age(key: str) -> tuple[int, int]:
    """Return attempt and step of a checkpoint's object; what is none of ours is never old."""
    step, attempt = keys.parse_checkpoint(key) or (sys.maxsize, sys.maxsize)
    return attempt, step
