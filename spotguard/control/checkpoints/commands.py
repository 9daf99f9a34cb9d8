"""What `spotguard checkpoints` asks of a run's store: list, verify, prune, pin."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from spotguard.checkpoint import retention
from spotguard.checkpoint.lineage import highest_claim, list_all, restorable
from spotguard.checkpoint.manifest import check_run, check_shards_present, load_manifest
from spotguard.checkpoint.reading import ShardReader, proven_pieces
from spotguard.control.journal.job_events import newest_events
from spotguard.control.journal.stored.published_launch import launched_numbers
from spotguard.errors import (
    ArchivedCheckpoint,
    BaseNotFound,
    CheckpointError,
    DamagedCheckpoint,
    ForeignCheckpoint,
    StateMismatch,
    UsageError,
)
from spotguard.events import keys
from spotguard.events.event import JobEvent
from spotguard.shared.json_documents import INSTANT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.checkpoint.lineage import CheckpointRef, Listing
    from spotguard.checkpoint.manifest import Manifest
    from spotguard.checkpoint.retention import Retention
    from spotguard.control.checkpoints.find import OpenedRun
    from spotguard.events.states import CheckpointKind
    from spotguard.storage.base import ObjectStore

    Progress = Callable[[int, int], None]
    """Told (bytes done, bytes in all) as a long task goes on."""


SCHEMA: Final = 1
"""Version of the documents that `spotguard checkpoints` prints."""
_LOOKS = 16
"""Checkpoints that are looked at side by side: each takes some requests, one after the other."""


class Validity(str, Enum):
    """What can be said of a checkpoint without reading its data; each knows its colour."""

    colour: str

    WHOLE = ("whole", "green")
    DAMAGED = ("damaged", "red")
    NEWER = ("newer_format", "yellow")
    """A later version of spotguard wrote it."""
    UNCOMMITTED = ("uncommitted", "dim")
    """A save that is under way, or what a dead one left behind."""
    FOREIGN = ("another_run's", "red")
    """Another run saved it, and it was copied here."""
    ARCHIVED = ("archived", "blue")
    """Its shards are in the store's archive, and have to be brought back before they are read."""

    def __new__(cls, value: str, colour: str) -> Validity:
        """Make a member that carries its colour."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.colour = colour
        return member

    @property
    def label(self) -> str:
        """Return it in words."""
        return str(self.value).replace("_", " ")


_PASSED = (Validity.DAMAGED, Validity.FOREIGN, Validity.ARCHIVED)
"""A resume goes on to the one before these. A newer format stops it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """One checkpoint in a list; None means unknown."""

    checkpoint: str
    """Its prefix in the run's store."""
    step: int
    attempt: int
    kind: CheckpointKind | None
    created_at: float | None = field(metadata=INSTANT)
    size_bytes: int | None
    world_size: int | None
    condition: Validity
    problem: str
    """What is wrong with it, in a sentence; empty if nothing is known to be."""
    in_history: bool | None
    """Whether a resume may use it; False for what a zombie wrote. None if a claim is damaged."""
    is_next: bool
    """Whether the next start goes on from it, as far as can be told without reading all data."""
    pinned: bool
    archived: bool = False
    """In the store's coldest class; where that can be read at once, it is whole all the same."""
    base_bytes: int | None = None
    """Beside `size_bytes`: frozen parameters, stored once for many checkpoints; 0 without any."""


@dataclass(frozen=True, kw_only=True)
class CheckpointsDocument:
    """What `checkpoints ls --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    run_id: str
    checkpoints: tuple[CheckpointRow, ...]
    """The newest first."""
    more: bool
    """Whether there are older ones; `--all` lists them, too."""


class FileProblem(NamedTuple):
    """A shard, or the manifest, that is not as it was."""

    file: str
    problem: str
    """What is wrong with it, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What reading all of a checkpoint showed."""

    checkpoint: str
    step: int
    attempt: int
    size_bytes: int | None
    condition: Validity
    problems: tuple[FileProblem, ...]


@dataclass(frozen=True, kw_only=True)
class VerificationDocument:
    """What `checkpoints verify --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    run_id: str
    ok: bool
    """Whether nothing that was read is damaged, of another run or of a newer format."""
    checkpoints: tuple[Verified, ...]


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What retention deletes, or would."""

    checkpoints: tuple[str, ...]
    """Prefixes, oldest first."""
    size_bytes: int


# ---------------------------------------------------------------- looking


def list_checkpoints(run: OpenedRun, newest: int | None = None) -> list[CheckpointRow]:
    """Return checkpoints and remains of saves, newest first; no tensor's data is read.

    Args:
        run: whose they are.
        newest: how many at most; None is all. Each one costs some requests.
    """
    listing = list_all(run.store)
    history = _history(run.store, listing)

    def row_of(ref: CheckpointRef) -> CheckpointRow | None:
        return _row(run, ref, history, listing)

    with ThreadPoolExecutor(_LOOKS, thread_name_prefix="spotguard-look") as crew:
        found = list(crew.map(row_of, listing.refs[::-1][:newest]))
    rows = [row for row in found if row is not None]
    first = next((row for row in rows if row.in_history and row.condition not in _PASSED), None)
    return [replace(row, is_next=row is first and row.condition is Validity.WHOLE) for row in rows]


def find_row(run: OpenedRun, ref: CheckpointRef, listing: Listing) -> CheckpointRow | None:
    """Return what a list says of one checkpoint; None if it is gone by now."""
    history = _history(run.store, listing)
    row = _row(run, ref, history, listing)
    if row is None or row.condition is not Validity.WHOLE or ref not in (history or ()):
        return row
    newer = takewhile(lambda each: each != ref, restorable(run.store, listing))
    return replace(row, is_next=all(look(run, each)[1] in _PASSED for each in newer))


def _history(store: ObjectStore, listing: Listing) -> set[CheckpointRef] | None:
    try:
        return set(restorable(store, listing))
    except DamagedCheckpoint:
        return None


def check_own(run: OpenedRun, ref: CheckpointRef) -> None:
    """Raise `ForeignCheckpoint` if another run saved it; what else is wrong `verify` tells."""
    try:
        run.manifest(ref)
    except ForeignCheckpoint:
        raise
    except CheckpointError:
        return


def look(run: OpenedRun, ref: CheckpointRef) -> tuple[Manifest | None, Validity, str]:
    """Return the manifest, if it can be read, and the checkpoint's condition and problem."""
    store, manifest = run.store, None
    try:
        manifest = load_manifest(store, ref.prefix)
        check_run(manifest, run.run_id)
        check_shards_present(store, manifest)
    except StateMismatch as problem:
        return None, Validity.NEWER, problem.message
    except ArchivedCheckpoint:
        return manifest, Validity.ARCHIVED, ""
    except ForeignCheckpoint as problem:
        return manifest, Validity.FOREIGN, problem.message
    except DamagedCheckpoint as problem:
        if store.head(keys.manifest(ref.prefix)) is None:  # never there, or pruned meanwhile
            return None, Validity.UNCOMMITTED, ""
        return manifest, Validity.DAMAGED, problem.message
    return manifest, Validity.WHOLE, ""


def verify(
    run: OpenedRun, refs: Sequence[CheckpointRef], on_progress: Progress | None = None
) -> list[Verified]:
    """Read every byte of the checkpoints and return what is wrong with each.

    Needs little memory, whatever their size. What retention deletes meanwhile is left out. Of what
    is archived or another run's, nothing is read.

    Raises:
        StoreError: the store failed, which says nothing about the checkpoints.
    """
    store = run.store
    looks = [(ref, *look(run, ref)) for ref in refs]
    sizes = [_bytes_to_read(manifest) for _, manifest, _, _ in looks]
    total, done = sum(sizes), 0
    results = []
    for ref, manifest, condition, problem in looks:
        unread = condition in (
            Validity.NEWER,
            Validity.ARCHIVED,
            Validity.FOREIGN,
        )
        problems = []
        if problem and (unread or not manifest):
            problems = [FileProblem("manifest.json", problem)]
        for shard in manifest.shards if manifest and not unread else ():
            end = done + shard.size_bytes
            try:
                done += shard.header_bytes
                for _, piece in proven_pieces(ShardReader(store, ref.prefix, shard)):
                    done += len(piece)
                    if on_progress:
                        on_progress(done, total)
            except (DamagedCheckpoint, BaseNotFound) as found:
                problems.append(FileProblem(f"{shard.folder or ''}{shard.file}", found.message))
            done = end  # also of a shard that was given up half way
            if on_progress:
                on_progress(done, total)
        if store.head(keys.manifest(ref.prefix)) is None:
            continue
        if not unread:
            condition = Validity.DAMAGED if problems else Validity.WHOLE
        results.append(
            Verified(
                checkpoint=ref.prefix,
                step=ref.step,
                attempt=ref.attempt,
                size_bytes=manifest.size_bytes if manifest else None,
                condition=condition,
                problems=tuple(problems),
            )
        )
    return results


def _bytes_to_read(manifest: Manifest | None) -> int:
    """Return the bytes of all shards, those of a base among them."""
    return sum(shard.size_bytes for shard in manifest.shards) if manifest else 0


# ---------------------------------------------------------------- changing


def plan_prune(run: OpenedRun, policy: Retention) -> Pruned:
    """Return what `prune` would delete; nothing is deleted, and a living run may be asked about."""
    claim = highest_claim(run.store)
    if claim is None:
        return Pruned(checkpoints=(), size_bytes=0)
    doomed = retention.to_prune(run.store, policy, attempt=claim.attempt, load=run.load)
    return Pruned(
        checkpoints=tuple(doomed),
        size_bytes=sum(info.size_bytes for prefix in doomed for info in run.store.list(prefix)),
    )


def prune(run: OpenedRun, policy: Retention) -> Pruned:
    """Delete what `policy` does not keep, of a run that is at rest.

    Raises:
        UsageError: the run goes on; it prunes by itself.
    """
    check_at_rest(run)
    planned = plan_prune(run, policy)
    claim = highest_claim(run.store)
    if claim is not None and planned.checkpoints:
        retention.prune(run.store, policy, attempt=claim.attempt, load=run.load, at_most=None)
    return planned


def check_at_rest(run: OpenedRun) -> None:
    """Raise `UsageError` unless the run has settled, or its newest attempt is known to be over."""
    if run.at_rest or _newest_attempt_is_over(run.store):
        return
    raise UsageError(
        f"Run {run.run_id} is not known to be at rest, and its job may be saving right now.",
        hint=f"a living run prunes itself at each save; or stop it first: "
        f"spotguard stop {run.run_id}",
    )


def pin(store: ObjectStore, ref: CheckpointRef, *, why: str = "") -> bool:
    """Keep a checkpoint until `unpin`; False if it was pinned before (`why` is replaced)."""
    before = _is_pinned(store, ref)
    retention.pin(store, ref.prefix, why=why)
    return not before


def unpin(store: ObjectStore, ref: CheckpointRef) -> bool:
    """Leave a checkpoint to retention again; False if it was not pinned."""
    before = _is_pinned(store, ref)
    retention.unpin(store, ref.prefix)
    return before


# ---------------------------------------------------------------- parts


def _row(
    run: OpenedRun,
    ref: CheckpointRef,
    history: set[CheckpointRef] | None,
    listing: Listing,
) -> CheckpointRow | None:
    """Return what a list says of a checkpoint; None if it is gone by now."""
    manifest, condition, problem = look(run, ref)
    size_bytes = manifest.size_bytes if manifest else None
    if condition is Validity.UNCOMMITTED:
        remains = list(run.store.list(ref.prefix))
        if not remains:
            return None
        size_bytes = sum(info.size_bytes for info in remains)
    return CheckpointRow(
        checkpoint=ref.prefix,
        step=ref.step,
        attempt=ref.attempt,
        kind=manifest.kind if manifest else None,
        created_at=manifest.created_at if manifest else None,
        size_bytes=size_bytes,
        world_size=manifest.world_size if manifest else None,
        condition=condition,
        problem=problem,
        in_history=None if history is None else ref in history,
        is_next=False,
        pinned=ref in listing.pinned,
        archived=ref in listing.archived,
        base_bytes=sum(shard.size_bytes for shard in manifest.bases) if manifest else None,
    )


def _is_pinned(store: ObjectStore, ref: CheckpointRef) -> bool:
    return store.head(keys.pinned(ref.prefix)) is not None


def _newest_attempt_is_over(store: ObjectStore) -> bool:
    """Return whether the controller or the job wrote down that the newest attempt has ended."""
    newest = next(launched_numbers(store), None)
    if newest is None or store.head(keys.end(newest)) is not None:
        return True
    return any(event.kind == JobEvent.ENDED.value for event in newest_events(store, newest))
