"""Which checkpoints stay, and the order of deletion that no crash can turn into a loss."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from spotguard.checkpoint import strict_json
from spotguard.checkpoint.lineage import check_not_fenced, list_all, restorable
from spotguard.checkpoint.manifest import check_shards_present, load_manifest
from spotguard.errors import AlreadyExists, DamagedCheckpoint, NotFound
from spotguard.events import keys
from spotguard.events.states import CheckpointKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.checkpoint.lineage import CheckpointRef, Listing
    from spotguard.checkpoint.manifest import Manifest
    from spotguard.storage.base import ObjectStore

LEAST_KEPT = 2
"""However little is asked for: the newest may prove damaged when it is needed."""
_LOOKED_AT = 4
"""Of so many of the newest it is looked whether their shards are there. Those before count as
whole when they are committed: a run that keeps thousands would ask for all of them at each save."""
_AT_ONCE = 4
"""So many checkpoints at most are deleted after a save, which the next save has to wait for."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints of the run's history stay.

    Besides these: the newest of kind `best`, every `final`, what is pinned, and the newest whose
    weights are finite.
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
    at_most: int | None = _AT_ONCE,
) -> list[str]:
    """Delete what `retention` does not keep; return the prefixes deleted, oldest first.

    For the run's writer (`attempt`), after a commit and before its next save begins to write.
    A later attempt may claim the run meanwhile: it goes on from what was newest when it looked,
    and one commit cannot push that out of the last two, which always stay.

    Until `keep_last` whole checkpoints are in the history, nothing outside of it goes either.
    What a dead save left behind (shards, no manifest) goes if it is of an older attempt, or of
    this one and older than its newest commit. Later attempts' objects are never touched.

    `load` may remember manifests: a committed one never changes. Of a long backlog `at_most`
    checkpoints go, and the next call goes on; None deletes all of it.

    Raises:
        Fenced: a later attempt has claimed the run; nothing was deleted.
        StoreError: the store failed; what remains is whole, and the next call goes on.
    """
    doomed = to_prune(store, retention, attempt=attempt, load=load, at_most=at_most)
    for prefix in doomed:
        _delete(store, prefix)
    return doomed


def to_prune(
    store: ObjectStore,
    retention: Retention,
    *,
    attempt: int,
    load: Callable[[ObjectStore, str], Manifest] = load_manifest,
    at_most: int | None = None,
) -> list[str]:
    """Return the prefixes that `prune` would delete now, oldest first; raises as it does."""
    check_not_fenced(store, attempt)
    listing = list_all(store)
    history = _History(store, list(restorable(store, listing)), listing, retention, load)
    doomed = chain(history.superseded(), _outside(listing, history, attempt))
    return sorted(ref.prefix for ref in islice(doomed, at_most))


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


class _Seen(NamedTuple):
    """What retention knows of a checkpoint."""

    kind: CheckpointKind | None
    """None if its manifest cannot be read."""
    is_whole: bool
    """True if it was looked at closely, and nothing is missing."""
    finite: bool
    """False if it is damaged, or its weights are NaN or infinite; earlier versions did not look."""


class _History:
    """The run's history as retention sees it."""

    def __init__(
        self,
        store: ObjectStore,
        refs: list[CheckpointRef],
        listing: Listing,
        retention: Retention,
        load: Callable[[ObjectStore, str], Manifest],
    ) -> None:
        """`refs` are newest first."""
        self.refs = refs
        self._store = store
        self._listing = listing
        self._retention = retention
        self._load = load
        self.enough = False
        """Whether `keep_last` whole ones stay; known once `superseded` is through with those."""

    def superseded(self) -> Iterator[CheckpointRef]:
        """Yield what may go, newest first."""
        whole = looked_at = 0
        best_seen = finite_seen = False
        for ref in self.refs:
            kept_as_newest = whole < self._retention.keep_last
            if self._stays(ref) and not kept_as_newest:
                continue
            if kept_as_newest and looked_at == _LOOKED_AT:
                whole += 1
                finite_seen = finite_seen or self._look(ref, False).finite
            else:
                kind, is_whole, finite = self._look(ref, kept_as_newest)
                special = kind is CheckpointKind.FINAL or (finite and not finite_seen)
                special |= kind is CheckpointKind.BEST and not best_seen
                best_seen |= kind is CheckpointKind.BEST
                finite_seen |= finite
                whole += is_whole
                looked_at += 1
                if not (kept_as_newest or special):
                    yield ref
            self.enough = whole >= self._retention.keep_last

    def _look(self, ref: CheckpointRef, closely: bool) -> _Seen:
        """Look at a checkpoint's manifest, and if `closely`, for its shards."""
        kind = None
        try:
            manifest = self._load(self._store, ref.prefix)
            kind = manifest.kind
            if closely:
                check_shards_present(self._store, manifest)
        except DamagedCheckpoint:
            return _Seen(kind, False, False)
        return _Seen(kind, closely, manifest.counters.get("finite") is not False)

    def _stays(self, ref: CheckpointRef) -> bool:
        every = self._retention.keep_every_steps
        return (every is not None and ref.step % every == 0) or ref in self._listing.pinned


def _outside(listing: Listing, history: _History, attempt: int) -> Iterator[CheckpointRef]:
    """Yield what may go of the folders that are not in the history."""
    inside = set(history.refs)
    own_step = max((ref.step for ref in history.refs if ref.attempt == attempt), default=0)
    for ref in listing.refs:
        if ref in inside:
            continue
        if ref in listing.committed:
            may_go = history.enough and ref.attempt < attempt and ref not in listing.pinned
        else:
            may_go = (ref.attempt, ref.step) < (attempt, own_step)
        if may_go:
            yield ref


def _delete(store: ObjectStore, prefix: str) -> None:
    """Delete a checkpoint, its manifest first: a crash leaves none rather than half of one."""
    store.delete(keys.manifest(prefix))
    for info in list(store.list(prefix)):
        store.delete(info.key)
