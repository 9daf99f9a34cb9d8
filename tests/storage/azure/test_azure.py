"""What Azure Blob Storage as a bucket promises, on azurite and on answers laid down beforehand.

What every store promises is tried on it in test_store_contract.py.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import inspect
import json
import logging
import secrets
import ssl
import subprocess
import sys
import time
import traceback
import tracemalloc
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import azure.core.exceptions
import azure.identity
import azure.storage.blob
import pytest
from azure.core.credentials import AccessToken

from spotguard.errors import (
    AlreadyExists,
    MissingExtra,
    NotFound,
    SpotguardError,
    StoreError,
    StoreUnavailable,
    TooLarge,
    UsageError,
)
from spotguard.shared.net import free_port
from spotguard.storage import who_am_i
from spotguard.storage.azure.access import AzureIdentity, AzurePlace, find_place
from spotguard.storage.azure.bucket import AzureBucket, open_azure
from spotguard.storage.azure.errors import no_token, problem_of
from spotguard.storage.deadline import give_up_after
from spotguard.storage.remote.bucket import ALWAYS, Precondition
from tests.storage.harness.canned import Canned, Reply
from tests.storage.harness.certificates import make_certificate
from tests.storage.harness.servers import AZURITE_ACCOUNT, AZURITE_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.storage.harness.servers import Server

SECRET = "cGxhbnRlZCBhY2NvdW50IGtleSBvZiBhIHN0b3JhZ2U="
PLACE = AzurePlace(
    url="az://box@acct", account="acct", endpoint="https://acct.nowhere.invalid", container="box"
)
XML = {"Content-Type": "application/xml"}
IF_ABSENT = Precondition(if_absent=True)
VARIABLES = ("CONNECTION_STRING", "ACCOUNT", "KEY", "SAS_TOKEN")


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)


@pytest.fixture
def bucket(azurite: Server, monkeypatch: pytest.MonkeyPatch) -> AzureBucket:
    """A prefix in a new container."""
    for name, value in azurite.env.items():
        monkeypatch.setenv(name, value)
    container = f"box-{secrets.token_hex(8)}"
    found = open_azure(f"az://{container}/some/runs/")
    make_container(found)
    return found


@pytest.fixture
def canned() -> Iterator[Canned]:
    """A server that says what it is told to."""
    with Canned() as canned:
        yield canned


@pytest.fixture
def canned_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Canned]:
    """The same over TLS, with a certificate that is trusted."""
    certificate = tmp_path / "tls.pem"
    make_certificate(certificate)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Canned(tls=context) as canned:
        yield canned


def make_container(bucket: AzureBucket) -> None:
    """Create the container that a bucket is in."""
    bucket._container().create_container()


def at(canned: Canned, *, key: str = SECRET, sas: str = "") -> AzureBucket:
    """Return a bucket whose service is the canned one."""
    return AzureBucket(replace(PLACE, endpoint=canned.endpoint, key=key, sas=sas))


def views(*content: bytes) -> list[memoryview]:
    """Return what a bucket takes as a body."""
    return [memoryview(each) for each in content]


def put(bucket: AzureBucket, key: str, content: bytes = b"content") -> str:
    """Store an object, whatever there is."""
    return bucket.put(key, views(content), condition=ALWAYS, writer="me")


def upload(bucket: AzureBucket, key: str, *contents: bytes) -> tuple[str, list[str]]:
    """Begin a write and store its parts; return its id, and what `finish` wants."""
    upload_id = bucket.begin(key, writer="me")
    numbered = enumerate(contents, 1)
    return upload_id, [bucket.put_part(key, upload_id, n, views(each)) for n, each in numbered]


# ------------------------------------------------------------ on azurite


@pytest.mark.e2e
def test_blocks_become_one_blob(bucket: AzureBucket) -> None:
    """Parts are joined in the order told, whatever the order they were sent in."""
    upload_id, parts = upload(bucket, "a/b", b"1", b"22", b"333")
    etag = bucket.finish("a/b", upload_id, parts[::-1], condition=IF_ABSENT, writer="me")
    found = bucket.head("a/b")

    assert found is not None
    assert (found.etag, bucket.get("a/b"), bucket.writer_of("a/b")) == (etag, b"333221", "me")
    assert abs((found.modified_at or 0) - time.time()) < 600


@pytest.mark.e2e
def test_of_two_uploads_one_wins_and_the_other_hears_of_it(bucket: AzureBucket) -> None:
    """Blocks of two writers of a key do not mix; the later `finish` is told so."""
    first, first_parts = upload(bucket, "x", b"1", b"2")
    second, second_parts = upload(bucket, "x", b"3", b"4")
    bucket.finish("x", first, first_parts, condition=IF_ABSENT, writer="me")
    with pytest.raises((AlreadyExists, NotFound)):
        bucket.finish("x", second, second_parts, condition=IF_ABSENT, writer="you")
    with pytest.raises(NotFound):
        bucket.finish("x", second, second_parts, condition=ALWAYS, writer="you")

    assert (bucket.get("x"), bucket.writer_of("x")) == (b"12", "me")


@pytest.mark.e2e
def test_a_finished_write_may_be_finished_again(bucket: AzureBucket) -> None:
    """A repeated `finish` changes no byte while the blob is its own, and is refused after that."""
    upload_id, parts = upload(bucket, "x", b"1", b"2")
    for _ in range(2):
        bucket.finish("x", upload_id, parts, condition=ALWAYS, writer="me")
    assert bucket.get("x") == b"12"

    put(bucket, "x", b"another")
    with pytest.raises(NotFound):
        bucket.finish("x", upload_id, parts, condition=ALWAYS, writer="me")


@pytest.mark.e2e
def test_damaged_bytes_are_refused_by_the_service(bucket: AzureBucket) -> None:
    """The MD5 that goes with a block is compared: other bytes are worth another try."""
    proof = {"Content-MD5": base64.b64encode(hashlib.md5(b"good").digest()).decode()}
    with (
        pytest.raises(StoreUnavailable, match="400 Md5Mismatch"),
        bucket._asking("x") as options,
    ):
        bucket._blob("x").stage_block("id", b"evil", headers=proof, **options)


@pytest.mark.e2e
def test_keys_of_any_letters_are_kept(bucket: AzureBucket) -> None:
    """What needs escaping in a URL or in XML is signed, stored and listed as it is."""
    keys = sorted(
        ["ü/ß", "a b+c", "100%25", "q?x=1&y#z", "'\"<&>", "日本/x", "~._-!*()", "a=b;c,d@e"]
    )
    for key in keys:
        put(bucket, key, key.encode())

    assert [info.key for info in bucket.page("").objects] == keys
    assert [bucket.get(key).decode() for key in keys] == keys


@pytest.mark.e2e
def test_a_copy_is_made_on_the_server(bucket: AzureBucket) -> None:
    """A copy keeps its condition and knows its writer."""
    put(bucket, "x y", b"1")
    etag = bucket.copy("x y", "z", condition=IF_ABSENT, writer="copier")
    with pytest.raises(AlreadyExists):
        bucket.copy("x y", "z", condition=IF_ABSENT, writer="copier")
    with pytest.raises(NotFound):
        bucket.copy("nothing", "z", condition=ALWAYS, writer="copier")
    found = bucket.head("z")

    assert found is not None
    assert (found.etag, bucket.get("z"), bucket.writer_of("z")) == (etag, b"1", "copier")


@pytest.mark.e2e
def test_archived_blobs_say_how_to_get_them_back(bucket: AzureBucket) -> None:
    """A blob in the archive is not read; the hint is what brings it back."""
    put(bucket, "x")
    bucket.archive("x")
    with pytest.raises(StoreError) as caught:
        bucket.get("x")

    assert "set-tier --tier Hot" in caught.value.hint


@pytest.mark.e2e
def test_a_range_beyond_the_end_is_refused(bucket: AzureBucket) -> None:
    """A blob that is too short is told apart from an answer that breaks off."""
    put(bucket, "x", b"0123456789")
    for offset in (3, 10, 20):
        with pytest.raises(StoreError, match="ends before") as caught:
            bucket.get_range("x", offset, [memoryview(bytearray(8))])
        assert type(caught.value) is StoreError
    with pytest.raises(NotFound):
        bucket.get_range("y", 0, [memoryview(bytearray(8))])


@pytest.mark.e2e
def test_a_missing_container_says_how_to_make_it(bucket: AzureBucket) -> None:
    """No container is no missing object: every call says what to type."""
    nowhere = AzureBucket(replace(bucket._place, container="nowhere"))
    for name, call in CALLS.items():
        with pytest.raises(StoreError) as caught:
            call(nowhere)
        assert type(caught.value) is StoreError, name
        assert "az storage container create --name nowhere" in caught.value.hint, name


@pytest.mark.e2e
def test_a_shared_access_signature_is_enough(
    bucket: AzureBucket, azurite: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a SAS instead of the key everything works, copies too."""
    blobs = f"{azurite.endpoint}/{AZURITE_ACCOUNT}"
    given = f"BlobEndpoint={blobs};AccountName={AZURITE_ACCOUNT};SharedAccessSignature={sas()}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", given)
    found = open_azure(bucket.url)
    put(found, "x", b"1")
    found.copy("x", "y", condition=IF_ABSENT, writer="me")
    upload_id, parts = upload(found, "z", b"2", b"3")
    found.finish("z", upload_id, parts, condition=IF_ABSENT, writer="me")

    assert [found.get(key) for key in "xyz"] == [b"1", b"1", b"23"]
    assert [info.key for info in found.page("").objects] == ["x", "y", "z"]


def sas() -> str:
    """Return a SAS for azurite's account."""
    return azure.storage.blob.generate_account_sas(
        AZURITE_ACCOUNT,
        AZURITE_KEY,
        resource_types=azure.storage.blob.ResourceTypes(container=True, object=True),
        permission=azure.storage.blob.AccountSasPermissions.from_string("rwdlac"),  # type: ignore[no-untyped-call]
        expiry=datetime.now(timezone.utc) + timedelta(hours=1),
        protocol="https,http",
    )


# ------------------------------------------------------------ on answers laid down beforehand


CALLS: dict[str, Callable[[AzureBucket], object]] = {
    "put": lambda bucket: put(bucket, "x"),
    "put_part": lambda bucket: bucket.put_part("x", "id", 1, views(b"1")),
    "finish": lambda bucket: bucket.finish("x", "i", ["aWQ="], condition=ALWAYS, writer="me"),
    "copy": lambda bucket: bucket.copy("x", "y", condition=ALWAYS, writer="me"),
    "archive": lambda bucket: bucket.archive("x"),
    "get": lambda bucket: bucket.get("x"),
    "get_range": lambda bucket: bucket.get_range("x", 0, [memoryview(bytearray(1))]),
    "head": lambda bucket: bucket.head("x"),
    "writer_of": lambda bucket: bucket.writer_of("x"),
    "page": lambda bucket: bucket.page(""),
    "delete": lambda bucket: bucket.delete("x"),
}


@pytest.mark.parametrize(
    ("status", "code", "kind", "hint"),
    [
        (400, "Md5Mismatch", StoreUnavailable, ""),
        (401, "NoAuthenticationInformation", StoreError, "az login"),
        (401, "InvalidAuthenticationInfo", StoreError, "az login"),
        (403, "AuthenticationFailed", StoreError, "another account than acct"),
        (403, "AuthorizationFailure", StoreError, "firewall"),
        (403, "AuthorizationPermissionMismatch", StoreError, "Storage Blob Data Contributor"),
        (403, "KeyBasedAuthenticationNotPermitted", StoreError, "unset AZURE_STORAGE_KEY"),
        (403, "SomethingNew", StoreError, "Storage Blob Data Contributor"),
        (403, "AccountIsDisabled", StoreError, "disabled"),
        (404, "ContainerNotFound", StoreError, "container create --name box --account-name acct"),
        (408, "", StoreUnavailable, ""),
        (409, "ContainerBeingDeleted", StoreUnavailable, ""),
        (409, "BlobImmutableDueToPolicy", StoreError, "retention"),
        (409, "InvalidBlobType", StoreError, "another prefix"),
        (412, "LeaseIdMissing", StoreError, "lease break"),
        (429, "", StoreUnavailable, ""),
        (500, "OperationTimedOut", StoreUnavailable, ""),
        (503, "ServerBusy", StoreUnavailable, ""),
    ],
)
def test_refusals_say_what_to_do(
    status: int, code: str, kind: type[StoreError], hint: str, canned: Canned
) -> None:
    """Each kind of refusal is told apart: worth another try, or what has to be done."""
    canned.replies[0] = Reply(status, {"x-ms-error-code": code} if code else {})
    bucket = at(canned)
    for name, call in CALLS.items():
        with pytest.raises(StoreError) as caught:
            call(bucket)
        assert type(caught.value) is kind, name
        assert hint in caught.value.hint
        assert "{" not in caught.value.hint


def test_a_clock_that_is_wrong_is_blamed(canned: Canned) -> None:
    """A signature refused by a server whose time is another one says so."""
    date = formatdate(time.time() - 1800, usegmt=True)
    reply = Reply(403, {"x-ms-error-code": "AuthenticationFailed", "Date": date})
    canned.replies[0] = reply
    with pytest.raises(StoreError) as caught:
        at(canned).get("x")

    assert "clock is 1" in caught.value.hint


def test_the_code_is_read_from_the_body_too(canned: Canned) -> None:
    """Where no header has it, the error's XML says what is wrong; other bodies say nothing."""
    xml = b"\xef\xbb\xbf<?xml version='1.0'?><Error><Code>ContainerNotFound</Code>"
    xml += b"<Message>The specified container does not exist.</Message></Error>"
    canned.replies.extend([Reply(404, XML, xml), Reply(404, {}, b"<html>")])
    canned.replies.popleft()
    with pytest.raises(StoreError, match="ContainerNotFound"):
        at(canned).get("x")
    with pytest.raises(NotFound):
        at(canned).get("x")


def test_what_is_too_large_is_refused_by_what_the_first_answer_says(canned: Canned) -> None:
    """Its body, which never comes here, is not waited for; nothing more is asked."""
    headers = {"Content-Range": f"bytes 0-{2**25 - 1}/{10**15}", "Content-Length": str(2**25)}
    canned.replies[0] = Reply(206, headers)
    with pytest.raises(TooLarge, match="x is too large"):
        at(canned).get("x", 1000)
    assert len(canned.heard) == 1


def test_what_arrives_damaged_is_worth_another_try(canned: Canned) -> None:
    """A blob whose bytes are not those of its MD5 is not returned."""
    md5 = base64.b64encode(hashlib.md5(b"good").digest()).decode()
    canned.replies[0] = range_reply(b"evil", {"x-ms-blob-content-md5": md5})
    with pytest.raises(StoreUnavailable, match="damaged"):
        at(canned).get("x")


def test_folders_of_hierarchical_accounts_are_left_out(canned: Canned) -> None:
    """Where folders are listed among the blobs, they are no objects; odd names are unescaped."""
    canned.replies[0] = Reply(
        200,
        XML,
        b"<?xml version='1.0'?><EnumerationResults><Blobs>"
        + entry("a", "<hdi_isfolder>true</hdi_isfolder>")
        + entry("a/b", "<spotguard_writer>me</spotguard_writer>")
        + entry("c/", "")
        + entry("d%EF%BF%BE", "", ' Encoded="true"')
        + b"</Blobs><NextMarker>more</NextMarker></EnumerationResults>",
    )
    page = at(canned).page("")

    assert [info.key for info in page.objects] == ["a/b", "d\ufffe"]
    assert page.next_token == "more"


def entry(name: str, metadata: str, kind: str = "") -> bytes:
    """Return what a listing says of a blob."""
    said = "<Content-Length>1</Content-Length><Etag>0x1</Etag><BlobType>BlockBlob</BlobType>"
    more = f"<Properties>{said}</Properties><Metadata>{metadata}</Metadata>"
    return f"<Blob><Name{kind}>{name}</Name>{more}</Blob>".encode()


def range_reply(content: bytes, headers: Mapping[str, str] | None = None) -> Reply:
    """Return the answer to a request for all of a blob."""
    said = {"Content-Range": f"bytes 0-{len(content) - 1}/{len(content)}", "ETag": '"0x1"'}
    return Reply(206, {**said, **(headers or {})}, content)


def test_an_encryption_scope_goes_with_every_write(
    canned: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPOTGUARD_AZURE_ENCRYPTION_SCOPE encrypts blobs, blocks and what they become."""
    monkeypatch.setenv("SPOTGUARD_AZURE_ENCRYPTION_SCOPE", "mine")
    canned.replies[0] = Reply(201, {"ETag": '"0x1"'})
    bucket = at(canned)
    put(bucket, "x")
    upload_id, parts = upload(bucket, "y", b"1")
    bucket.finish("y", upload_id, parts, condition=ALWAYS, writer="me")

    assert {heard.headers.get("x-ms-encryption-scope") for heard in canned.heard} == {"mine"}


def test_every_body_is_proven_by_the_server(canned: Canned) -> None:
    """Blobs, blocks and lists of blocks carry the MD5 of all their views."""
    canned.replies[0] = Reply(201, {"ETag": '"0x1"'})
    bucket = at(canned)
    bucket.put("x", views(b"12", b"", b"3456789"), condition=ALWAYS, writer="me")
    upload_id, parts = upload(bucket, "y", b"123456789")
    bucket.finish("y", upload_id, parts, condition=ALWAYS, writer="me")

    md5 = base64.b64encode(hashlib.md5(b"123456789").digest()).decode()
    sent = [heard.headers["content-md5"] for heard in canned.heard]
    assert sent[:2] == [md5, md5]
    assert len(base64.b64decode(sent[2])) == 16


# ------------------------------------------------------------ places and rights


@pytest.mark.parametrize(
    ("url", "env", "endpoint", "container", "prefix", "told"),
    [
        ("az://box@acct/a b/c/", {}, "https://acct.blob.core.windows.net", "box", "a b/c/",
         "az://box@acct/a b/c"),
        ("az://box", {"ACCOUNT": "acct"}, "https://acct.blob.core.windows.net", "box", "",
         "az://box@acct"),
        ("https://acct.blob.core.windows.net/box/a%20b", {}, "https://acct.blob.core.windows.net",
         "box", "a b/", "az://box@acct/a b"),
        ("https://acct.blob.core.chinacloudapi.cn/box/a%20b", {},
         "https://acct.blob.core.chinacloudapi.cn", "box", "a b/",
         "https://acct.blob.core.chinacloudapi.cn/box/a%20b"),
        ("az://box/x", {"CONNECTION_STRING": f"AccountName=acct;AccountKey={SECRET};"
                        "EndpointSuffix=core.usgovcloudapi.net"},
         "https://acct.blob.core.usgovcloudapi.net", "box", "x/", "az://box@acct/x"),
        ("az://box@other/x", {"CONNECTION_STRING": f"AccountName=acct;AccountKey={SECRET}"},
         "https://other.blob.core.windows.net", "box", "x/", "az://box@other/x"),
    ],
)  # fmt: skip
def test_places_are_found(
    url: str,
    env: dict[str, str],
    endpoint: str,
    container: str,
    prefix: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ways to name a place lead there, and what `url` says leads there again."""
    for name, value in env.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    for given in (url, told):
        place = find_place(given)
        with contextlib.closing(open_azure(given)) as bucket:
            assert bucket._container().url == f"{endpoint}/{container}"
        assert (place.prefix, place.url) == (prefix, told)


@pytest.mark.parametrize(
    ("url", "env"),
    [
        ("az://box", {}),
        ("az://@acct", {}),
        ("https://acct.blob.core.windows.net/", {}),
        (f"https://acct.blob.core.windows.net/box?sig={SECRET}", {}),
        (f"az://box:{SECRET}@acct", {}),
        ("az://box@acct", {"SAS_TOKEN": f"sv=2020&signature={SECRET}"}),
        ("az://box", {"CONNECTION_STRING": f"AccountKey={SECRET}"}),
    ],
)
def test_places_that_make_no_sense_are_refused(
    url: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing or too much is said, and how to write it; a key in it is not repeated."""
    for name, value in env.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    with pytest.raises(UsageError) as caught:
        open_azure(url)

    assert caught.value.hint
    assert SECRET not in "".join(traceback.format_exception(caught.value)) + caught.value.hint


@pytest.mark.parametrize("status", [400, 401, 403, 404, 412, 416, 503])
@pytest.mark.parametrize("kind", ["key", "sas", "token"])
def test_no_secret_gets_out(
    status: int,
    kind: str,
    canned: Canned,
    canned_tls: Canned,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that repeats what it was sent does not make us repeat it."""
    buckets = {
        "key": lambda: at(canned),
        "sas": lambda: at(canned, key="", sas=f"sv=2021&sig={SECRET}"),
        "token": lambda: logged_in(canned_tls, Login()),
    }
    bucket = buckets[kind]()
    server = canned_tls if kind == "token" else canned
    body = f"<Error><Code>{SECRET}</Code><Message>{SECRET}</Message></Error>".encode()
    server.replies[0] = Reply(status, {"x-ms-error-code": f"sig={SECRET}"}, body)
    caplog.set_level(logging.DEBUG)
    told = repr(bucket) + repr(bucket._place)
    for call in CALLS.values():
        try:
            call(bucket)
        except SpotguardError as problem:
            told += "".join(traceback.format_exception(problem)) + repr(problem) + problem.hint
    bucket.close()

    assert server.heard
    assert SECRET not in told + caplog.text
    assert "SharedKey acct" not in told + caplog.text


def test_a_broken_connection_does_not_tell_the_signature(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be reached is told by its account, not by a URL with the SAS in it."""
    place = replace(PLACE, endpoint=f"http://127.0.0.1:{free_port()}", sas=f"sv=2021&sig={SECRET}")
    caplog.set_level(logging.DEBUG)
    for call in CALLS.values():
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:\d+ broke") as caught:
            call(AzureBucket(place))
        assert SECRET not in "".join(traceback.format_exception(caught.value)) + caplog.text


def test_a_key_that_is_none_is_refused_before_it_is_used(canned: Canned) -> None:
    """A key that was not copied whole is told, and how to copy it; it is not repeated."""
    with pytest.raises(StoreError, match="key of the storage account acct is not base64") as caught:
        at(canned, key=SECRET[:-1]).get("x")

    assert "az storage account keys list --account-name acct" in caught.value.hint
    assert SECRET[:-1] not in "".join(traceback.format_exception(caught.value))
    assert canned.heard == []


def test_a_shared_access_signature_is_sent_whole(canned: Canned) -> None:
    """A signature with signs that need escaping arrives as it was given."""
    canned.replies[0] = range_reply(b"1")
    at(canned, key="", sas="sv=2021&sig=a%2Bb%2Fc%3D").get("x")

    assert parse_qs(urlsplit(canned.heard[0].target).query)["sig"] == ["a+b/c="]


class Login:
    """Gives tokens, good for as many seconds each; then says that nobody is logged in."""

    def __init__(self, *good_for_s: float) -> None:
        self._good_for_s = list(good_for_s or [3600.0])
        self.scopes: list[str] = []

    def get_token(self, *scopes: str, **_options: object) -> AccessToken:
        """Return the next token."""
        self.scopes += scopes
        if not self._good_for_s:
            raise azure.identity.CredentialUnavailableError(f"az said {SECRET}")
        return AccessToken(SECRET, int(time.time() + self._good_for_s.pop(0)))


def logged_in(canned: Canned, login: Login) -> AzureBucket:
    """Return a bucket that shows tokens; the client does so over TLS alone."""
    return AzureBucket(replace(PLACE, endpoint=canned.endpoint), login)


def test_a_token_is_asked_for_once_and_renewed_in_time(canned_tls: Canned) -> None:
    """A token serves until five minutes before its end; without a new one, the login is told."""
    canned_tls.replies[0] = range_reply(b"1")
    login = Login(3600.0, 100.0)
    with contextlib.closing(logged_in(canned_tls, login)) as bucket:
        for _ in range(3):
            bucket.get("x")
    with contextlib.closing(logged_in(canned_tls, login)) as bucket:
        bucket.get("x")
        with pytest.raises(StoreError, match="CredentialUnavailableError") as caught:
            bucket.get("x")

    assert {heard.headers["authorization"] for heard in canned_tls.heard} == {f"Bearer {SECRET}"}
    assert login.scopes == ["https://storage.azure.com/.default"] * 3
    assert "az login" in caught.value.hint


def test_without_any_token_the_login_is_explained() -> None:
    """Nobody logged in is no passing problem, and the hint says what to type."""
    problem = no_token(azure.identity.CredentialUnavailableError(f"az said {SECRET}"))

    assert type(problem) is StoreError
    assert "az login" in problem.hint
    assert SECRET not in str(problem)


PASSING = {
    *("ServiceRequestError", "ServiceRequestTimeoutError", "ServiceResponseError"),
    *("ServiceResponseTimeoutError", "IncompleteReadError", "HttpResponseError", "DecodeError"),
}
LASTING = {
    *("AzureError", "ClientAuthenticationError", "ODataV4Error"),
    *("TooManyRedirectsError", "ResourceExistsError", "ResourceModifiedError"),
    *("ResourceNotFoundError", "ResourceNotModifiedError", "ResponseNotReadError"),
    *("StreamClosedError", "StreamConsumedError"),
    *("AuthenticationRequiredError", "CredentialUnavailableError"),
}


def test_a_tenant_that_cannot_be_one_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try does not mend what the environment says; the hint is that for every login."""
    settings = {"TENANT_ID": "no tenant!", "CLIENT_ID": "c", "CLIENT_SECRET": SECRET}
    for name, value in settings.items():
        monkeypatch.setenv(f"AZURE_{name}", value)
    with contextlib.closing(open_azure("az://box@account/runs")) as bucket:
        for ask in (lambda: bucket.get("x"), lambda: who_am_i("az://box@account/runs")):
            with pytest.raises(StoreError, match="credentials") as caught:
                ask()
            assert type(caught.value) is StoreError
            assert "az login" in caught.value.hint
            assert SECRET not in str(caught.value)


def test_a_login_that_takes_no_such_setting_is_told() -> None:
    """Some settings are looked at only when a token is asked for."""

    class Picky:
        def get_token(self, *scopes: str, **options: object) -> AccessToken:
            raise ValueError(SECRET)

    with pytest.raises(StoreError, match="no credentials") as caught:
        AzureIdentity(Picky()).get_token("scope")
    assert type(caught.value) is StoreError
    assert SECRET not in str(caught.value)


def test_every_problem_with_a_login_is_known() -> None:
    """Each exception of azure.core and azure.identity was looked at: try again, or a hint."""
    modules = {**vars(azure.core.exceptions), **vars(azure.identity)}
    found = {
        name: kind
        for name, kind in modules.items()
        if inspect.isclass(kind) and issubclass(kind, azure.core.exceptions.AzureError)
    }
    assert set(found) <= PASSING | LASTING
    for name, kind in found.items():
        problem = kind.__new__(kind)
        problem.args = (SECRET,)
        for told in (no_token(problem), problem_of(problem, "x", ALWAYS, PLACE)):
            assert isinstance(told, StoreUnavailable) == (name in PASSING), name
            assert SECRET not in str(told) + told.hint
        assert no_token(problem).hint or name in PASSING


@pytest.mark.parametrize("missing", ["azure", "azure.storage.blob", "azure.identity"])
def test_a_missing_package_is_told_when_a_store_is_opened(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra, nothing is begun: the message is the command that installs it."""
    hide(missing, monkeypatch)
    with pytest.raises(MissingExtra) as caught:
        open_azure("az://box@acct")

    assert caught.value.hint == "pip install 'spotguard[azure]'"


def test_with_a_key_no_login_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds out who is logged in has not to be installed where there is a key."""
    hide("azure.identity", monkeypatch)
    monkeypatch.setenv("AZURE_STORAGE_KEY", SECRET)

    assert open_azure("az://box@acct").url == "az://box@acct"


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package be one that is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )


def test_opening_loads_nothing() -> None:
    """No vendor's library is loaded before the first request."""
    program = (
        "import sys, json; from spotguard.storage.azure.bucket import open_azure;"
        "open_azure('az://box@acct/x');"
        "print(json.dumps([name for name in sys.modules"
        " if name.startswith(('azure.core', 'azure.storage.', 'azure.identity', 'requests'))]))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert json.loads(said.stdout) == []


# ------------------------------------------------------------ bytes


def test_bytes_move_without_being_kept(canned: Canned) -> None:
    """A block is sent from where it is and received where it shall be, a piece at a time."""
    bucket = at(canned)
    block = memoryview(bytearray(16 << 20))
    answer = range_reply(bytes(block))
    canned.replies.extend([Reply(201), answer, Reply(201), answer])
    canned.replies.popleft()
    for _ in range(2):  # what is kept is made the first time
        tracemalloc.start()
        try:
            bucket.put_part("x", "id", 1, [block[:5], block[5:]])
            bucket.get_range("x", 0, [block[:7], block[7:]])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert [heard.size_bytes for heard in canned.heard] == [16 << 20, 0] * 2
    assert peak < 2 << 20


def test_a_range_that_breaks_off_is_worth_another_try(canned: Canned) -> None:
    """An answer that ends early is not a blob that does; it is not asked for again by itself."""
    said = {"Content-Range": "bytes 0-7/8", "Content-Length": "8", "ETag": '"0x1"'}
    canned.replies[0] = Reply(206, said, b"123", closes=True)
    bucket = at(canned)
    with pytest.raises(StoreUnavailable, match="broke"):
        bucket.get_range("x", 0, [memoryview(bytearray(8))])

    assert len(canned.heard) == 1


def test_after_the_deadline_nothing_is_sent(canned: Canned) -> None:
    """A block whose deadline has passed is given up, not sent to its end."""
    with give_up_after(-1.0), pytest.raises(StoreUnavailable, match="in time"):
        at(canned).put_part("x", "id", 1, views(b"1"))
