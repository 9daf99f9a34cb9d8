"""Credentials that expire in the middle of a transfer: renewed unseen, or told in a sentence."""

from __future__ import annotations

import ssl
import traceback
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import pytest

from spotguard.errors import StoreError
from spotguard.testing import FakeClock
from tests.storage.harness import doors
from tests.storage.harness.certificates import make_certificate
from tests.storage.harness.fault_proxy import FaultProxy
from tests.storage.harness.lanes import SMALL_PARTS, Lane, open_bucket
from tests.storage.harness.scripted_server import scripted_server
from tests.storage.harness.servers import AZURITE_ACCOUNT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spotguard.storage.base import ObjectStore
    from spotguard.storage.remote.bucket import Bucket
    from tests.storage.harness.doors import Door

pytestmark = pytest.mark.e2e

KEY = "folder/victim"
SMALL = b"some small content"
LARGE = b"".join(bytes([number]) * (175_000 + number) for number in range(4))
SECRETS = (doors.TOKEN, doors.REFRESH, doors.CLIENT_SECRET, doors.SESSION)


class Guarded:
    """A place in a bucket, behind a door."""

    def __init__(self, lane: Lane, door: Door, bucket: Callable[[], Any]) -> None:
        self.lane, self.door, self._bucket = lane, door, bucket
        lane.proxy.on(door, times=None)

    def store(self) -> ObjectStore:
        """Return a store that has been used before, with a bucket of its own."""
        bucket = self._bucket()
        vars(bucket)["part_rules"] = SMALL_PARTS
        self.lane.opened.append(bucket)
        store = self.lane.store(cast("Bucket", bucket), clock=FakeClock())
        store.head(KEY)
        return store


@pytest.fixture
def guarded(request: pytest.FixtureRequest, lane: Lane) -> Guarded:
    """Return the lane behind a door."""
    made: Guarded = request.getfixturevalue(f"guarded_{lane.kind}")
    return made


@pytest.fixture
def guarded_s3(lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    """S3, with credentials in a file."""
    path = tmp_path / "credentials"
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return Guarded(lane, doors.S3Door(path), lambda: open_bucket(lane.url))


@pytest.fixture
def guarded_gcs(lane: Lane) -> Iterator[Guarded]:
    """Google Cloud Storage, with what `gcloud auth application-default login` leaves."""
    from google.oauth2.credentials import Credentials

    from spotguard.storage.gcs.bucket import GcsBucket, GcsPlace

    door = doors.GoogleDoor()
    container, _, prefix = lane.url.removeprefix("gs://").partition("/")
    place = GcsPlace(bucket=container, prefix=f"{prefix}/", emulator=lane.proxy.endpoint)
    with scripted_server(door.give_token) as service:
        yield Guarded(
            lane,
            door,
            lambda: GcsBucket(
                place,
                Credentials(  # type: ignore[no-untyped-call]
                    door.token,
                    refresh_token=doors.REFRESH,
                    token_uri=f"{service.endpoint}/token",
                    client_id="client",
                    client_secret=doors.CLIENT_SECRET,
                ),
            ),
        )


@pytest.fixture
def guarded_azure(lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    """Azure, with a login; the client shows tokens over TLS alone."""
    from spotguard.storage.azure.access import AzurePlace
    from spotguard.storage.azure.bucket import AzureBucket

    certificate = tmp_path / "tls.pem"
    make_certificate(certificate)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    door = doors.AzureDoor()
    container, _, prefix = lane.url.removeprefix("az://").partition("/")
    with FaultProxy(lane.proxy.upstream_port, tls=context) as proxy:
        place = AzurePlace(
            url=lane.url,
            account=AZURITE_ACCOUNT,
            endpoint=f"{proxy.endpoint}/{AZURITE_ACCOUNT}",
            container=container,
            prefix=f"{prefix}/",
        )
        behind = replace(lane, proxy=proxy, opened=lane.opened)
        yield Guarded(behind, door, lambda: AzureBucket(place, door))


def test_a_write_goes_on_with_renewed_credentials(guarded: Guarded) -> None:
    """Whichever request of a write in parts finds them expired, the object is whole, and alone."""
    for nth in count(1):
        store = guarded.store()
        guarded.door.expire_at(nth)
        store.put(KEY, LARGE)
        over = not guarded.door.refused

        assert store.get(KEY) == LARGE
        assert [info.key for info in store.list()] == [KEY]
        if over:
            break
    assert nth > 4


def test_reads_go_on_with_renewed_credentials(guarded: Guarded) -> None:
    """Also where a service refuses without a word, as it does where only the head was asked for."""
    store = guarded.store()
    store.put(KEY, LARGE)
    into = memoryview(bytearray(len(LARGE)))

    def ranged() -> bytes:
        store.get_into(KEY, 0, into)
        return bytes(into)

    reads: list[Callable[[], object]] = [
        lambda: store.head(KEY),
        lambda: store.get(KEY),
        ranged,
        lambda: list(store.list()),
    ]
    for read in reads:
        before = read()
        guarded.door.refused = 0
        guarded.door.expire()
        into[:] = bytes(len(into))
        assert read() == before
        assert guarded.door.refused


def test_credentials_that_nobody_renews_are_told_at_once(guarded: Guarded) -> None:
    """One clear error with what to do, no waiting, no secret; and what was there stays."""
    for nth in count(1):
        store = guarded.store()
        store.put(KEY, SMALL)
        guarded.door.expire_at(nth, renewable=False)
        heard = len(guarded.lane.proxy.heard)
        problem: StoreError | None = None
        try:
            store.put(KEY, LARGE)
        except StoreError as found:
            problem = found
        heard = len(guarded.lane.proxy.heard) - heard
        guarded.door.expire()

        again = guarded.store()
        assert [info.key for info in again.list()] == [KEY]
        again.clean_up(older_than_s=-60.0)
        if problem is None:
            assert again.get(KEY) == LARGE
            break
        assert again.get(KEY) == SMALL
        assert heard < nth + 8
        assert_clear(problem)
    assert nth > 4


def test_reads_tell_it_too(guarded: Guarded) -> None:
    """The error of a read is as clear, and as silent about what was sent."""
    store = guarded.store()
    store.put(KEY, SMALL)
    guarded.door.expire(renewable=False)
    reads: list[Callable[[], object]] = [
        lambda: store.get(KEY),
        lambda: store.get_into(KEY, 0, memoryview(bytearray(1))),
        lambda: list(store.list()),
    ]
    for read in reads:
        with pytest.raises(StoreError) as caught:
            read()
        assert_clear(caught.value)


def assert_clear(problem: StoreError) -> None:
    """Check that an error tells what is wrong and what to do, and nothing else."""
    told = "".join(traceback.format_exception(problem)) + repr(problem) + problem.hint
    assert type(problem) is StoreError
    assert "credentials" in problem.message
    assert "\n" not in problem.message
    assert "login" in problem.hint
    assert not [secret for secret in SECRETS if secret in told]
