"""Reads that a controller repeats: signed once, sent again, and never an old answer for a new."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import NotFound, StoreError, StoreUnavailable, TooLarge
from spotguard.storage.http.connections import Answer
from spotguard.storage.remote.bucket import Page
from spotguard.storage.s3 import signed_reads
from spotguard.storage.s3.signed_reads import SignedReads
from spotguard.storage.s3.transport import Noted, Wire
from tests.storage.harness.scripted_server import Reply, scripted_server
from tests.storage.s3 import test_s3
from tests.storage.s3.test_s3 import bucket_at, failure, put

pytest.importorskip("boto3")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.storage.s3.bucket import S3Bucket
    from tests.storage.harness.scripted_server import Request

_clean_environment = test_s3._clean_environment  # fixtures, by their names
bucket = test_s3.bucket


def test_what_is_read_again_is_as_it_is_now(bucket: S3Bucket) -> None:
    """Each read sees the newest bytes, each listing all objects, and what is gone is gone."""
    for turn in range(3):
        put(bucket, "beat", b"%d" % turn)
        assert [bucket.get("beat", 10) for _ in range(2)] == [b"%d" % turn] * 2
        assert [each.key for each in bucket.page("").objects] == ["beat"]
        put(bucket, f"event-{turn}", b"1")
        assert len(bucket.page("").objects) == 2
        assert bucket.page("").objects == bucket.page("").objects
        bucket.delete(f"event-{turn}")
    with pytest.raises(TooLarge):
        bucket.get("beat", 0)
    bucket.delete("beat")
    for _ in range(2):
        with pytest.raises(NotFound):
            bucket.get("beat", 10)
    assert not bucket.page("").objects


LISTED = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"""


def _signature(request: Request) -> str:
    return request.headers["authorization"]


def test_an_answer_that_is_as_before_costs_one_request_and_no_signature() -> None:
    """That is what a controller of many quiet runs lives from."""
    with scripted_server(lambda _: Reply(body=LISTED)) as server:
        bucket = bucket_at(server)
        for prefix in ("a/", "b/"):
            pages = [bucket.page(prefix, start_after="a/1") for _ in range(3)]
            assert pages[0] is pages[1] is pages[2]

    assert len(server.requests) == 6
    assert len(set(map(_signature, server.requests))) == 2


@pytest.mark.parametrize("said", ["RequestTimeTooSkewed", "ExpiredToken", "SlowDown"])
def test_a_refusal_of_what_was_signed_before_is_asked_anew(said: str) -> None:
    """Whatever the server says of it: what botocore hears then is what the caller is told."""
    first = iter([Reply(body=b"1"), failure(said), Reply(body=b"2")])
    with scripted_server(lambda _: next(first, failure(said))) as server:
        bucket = bucket_at(server)
        assert [bucket.get("beat", 10) for _ in range(2)] == [b"1", b"2"]
        with pytest.raises(StoreError):
            bucket.get("beat", 10)
    assert len(server.requests) >= 5, "botocore asked, too"


def test_what_broke_off_is_never_taken_for_the_whole() -> None:
    """Not in the first answer, and not in one to a request that is sent again."""
    whole, cut = Reply(body=b"0123456789"), Reply(body=b"0123", claimed=10)
    replies = iter([whole, cut, whole])
    with scripted_server(lambda _: next(replies, whole)) as server:
        bucket = bucket_at(server)
        assert bucket.get("beat", 20) == b"0123456789"
        try:
            again = bucket.get("beat", 20)
        except StoreUnavailable:
            again = bucket.get("beat", 20)
        assert again == b"0123456789"


def test_what_is_gone_is_asked_for_once_a_look() -> None:
    """A kept request that was refused is not sent a second time."""
    replies = iter([Reply(body=b"1"), *[failure("NoSuchKey", status=404)] * 9])
    with scripted_server(lambda _: next(replies)) as server:
        bucket = bucket_at(server)
        bucket.get("beat", 10)
        for _ in range(4):
            with pytest.raises(NotFound):
                bucket.get("beat", 10)
    assert len(server.requests) == 1 + 2 + 3


class _Recorded(Wire):
    """A wire that answers each kept request by its own word."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.sent = 0

    @contextlib.contextmanager
    def noting(self) -> Iterator[Noted]:
        yield Noted(url="http://server/x", body=b"page")

    def again(self, noted: Noted) -> Answer:
        self.sent += 1
        return Answer(status=200, headers={}, body=b"page")


def test_a_signature_is_used_for_two_minutes_and_what_is_kept_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S3 takes it for 15: a machine whose clock is late has room, and memory stays small."""
    now, wire = [0.0], _Recorded()
    reads, asked = SignedReads(wire, monotonic=lambda: now[0]), list[str]()

    def ask(word: str) -> Page:
        asked.append(word)
        return Page([], [], None)

    for now[0] in (0.0, 60.0, 119.0, 121.0, 200.0):
        reads.page("a", lambda: ask("a"))
    assert (len(asked), wire.sent) == (2, 3)

    for number in range(3000):
        reads.page(number, lambda: ask("b"))
    assert len(reads._kept) == 3001
    now[0] = 400.0
    reads.page("c", lambda: ask("c"))
    assert len(reads._kept) == 1, "what can be sent no more is not kept"
    monkeypatch.setattr(signed_reads, "_MOST_KEPT_BYTES", 20_000)
    for number in range(3000):
        reads.page(number, lambda: ask("b"))
    assert len(reads._kept) < 20
