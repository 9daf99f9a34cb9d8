"""Objects too large for one request to copy: on S3 they go to the archive in parts."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest
from crc32c import crc32c

from spotguard.errors import AlreadyExists, StoreUnavailable
from spotguard.testing import FakeClock
from tests.storage.harness import fault_proxy as faults
from tests.storage.harness.lanes import SMALL_PARTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.storage.base import ObjectInfo, ObjectStore
    from tests.storage.harness.fault_proxy import Exchange
    from tests.storage.harness.lanes import Lane

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("lane", ["s3"], indirect=True)]

KEY = "folder/victim"
LARGE = b"".join(bytes([number]) * (175_000 + number) for number in range(4))
MOST = SMALL_PARTS.max_bytes
PIECES = [LARGE[at : at + MOST] for at in range(0, len(LARGE), MOST)]


def stored(lane: Lane, content: bytes = LARGE) -> ObjectStore:
    """Return a store with an object in it."""
    store = lane.store(clock=FakeClock(), patience_s=0.5)
    store.put(KEY, content)
    return store


def found(store: ObjectStore) -> ObjectInfo:
    """Return what there is."""
    info = store.head(KEY)
    assert info is not None
    return info


def said_by_s3(lane: Lane, ask: str, **options: Any) -> Any:
    """Return what S3 itself says of the object."""
    boto3 = pytest.importorskip("boto3")
    bucket, _, prefix = lane.url.removeprefix("s3://").partition("/")
    return getattr(boto3.client("s3"), ask)(Bucket=bucket, Key=f"{prefix}/{KEY}", **options)


def crc_of(content: bytes) -> bytes:
    """Return the checksum as S3 keeps it."""
    return crc32c(content).to_bytes(4, "big")


def test_a_large_object_goes_to_the_archive_in_parts(lane: Lane) -> None:
    """Each byte is copied once, and size, class, writer and checksum are right afterwards."""
    ranges: list[str] = []

    def note(exchange: Exchange) -> None:
        ranges.append(exchange.headers.get("x-amz-copy-source-range", ""))
        exchange.pass_on()

    store = stored(lane)
    writer = lane.bucket().writer_of(KEY)
    lane.proxy.on(note, method="PUT", times=None)
    store.archive(KEY)
    lane.proxy.heal()
    head = said_by_s3(lane, "head_object", ChecksumMode="ENABLED")

    ends = [*range(MOST, len(LARGE), MOST), len(LARGE)]
    starts = range(0, len(LARGE), MOST)
    assert ranges == [f"bytes={a}-{b - 1}" for a, b in zip(starts, ends, strict=True)]
    assert (found(store).archived, found(store).size_bytes) == (True, len(LARGE))
    assert head["StorageClass"] == "DEEP_ARCHIVE"
    assert lane.bucket().writer_of(KEY) == writer
    of_parts = crc_of(b"".join(map(crc_of, PIECES)))
    assert head["ChecksumCRC32C"].partition("-")[0] == base64.b64encode(of_parts).decode()
    said_by_s3(lane, "restore_object", RestoreRequest={"Days": 1})
    assert said_by_s3(lane, "get_object")["Body"].read() == LARGE


def test_no_more_than_one_request_copies_is_not_cut(lane: Lane) -> None:
    """Up to the limit itself the object is moved by one request."""
    store = stored(lane, LARGE[:MOST])
    heard = len(lane.proxy.heard)
    store.archive(KEY)

    assert [each.split(" ")[0] for each in lane.proxy.heard[heard:]] == ["HEAD", "PUT"]
    assert found(store).archived


@pytest.mark.parametrize("content", [LARGE, LARGE[:MOST]], ids=["parts", "whole"])
@pytest.mark.parametrize("key", ["arn:aws:kms:us-east-1:1:key/2", ""])
def test_the_archive_keeps_the_key(
    lane: Lane, monkeypatch: pytest.MonkeyPatch, content: bytes, key: str
) -> None:
    """Who moves an object need not name the key that it was written with: it stays the same."""
    monkeypatch.setenv("SPOTGUARD_S3_SSE_KMS_KEY_ID", key)
    store = stored(lane, content)
    before = said_by_s3(lane, "head_object")
    monkeypatch.setenv("SPOTGUARD_S3_SSE_KMS_KEY_ID", "" if key else "arn:aws:kms:x:1:key/other")
    store.archive(KEY)
    after = said_by_s3(lane, "head_object")

    assert after["StorageClass"] == "DEEP_ARCHIVE"
    assert after.get("SSEKMSKeyId", "") == key
    assert after.get("ServerSideEncryption") == before.get("ServerSideEncryption")


@pytest.mark.parametrize("nth", range(1, 2 + len(PIECES) + 1))
def test_death_in_the_middle_leaves_the_object_as_it_was(lane: Lane, nth: int) -> None:
    """Whatever comes last, the original is read as before, and nothing is left after a clean-up."""
    store = stored(lane)
    before = found(store)
    for method in ("PUT", "POST", "DELETE"):
        lane.proxy.on(faults.refuse(503), method=method, nth=nth_of(method, nth), times=None)
    with pytest.raises(StoreUnavailable):
        store.archive(KEY)
    lane.proxy.heal()

    assert (found(store), store.get(KEY)) == (before, LARGE)
    assert len(lane.bucket().uploads("")) == (nth > 1)
    store.clean_up(older_than_s=-60.0)
    assert list(lane.bucket().uploads("")) == []
    store.archive(KEY)
    assert found(store).archived


def nth_of(method: str, nth: int) -> int:
    """Return from which request of a kind on there is no answer, if death comes at the `nth`.

    They are: POST, which begins; a PUT for each part; POST, which ends it.
    """
    if method == "POST":
        return 1 if nth == 1 else 2
    return max(1, nth - 1) if method == "PUT" else 1


def test_an_answer_that_is_lost_is_no_failure(lane: Lane) -> None:
    """If the last request took effect, the object is in the archive, and that is found out."""
    store = stored(lane)
    lane.proxy.on(faults.lose_answer(), method="POST", nth=2)
    store.archive(KEY)

    assert found(store).archived
    assert list(lane.bucket().uploads("")) == []


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_what_changed_meanwhile_stays_as_it_is(lane: Lane, change: str) -> None:
    """What was written or pruned while the parts were copied is not undone."""
    store, other = stored(lane), lane.store()
    changes: dict[str, Callable[[], object]] = {
        "replace": lambda: other.put(KEY, b"new"),
        "delete": lambda: other.delete(KEY),
    }

    def come_between(exchange: Exchange) -> None:
        changes[change]()
        finish_as_s3(exchange, other.head(KEY))

    lane.proxy.on(come_between, method="POST", nth=2)
    with pytest.raises(AlreadyExists):
        store.archive(KEY)

    now = store.head(KEY)
    assert (now and (now.size_bytes, now.archived)) == ((3, False) if change == "replace" else None)
    assert list(lane.bucket().uploads("")) == []


def finish_as_s3(exchange: Exchange, now: ObjectInfo | None) -> None:
    """Heed the condition, which moto reads over here."""
    wanted = exchange.headers.get("if-match")
    if wanted is None or (now and wanted == f'"{now.etag}"'):
        exchange.pass_on()
    elif now is None:
        faults.refuse(404, b"<Error><Code>NoSuchKey</Code></Error>")(exchange)
    else:
        faults.refuse(412, b"<Error><Code>PreconditionFailed</Code></Error>")(exchange)


def test_only_what_was_looked_at_is_copied(lane: Lane) -> None:
    """Each part names the version that it is of: S3 mixes no two of them."""
    versions: set[str | None] = set()

    def note(exchange: Exchange) -> None:
        versions.add(exchange.headers.get("x-amz-copy-source-if-match"))
        exchange.pass_on()

    store = stored(lane)
    etag = found(store).etag
    lane.proxy.on(note, method="PUT", times=None)
    store.archive(KEY)

    assert versions == {f'"{etag}"'}
