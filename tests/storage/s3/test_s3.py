"""`S3Bucket`: what it asks of a server, what it makes of the answers, and what it never says."""

from __future__ import annotations

import base64
import inspect
import logging
import os
import threading
import traceback
import uuid
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import (
    AlreadyExists,
    NotFound,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    UsageError,
)
from spotguard.storage.deadline import give_up_after
from spotguard.storage.remote.bucket import ALWAYS, Precondition
from spotguard.storage.remote.store import RemoteStore
from spotguard.storage.s3.bucket import S3Bucket
from spotguard.storage.s3.errors import Asked, from_answer, from_botocore, is_known
from tests.storage.harness.scripted_server import Reply, Request, scripted_server

boto3 = pytest.importorskip("boto3")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.storage.harness.scripted_server import Scripted
    from tests.storage.harness.servers import Server

IF_ABSENT = Precondition(if_absent=True)
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDACCESSKEY",
    "AWS_SECRET_ACCESS_KEY": "planted/secret+key",
    "AWS_SESSION_TOKEN": "planted-session-token",
}
ASKED = Asked(right="s3:PutObject", bucket="b", prefix="runs/", key="x")
OK = Reply(headers={"etag": '"e"'})


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "SPOTGUARD_S3"))]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["moto", "rclone"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    """A bucket on a real emulator, below a prefix of its own."""
    server: Server = request.getfixturevalue(request.param)
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    if request.param == "moto":
        boto3.client("s3").create_bucket(Bucket="bucket")
    return S3Bucket(f"s3://bucket/runs/{uuid.uuid4().hex}")


def bucket_at(server: Scripted) -> S3Bucket:
    """Return a bucket on a scripted server."""
    return S3Bucket(f"s3://b/runs?endpoint={server.endpoint}&region=eu-north-1")


def views(*parts: bytes) -> list[memoryview]:
    """Return the parts as a body."""
    return [memoryview(part) for part in parts]


def put(bucket: S3Bucket, key: str, *parts: bytes, condition: Precondition = ALWAYS) -> str:
    """Put the parts as one object."""
    return bucket.put(key, views(*parts), condition=condition, writer="me")


def failure(code: str, *, message: str = "", status: int = 0) -> Reply:
    """Return an answer as S3 refuses."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    known = {"SlowDown": 503, "PreconditionFailed": 412}
    return Reply(status or known.get(code, 403), {"content-type": "application/xml"}, body)


def problem_with(reply: Reply, act: Callable[[S3Bucket], object]) -> StoreError:
    """Return the error that `act` ends with when the server answers with `reply`."""
    with scripted_server(lambda _: reply) as server, pytest.raises(StoreError) as caught:
        act(bucket_at(server))
    return caught.value


def test_an_object_comes_back_as_it_was_put(bucket: S3Bucket) -> None:
    """Several views make one object, whatever its key looks like; its writer stays with it."""
    key = "a/b ü+%?&=#.json"
    etag = put(bucket, key, b"hel", b"lo")
    found = bucket.head(key)

    assert bucket.get(key) == b"hello"
    assert bucket.writer_of(key) == "me"
    assert found is not None
    assert (found.key, found.size_bytes, found.etag) == (key, 5, etag)
    assert found.modified_at is not None


def test_an_empty_object_is_an_object(bucket: S3Bucket) -> None:
    """No bytes can be put, too."""
    put(bucket, "empty")

    assert bucket.get("empty") == b""


def test_what_is_not_there_is_not_found(bucket: S3Bucket) -> None:
    """Reading raises, looking answers None, removing is content."""
    with pytest.raises(NotFound):
        bucket.get("none")
    with pytest.raises(NotFound):
        bucket.get_range("none", 0, [memoryview(bytearray(1))])
    assert bucket.head("none") is None
    assert bucket.writer_of("none") is None
    bucket.delete("none")


def test_what_is_too_large_is_not_fetched() -> None:
    """One request, and the server, which would go on for ever, is left alone."""
    endless = Reply(headers={"etag": '"e"'}, body=bytes(1 << 16), claimed=10**15, endless=True)
    with (
        scripted_server(lambda _: endless) as server,
        pytest.raises(TooLarge, match="x is too large"),
    ):
        bucket_at(server).get("x", 1000)
    assert len(server.requests) == 1


def test_an_object_without_a_date_is_an_object() -> None:
    """Not every server says when an object was written."""
    with scripted_server(lambda _: OK) as server:
        found = bucket_at(server).head("x")
    assert found is not None
    assert (found.etag, found.modified_at) == ("e", None)


LISTED = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>%s</Key><Size>1</Size>
<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>"e"</ETag></Contents></ListBucketResult>"""


@pytest.mark.parametrize(
    ("listed", "error"), [(b"runs/x.json", NotFound), (b"runs/x", StoreError), (b"", StoreError)]
)
def test_a_denied_read_of_what_a_list_does_not_name_is_no_object(
    listed: bytes, error: type[StoreError]
) -> None:
    """S3 denies the read of an absent object to who may list below a prefix only."""
    denied = Reply(403, body=b"<Error><Code>AccessDenied</Code></Error>")

    def reply(request: Request) -> Reply:
        is_list = "list-type=2" in request.path and listed
        return Reply(body=LISTED % listed) if is_list else denied

    with scripted_server(reply) as server:
        with pytest.raises(error) as whole:
            bucket_at(server).get("x", 10)
        with pytest.raises(error) as part:
            bucket_at(server).get_range("x", 0, views(b"1234"))
        if error is NotFound:
            assert bucket_at(server).head("x") is None
    assert (type(whole.value), type(part.value)) == (error, error)


def test_a_range_fills_the_views_in_order(bucket: S3Bucket) -> None:
    """The bytes from the offset on go into one view after the other, and no further."""
    put(bucket, "x", b"0123456789")
    memory = bytearray(8)
    bucket.get_range("x", 3, [memoryview(memory)[1:3], memoryview(memory)[4:7]])

    assert memory == b"\x0034\x00567\x00"


@pytest.mark.parametrize("offset", [8, 100])
def test_a_range_past_the_end_is_an_error(bucket: S3Bucket, offset: int) -> None:
    """It is said at once that the object is too short; another try does not help."""
    put(bucket, "x", b"0123456789")

    with pytest.raises(StoreError, match="ends before") as caught:
        bucket.get_range("x", offset, [memoryview(bytearray(3))])
    assert type(caught.value) is StoreError


def test_parts_make_one_object(bucket: S3Bucket) -> None:
    """Parts sent in order are the object once it is finished, and not before."""
    upload_id = bucket.begin("big", writer="me")
    assert [each.key for each in bucket.uploads("")] == ["big"]
    bodies = [bytes([number]) * (5 << 20) for number in (1, 2)] + [b"end"]
    parts = [
        bucket.put_part("big", upload_id, number, views(body))
        for number, body in enumerate(bodies, 1)
    ]
    assert bucket.head("big") is None
    bucket.finish("big", upload_id, parts, condition=ALWAYS, writer="me")

    assert bucket.get("big") == b"".join(bodies)
    assert bucket.writer_of("big") == "me"
    assert not bucket.uploads("")


def test_a_write_in_parts_can_be_given_up_twice(bucket: S3Bucket) -> None:
    """Its bytes are freed, and nothing is left of it."""
    upload_id = bucket.begin("big", writer="me")
    bucket.put_part("big", upload_id, 1, views(b"x"))
    bucket.abort("big", upload_id)
    bucket.abort("big", upload_id)

    assert not bucket.uploads("")
    assert bucket.head("big") is None


@pytest.mark.parametrize("bucket", ["rclone"], indirect=True)  # moto fails here by a bug of its own
def test_what_was_given_up_cannot_be_finished(bucket: S3Bucket) -> None:
    """The upload is not found, which is how a lost answer looks, too."""
    upload_id = bucket.begin("big", writer="me")
    part = bucket.put_part("big", upload_id, 1, views(b"x"))
    bucket.abort("big", upload_id)

    with pytest.raises(NotFound):
        bucket.finish("big", upload_id, [part], condition=ALWAYS, writer="me")


def test_pages_are_sorted_and_relative_to_the_prefix(bucket: S3Bucket) -> None:
    """A listing tells keys as they were put; with folders, what is below is told as one."""
    for key in ("b", "a/2", "a/1", "c ü"):
        put(bucket, key, b"x")

    assert [info.key for info in bucket.page("").objects] == ["a/1", "a/2", "b", "c ü"]
    assert [info.key for info in bucket.page("", start_after="a/2").objects] == ["b", "c ü"]
    folders = bucket.page("", folders=True)
    assert (list(folders.folders), [each.key for each in folders.objects]) == (["a/"], ["b", "c ü"])


def test_a_copy_has_the_bytes_and_a_writer_of_its_own(bucket: S3Bucket) -> None:
    """The copy tells who copied it."""
    put(bucket, "x", b"bytes")
    bucket.copy("x", "y", condition=ALWAYS, writer="copier")

    assert (bucket.get("y"), bucket.writer_of("y")) == (b"bytes", "copier")


@pytest.mark.parametrize("bucket", ["moto"], indirect=True)
def test_conditions_are_kept(bucket: S3Bucket) -> None:
    """A write that may only create, or only replace what it knows, loses to another writer."""
    etag = put(bucket, "x", b"first", condition=IF_ABSENT)
    with pytest.raises(AlreadyExists):
        put(bucket, "x", b"second", condition=IF_ABSENT)
    with pytest.raises(AlreadyExists):
        put(bucket, "x", b"second", condition=Precondition(if_match="0" * 32))
    with pytest.raises(AlreadyExists):
        bucket.copy("x", "x", condition=IF_ABSENT, writer="me")
    assert bucket.get("x") == b"first"

    put(bucket, "x", b"second", condition=Precondition(if_match=etag))
    assert bucket.get("x") == b"second"


@pytest.mark.parametrize("bucket", ["moto"], indirect=True)
def test_a_write_in_parts_keeps_its_condition(bucket: S3Bucket) -> None:
    """Whoever finishes second loses."""
    upload_id = bucket.begin("x", writer="me")
    part = bucket.put_part("x", upload_id, 1, views(b"parts"))
    put(bucket, "x", b"first")

    with pytest.raises(AlreadyExists):
        bucket.finish("x", upload_id, [part], condition=IF_ABSENT, writer="me")
    assert bucket.get("x") == b"first"


@pytest.mark.parametrize("bucket", ["moto"], indirect=True)
def test_an_archived_object_is_in_the_coldest_class(bucket: S3Bucket) -> None:
    """It stays where it is, its writer too."""
    put(bucket, "x", b"bytes")
    bucket.archive("x")
    listed = boto3.client("s3").list_objects_v2(Bucket="bucket")["Contents"]

    assert bucket.writer_of("x") == "me"
    assert "DEEP_ARCHIVE" in {each["StorageClass"] for each in listed}


def test_a_store_of_it_moves_large_objects_in_parts(bucket: S3Bucket) -> None:
    """Through `RemoteStore`, what is larger than a part comes back the same."""
    store = RemoteStore(bucket, threads=4)
    data = os.urandom(1 << 20) * 23 + b"end"
    back = bytearray(len(data))
    store.put("large", data)
    store.get_into("large", 0, memoryview(back))

    assert back == data


def test_the_server_can_prove_every_body() -> None:
    """A put and a part each carry the CRC-32C of all their bytes, and are not hashed twice."""
    with scripted_server(lambda _: OK) as server:
        bucket = bucket_at(server)
        put(bucket, "x", b"1234", b"56789")
        part = bucket.put_part("x", "id", 1, views(b"123456789"))

    check = base64.b64encode((0xE3069283).to_bytes(4, "big")).decode()  # RFC 3720's own example
    assert part == f"e {check}"
    for request in server.requests:
        assert request.body == b"123456789"
        assert request.headers["x-amz-checksum-crc32c"] == check
        assert "x-amz-checksum-crc32c" in request.headers["authorization"]
        assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert "eu-north-1" in request.headers["authorization"]


def test_a_body_that_the_server_finds_damaged_is_worth_another_try() -> None:
    """`BadDigest` says nothing about the object, only about the way."""
    problem = problem_with(failure("BadDigest"), lambda bucket: put(bucket, "x", b"1"))

    assert type(problem) is StoreUnavailable


def test_an_object_that_does_not_fit_its_checksum_is_not_returned() -> None:
    """What `get` returns was proven where the server keeps a checksum."""
    reply = Reply(headers={"x-amz-checksum-crc32c": "AAAAAA=="}, body=b"flipped")

    assert type(problem_with(reply, lambda bucket: bucket.get("x"))) is StoreUnavailable


def test_the_checksum_of_parts_is_no_checksum_of_the_object() -> None:
    """A checksum of checksums cannot be compared; the object is returned."""
    reply = Reply(headers={"x-amz-checksum-crc32c": "AAAAAA==-2"}, body=b"bytes")
    with scripted_server(lambda _: reply) as server:
        assert bucket_at(server).get("x") == b"bytes"


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda bucket: bucket.get("x"), id="get"),
        pytest.param(
            lambda bucket: bucket.get_range("x", 0, [memoryview(bytearray(9))]), id="get_range"
        ),
    ],
)
def test_an_answer_that_breaks_off_is_worth_another_try(act: Callable[[S3Bucket], object]) -> None:
    """Fewer bytes than promised are never taken for the object."""
    headers = {"content-range": "bytes 0-8/9", "etag": '"e"'}
    reply = Reply(206, headers, body=b"1234", claimed=9)

    assert type(problem_with(reply, act)) is StoreUnavailable


@pytest.mark.parametrize("body", [b"<html>log in", b"{}", b"<Other/>"])
def test_what_does_not_speak_s3_is_a_store_error(body: bytes) -> None:
    """A proxy's page is taken neither for a stored object nor for a begun write."""
    reply = Reply(headers={"content-type": "text/html"}, body=body)

    assert problem_with(reply, lambda bucket: put(bucket, "x", b"1"))
    assert problem_with(reply, lambda bucket: bucket.begin("x", writer="me"))
    assert problem_with(reply, lambda bucket: bucket.copy("x", "y", condition=ALWAYS, writer="me"))


def test_a_request_ends_at_the_callers_deadline() -> None:
    """A server that never answers costs no more than the time that was left."""
    done = threading.Event()
    with scripted_server(lambda _: Reply(hang=done)) as server:
        with give_up_after(0.2), pytest.raises(StoreUnavailable, match="in time"):
            bucket_at(server).head("x")
        done.set()


def test_what_is_lost_is_told_apart_from_what_is_taken() -> None:
    """412 is another writer's success; 409 says only that both were at it."""
    conflict = Reply(409, {}, b"<Error><Code>ConditionalRequestConflict</Code></Error>")

    taken = problem_with(
        failure("PreconditionFailed"), lambda bucket: put(bucket, "x", condition=IF_ABSENT)
    )
    busy = problem_with(conflict, lambda bucket: put(bucket, "x", condition=IF_ABSENT))
    assert (type(taken), type(busy)) == (AlreadyExists, StoreUnavailable)


def test_encryption_is_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects, parts and copies are encrypted by the key that the user names."""
    monkeypatch.setenv("SPOTGUARD_S3_SSE_KMS_KEY_ID", "alias/mine")
    begun = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    with scripted_server(lambda _: Reply(headers={"etag": '"e"'}, body=begun)) as server:
        put(bucket_at(server), "x", b"1")
        bucket_at(server).begin("x", writer="me")

    for request in server.requests:
        assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/mine"


def test_a_url_is_given_back_as_it_was_given() -> None:
    """What opened the bucket opens it again."""
    url = "s3://bucket/some/prefix?endpoint=http://127.0.0.1:9000&region=eu-west-1"

    assert S3Bucket(url).url == url
    assert S3Bucket("s3://bucket").url == "s3://bucket"
    assert S3Bucket("s3://bucket/a/").url == "s3://bucket/a"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "no bucket"),
        ("s3://b?endpint=http://x", "endpint"),
        ("s3://my bucket/x", "my bucket"),
        ("s3://b\u00fccket/x", "b\u00fccket"),
        ("s3://my:bucket/x", "my:bucket"),
        ("s3://[b/x", "no bucket can be called"),
        ("s3://b?endpoint=localhost:9000", "http"),
        ("s3://b?endpoint=http://me:hunter2@host", "login"),
        ("s3://b?endpoint=me:hunter2@host:9000", "login"),
        ("s3://b?endpoint=http://host:99999", "http"),
    ],
)
def test_a_url_that_names_no_bucket_is_refused(url: str, said: str) -> None:
    """The message says what is wrong with it, and repeats no password."""
    with pytest.raises(UsageError, match=said) as caught:
        S3Bucket(url)
    assert "hunter2" not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize(
    ("code", "error", "told"),
    [
        ("AccessDenied", StoreError, "s3:PutObject on arn:aws:s3:::b/runs/*"),
        ("NoSuchBucket", StoreError, "aws s3 mb s3://b"),
        ("ExpiredToken", StoreError, "renew"),
        ("InvalidAccessKeyId", StoreError, "renew"),
        ("SignatureDoesNotMatch", StoreError, "AWS_SECRET_ACCESS_KEY"),
        ("RequestTimeTooSkewed", StoreError, "timedatectl"),
        ("SlowDown", StoreUnavailable, "tried again"),
        ("InternalError", StoreUnavailable, "tried again"),
        ("NoSuchKey", NotFound, ""),
        ("NoSuchUpload", NotFound, ""),
        ("KMS.DisabledException", StoreError, "SPOTGUARD_S3_SSE_KMS_KEY_ID"),
        ("XMinioStorageFull", StoreFull, "quota"),
        ("NeverHeardOf", StoreError, ""),
    ],
)
def test_a_refusal_says_what_to_do(code: str, error: type[StoreError], told: str) -> None:
    """Each code has its error and its way out."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    problem = from_answer(answer, ASKED)

    assert type(problem) is error
    assert told in problem.hint


def test_a_refusal_that_nobody_knows_is_told_in_the_servers_words() -> None:
    """Then its code and its sentence are all there is to go by."""
    answer = {
        "Error": {"Code": "NeverHeardOf", "Message": "the moon is full"},
        "ResponseMetadata": {"HTTPStatusCode": 403},
    }

    assert "NeverHeardOf: the moon is full" in str(from_answer(answer, ASKED))


def test_a_wrong_region_names_the_right_one() -> None:
    """Whether S3 says it in the body or in a header."""
    for answer in (
        {"Error": {"Code": "AuthorizationHeaderMalformed", "Region": "eu-west-3"}},
        {
            "Error": {"Code": "301"},
            "ResponseMetadata": {"HTTPHeaders": {"x-amz-bucket-region": "eu-west-3"}},
        },
    ):
        assert "?region=eu-west-3" in from_answer(answer, ASKED).hint


def test_an_unknown_server_error_is_worth_another_try() -> None:
    """Any 5xx passes, and so does 429."""
    for status in (429, 599):
        answer = {"Error": {"Code": "Weird"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        assert type(from_answer(answer, ASKED)) is StoreUnavailable


def test_every_error_of_botocores_is_known() -> None:
    """A new class in botocore fails this test, until somebody says what it means."""
    from botocore import exceptions

    kinds = [
        kind
        for _, kind in inspect.getmembers(exceptions, inspect.isclass)
        if kind.__module__ == exceptions.__name__ and issubclass(kind, BaseException)
    ]
    unknown = {kind.__name__ for kind in kinds if not is_known(kind)}
    assert len(kinds) > 90
    assert unknown == {"ClientError"}  # an answer, told by its code


def test_credentials_that_are_missing_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint names the variables; nothing is sent."""
    for name in SECRETS:
        monkeypatch.delenv(name)
    with scripted_server(lambda _: OK) as server:
        with pytest.raises(StoreError, match="no usable credentials") as caught:
            bucket_at(server).get("x")
        assert not server.requests
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AWS_PROFILE", "nobody", "ProfileNotFound"),
        ("AWS_ENDPOINT_URL_S3", "hunter2", "no URL"),
        ("AWS_ENDPOINT_URL_S3", "http://hunter2:99999", "no URL"),
        ("AWS_DEFAULT_REGION", "no region", "InvalidRegionError"),
    ],
)
def test_settings_that_make_no_sense_are_told(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    """Also where the first thing asked for is not a request."""
    monkeypatch.setenv(name, value)

    with pytest.raises(StoreError, match=said) as caught:
        _ = S3Bucket("s3://b").heeds_conditions
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("code", "status", "error", "told"),
    [
        ("AccessDenied", 403, StoreError, "the role trusts it"),
        ("NeverHeardOf", 400, StoreError, "the role trusts it"),
        ("Throttling", 400, StoreUnavailable, "metadata service"),
        ("NeverHeardOf", 500, StoreUnavailable, "metadata service"),
    ],
)
def test_a_role_that_is_not_given_is_told(
    in_a_role: Callable[[str], None], code: str, status: int, error: type[StoreError], told: str
) -> None:
    """What the token service refuses is a sentence too, and worth another try only if it passes."""
    said = f"<ErrorResponse><Error><Code>{code}</Code></Error></ErrorResponse>".encode()
    answer = Reply(status, {"content-type": "text/xml"}, said)
    with scripted_server(lambda _: answer) as sts, scripted_server(lambda _: OK) as server:
        in_a_role(sts.endpoint)
        with pytest.raises(StoreError, match=f"could not be fetched .{code}") as caught:
            bucket_at(server).put("x", views(b"1"), condition=ALWAYS, writer="me")
        assert len(sts.requests) == 1
        assert not server.requests
    assert type(caught.value) is error
    assert told in caught.value.hint


@pytest.fixture
def in_a_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Make the credentials those of a role, which the token service at an endpoint gives."""

    def assume(endpoint: str) -> None:
        config = tmp_path / "config"
        config.write_text(
            "[profile train]\nrole_arn = arn:aws:iam::1:role/train\nsource_profile = base\n"
            "region = eu-north-1\n"
            "[profile base]\naws_access_key_id = AK\naws_secret_access_key = SK\n"
        )
        for name in SECRETS:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_PROFILE", "train")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", endpoint)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    return assume


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ("credential_process = echo planted", "JSONDecodeError"),
        ("credential_process = echo []", "AttributeError"),
        ("credential_process = /no/such/program", "FileNotFoundError"),
        ("role_arn = arn:aws:iam::1:role/r\nweb_identity_token_file = /no/file", "FileNotFoundErr"),
    ],
)
def test_credentials_that_make_no_sense_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: str, kind: str
) -> None:
    """They are what is wrong, and not the endpoint; whatever a program said is not repeated."""
    for name in SECRETS:
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text(f"[default]\nregion = eu-north-1\n{settings}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with scripted_server(lambda _: OK) as server:
        with pytest.raises(StoreError, match=f"credentials .* cannot be used .{kind}") as caught:
            bucket_at(server).get("x")
        assert not server.requests
    assert "aws configure list" in caught.value.hint
    assert "planted" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("ending", ["\n", "\r\n x", "\u20ac"])
@pytest.mark.parametrize("name", ["AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"])
def test_a_line_break_in_credentials_tells_no_secret(
    monkeypatch: pytest.MonkeyPatch, name: str, ending: str
) -> None:
    """A variable read from a file with its last line break is told; its value is nowhere."""
    monkeypatch.setenv(name, f"planted{ending}")
    with scripted_server(lambda _: OK) as server:
        with pytest.raises(StoreError, match="line break") as caught:
            RemoteStore(bucket_at(server)).put("x", b"1")
        assert not server.requests
    assert name in caught.value.hint
    problem: BaseException | None = caught.value
    while problem is not None:
        assert "planted" not in f"{problem!r}{vars(problem)}"
        problem = problem.__cause__ or problem.__context__


def test_s3_itself_keeps_conditions_and_others_are_tried() -> None:
    """Nothing is sent to find out which of the two it is."""
    assert S3Bucket("s3://b?region=eu-west-1").heeds_conditions is True
    assert S3Bucket("s3://b?endpoint=http://127.0.0.1:9").heeds_conditions is None


def test_a_server_that_is_not_there_is_worth_another_try() -> None:
    """A refused connection is no verdict."""
    with scripted_server(lambda _: OK) as server:
        bucket = bucket_at(server)

    with pytest.raises(StoreUnavailable):
        bucket.get("x")


def test_a_class_without_an_entry_is_a_plain_error() -> None:
    """Whatever botocore comes up with, the caller sees a `StoreError`."""
    from botocore.exceptions import BotoCoreError

    class Novel(BotoCoreError):
        fmt = "novel"

    assert type(from_botocore(Novel(), ASKED)) is StoreError


@pytest.fixture
def own_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """All that spotguard logs, down to DEBUG."""
    with caplog.at_level(logging.DEBUG, logger="spotguard"):
        yield caplog


@pytest.mark.parametrize("status", [403, 503])
@pytest.mark.parametrize("code", ["SignatureDoesNotMatch", "AccessDenied", "NeverHeardOf", "echo"])
def test_no_secret_is_ever_said(code: str, status: int, own_log: pytest.LogCaptureFixture) -> None:
    """A server that repeats keys, token and signature gets them into nothing of ours."""
    seen: list[str] = []

    def echo(request: Request) -> Reply:
        signature = request.headers["authorization"].rpartition("Signature=")[2]
        seen.append(signature)
        said = " ".join([*SECRETS.values(), signature])
        return failure(said if code == "echo" else code, message=said, status=status)

    with scripted_server(echo) as server:
        bucket = bucket_at(server)
        with pytest.raises(StoreError) as caught:
            put(bucket, "x", b"1")
    problem = caught.value
    trace = "".join(traceback.format_exception(problem))
    logged = "".join(each.getMessage() for each in own_log.records if "spotguard" in each.name)
    told = f"{problem!r}{problem.hint}{trace}{bucket!r}{bucket.url}{logged}{vars(problem)}"
    assert seen
    assert not [secret for secret in [*SECRETS.values(), *seen] if secret in told]
