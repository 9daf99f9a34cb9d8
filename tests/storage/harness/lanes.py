"""Buckets on emulators or a fake, each reached through a proxy that can fail, new for each test."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import requests

from spotguard.storage.remote.bucket import PartRules
from spotguard.storage.remote.store import RemoteStore
from tests.storage.harness.fake_gcs import FakeGcs
from tests.storage.harness.fault_proxy import FaultProxy
from tests.storage.harness.servers import CannotRun, Server, moto_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.shared.units import Clock
    from spotguard.storage.remote.bucket import Bucket

SMALL_PARTS = PartRules(min_bytes=1 << 16, max_bytes=1 << 18, max_parts=10_000)
"""With these a state of a few MB goes up in parts; `moto_small_parts` takes them."""
SCHEMES = {"s3": "s3", "azure": "az", "gcs": "gs"}
_FOREIGN = ("AWS_", "AZURE_STORAGE_", "STORAGE_EMULATOR_HOST", "GOOGLE_", "SPOTGUARD_S3_")


@dataclass(frozen=True)
class Lane:
    """A place in a bucket, and the proxy on the way to it."""

    kind: str
    url: str
    proxy: FaultProxy
    opened: list[Bucket] = field(default_factory=list, repr=False)

    def bucket(self) -> Bucket:
        """Return the bucket, with small parts; it has connections of its own."""
        made = open_bucket(self.url)
        vars(made)["part_rules"] = SMALL_PARTS
        self.opened.append(made)
        return made

    def store(
        self,
        bucket: Bucket | None = None,
        *,
        clock: Clock | None = None,
        patience_s: float = 30.0,
        threads: int = 4,
    ) -> RemoteStore:
        """Return a store of it that puts what is over 64 kB in parts."""
        return RemoteStore(
            bucket or self.bucket(),
            clock=clock,
            patience_s=patience_s,
            threads=threads,
            single_bytes=1 << 16,
        )


@pytest.fixture(scope="session")
def moto_small_parts() -> Iterator[Server]:
    """S3 by moto, for the whole run, that takes parts of less than 5 MB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("S3_UPLOAD_PART_MIN_SIZE", "1024")
        try:
            starting = moto_server()
            server = starting.__enter__()
        except CannotRun as why:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(why))
    yield server
    starting.__exit__(None, None, None)


@pytest.fixture(params=["s3", "azure", "gcs"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    """Return a way to an empty place in S3 by moto, Azure by azurite, or Google's by our fake."""
    forget_accounts(monkeypatch)
    container = f"box-{secrets.token_hex(8)}"
    with _server(request, container) as server, FaultProxy(server.port) as proxy:
        for variable, value in server.env.items():
            monkeypatch.setenv(variable, value.replace(server.endpoint, proxy.endpoint))
        if request.param != "gcs":
            make_container(request.param, container)
        lane = Lane(request.param, f"{SCHEMES[request.param]}://{container}/some/runs", proxy)
        yield lane
        for bucket in lane.opened:
            close(bucket)


@contextlib.contextmanager
def _server(request: pytest.FixtureRequest, container: str) -> Iterator[Server]:
    if request.param == "gcs":
        with FakeGcs(container) as fake:
            env = {"STORAGE_EMULATOR_HOST": fake.endpoint}
            yield Server(port=fake.port, pid=os.getpid(), env=env)
    else:
        yield request.getfixturevalue("moto_small_parts" if request.param == "s3" else "azurite")


def open_bucket(url: str) -> Bucket:
    """Return the bucket at a URL."""
    scheme = url.partition("://")[0]
    if scheme == "s3":
        from spotguard.storage.s3.bucket import S3Bucket

        return S3Bucket(url)
    if scheme == "gs":
        from spotguard.storage.gcs.bucket import open_gcs

        return open_gcs(url)
    from spotguard.storage.azure.bucket import open_azure

    return open_azure(url)


def close(bucket: Bucket) -> None:
    """Close its connections, where that is not left to the collector of garbage."""
    if hasattr(bucket, "close"):
        bucket.close()


def silence_for(test: str) -> float:
    """Return the seconds of silence after which a test gives a server up.

    Short where the server is to be silent, for good or between two pieces; else long, as a busy
    machine is slow to answer.
    """
    return 1.0 if "stall" in test or "slow" in test else 20.0


def be_impatient(monkeypatch: pytest.MonkeyPatch, silence_s: float) -> None:
    """Let a server that says nothing be given up after so long, by every kind of bucket."""
    for module in ("http.connections", "http.requests_adapter", "azure.bucket", "gcs.bucket"):
        monkeypatch.setattr(f"spotguard.storage.{module}.SILENCE_S", silence_s)


def forget_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the user's environment says of accounts and servers."""
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)


def make_container(kind: str, name: str) -> None:
    """Create a bucket or container on the server that the environment names."""
    if kind in ("s3", "moto"):
        boto3 = pytest.importorskip("boto3")
        boto3.client("s3").create_bucket(Bucket=name)
    elif kind == "gcs":
        api = f"{os.environ['STORAGE_EMULATOR_HOST']}/storage/v1/b"
        requests.post(api, json={"name": name}, timeout=10).raise_for_status()
    else:
        blob = pytest.importorskip("azure.storage.blob")
        connection = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
        with blob.BlobServiceClient.from_connection_string(connection) as service:
            service.create_container(name)
