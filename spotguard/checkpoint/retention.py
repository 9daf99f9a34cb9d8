"""Which checkpoints stay, and the order of deletion that no crash can turn into a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.checkpoint import strict_json
from spotguard.checkpoint.lineage import CheckpointRef, check_not_fenced, restorable
from spotguard.checkpoint.manifest import check_shards_present, load_manifest
from spotguard.errors import AlreadyExists, DamagedCheckpoint, NotFound
from spotguard.events import keys
from spotguard.events.states import CheckpointKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.storage.base import ObjectStore

LEAST_KEPT = 2
"""However little is asked for: the newest may prove damaged when it is needed."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints of the run's history stay.

    Besides these: the newest of kind `best`, every `final`, and what is pinned.
    """

    keep_last: int = 3
    """How many of the newest whole checkpoints stay; at least 2."""
    keep_every_steps: int | None = None
    """Checkpoints whose step is a multiple of this stay for good; None keeps none that way."""

    def __post_init__(self) -> None:
        """Refuse settings that would leave nothing to fall back on."""
        if self.keep_last < LEAST_KEPT:
            raise ValueError(f"Retention.keep_last is {self.keep_last}, the least is {LEAST_KEPT}")
        if self.keep_every_steps is not None and self.keep_every_steps < 1:
            raise ValueError(
                f"Retention.keep_every_steps is {self.keep_every_steps}, the least is 1"
            )


def prune(
    store: ObjectStore,
    retention: Retention,
    *,
    attempt: int,
    load: Callable[[ObjectStore, str], Manifest] = load_manifest,
) -> list[str]:
    """Delete what `retention` does not keep; return the prefixes deleted, oldest first.

    For the run's writer (`attempt`), after a commit and before its next save begins to write.
    A later attempt may claim the run meanwhile: it goes on from what was newest when it looked,
    and one commit cannot push that out of the last two, which always stay.

    Until `keep_last` whole checkpoints are in the history, nothing outside of it goes either.
    What a dead save left behind (shards, no manifest) goes if it is of an older attempt, or of
    this one and older than its newest commit. Later attempts' objects are never touched.

    `load` may remember manifests: a committed one never changes.

    Raises:
        Fenced: a later attempt has claimed the run; nothing was deleted.
        StoreError: the store failed; what remains is whole, and the next call goes on.
    """
    doomed = to_prune(store, retention, attempt=attempt, load=load)
    for prefix in doomed:
        _delete(store, prefix)
    return doomed


def to_prune(
    store: ObjectStore,
    retention: Retention,
    *,
    attempt: int,
    load: Callable[[ObjectStore, str], Manifest] = load_manifest,
) -> list[str]:
    """Return the prefixes that `prune` would delete now, oldest first; raises as it does."""
    check_not_fenced(store, attempt)
    history = list(restorable(store))
    superseded, enough = _superseded(store, history, retention, load)
    outside = _outside(store, history, attempt, committed_too=enough)
    return sorted(ref.prefix for ref in (*superseded, *outside))


def discard_uncommitted(store: ObjectStore, prefix: str) -> None:
    """Delete the shards of a save that failed, to get their room back.

    Call it once no rank writes that save any more.

    Raises:
        AlreadyExists: the checkpoint is committed; nothing was deleted.
    """
    if store.head(keys.manifest(prefix)) is not None:
        raise AlreadyExists(f"{prefix} is committed and cannot be discarded")
    _delete(store, prefix)


def pin(store: ObjectStore, prefix: str, *, why: str = "") -> None:
    """Keep a committed checkpoint until `unpin`; `NotFound` if there is none at `prefix`."""
    if store.head(keys.manifest(prefix)) is None:
        raise NotFound(f"there is no checkpoint {prefix}")
    store.put(keys.pinned(prefix), strict_json.dumps({"why": why}, what="pin"))


def unpin(store: ObjectStore, prefix: str) -> None:
    """Leave a checkpoint to retention again; nothing happens if it was not pinned."""
    store.delete(keys.pinned(prefix))


def _superseded(
    store: ObjectStore,
    history: Sequence[CheckpointRef],
    retention: Retention,
    load: Callable[[ObjectStore, str], Manifest],
) -> tuple[list[CheckpointRef], bool]:
    """Return what may go of the history, and whether `keep_last` whole checkpoints stay."""
    doomed = []
    whole = 0
    best_seen = False
    for ref in history:  # newest first
        kind, is_whole = _look(store, ref, load)
        special = kind is CheckpointKind.FINAL or (kind is CheckpointKind.BEST and not best_seen)
        best_seen |= kind is CheckpointKind.BEST
        if whole >= retention.keep_last and not special and not _stays(store, ref, retention):
            doomed.append(ref)
        whole += is_whole
    return doomed, whole >= retention.keep_last


def _look(
    store: ObjectStore, ref: CheckpointRef, load: Callable[[ObjectStore, str], Manifest]
) -> tuple[CheckpointKind | None, bool]:
    """Return a checkpoint's kind, None if unreadable, and whether all of it is there."""
    kind = None
    try:
        manifest = load(store, ref.prefix)
        kind = manifest.kind
        check_shards_present(store, manifest)
    except DamagedCheckpoint:
        return kind, False
    return kind, True


def _stays(store: ObjectStore, ref: CheckpointRef, retention: Retention) -> bool:
    every = retention.keep_every_steps
    return (every is not None and ref.step % every == 0) or _pinned(store, ref)


def _pinned(store: ObjectStore, ref: CheckpointRef) -> bool:
    return store.head(keys.pinned(ref.prefix)) is not None


def _outside(
    store: ObjectStore, history: Sequence[CheckpointRef], attempt: int, *, committed_too: bool
) -> Iterator[CheckpointRef]:
    """Yield what may go of the folders that are not in the history."""
    inside = set(history)
    own_step = max((ref.step for ref in history if ref.attempt == attempt), default=0)
    for folder in store.list_folders(keys.CHECKPOINTS):
        ref = CheckpointRef.of(folder)
        if ref is None or ref in inside:
            continue
        if store.head(keys.manifest(ref.prefix)) is not None:
            may_go = committed_too and ref.attempt < attempt and not _pinned(store, ref)
        else:
            may_go = (ref.attempt, ref.step) < (attempt, own_step)
        if may_go:
            yield ref


def _delete(store: ObjectStore, prefix: str) -> None:
    """Delete a checkpoint, its manifest first: a crash leaves none rather than half of one."""
    store.delete(keys.manifest(prefix))
    for info in list(store.list(prefix)):
        store.delete(info.key)
