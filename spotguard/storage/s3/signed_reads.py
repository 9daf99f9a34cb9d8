"""Small reads that were signed a moment ago, sent again as they are.

A controller asks the same things of each of its runs every few seconds, and botocore takes one to
two milliseconds of a core to write, sign and understand a request. S3 takes a signature for 15
minutes. So a signed request is kept for two. Where something else comes back than was hoped for,
botocore is asked anew: it alone knows refusals, redirects, and what a changed listing says.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from spotguard.storage.remote.bucket import Page
    from spotguard.storage.s3.transport import Noted, Wire

_SIGNED_FOR_S = 120.0
_MOST_KEPT_BYTES = 32 << 20
"""Of all together: some ten thousand requests, for that many nodes may one process look after."""
_MOST_BYTES = 1 << 16
"""Of a listing that is kept: a longer one is asked for by who reads it once."""
_PARSED = 4
"""A parsed listing takes about so many times the bytes of its answer."""


@dataclass(frozen=True)
class _Kept:
    noted: Noted
    page: Page | None
    until: float
    size_bytes: int
    """About so much of this process's memory."""


class SignedReads:
    """What was read through a wire in the last two minutes, and how. Thread-safe."""

    def __init__(self, wire: Wire, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wire = wire
        self._monotonic = monotonic
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        """Oldest signature first."""
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str, ask: Callable[[], tuple[bytes, str]]) -> tuple[bytes, str]:
        """Return an object's bytes and the CRC-32C that the server promises, or an empty one.

        They are of the kept request's answer, else what `ask` returns.
        """
        kept = self._found(("get", key))
        if kept is not None:
            answer = self._wire.again(kept.noted)
            if answer.status == HTTPStatus.OK:
                return answer.body, answer.headers.get("x-amz-checksum-crc32c", "")
            self._forget(("get", key))
        with self._wire.noting() as noted:
            told = ask()
        noted.body = b""  # the next answer has other bytes
        self._keep(("get", key), noted)
        return told

    def page(self, wanted: Hashable, ask: Callable[[], Page]) -> Page:
        """Return a page: the kept one if the answer is the same, else what `ask` returns."""
        kept = self._found(("page", wanted))
        if kept is not None and kept.page is not None:
            answer = self._wire.again(kept.noted)
            if answer.status == HTTPStatus.OK and answer.body == kept.noted.body:
                return kept.page
            self._forget(("page", wanted))
        with self._wire.noting() as noted:
            page = ask()
        if len(noted.body) <= _MOST_BYTES:
            self._keep(("page", wanted), noted, page)
        return page

    def _found(self, wanted: Hashable) -> _Kept | None:
        """Return what is kept of a request, if its signature still counts."""
        with self._lock:
            kept = self._kept.get(wanted)
        return kept if kept is not None and self._monotonic() < kept.until else None

    def _forget(self, wanted: Hashable) -> None:
        """Ask botocore the next time: one more question for each refusal, and no more."""
        with self._lock:
            self._drop(wanted)

    def _keep(self, wanted: Hashable, noted: Noted, page: Page | None = None) -> None:
        words = len(noted.url) + sum(len(name) + len(text) for name, text in noted.headers.items())
        now = self._monotonic()
        kept = _Kept(noted, page, now + _SIGNED_FOR_S, 1024 + words + _PARSED * len(noted.body))
        with self._lock:
            self._drop(wanted)
            self._kept[wanted] = kept
            self._kept_bytes += kept.size_bytes
            while self._kept_bytes > _MOST_KEPT_BYTES or self._oldest.until <= now:
                self._drop(next(iter(self._kept)))

    @property
    def _oldest(self) -> _Kept:
        return next(iter(self._kept.values()))

    def _drop(self, wanted: Hashable) -> None:
        dropped = self._kept.pop(wanted, None)
        self._kept_bytes -= 0 if dropped is None else dropped.size_bytes
