"""What users and their credentials must be able to rely on: nothing is told, nothing escapes.

Planted keys, tokens and connection strings are used for a whole run on each kind of store, well and
ill, and looked for in all that it says and keeps.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import traceback
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
import torch

from spotguard.control.create_run import create_run
from spotguard.errors import SpotguardError, StoreError, UsageError
from spotguard.events.event import Event
from spotguard.runtime.process.settings import Settings
from spotguard.runtime.reporting.event_log import EventLog
from spotguard.spec.model import JobSpec
from spotguard.storage import open_store
from spotguard.storage.remote.store import RemoteStore
from spotguard.testing import FakeClock
from tests.runtime.harness.lab import Rank
from tests.storage.harness import fault_proxy as faults
from tests.storage.harness.fake_gcs import FakeGcs
from tests.storage.harness.lanes import be_impatient, close, forget_accounts, open_bucket
from tests.storage.harness.scripted_server import Reply, scripted_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spotguard.storage.base import ObjectStore
    from tests.storage.harness.fault_proxy import Exchange
    from tests.storage.harness.lanes import Lane
    from tests.storage.harness.scripted_server import Request

PLANTED = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDKEYID",
    "AWS_SECRET_ACCESS_KEY": "planted/secret+access+key",
    "AWS_SESSION_TOKEN": "planted-session-token",
}
ESCAPES = [
    *("../x", "a/../../x", "/etc/passwd", "a//b", "./x", "..", "a/..", "x\0y", "x\ny", "x\x7fy"),
    *("", "/", "a/", "\r\nX-Header: 1", ".spotguard/x"),
]


@pytest.fixture
def planted(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the secrets that the lane's credentials are made of."""
    be_impatient(monkeypatch, 0.5)
    if lane.kind == "s3":
        for name, value in PLANTED.items():
            monkeypatch.setenv(name, value)
        return list(PLANTED.values())
    from tests.storage.harness.servers import AZURITE_KEY

    return [AZURITE_KEY]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[io.StringIO]:
    """Return what our loggers say, down to DEBUG, with their tracebacks."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    log = logging.getLogger("spotguard")
    before = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    yield heard
    log.removeHandler(handler)
    log.setLevel(before)


def of_problem(problem: SpotguardError) -> str:
    """Return all that an error could tell a user, a log or a report."""
    trace = "".join(traceback.format_exception(problem))
    return f"{problem!r}{problem}{problem.hint}{vars(problem)!r}{trace}"


def files_below(folder: Path) -> str:
    """Return every byte that was written below a folder: journals and all."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return "".join(path.read_bytes().decode("latin-1") for path in paths)


def objects_in(store: ObjectStore) -> str:
    """Return every byte in a store: run.json, claims, events, manifests, shards."""
    return "".join(f"{each.key}{store.get(each.key).decode('latin-1')}" for each in store.list())


def assert_unsaid(secrets: list[str], told: str) -> None:
    """Check that no secret is there, as it is or as URLs, base64 and JSON have it."""
    assert len(told) > 100
    for secret in secrets:
        in_base64 = base64.b64encode(secret.encode()).decode().rstrip("=")
        for form in {secret, quote(secret, safe=""), in_base64, json.dumps(secret)[1:-1]}:
            assert form not in told


@pytest.mark.e2e
@pytest.mark.parametrize("lane", ["s3", "azure"], indirect=True)
def test_a_run_keeps_no_secret(
    lane: Lane, planted: list[str], told: io.StringIO, tmp_path: Path
) -> None:
    """Journal, run.json, claims, events, manifests and shards of a run hold none; nor its log."""
    store = open_store(lane.url)
    (tmp_path / "job.py").write_text("print('trains')")
    spec = JobSpec(
        script=str(tmp_path / "job.py"), workdir=str(tmp_path), name="job", store=lane.url
    )
    run_id = create_run(spec)
    rank = Rank(store)
    rank.start()
    rank.now(10, s={"weight": torch.zeros(1000)})
    EventLog(store, attempt=1, node=0, rank=0).write(
        Event(kind="note", at=1.7e9, attempt=1, node=0, rank=0, data={"store": store.url})
    )
    said = f"{store!r}{store.url}{vars(store)!r}{told.getvalue()}{files_below(tmp_path)}"
    kept = objects_in(store)
    close(store._bucket)  # type: ignore[attr-defined]

    assert f"{run_id}/run.json" in kept
    assert run_id in files_below(tmp_path)
    assert_unsaid(planted, said + kept)


def echo(exchange: Exchange, status: int) -> None:
    """Refuse, and repeat all that was sent."""
    sent = " ".join(f"{name}={value}" for name, value in exchange.headers.items())
    secrets = " ".join([*PLANTED.values(), sent])
    body = f"<Error><Code>Odd</Code><Message>{secrets}</Message></Error>".encode()
    faults.refuse(status, body, x_ms_error_code="Odd", x_amz_request_id=PLANTED_ID)(exchange)


PLANTED_ID = PLANTED["AWS_SECRET_ACCESS_KEY"]


@pytest.mark.e2e
@pytest.mark.parametrize("lane", ["s3", "azure"], indirect=True)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 500, 503])
def test_a_server_that_repeats_secrets_is_not_repeated(
    lane: Lane, planted: list[str], told: io.StringIO, status: int
) -> None:
    """Whatever it refuses, and however, errors and log hold none of what it was sent."""
    store = lane.store(clock=FakeClock(), patience_s=0.5)
    store.put("x", b"1")
    lane.proxy.on(lambda exchange: echo(exchange, status), times=None)
    calls: list[Callable[[], object]] = [
        lambda: store.put("x", b"2"),
        lambda: store.put("x", bytes(300_000), if_absent=True),
        lambda: store.get("x"),
        lambda: store.get_into("x", 0, memoryview(bytearray(1))),
        lambda: store.head("x"),
        lambda: list(store.list()),
        lambda: store.list_folders(""),
        lambda: store.copy("x", "y"),
        lambda: store.delete("x"),
        lambda: store.archive("x"),
        lambda: store.clean_up(older_than_s=0),
        lambda: store.warm(),
    ]
    said = ""
    for call in calls:
        try:
            call()
        except StoreError as problem:
            said += of_problem(problem)
    assert_unsaid(planted, said + told.getvalue())
    assert "Signature=" not in said
    assert "SharedKey" not in said


@pytest.mark.parametrize("status", [400, 403, 503])
def test_a_signature_of_shared_access_is_not_repeated(
    status: int, told: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signature, which stands in every URL of Azure's, is in no error and no log."""
    forget_accounts(monkeypatch)
    secret = "planted+signature/of+shared+access="
    sas = f"sv=2021-08-06&sp=rwdl&sig={quote(secret, safe='')}"

    def repeat(request: Request) -> Reply:
        body = f"<Error><Code>Odd</Code><Message>{request.path} {secret}</Message></Error>"
        return Reply(status, {"content-type": "application/xml"}, body.encode())

    with scripted_server(repeat) as server:
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"BlobEndpoint={server.endpoint}/acct;AccountName=acct;SharedAccessSignature={sas}",
        )
        bucket = open_bucket("az://box/runs")
        store = RemoteStore(bucket, clock=FakeClock(), patience_s=0.5)
        said = f"{bucket!r}{store!r}{store.url}"
        for call in (lambda: store.get("x"), lambda: store.put("x", b"1"), lambda: store.head("x")):
            with pytest.raises(StoreError) as caught:
                call()
            said += of_problem(caught.value)
        close(bucket)
    assert server.requests
    assert_unsaid([secret], said + told.getvalue())


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAPLANTED:plantedsecret@bucket/x",
        "s3://bucket/x?endpoint=https://user:plantedsecret@host",
        "s3://bucket/x?aws_secret_access_key=plantedsecret",
        "gs://user:plantedsecret@bucket/x",
        "gs://bucket/x?access_token=plantedsecret",
        "az://box@acct/x?sig=plantedsecret",
        "az://user:plantedsecret@acct/x",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """URLs are shown, logged and kept in the run: one with a login is not taken."""
    forget_accounts(monkeypatch)
    with pytest.raises(UsageError) as caught:
        open_store(url)

    assert "plantedsecret" not in of_problem(caught.value)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    """Google Cloud Storage."""
    forget_accounts(monkeypatch)
    with FakeGcs() as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.endpoint)
        yield fake


@pytest.mark.parametrize("key", ESCAPES)
def test_no_key_leaves_the_prefix(key: str, fake: FakeGcs) -> None:
    """A key that climbs, is absolute or holds control characters reaches no server at all."""
    bucket = open_bucket(f"gs://{fake.bucket}/some/runs")
    store = RemoteStore(bucket, clock=FakeClock())
    calls: list[Callable[[], object]] = [
        lambda: store.put(key, b"1"),
        lambda: store.put(key, b"1", if_absent=True),
        lambda: store.get(key),
        lambda: store.get_into(key, 0, memoryview(bytearray(1))),
        lambda: store.head(key),
        lambda: store.delete(key),
        lambda: store.copy(key, "x"),
        lambda: store.copy("x", key),
        lambda: store.archive(key),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()
    close(bucket)
    assert fake.asked == []


@pytest.mark.parametrize("run_id", ["../other", "a/b", "/x", "A", "x\n", "-x", "x" * 64, "."])
def test_no_run_id_leaves_the_store(run_id: str) -> None:
    """A run id is one small folder's name, or is refused before anything is opened."""
    with pytest.raises(UsageError, match="run_id"):
        Settings.from_environment(
            run_id=run_id, store=None, seed=None, save_every=None, keep_last=None, peer_timeout=None
        )


@pytest.mark.parametrize(
    "prefix", ["runs/../../other", "runs/..", "..", "runs//x", "runs/./x", "a%2F..%2Fb", "é/ü x"]
)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_an_odd_prefix_is_kept_to_or_refused(
    scheme: str, prefix: str, fake: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written below an odd prefix begins, on the wire, with that prefix as it is."""
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)

    def accept(request: Request) -> Reply:
        return Reply(headers={"etag": '"e"'})

    with scripted_server(accept) as server:
        url = f"{scheme}://{fake.bucket}/{prefix}"
        if scheme == "s3":
            url += f"?endpoint={server.endpoint}"
        with contextlib.suppress(UsageError):
            bucket = open_bucket(url)
            RemoteStore(bucket, clock=FakeClock()).put("x", b"1")
            close(bucket)
        wanted = f"{prefix.strip('/')}/x"
        assert list(fake.objects) in ([], [wanted])
        assert {request.path for request in server.requests} <= {
            quote(f"/{fake.bucket}/{wanted}", safe="/~")
        }
