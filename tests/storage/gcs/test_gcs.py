"""What Google Cloud Storage as a bucket promises, on a fake that keeps the service's rules.

What every store promises is tried on it in test_store_contract.py.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import subprocess
import sys
import traceback
import tracemalloc
from contextlib import closing
from typing import TYPE_CHECKING

import google.api_core.exceptions
import google.auth.exceptions
import google.oauth2.credentials
import pytest
import requests
import urllib3

from spotguard.errors import (
    AlreadyExists,
    MissingExtra,
    NotFound,
    StoreError,
    StoreUnavailable,
    TooLarge,
    UsageError,
)
from spotguard.shared.net import free_port
from spotguard.storage.deadline import give_up_after
from spotguard.storage.gcs.bucket import PARTS, GcsBucket, GcsPlace, open_gcs
from spotguard.storage.gcs.errors import no_token, problem_of
from spotguard.storage.remote.bucket import ALWAYS, Precondition
from tests.storage.harness.canned import Canned, Reply
from tests.storage.harness.fake_gcs import FakeGcs, Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = "ya29.planted-bearer-token"
IF_ABSENT = Precondition(if_absent=True)


@pytest.fixture
def fake() -> Iterator[FakeGcs]:
    """The service, with the bucket `box`."""
    with FakeGcs(page_size=10) as fake:
        yield fake


@pytest.fixture
def bucket(fake: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsBucket]:
    """A prefix of it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.endpoint)
    with closing(open_gcs("gs://box/some/runs/")) as bucket:
        yield bucket


def views(*content: bytes) -> list[memoryview]:
    """Return what a bucket takes as a body."""
    return [memoryview(each) for each in content]


def put(bucket: GcsBucket, key: str, content: bytes = b"content") -> str:
    """Store an object, whatever there is."""
    return bucket.put(key, views(content), condition=ALWAYS, writer="me")


def upload(bucket: GcsBucket, key: str, parts: int) -> tuple[str, list[str], bytes]:
    """Begin a write and store its parts; return its id, what `finish` wants, and the bytes."""
    upload_id = bucket.begin(key, writer="me")
    contents = [b"%05d," % number for number in range(1, parts + 1)]
    names = [
        bucket.put_part(key, upload_id, number, views(content))
        for number, content in enumerate(contents, 1)
    ]
    return upload_id, names, b"".join(contents)


@pytest.mark.parametrize("parts", [1, 32, 33, 64, 70])
def test_any_number_of_parts_becomes_one_object(
    parts: int, bucket: GcsBucket, fake: FakeGcs
) -> None:
    """More parts than one composition takes are composed in groups; nothing else is left."""
    upload_id, names, whole = upload(bucket, "a/b", parts)
    bucket.finish("a/b", upload_id, names, condition=IF_ABSENT, writer="me")

    assert bucket.get("a/b") == whole
    assert bucket.writer_of("a/b") == "me"
    assert list(fake.objects) == ["some/runs/a/b"]


def test_parts_are_stored_where_no_early_deletion_costs(bucket: GcsBucket, fake: FakeGcs) -> None:
    """Parts and groups are STANDARD; the object itself is of the class the bucket says."""
    upload_id, names, _ = upload(bucket, "x", 33)
    classes = {stored.described["storageClass"] for stored in fake.objects.values()}
    bucket.finish("x", upload_id, names, condition=ALWAYS, writer="me")

    assert classes == {"STANDARD"}
    assert "storageClass" not in fake.objects["some/runs/x"].described


def test_a_lost_race_leaves_parts_that_abort_frees(bucket: GcsBucket, fake: FakeGcs) -> None:
    """Who comes second is told so, the winner's bytes stay, and no part is left after `abort`."""
    upload_id, names, _ = upload(bucket, "x", 33)
    put(bucket, "x", b"first")
    with pytest.raises(AlreadyExists):
        bucket.finish("x", upload_id, names, condition=IF_ABSENT, writer="me")
    bucket.abort("x", upload_id)
    bucket.abort("x", upload_id)

    assert bucket.get("x") == b"first"
    assert list(fake.objects) == ["some/runs/x"]


def test_a_write_that_was_broken_off_is_found_by_its_key(bucket: GcsBucket) -> None:
    """`uploads` tells each write in parts once, below the prefix, with the time of its start."""
    began = {key: upload(bucket, key, 12)[0] for key in ("a/x", "a/y/z", "b")}
    found = bucket.uploads("a/")

    assert [(each.key, each.upload_id) for each in found] == [
        ("a/x", began["a/x"]),
        ("a/y/z", began["a/y/z"]),
    ]
    assert all(each.started_at is not None and each.started_at > 1.7e9 for each in found)


def test_a_finished_write_cannot_be_finished_again(bucket: GcsBucket) -> None:
    """A repeated `finish` finds no parts: `NotFound`, and the object stays."""
    upload_id, names, whole = upload(bucket, "x", 3)
    bucket.finish("x", upload_id, names, condition=ALWAYS, writer="me")
    with pytest.raises(NotFound):
        bucket.finish("x", upload_id, names, condition=ALWAYS, writer="me")

    assert bucket.get("x") == whole


def test_parts_that_cannot_be_deleted_do_not_undo_the_write(
    bucket: GcsBucket, fake: FakeGcs
) -> None:
    """The object is there and told so; its parts are left for the next clean-up."""
    upload_id, names, whole = upload(bucket, "x", 3)
    fake.faults.extend([Fault(0), Fault(503)])
    bucket.finish("x", upload_id, names, condition=ALWAYS, writer="me")

    assert bucket.get("x") == whole
    assert [each.upload_id for each in bucket.uploads("")] == [upload_id]

    upload_id, names, _ = upload(bucket, "y", 3)
    fake.faults.extend([Fault(0), Fault(0, cut_after_bytes=2)])
    bucket.finish("y", upload_id, names, condition=ALWAYS, writer="me")

    assert bucket.get("y") == whole


def test_every_body_is_proven_by_the_server(bucket: GcsBucket, fake: FakeGcs) -> None:
    """Objects and parts carry the crc32c of all their views, which the server compares."""
    bucket.put("x", views(b"12", b"", b"3456789"), condition=ALWAYS, writer="me")
    bucket.put_part("y", "id", 1, views(b"123456789"))

    # 0xe3069283 is the check value of CRC-32C, for the bytes "123456789".
    told = [asked.body for asked in fake.asked if asked.query["uploadType"] != "resumable"]
    told += [asked.body for asked in fake.asked if asked.method == "POST"][1:]
    assert [b'"crc32c": "4waSgw=="' in each for each in told] == [True, True]


def test_what_is_too_large_is_refused_by_the_bytes_that_come(
    bucket: GcsBucket, fake: FakeGcs
) -> None:
    """By one request, that ends there."""
    put(bucket, "x", bytes(300_000))
    asked = len(fake.asked)
    with pytest.raises(TooLarge, match="x is too large"):
        bucket.get("x", 1000)
    assert len(fake.asked) == asked + 1


def test_damaged_bytes_are_worth_another_try(bucket: GcsBucket, fake: FakeGcs) -> None:
    """Bytes that arrive damaged, at either end, are never taken."""
    fake.faults.append(Fault(400, "invalid", 'Provided CRC32C "x" doesn\'t match calculated "y"'))
    with pytest.raises(StoreUnavailable):
        put(bucket, "x")
    fake.faults.extend([Fault(0), Fault(0, damages=True)])
    with pytest.raises(StoreUnavailable):
        bucket.put_part("x", "id", 1, views(b"content"))
    put(bucket, "x")
    fake.faults.append(Fault(0, flips=True))
    with pytest.raises(StoreUnavailable, match="damaged"):
        bucket.get("x")

    assert bucket.get("x") == b"content"


def test_a_range_that_breaks_off_is_worth_another_try(bucket: GcsBucket, fake: FakeGcs) -> None:
    """An answer that ends early is not an object that does."""
    put(bucket, "x", b"0123456789")
    fake.faults.append(Fault(0, cut_after_bytes=3))
    into = bytearray(8)
    with pytest.raises(StoreUnavailable, match="broke"):
        bucket.get_range("x", 1, [memoryview(into)])
    for offset in (3, 10):
        with pytest.raises(StoreError, match="ends before") as caught:
            bucket.get_range("x", offset, [memoryview(into)])
        assert type(caught.value) is StoreError
    bucket.get_range("x", 1, [memoryview(into)[:3], memoryview(into)[3:]])

    assert into == b"12345678"


def test_an_etag_no_object_has_is_never_matched(bucket: GcsBucket) -> None:
    """An etag of another kind of store loses, and "0" does not turn into create-if-absent."""
    for etag in ("0", "0x8DC", ""):
        with pytest.raises(AlreadyExists):
            bucket.put("x", views(b"1"), condition=Precondition(if_match=etag), writer="me")

    assert bucket.head("x") is None


def test_pages_follow_each_other_without_gaps(bucket: GcsBucket, fake: FakeGcs) -> None:
    """A listing in pages tells every key once, in order; markers of folders are left out."""
    keys = sorted(f"k{number}/x" for number in range(25))
    for key in keys:
        put(bucket, key)
    put(bucket, "k0/")
    seen: list[str] = []
    token: str | None = None
    while True:
        page = bucket.page("k", token=token)
        seen += [info.key for info in page.objects]
        token = page.next_token
        if token is None:
            break

    assert seen == keys
    assert bucket.page("", start_after="k9", folders=True).folders == ["k9/"]


def test_copies_are_made_on_the_server(bucket: GcsBucket) -> None:
    """A copy keeps its condition and knows its writer."""
    put(bucket, "x", b"1")
    etag = bucket.copy("x", "y", condition=IF_ABSENT, writer="copier")
    with pytest.raises(AlreadyExists):
        bucket.copy("x", "y", condition=IF_ABSENT, writer="copier")
    found = bucket.head("y")

    assert found is not None
    assert (found.etag, bucket.get("y"), bucket.writer_of("y")) == (etag, b"1", "copier")


def test_archived_objects_are_of_the_coldest_class(bucket: GcsBucket, fake: FakeGcs) -> None:
    """`archive` moves the object to ARCHIVE, where it can still be read."""
    put(bucket, "x")
    bucket.archive("x")

    assert fake.objects["some/runs/x"].described["storageClass"] == "ARCHIVE"
    assert bucket.get("x") == b"content"


@pytest.mark.parametrize("key", ["projects/p/locations/l/keyRings/r/cryptoKeys/k", None])
def test_the_archive_keeps_the_key(
    fake: FakeGcs, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Who moves an object need not name the key that it was written with: it stays the same."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.endpoint)
    monkeypatch.setenv("SPOTGUARD_GCS_KMS_KEY", key or "")
    with closing(open_gcs("gs://box/runs")) as bucket:
        put(bucket, "x")
    monkeypatch.setenv("SPOTGUARD_GCS_KMS_KEY", "" if key else "another")
    with closing(open_gcs("gs://box/runs")) as bucket:
        bucket.archive("x")

    described = fake.objects["runs/x"].described
    assert (described["storageClass"], described.get("kmsKeyName")) == ("ARCHIVE", key)


def test_a_key_of_the_customers_encrypts_everything(
    fake: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPOTGUARD_GCS_KMS_KEY goes with objects, parts, compositions and copies."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.endpoint.removeprefix("http://"))
    monkeypatch.setenv("SPOTGUARD_GCS_KMS_KEY", "projects/p/cryptoKeys/k")
    bucket = open_gcs("gs://box")
    put(bucket, "x")
    bucket.copy("x", "y", condition=ALWAYS, writer="me")
    upload_id, names, _ = upload(bucket, "z", 2)
    parts = [stored for name, stored in fake.objects.items() if name.startswith(PARTS)]
    bucket.finish("z", upload_id, names, condition=ALWAYS, writer="me")

    keys = {stored.described.get("kmsKeyName") for stored in (*parts, *fake.objects.values())}
    assert keys == {"projects/p/cryptoKeys/k"}


@pytest.mark.parametrize(
    ("status", "reason", "message", "kind", "hint"),
    [
        (401, "authError", "Invalid Credentials", StoreError, "application-default login"),
        (403, "forbidden", "does not have storage.objects.create access", StoreError, "objectUser"),
        (403, "rateLimitExceeded", "", StoreUnavailable, ""),
        (403, "accountDisabled", "billing", StoreError, "billing"),
        (403, "accessNotConfigured", "", StoreError, "gcloud services enable"),
        (403, "insufficientPermissions", "", StoreError, "--scopes"),
        (403, "forbidden", "prohibited by organization's policy", StoreError, "VPC"),
        (403, "forbidden", "Permission denied on Cloud KMS key", StoreError, "cryptoKeyEncrypter"),
        (403, "retentionPolicyNotMet", "", StoreError, "retention policy"),
        (400, "userProjectMissing", "", StoreError, "GOOGLE_CLOUD_QUOTA_PROJECT"),
        (404, "notFound", "The specified bucket does not exist.", StoreError, "buckets create"),
        (408, "", "", StoreUnavailable, ""),
        (409, "conflict", "", StoreUnavailable, ""),
        (429, "rateLimitExceeded", "", StoreUnavailable, ""),
        (500, "backendError", "", StoreUnavailable, ""),
        (503, "", "", StoreUnavailable, ""),
    ],
)
def test_refusals_say_what_to_do(
    status: int,
    reason: str,
    message: str,
    kind: type[StoreError],
    hint: str,
    bucket: GcsBucket,
    fake: FakeGcs,
) -> None:
    """Each kind of refusal is told apart: worth another try, or what has to be done."""
    for call in CALLS.values():
        fake.faults.append(Fault(status, reason, message))
        with pytest.raises(StoreError) as caught:
            call(bucket)
        assert type(caught.value) is kind
        assert hint in caught.value.hint
        assert "{" not in caught.value.hint


def test_a_missing_permission_is_named(bucket: GcsBucket, fake: FakeGcs) -> None:
    """Whoever hands out rights reads which one is missing."""
    said = "me@x.iam.gserviceaccount.com does not have storage.objects.list access to the bucket."
    fake.faults.append(Fault(403, "forbidden", said))
    with pytest.raises(StoreError, match=r"403 forbidden \(missing storage\.objects\.list\)"):
        bucket.page("")


CALLS: dict[str, Callable[[GcsBucket], object]] = {
    "put": lambda bucket: put(bucket, "x"),
    "put_part": lambda bucket: bucket.put_part("x", "id", 1, views(b"1")),
    "finish": lambda bucket: bucket.finish("x", "i", ["1"], condition=ALWAYS, writer="me"),
    "copy": lambda bucket: bucket.copy("x", "y", condition=ALWAYS, writer="me"),
    "archive": lambda bucket: bucket.archive("x"),
    "get": lambda bucket: bucket.get("x"),
    "get_range": lambda bucket: bucket.get_range("x", 0, [memoryview(bytearray(1))]),
    "head": lambda bucket: bucket.head("x"),
    "writer_of": lambda bucket: bucket.writer_of("x"),
    "page": lambda bucket: bucket.page(""),
    "uploads": lambda bucket: bucket.uploads(""),
    "abort": lambda bucket: bucket.abort("x", "id"),
    "delete": lambda bucket: bucket.delete("x"),
}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 412, 416, 503])
def test_no_token_gets_out(status: int, fake: FakeGcs, caplog: pytest.LogCaptureFixture) -> None:
    """A server that repeats the token in its answers does not make us repeat it."""
    place = GcsPlace(bucket="box", emulator=fake.endpoint)
    token = google.oauth2.credentials.Credentials(SECRET)  # type: ignore[no-untyped-call]
    bucket = GcsBucket(place, token)
    caplog.set_level(logging.DEBUG)
    told = repr(bucket)
    for call in CALLS.values():
        fake.faults.append(Fault(status, f"Bearer {SECRET}", f"bucket {SECRET} does not exist"))
        try:
            call(bucket)
        except StoreError as problem:
            told += "".join(traceback.format_exception(problem)) + repr(problem) + problem.hint

    assert {asked.headers.get("authorization") for asked in fake.asked} <= {f"Bearer {SECRET}"}
    assert SECRET not in told + caplog.text


def test_requests_carry_the_token(fake: FakeGcs) -> None:
    """What google.auth gives is sent with every request."""
    token = google.oauth2.credentials.Credentials(SECRET)  # type: ignore[no-untyped-call]
    place = GcsPlace(bucket="box", emulator=fake.endpoint)
    put(GcsBucket(place, token), "x")

    assert fake.asked[0].headers["authorization"] == f"Bearer {SECRET}"


PASSING = {"TransportError", "ResponseError", "TimeoutError"}
LASTING = {
    *("GoogleAuthError", "DefaultCredentialsError", "RefreshError", "UserAccessTokenError"),
    *("ClientCertError", "MutualTLSChannelError", "OAuthError", "MalformedError"),
    *("ReauthFailError", "ReauthSamlChallengeFailError", "OSError"),
    *("InvalidOperation", "InvalidResource", "InvalidType", "InvalidValue"),
}


def test_every_problem_with_a_login_is_known() -> None:
    """Each of google.auth's exceptions was looked at: worth another try, or a hint what to do."""
    found = {
        name: kind
        for name, kind in vars(google.auth.exceptions).items()
        if inspect.isclass(kind) and issubclass(kind, google.auth.exceptions.GoogleAuthError)
    }
    assert set(found) <= PASSING | LASTING
    for name, kind in found.items():
        problem = no_token(kind(f"Bearer {SECRET}"))
        assert isinstance(problem, StoreUnavailable) == (name in PASSING), name
        assert problem.hint or name in PASSING
        assert SECRET not in str(problem) + problem.hint


def test_every_way_to_have_no_answer_is_known() -> None:
    """What google.api_core, requests and urllib3 raise is translated and not repeated."""
    modules = (google.api_core.exceptions, requests.exceptions, urllib3.exceptions)
    found = {
        kind
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ != "builtins"
    }
    url = f"GET https://x/?upload_id={SECRET}"
    for kind in found:
        refusal = issubclass(kind, google.api_core.exceptions.GoogleAPICallError)
        problem = kind(url) if refusal else kind.__new__(kind)
        problem.args = (url,)
        told = problem_of(problem, "x", ALWAYS, "box")
        assert isinstance(told, StoreError)
        assert SECRET not in str(told) + told.hint, kind
        if issubclass(kind, (OSError, urllib3.exceptions.HTTPError)):
            assert isinstance(told, StoreUnavailable), kind


def test_a_login_that_may_be_tried_again_is() -> None:
    """A token service that is overloaded is no missing login."""
    busy = google.auth.exceptions.RefreshError("busy", retryable=True)  # type: ignore[no-untyped-call]
    expired = google.auth.exceptions.RefreshError("invalid_grant")  # type: ignore[no-untyped-call]

    assert type(no_token(busy)) is StoreUnavailable
    assert "have expired" in no_token(expired).message
    assert "application-default login" in no_token(expired).hint


@pytest.mark.parametrize("url", ["gs://", "gs:///x", "gs://box/x?sig=abc", "gs://me:pw@box/x"])
def test_urls_that_name_no_bucket_are_refused(url: str) -> None:
    """A URL is a bucket and a prefix; what else stands in it is not repeated."""
    with pytest.raises(UsageError) as caught:
        open_gcs(url)

    assert "abc" not in str(caught.value)
    assert "pw" not in str(caught.value)


def test_conditions_are_believed_in_only_where_they_are_kept(
    bucket: GcsBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service keeps conditions; an emulator has to be tried."""
    assert bucket.heeds_conditions is None
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    assert open_gcs("gs://box").heeds_conditions is True
    assert open_gcs("gs://box/a/").url == "gs://box/a"


@pytest.mark.parametrize("missing", ["crc32c", "google", "google.cloud.storage"])
def test_a_missing_package_is_told_when_a_store_is_opened(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra, nothing is begun: the message is the command that installs it."""
    hide(missing, monkeypatch)
    with pytest.raises(MissingExtra) as caught:
        open_gcs("gs://box")

    assert caught.value.hint == "pip install 'spotguard[gcp]'"


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package be one that is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )


def test_opening_loads_nothing() -> None:
    """Neither the vendor's library nor a checksum library is loaded before the first request."""
    program = (
        "import sys, json; from spotguard.storage.gcs.bucket import open_gcs; open_gcs('gs://box/x');"
        "print(json.dumps([name for name in sys.modules if name in ('crc32c', 'requests') or"
        " name.startswith(('google.auth', 'google.api_core', 'google.cloud.storage'))]))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert json.loads(said.stdout) == []


def test_nothing_but_what_is_needed_is_asked(bucket: GcsBucket, fake: FakeGcs) -> None:
    """A call is one request, a part two; the client asks nothing of its own beside them."""
    put(bucket, "x")
    bucket.get("x")
    bucket.get_range("x", 0, [memoryview(bytearray(3))])
    bucket.head("x")
    bucket.page("")
    bucket.put_part("x", "id", 1, views(b"1"))
    bucket.delete("x")

    asked = [asked.method for asked in fake.asked]
    assert asked == ["POST", "GET", "GET", "GET", "GET", "POST", "PUT", "DELETE"]


def test_no_answer_is_worth_another_try() -> None:
    """Where nothing listens, every call says so, and none tells a URL."""
    place = GcsPlace(bucket="box", emulator=f"http://127.0.0.1:{free_port()}")
    for name, call in CALLS.items():
        if name != "abort":  # it would be tried at the next clean-up
            with pytest.raises(StoreUnavailable, match="Google Cloud Storage broke: Conn"):
                call(GcsBucket(place))


def test_after_the_deadline_nothing_is_sent(bucket: GcsBucket, fake: FakeGcs) -> None:
    """A part whose deadline has passed is given up, not sent to its end."""
    with give_up_after(-1.0), pytest.raises(StoreUnavailable, match="in time"):
        bucket.put_part("x", "id", 1, views(b"1"))


def test_parts_are_sent_from_where_they_are() -> None:
    """Sending 16 MB takes no memory of that size."""
    part = memoryview(bytearray(16 << 20))
    with (
        Canned() as canned,
        closing(GcsBucket(GcsPlace(bucket="box", emulator=canned.endpoint))) as b,
    ):
        where = {"Location": f"{canned.endpoint}/session"}
        canned.replies.extend([Reply(200, where), Reply()] * 2)
        canned.replies.popleft()
        for _ in range(2):  # what is kept is made the first time
            tracemalloc.start()
            try:
                b.put_part("x", "id", 1, [part[:5], part[5:]])
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()

    assert canned.heard[-1].size_bytes == 16 << 20
    assert peak < 1 << 20
