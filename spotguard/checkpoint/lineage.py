"""Which checkpoints count: claims fence writers and name what each attempt went on from.

    attempt 1   10 ── 20 ── 30 ─ ─ 40        40 was committed by a zombie, after the claim of 2
                             ╲
    attempt 2                 40' ── 50' ── 60'
                                      ╲
    attempt 3 (fresh claim, resumed   60''           → restorable: 60'' 50' 40' 30 20 10
               from 50': 60' was bad)

An attempt claims its number once, naming the checkpoint that it goes on from. From then on the
run's history is: that attempt's own checkpoints, then the named one and those before it in its
attempt, then what that attempt had gone on from, and so on. Whatever else older attempts commit,
before or after, is not in it. The store decides races: a claim is created only if absent, so two
processes never share a number, and of two attempts that start at once the higher number wins; the
other learns of it when it claims or at its next `check_not_fenced`, and what it commits in between
does not count.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from spotguard.checkpoint import strict_json
from spotguard.checkpoint.fields import Fields
from spotguard.checkpoint.manifest import (
    MAX_STEP,
    PREFIX_PATTERN,
    Manifest,
    check_shards_present,
    load_manifest,
)
from spotguard.errors import AlreadyExists, DamagedCheckpoint, Fenced, NotFound, UsageError
from spotguard.events import keys
from spotguard.events.checksummed import check_bytes, with_checksum
from spotguard.events.keys import MAX_ATTEMPT
from spotguard.events.untrusted import Refused, check_size
from spotguard.shared.units import SystemClock, to_iso
from spotguard.storage.remote.thread_pool import Crew
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from spotguard.checkpoint.strict_json import Json
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

SCHEMA = 1
_READS = 16
"""Claims that are read side by side."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """A committed checkpoint, by its place in the store."""

    prefix: str
    step: int
    attempt: int

    @classmethod
    def of(cls, prefix: str) -> CheckpointRef | None:
        """Return the checkpoint that a prefix or a key below it names, else None."""
        found = keys.parse_checkpoint(prefix)
        if found is None:
            return None
        step, attempt = found
        return cls(prefix=keys.checkpoint(step, attempt), step=step, attempt=attempt)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An attempt's word that it is the run's only writer from now on."""

    attempt: int
    claimed_at: float
    """Seconds since the epoch."""
    resumed_from: str | None
    """Prefix of the checkpoint it goes on from; None for a start from nothing."""
    writer: str
    """Host, process and a random token: tells two claimants apart."""
    extra: dict[str, Json] = field(default_factory=dict)
    """Place, price, nodes: what the launcher knew."""

    @property
    def resumed_step(self) -> int:
        """Return the steps done when it started."""
        found = keys.parse_checkpoint(self.resumed_from or "")
        return found[0] if found else 0

    def to_json(self) -> bytes:
        """Return the claim as the bytes the store keeps."""
        body = {
            "schema": SCHEMA,
            **self.__dict__,
            "claimed_at": to_iso(self.claimed_at),
            "resumed_step": self.resumed_step,
        }
        return with_checksum(strict_json.dumps(body, what="claim"))

    @classmethod
    def from_json(cls, raw: bytes, *, what: str = "claim") -> Claim:
        """Return the claim that `to_json` wrote; `DamagedCheckpoint` if it is none."""
        try:
            check_size(raw, what)
            check_bytes(raw, what)
        except Refused as problem:
            raise DamagedCheckpoint(str(problem)) from None
        fields = Fields(strict_json.loads(raw, what=what), what)
        claim = cls(
            attempt=fields.integer("attempt", low=1, high=MAX_ATTEMPT),
            claimed_at=fields.instant("claimed_at"),
            resumed_from=fields.maybe_text("resumed_from", PREFIX_PATTERN),
            writer=fields.text("writer"),
            extra=fields.object("extra"),
        )
        source = CheckpointRef.of(claim.resumed_from or "")
        if source and not 1 <= source.attempt < claim.attempt:  # else the walk would never end
            fields.refuse("resumed_from", f"a checkpoint of an attempt before {claim.attempt}")
        return claim


def claim_attempt(
    store: ObjectStore,
    attempt: int,
    resumed_from: str | None,
    extra: Mapping[str, Json] | None = None,
    *,
    clock: Clock | None = None,
) -> Claim:
    """Make `attempt` the run's only writer; it goes on from the checkpoint at `resumed_from`.

    Choose `resumed_from` first (`latest_valid`), then claim. If the attempt before commits once
    more in between, that checkpoint is outside the history: work is lost, never mixed.

    Raises:
        Fenced: the number is taken, or a higher one is.
        UsageError: `attempt` or `resumed_from` makes no sense.
    """
    claim = Claim(
        attempt=attempt,
        claimed_at=(clock or SystemClock()).now(),
        resumed_from=resumed_from,
        writer=f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(8)}",
        extra=dict(extra or {}),
    )
    raw = claim.to_json()
    claim = _readable(raw)
    check_not_fenced(store, attempt)
    try:
        store.put(keys.claim(attempt), raw, if_absent=True)
    except AlreadyExists:
        found = read_claim(store, attempt)
        # A request repeated after a lost answer meets its own claim.
        if found is None or found.writer != claim.writer:
            holder = found.writer if found else "another process"
            raise Fenced(
                f"attempt {attempt} is already claimed by {holder}",
                hint="each start of the job needs an attempt number of its own",
            ) from None
    check_not_fenced(store, attempt)
    return claim


def read_claim(store: ObjectStore, attempt: int) -> Claim | None:
    """Return an attempt's claim, or None if it died before it made one.

    Raises:
        DamagedCheckpoint: there is one, but it cannot be read; the run's history is unknown.
    """
    key = keys.claim(attempt)
    try:
        claim = Claim.from_json(get_small(store, key), what=key)
        if claim.attempt != attempt:
            raise DamagedCheckpoint(f"{key} is of attempt {claim.attempt}")
    except NotFound:
        return None
    except (DamagedCheckpoint, Refused) as problem:
        raise DamagedCheckpoint(
            str(problem),
            hint=f"restore {key} from a backup; deleting it gives up what attempt {attempt} did",
        ) from None
    return claim


def highest_claim(store: ObjectStore) -> Claim | None:
    """Return the claim of the attempt that may write, or None if none was ever made."""
    return next(_claims_from(store, MAX_ATTEMPT), None)


def check_not_fenced(store: ObjectStore, attempt: int) -> None:
    """Raise `Fenced` if a later attempt has claimed the run. One listing, no data."""
    for number in reversed(attempt_numbers(store)):
        if number > attempt and store.head(keys.claim(number)) is not None:
            raise Fenced(f"attempt {attempt} is fenced: attempt {number} has claimed the run")


@dataclass(frozen=True)
class Listing:
    """What stands in the store, without a request for each checkpoint."""

    refs: tuple[CheckpointRef, ...]
    """Every folder of a checkpoint, oldest first, committed or not."""
    committed: frozenset[CheckpointRef]
    pinned: frozenset[CheckpointRef]
    claims: Mapping[int, Claim | DamagedCheckpoint]
    """By attempt, without those that have none."""
    archived: frozenset[CheckpointRef] = frozenset()
    """Those with a file in the store's coldest class."""

    def claim(self, attempt: int) -> Claim | None:
        """Return what `read_claim` would."""
        found = self.claims.get(attempt)
        if isinstance(found, DamagedCheckpoint):
            raise found
        return found


def list_all(store: ObjectStore) -> Listing:
    """Return what stands in the store: a request for each thousand files, and for each claim."""
    refs: dict[CheckpointRef, None] = {}
    committed, pinned, archived = set(), set(), set()
    ref: CheckpointRef | None = None
    for info in store.list(keys.CHECKPOINTS):
        if ref is None or not info.key.startswith(ref.prefix):
            ref = CheckpointRef.of(info.key)
            if ref is None:
                continue
            refs[ref] = None
        if info.archived:
            archived.add(ref)
        if info.key == keys.manifest(ref.prefix):
            committed.add(ref)
        elif info.key == keys.pinned(ref.prefix):
            pinned.add(ref)
    return Listing(
        tuple(refs),
        frozenset(committed),
        frozenset(pinned),
        _all_claims(store),
        frozenset(archived),
    )


def _all_claims(store: ObjectStore) -> dict[int, Claim | DamagedCheckpoint]:
    def read(attempt: int) -> Claim | DamagedCheckpoint | None:
        try:
            return read_claim(store, attempt)
        except DamagedCheckpoint as problem:
            return problem

    attempts = attempt_numbers(store)
    with Crew(_READS, "spotguard-claims") as crew:  # a last save at the process's end prunes, too
        found = zip(attempts, crew.map(read, attempts), strict=True)
        return {attempt: claim for attempt, claim in found if claim is not None}


def restorable(store: ObjectStore, listing: Listing | None = None) -> Iterator[CheckpointRef]:
    """Yield the committed checkpoints of the run's history, newest first, shards unseen.

    Without a `listing`, the folders are listed and each is asked for its manifest when its turn
    comes: what is cheapest for the first few. With one, the store is not asked.
    """
    claim_of: Callable[[int], Claim | None]
    if listing is None:
        claim, claim_of = highest_claim(store), partial(read_claim, store)
    else:
        claim, claim_of = listing.claim(max(listing.claims, default=0)), listing.claim
    if claim is None:
        return
    committed = _Committed(store, listing)
    attempt, newest = claim.attempt, MAX_STEP
    while claim is not None:
        yield from committed.of(attempt, oldest=claim.resumed_step, newest=newest)
        source = CheckpointRef.of(claim.resumed_from or "")
        if source is None:
            return
        attempt, newest = source.attempt, source.step
        claim = claim_of(attempt)
    # The attempt that was gone on from lost its claim: its own history is all that is known.
    yield from committed.of(attempt, oldest=0, newest=newest)


def latest_valid(
    store: ObjectStore,
    *,
    verify: Callable[[ObjectStore, Manifest], None] = check_shards_present,
) -> tuple[Manifest | None, list[tuple[str, str]]]:
    """Return the newest checkpoint that passes, and (prefix, problem) of each newer one.

    `verify` may read as much as it likes (`check_shards_intact` reads all) and raises
    `DamagedCheckpoint` to go on to the one before. No manifest with problems listed means that
    all are damaged: say so before starting from nothing.

    Raises:
        StateMismatch: a newer spotguard wrote the newest; older ones are not silently used.
        StoreError: the store failed, which says nothing about the checkpoint.
    """
    skipped: list[tuple[str, str]] = []
    for ref in restorable(store):
        try:
            manifest = load_manifest(store, ref.prefix)
            verify(store, manifest)
        except DamagedCheckpoint as problem:
            skipped.append((ref.prefix, problem.message))
        else:
            return manifest, skipped
    return None, skipped


class _Committed:
    """The checkpoints of a store, by attempt: listed once, looked at when they are needed."""

    def __init__(self, store: ObjectStore, listing: Listing | None) -> None:
        self._store = store
        self._listing = listing
        self._by_attempt: dict[int, list[CheckpointRef]] = {}
        for ref in listing.refs if listing else folders(store):
            self._by_attempt.setdefault(ref.attempt, []).append(ref)

    def of(self, attempt: int, *, oldest: int, newest: int) -> Iterator[CheckpointRef]:
        for ref in reversed(self._by_attempt.get(attempt, [])):
            if oldest <= ref.step <= newest and self._has_manifest(ref):
                yield ref

    def _has_manifest(self, ref: CheckpointRef) -> bool:
        if self._listing is not None:
            return ref in self._listing.committed
        return self._store.head(keys.manifest(ref.prefix)) is not None


def folders(store: ObjectStore) -> list[CheckpointRef]:
    """Return every folder of a checkpoint, oldest first, committed or not."""
    found = map(CheckpointRef.of, store.list_folders(keys.CHECKPOINTS))
    return [ref for ref in found if ref is not None]


def attempt_numbers(store: ObjectStore) -> list[int]:
    """Return the numbers of all attempts that have left something, ascending."""
    found = map(keys.parse_attempt, store.list_folders(keys.ATTEMPTS))
    return sorted(number for number in found if number is not None)


def _claims_from(store: ObjectStore, highest: int) -> Iterator[Claim]:
    for number in reversed(attempt_numbers(store)):
        claim = read_claim(store, number) if number <= highest else None
        if claim is not None:
            yield claim


def _readable(raw: bytes) -> Claim:
    """Return the claim just as its readers will see it; nothing unreadable is ever stored."""
    try:
        return Claim.from_json(raw)
    except DamagedCheckpoint as problem:
        raise UsageError(problem.message) from problem
