"""Conditional writes on servers that ignore the condition: slower, and as safe.

S3 itself, GCS and Azure decide themselves which of two racing writers is first. Some S3-like
servers take `If-None-Match` and overwrite all the same. There the order is found out by bids:

1. The writer stores its object as a bid beside the key, under a name of its own.
2. It waits until the server's clock, which stamps objects to the second, has moved on, so that
   no bid that comes later can carry an earlier stamp.
3. The earliest bid (by stamp, then name) is the one that counts, and all writers see the same.
   Each copies it to the key if nothing is there: a winner that died is carried to its end.

It needs what every such server has: a listing that shows what was written, and one clock. Bids
are left for `clean_up`, since a slow rival must find the winner's. Objects too large for one
request (a shard, which only one rank of one attempt ever writes) are looked for and then written.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from typing import TYPE_CHECKING

from spotguard.errors import AlreadyExists, NotFound, StoreUnavailable
from spotguard.storage.deadline import remaining_s
from spotguard.storage.keys import RESERVED
from spotguard.storage.remote.bucket import ALWAYS, Precondition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spotguard.storage.base import ObjectInfo
    from spotguard.storage.remote.bucket import Bucket
    from spotguard.units import Clock

log = logging.getLogger("spotguard")
BIDS = f"{RESERVED}/bids/"
_BID_S = 2.0
"""A bid must be stored within this, or is given up for a new one: a slow one could come late."""
_RESOLUTION_S = 1.0
_ROUND_S = 30.0
"""Bids further apart are not of the same race; whoever takes longer begins again."""
_TRIES = 5


def heeds_conditions(bucket: Bucket) -> bool:
    """Return whether the server keeps conditions; one whose kind does not say is tried."""
    if bucket.heeds_conditions is not None:
        return bucket.heeds_conditions
    key = f"{RESERVED}/probe/{secrets.token_hex(16)}"
    word = [memoryview(b"spotguard")]
    bucket.put(key, word, condition=ALWAYS, writer="probe")
    try:
        bucket.put(key, word, condition=Precondition(if_absent=True), writer="probe")
    except AlreadyExists:
        return True
    finally:
        bucket.delete(key)
    log.warning(
        "%s overwrites where it was asked to create only: spotguard finds out by bids who is "
        "first, which takes three seconds for each such write",
        bucket.url,
    )
    return False


class BiddingBucket:
    """The conditional writes of a bucket whose server keeps no conditions."""

    def __init__(self, bucket: Bucket, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock

    def put(
        self, key: str, body: Sequence[memoryview], *, condition: Precondition, writer: str
    ) -> str:
        """Store the views if their bid is the first; return the etag."""
        return self._race(
            key,
            condition,
            writer,
            lambda bid: self._bucket.put(bid, body, condition=ALWAYS, writer=writer),
        )

    def copy(self, source: str, target: str, *, condition: Precondition, writer: str) -> str:
        """Copy an object if the bid for it is the first; return the etag."""
        return self._race(
            target,
            condition,
            writer,
            lambda bid: self._bucket.copy(source, bid, condition=ALWAYS, writer=writer),
        )

    def finish(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[str],
        *,
        condition: Precondition,
        writer: str,
    ) -> str:
        """Look whether the condition holds, then make the parts the object."""
        self._check(key, condition)
        return self._bucket.finish(key, upload_id, parts, condition=ALWAYS, writer=writer)

    def forget(self, key: str) -> None:
        """Remove all bids for a key that was deleted: they must not bring it back."""
        for bid in list(self._bids(f"{BIDS}{key}/")):
            self._bucket.delete(bid.key)

    def _race(
        self, key: str, condition: Precondition, writer: str, place: Callable[[str], str]
    ) -> str:
        for _ in range(_TRIES):
            found = self._check(key, condition)
            self._check_time(key)
            began = self._clock.monotonic()
            folder = f"{BIDS}{key}/{_race_of(condition)}/"
            bid = f"{folder}{writer}-{secrets.token_hex(4)}"
            place(bid)
            if self._clock.monotonic() - began <= _BID_S:
                self._clock.sleep(_BID_S + _RESOLUTION_S)
                first = self._first(folder, bid, _since(found))
                try:
                    self._check(key, condition)
                except AlreadyExists:
                    return self._carried_out(key, writer)
                if self._clock.monotonic() - began <= _ROUND_S:
                    return self._carry_out(first, bid, key)
            self._bucket.delete(bid)
        raise StoreUnavailable(f"{self._bucket.url} is too slow to find out who writes {key} first")

    def _check_time(self, key: str) -> None:
        """Place no bid that there is no time to wait for: it could win after its writer gave up."""
        left_s = remaining_s()
        if left_s is not None and left_s < _BID_S + _RESOLUTION_S:
            raise StoreUnavailable(f"too little time is left to find out who writes {key} first")

    def _carried_out(self, key: str, writer: str) -> str:
        """Return the etag of our own object, if a rival saw that our bid is the first."""
        found = self._bucket.head(key)
        if found is None or self._bucket.writer_of(key) != writer:
            raise AlreadyExists(f"{key} was written by another writer at the same time")
        return found.etag

    def _check(self, key: str, condition: Precondition) -> ObjectInfo | None:
        """Return what is at `key` if the condition holds for it."""
        found = self._bucket.head(key)
        if condition.if_absent and found is not None:
            raise AlreadyExists(f"{key} exists already")
        if condition.if_match is not None and (found is None or found.etag != condition.if_match):
            raise AlreadyExists(f"{key} was changed by another writer")
        return found

    def _first(self, folder: str, mine: str, since: float) -> str:
        """Return the bid that counts: the earliest of those in the same round as `mine`."""
        bids = {info.key: info.modified_at or 0.0 for info in self._bids(folder)}
        if mine not in bids:  # whoever deletes a key deletes the bids for it
            raise StoreUnavailable("what is being written was deleted meanwhile")
        since = min(since, bids[mine])
        same_round = [bid for bid, at in bids.items() if at > bids[mine] - _ROUND_S and at >= since]
        return min(same_round, key=lambda bid: (bids[bid], bid))

    def _bids(self, folder: str) -> Iterator[ObjectInfo]:
        token: str | None = None
        while True:
            page = self._bucket.page(folder, token=token)
            yield from page.objects
            token = page.next_token
            if token is None:
                return

    def _carry_out(self, first: str, mine: str, key: str) -> str:
        writer = first.rpartition("/")[2].partition("-")[0]
        try:
            etag = self._bucket.copy(first, key, condition=ALWAYS, writer=writer)
        except NotFound:
            raise StoreUnavailable(f"{key} was deleted meanwhile") from None
        if first == mine:
            return etag
        self._bucket.delete(mine)
        raise AlreadyExists(f"{key} was written by another writer at the same time")


def _since(replaced: ObjectInfo | None) -> float:
    """Return when the round began that is about replacing a version.

    An etag can be the hash of the content, so that the same race was run before, for a version
    that was the same. Its bids are older than this version by the wait for that race at least.
    Stamps are all of the server's one clock. A version can be stamped anew, a moment later, by
    whoever carries out the same bid; hence what is a little older still counts.
    """
    if replaced is None or replaced.modified_at is None:
        return 0.0
    return replaced.modified_at - _BID_S


def _race_of(condition: Precondition) -> str:
    """Return a name for what is bid for: to create the object, or to replace this one version."""
    if condition.if_match is None:
        return "absent"
    return hashlib.sha256(condition.if_match.encode()).hexdigest()[:32]
