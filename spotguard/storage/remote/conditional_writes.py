"""Conditional writes, on which all that must not be written twice rests, need the server's help.

S3 itself, GCS and Azure decide which of two racing writers is first. Some S3-like servers take
`If-None-Match` and overwrite all the same: there two nodes could both believe that they had won.
Such a server is found out by one small trial write, before the first write with a condition, and
refused. Everything else works on it, so what lies there can still be read.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from spotguard.errors import AlreadyExists, StoreError
from spotguard.storage.keys import RESERVED
from spotguard.storage.remote.bucket import ALWAYS, Precondition

if TYPE_CHECKING:
    from spotguard.storage.remote.bucket import Bucket


def heeds_conditions(bucket: Bucket) -> bool:
    """Return whether the server keeps conditions; one whose kind does not say is tried.

    It is tried a second time before it is refused: of a server with several copies, one may have
    been behind.
    """
    if bucket.heeds_conditions is not None:
        return bucket.heeds_conditions
    return _passes_trial(bucket) or _passes_trial(bucket)


def _passes_trial(bucket: Bucket) -> bool:
    key = f"{RESERVED}/probe/{secrets.token_hex(16)}"
    word = [memoryview(b"spotguard")]
    try:
        bucket.put(key, word, condition=ALWAYS, writer="probe")
        bucket.put(key, word, condition=Precondition(if_absent=True), writer="probe")
    except AlreadyExists:
        return True
    finally:
        with contextlib.suppress(StoreError):  # it would hide the verdict, and does no harm
            bucket.delete(key)
    return False


def refusal(url: str) -> StoreError:
    """Return what is told of a store whose server ignores conditions."""
    return StoreError(
        f"the server of {url} ignores the condition of a write (If-None-Match), so two nodes "
        "could both believe that they had won",
        hint="use a server that honours If-None-Match, such as Amazon S3, MinIO or R2, or a folder "
        "that all nodes share, e.g. --store /shared/runs",
    )
