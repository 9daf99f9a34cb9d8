"""Moving old checkpoints to where keeping them is cheap: the store's coldest class.

What is archived is known to the store alone: each listing tells it of each object. So there is
nothing to write down first and nothing to repair, and a bucket's own lifecycle rule or an operator
may do the same. Only shards are moved; manifests and pins stay where they can be read, so that a
checkpoint that is archived, or half of it, still says what it is. A restore passes over it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from spotguard.checkpoint.lineage import list_all, restorable
from spotguard.checkpoint.manifest import check_shards_present
from spotguard.checkpoint.retention import LEAST_KEPT
from spotguard.control.checkpoints.commands import SCHEMA, check_at_rest
from spotguard.errors import DamagedCheckpoint, NotFound, StateMismatch
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.shared.json_documents import INSTANT
from spotguard.shared.units import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from spotguard.checkpoint.lineage import CheckpointRef
    from spotguard.checkpoint.manifest import Manifest
    from spotguard.control.checkpoints.commands import Progress
    from spotguard.control.checkpoints.find import OpenedRun
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectInfo, ObjectStore

_AT_ONCE = 8
"""Objects moved, and manifests read, side by side: the bytes do not pass through this machine."""
_STAYS_HOT = (CheckpointKind.FINAL, CheckpointKind.BEST)


@dataclass(frozen=True, kw_only=True)
class Archivable:
    """A checkpoint that is old enough, and what of it is not archived yet."""

    checkpoint: str
    """Its prefix in the run's store."""
    step: int
    attempt: int
    created_at: float
    shards: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        """Of what is to be moved."""
        return sum(shard.size_bytes for shard in self.shards)

    def row(self) -> ArchivedRow:
        """Return what is told of it."""
        return ArchivedRow(
            checkpoint=self.checkpoint,
            step=self.step,
            attempt=self.attempt,
            created_at=self.created_at,
            shards=len(self.shards),
            size_bytes=self.size_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class ArchivedRow:
    """One checkpoint of which something is moved, or would be."""

    checkpoint: str
    """Its prefix in the run's store."""
    step: int
    attempt: int
    created_at: float = field(metadata=INSTANT)
    shards: int
    """How many of its shards are to be moved."""
    size_bytes: int
    """Of these."""


@dataclass(frozen=True, kw_only=True)
class ArchiveDocument:
    """What `checkpoints archive --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    run_id: str
    archived: bool
    """False for a dry run: nothing was moved."""
    checkpoints: tuple[ArchivedRow, ...]
    """The oldest first."""


def plan_archive(
    run: OpenedRun, *, older_than_s: float, clock: Clock | None = None
) -> list[Archivable]:
    """Return what `archive` would move now, oldest first.

    Never the last two whole checkpoints of the history nor what is newer than those, and nothing
    that is pinned, `final`, `best`, not committed, or damaged.

    Raises:
        UsageError: the run is not known to be at rest, or its store has no archive.
        DamagedCheckpoint: a claim cannot be read, so that it is unknown which ones are the last.
    """
    check_at_rest(run)
    _check_has_archive(run.store)
    before = (clock or SystemClock()).now() - older_than_s

    def look(ref: CheckpointRef) -> Archivable | None:
        return _look(run, ref, before)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="spotguard-look") as crew:
        return [found for found in crew.map(look, _may_go(run)) if found is not None]


def archive(
    store: ObjectStore, planned: Sequence[Archivable], on_progress: Progress | None = None
) -> list[Archivable]:
    """Move what was planned, oldest first; return what was moved.

    What was pinned or pruned since is left alone.

    Raises:
        StoreError: the store failed; what was not moved is as it was, and the next call goes on.
    """
    total = sum(item.size_bytes for item in planned)
    done, moved = 0, []
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="spotguard-archive") as crew:
        for item in planned:
            if store.head(keys.pinned(item.checkpoint)) is None:
                wanted = (shard.key for shard in item.shards)
                moved += [item] * all(crew.map(lambda key: _moved(store, key), wanted))
            done += item.size_bytes
            if on_progress:
                on_progress(done, total)
    return moved


def _moved(store: ObjectStore, key: str) -> bool:
    try:
        store.archive(key)
    except NotFound:
        return False
    return True


def _check_has_archive(store: ObjectStore) -> None:
    """Let the store itself say whether it has an archive; nothing is moved."""
    try:
        store.archive(f"{keys.CHECKPOINTS}no-such-checkpoint")
    except NotFound:
        return


def _may_go(run: OpenedRun) -> Iterable[CheckpointRef]:
    """Return the committed checkpoints, oldest first, without the last ones and pinned ones."""
    listing = list_all(run.store)
    stay = set(_last(run, restorable(run.store, listing))) | listing.pinned
    return [ref for ref in listing.refs if ref in listing.committed and ref not in stay]


def _last(run: OpenedRun, history: Iterable[CheckpointRef]) -> Iterator[CheckpointRef]:
    """Yield the newest of the history until so many of them are whole."""
    whole = 0
    for ref in history:
        if whole == LEAST_KEPT:
            return
        yield ref
        whole += _is_whole(run, ref)


def _is_whole(run: OpenedRun, ref: CheckpointRef) -> bool:
    try:
        check_shards_present(run.store, run.manifest(ref))
    except (DamagedCheckpoint, StateMismatch):
        return False
    return True


def _look(run: OpenedRun, ref: CheckpointRef, before: float) -> Archivable | None:
    try:
        manifest = run.manifest(ref)
    except (DamagedCheckpoint, StateMismatch):
        return None
    if manifest.kind in _STAYS_HOT or manifest.created_at > before:
        return None
    shards = tuple(_hot_shards(run.store, manifest))
    if not shards:
        return None
    return Archivable(
        checkpoint=ref.prefix,
        step=ref.step,
        attempt=ref.attempt,
        created_at=manifest.created_at,
        shards=shards,
    )


def _hot_shards(store: ObjectStore, manifest: Manifest) -> Iterator[ObjectInfo]:
    wanted = {shard.key(manifest.prefix) for shard in manifest.own}
    for info in store.list(manifest.prefix):
        if info.key in wanted and not info.archived:
            yield info
