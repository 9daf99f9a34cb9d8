"""A bucket as an object store: parts in parallel, each tried again alone, all within a deadline.

What a vendor's file (`bucket.Bucket`) does with one request, this makes right and fast:

- Large objects go up in parts and come down in ranges, several at a time, straight from and into
  the caller's memory. Parts are as large as a connection moves in about two seconds, so that one
  that fails costs little and a fast line is not slowed by round trips.
- A request that failed for a passing reason is repeated, with growing, random pauses, until the
  caller's deadline (`deadline.give_up_after`) or for a minute and a half.
- An answer can be lost although the write took effect. Every write carries a word of its writer,
  so that a repeated create-if-absent that finds the key taken knows whether by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import time
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, wait
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from tenacity import Retrying, retry_if_exception_type

from spotguard.errors import AlreadyExists, NotFound, StoreError, StoreUnavailable, UsageError
from spotguard.shared.units import SystemClock
from spotguard.storage.base import Reads
from spotguard.storage.buffers import cut, size_of, targets_of, views_of
from spotguard.storage.deadline import remaining_s
from spotguard.storage.keys import check_folder, check_key, check_prefix, is_part
from spotguard.storage.remote.bucket import Precondition
from spotguard.storage.remote.conditional_writes import heeds_conditions, refusal
from spotguard.storage.remote.thread_pool import Crew

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from tenacity import RetryCallState

    from spotguard.shared.units import Clock
    from spotguard.storage.base import Content, ObjectInfo, Target
    from spotguard.storage.remote.bucket import Bucket, Page

Result = TypeVar("Result")

PATIENCE_S = 90.0
"""For a request without a deadline: longer than a name server or a token service is ever away."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 8.0
_TELL_AFTER_S, _TELL_EVERY_S = 5.0, 60.0
"""A store that is waited for is named: a command that says nothing looks as if it hung."""
log = logging.getLogger(__name__)
_DICE = random.SystemRandom()

_MB = 1 << 20
_SINGLE_BYTES = 8 * _MB
"""Up to here an object is put by one request: parts would need two more."""
_FIRST_PART_BYTES = 16 * _MB
_LARGEST_PART_BYTES = 64 * _MB
_PART_S = 2.0
_READ_BYTES = 16 * _MB
_THREADS = max(8, min(32, 4 * (os.cpu_count() or 2)))
"""One connection to S3 moves 50-90 MB/s (docs.aws.amazon.com/AmazonS3/latest/userguide,
"Performance guidelines"); fewer would leave a fast line idle."""


class RemoteStore:
    """An `ObjectStore` made of a `Bucket`. Thread-safe."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        clock: Clock | None = None,
        patience_s: float = PATIENCE_S,
        threads: int = _THREADS,
        single_bytes: int = _SINGLE_BYTES,
    ) -> None:
        self._bucket = bucket
        self._clock = clock or SystemClock()
        self._patience_s = patience_s
        self._told_at = float("-inf")
        self._threads = threads
        self._single_bytes = max(single_bytes, bucket.part_rules.min_bytes)
        self._connection_rate: float | None = None
        self._heeds_conditions: bool | None = None

    @property
    def url(self) -> str:
        """Where it is, in the form `open_store` takes; holds no secret."""
        return self._bucket.url

    def best_reads(self, key: str) -> Reads:
        """Return as many reads as there are connections: all objects are equally far away."""
        return Reads(threads=self._threads, size_bytes=_READ_BYTES)

    def check_conditions(self) -> None:
        """Raise `StoreError` if the server ignores conditions; one that may do so is tried once.

        Not a `cached_property`: before Python 3.12 all stores share its lock, and would wait for
        one whose server hangs. Two threads may both find it out, which does no harm.
        """
        if self._heeds_conditions is None:
            self._heeds_conditions = self._tried(lambda: heeds_conditions(self._bucket))
        if not self._heeds_conditions:
            raise refusal(self.url)

    # ------------------------------------------------------------ writing

    def put(
        self,
        key: str,
        data: Content,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Store `data` whole or not at all; return its etag."""
        check_key(key)
        if if_absent and if_match is not None:
            raise UsageError("put: if_absent and if_match exclude each other")
        condition = Precondition(if_absent=if_absent, if_match=if_match)
        if condition:  # before the first part is sent
            self.check_conditions()
        size_bytes = size_of(data)
        if size_bytes > self._single_bytes:
            return self._put_parts(key, data, size_bytes, condition)
        body = list(views_of(data))
        return self._settle(
            key,
            lambda writer: self._bucket.put(key, body, condition=condition, writer=writer),
        )

    def copy(self, source: str, target: str, *, if_absent: bool = False) -> str:
        """Make `target` an object with the bytes of `source`; return its etag."""
        check_key(source)
        check_key(target)
        condition = Precondition(if_absent=if_absent)
        if condition:
            self.check_conditions()
        return self._settle(
            target,
            lambda writer: self._bucket.copy(source, target, condition=condition, writer=writer),
        )

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""
        check_key(key)
        self._tried(lambda: self._bucket.delete(key))

    def archive(self, key: str) -> None:
        """Move the object to the service's coldest class."""
        check_key(key)
        self._tried(lambda: self._bucket.archive(key))

    def _put_parts(self, key: str, data: Content, size_bytes: int, condition: Precondition) -> str:
        writer = _new_writer()
        upload_id = self._tried(lambda: self._bucket.begin(key, writer=writer))
        try:
            parts = self._send_parts(key, upload_id, data, self._part_bytes(size_bytes))
            return self._settle(
                key,
                lambda writer: self._bucket.finish(
                    key, upload_id, parts, condition=condition, writer=writer
                ),
                writer=writer,
            )
        except BaseException:
            with contextlib.suppress(StoreError):  # else `clean_up` does it, at a later start
                self._bucket.abort(key, upload_id)
            raise

    def _send_parts(self, key: str, upload_id: str, data: Content, part_bytes: int) -> list[str]:
        sent: list[Future[str]] = []
        under_way: set[Future[str]] = set()

        def send(number: int, body: list[memoryview]) -> str:
            return self._tried(lambda: self._timed_part(key, upload_id, number, body))

        try:
            for number, body in enumerate(_bodies(views_of(data), part_bytes), 1):
                # What waits in line goes on the wire although its stream says meanwhile that nobody
                # wants it any more: no more waits than keeps all threads busy.
                if len(under_way) > self._threads:
                    done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    if any(part.exception() for part in done):
                        break
                sent.append(self._crew.submit(send, number, body))
                under_way.add(sent[-1])
            return _results(sent)
        finally:
            _stand_still(sent)  # nobody may read the caller's memory after this returns

    def _timed_part(self, key: str, upload_id: str, number: int, body: list[memoryview]) -> str:
        began = time.monotonic()
        part = self._bucket.put_part(key, upload_id, number, body)
        rate = sum(map(len, body)) / max(time.monotonic() - began, 1e-3)
        before = self._connection_rate
        self._connection_rate = rate if before is None else 0.7 * before + 0.3 * rate
        return part

    def _part_bytes(self, size_bytes: int) -> int:
        """Return how large parts shall be: about two seconds each, and work for all threads."""
        rules = self._bucket.part_rules
        rate = self._connection_rate
        wanted = _FIRST_PART_BYTES if rate is None else int(rate * _PART_S)
        wanted = min(wanted, _LARGEST_PART_BYTES, -(-size_bytes // self._threads))
        least = max(rules.min_bytes, -(-size_bytes // rules.max_parts))
        return min(-(-max(wanted, least) // _MB) * _MB, rules.max_bytes)

    # ------------------------------------------------------------ reading

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole object; `NotFound` if there is none."""
        check_key(key)
        return self._tried(lambda: self._bucket.get(key, max_bytes))

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill `into` with the object's bytes from `offset`."""
        check_key(key)
        reads = []
        for body in _bodies(iter(targets_of(into)), _READ_BYTES):
            reads.append((offset, body))
            offset += sum(map(len, body))

        def read(start: int, body: list[memoryview]) -> None:
            self._tried(lambda: self._bucket.get_range(key, start, body))

        if len(reads) <= 1:
            for start, body in reads:
                read(start, body)
            return
        under_way = [self._crew.submit(read, start, body) for start, body in reads]
        try:
            _results(under_way)
        finally:
            _stand_still(under_way)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        check_key(key)
        return self._tried(lambda: self._bucket.head(key))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the matching objects, sorted, a page at a time."""
        check_prefix(prefix)
        return self._list(prefix, start_after)

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return, sorted, the prefixes one level below `prefix`."""
        check_folder(prefix)
        return [
            folder
            for page in self._pages(prefix, "", folders=True)
            for folder in page.folders
            if _is_ours(folder.rstrip("/"))
        ]

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        for page in self._pages(prefix, start_after, folders=False):
            for info in page.objects:
                if info.key > start_after and _is_ours(info.key):
                    yield info

    def _pages(self, prefix: str, start_after: str, *, folders: bool) -> Iterator[Page]:
        token: str | None = None
        while True:
            page = self._page(prefix, start_after, folders, token)
            yield page
            token = page.next_token
            if token is None:
                return

    def _page(self, prefix: str, start_after: str, folders: bool, token: str | None) -> Page:
        return self._tried(
            lambda: self._bucket.page(prefix, start_after=start_after, folders=folders, token=token)
        )

    # ------------------------------------------------------------ upkeep

    def warm(self) -> None:
        """Open the connections and start the threads that a large transfer uses."""
        name = f"warm-{_new_writer()}"

        def look() -> None:
            with contextlib.suppress(StoreError):
                self._bucket.head(name)

        _stand_still([self._crew.submit(look) for _ in range(self._threads)])

    def clean_up(self, prefix: str = "", *, older_than_s: float) -> int:
        """Abort writes in parts that were broken off so long ago; return how many."""
        check_prefix(prefix)
        before = self._clock.now() - older_than_s
        uploads = self._tried(lambda: self._bucket.uploads(prefix))
        old = [each for each in uploads if each.started_at is None or each.started_at < before]
        for each in old:
            self._tried(partial(self._bucket.abort, each.key, each.upload_id))
        return len(old)

    # ------------------------------------------------------------ trying

    @cached_property
    def _crew(self) -> Crew:
        return Crew(self._threads, "spotguard-store")

    def _settle(self, key: str, write: Callable[[str], str], *, writer: str | None = None) -> str:
        """Return the etag of a write that may be tried more than once, and takes effect once."""
        mine = writer or _new_writer()

        def once() -> str:
            try:
                return write(mine)
            except (AlreadyExists, NotFound):
                # Taken, or the upload is no more: by our own earlier try, as it may turn out, or
                # by this one, which a network or a proxy can deliver twice.
                if self._bucket.writer_of(key) == mine:
                    found = self._bucket.head(key)
                    if found is not None:
                        return found.etag
                raise

        return self._tried(once)

    def _tried(self, call: Callable[[], Result]) -> Result:
        """Return what `call` does, tried again while it fails for a passing reason."""
        clock = self._clock
        began = clock.monotonic()

        def over(state: RetryCallState) -> bool:
            left_s = remaining_s()
            patience_s = self._patience_s - (clock.monotonic() - began)
            return state.upcoming_sleep >= min(patience_s, patience_s if left_s is None else left_s)

        def tell(state: RetryCallState) -> None:
            now = clock.monotonic()
            if now - began < _TELL_AFTER_S or now - self._told_at < _TELL_EVERY_S:
                return
            self._told_at = now
            problem = state.outcome and state.outcome.exception()
            log.warning(
                "waiting for %s: %s; it is tried again for %.0f s in all",
                self.url,
                problem,
                self._patience_s,
            )

        retrying = Retrying(
            stop=over,
            wait=_pause_s,
            retry=retry_if_exception_type(StoreUnavailable),
            sleep=clock.sleep,
            before_sleep=tell,
            reraise=True,
        )
        return retrying(call)


def _pause_s(state: RetryCallState) -> float:
    """Return how long to wait before the next try: up to twice as long as before the last one.

    tenacity's own would draw from Python's global generator, which the training script has seeded.
    """
    longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (state.attempt_number - 1))
    return _DICE.uniform(0.0, longest_s)


def _new_writer() -> str:
    return secrets.token_hex(16)


def _bodies(views: Iterable[memoryview], size_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the views in groups of `size_bytes` each, the last one what is left."""
    body: list[memoryview] = []
    for part, ends in cut(views, size_bytes):
        body.append(part)
        if ends:
            yield body
            body = []


def _results(futures: Sequence[Future[Result]]) -> list[Result]:
    """Return what the calls returned; raise what the first failed one raised, at once."""
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future.done():
            future.result()
    return [future.result() for future in futures]


def _stand_still(futures: Sequence[Future[Result]]) -> None:
    """Return when none of the calls runs any more; those not begun never do."""
    for future in futures:
        future.cancel()
    wait(futures)


def _is_ours(key: str) -> bool:
    return all(map(is_part, key.split("/")))
