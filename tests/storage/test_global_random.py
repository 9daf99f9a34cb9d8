"""The global random generators are the training script's: no store draws from one, whatever fails.

They are seeded for each micro-batch, and the stores are used by background threads. A draw of a
store's between a seed and an augmentation would change the weights, without a word.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from spotguard.errors import StoreError
from spotguard.storage import FileStore, PrefixedStore
from spotguard.storage.azure.bucket import AzureBucket
from spotguard.storage.gcs.bucket import open_gcs
from spotguard.storage.http.private_random import MODULES
from spotguard.storage.remote.store import RemoteStore
from spotguard.storage.s3.bucket import S3Bucket
from spotguard.testing import FakeClock, FaultyStore, MemoryStore
from spotguard.testing.bucket import MemoryBucket
from tests.storage.azure.test_azure import PLACE
from tests.storage.harness.canned import Canned
from tests.storage.harness.canned import Reply as CannedReply
from tests.storage.harness.fake_gcs import FakeGcs, Fault
from tests.storage.harness.lanes import forget_accounts
from tests.storage.harness.scripted_server import Reply, scripted_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.storage.base import ObjectStore

OPERATIONS = ("put", "get", "get_range", "head", "page", "delete", "copy", "begin", "finish")
VENDORS = {
    "boto3": ("boto3", "botocore"),
    "google": ("google.auth", "google.api_core", "google.cloud.storage", "google.oauth2"),
    "azure": ("azure.core", "azure.identity", "azure.storage.blob", "msal"),
}
DRAWS_ELSEWHERE = re.compile(r"_async\.py$|/tests?/|s3transfer")
"""Of a vendor's files those that no store of ours runs."""


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Fail unless Python's, NumPy's and torch's global generators are at its end as before it."""
    before = random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state()
    yield
    assert random.getstate() == before[0], "Python's generator was drawn from"
    assert repr(np.random.get_state(legacy=False)) == before[1], "NumPy's was"
    assert torch.equal(torch.get_rng_state(), before[2]), "torch's was"


def use(store: ObjectStore) -> None:
    """Do everything that a store can do, three times, in a background thread as a save does."""

    def work() -> None:
        for number in range(3):
            for call in (
                lambda key: store.put(key, b"x" * 100),
                lambda key: store.put(key, b"y", if_absent=True),
                store.get,
                store.head,
                lambda key: store.get_into(key, 0, memoryview(bytearray(4))),
                lambda key: list(store.list("a")),
                lambda key: store.copy(key, f"{key}-copy"),
                store.delete,
                lambda key: store.clean_up(older_than_s=0.0),
            ):
                with contextlib.suppress(StoreError):
                    call(f"a/{number}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def faulty_bucket(clock: FakeClock) -> RemoteStore:
    """Return a store in memory of which each operation fails, and loses an answer, again."""
    bucket = MemoryBucket(page_size=2, clock=clock)
    for operation in OPERATIONS:
        bucket.fail(operation, times=3).lose_answer(operation, nth=5, times=2)
    return RemoteStore(bucket, clock=clock)


def faulty_store(tmp_path: Path, clock: FakeClock) -> FaultyStore:
    """Return a folder of which each operation fails, is slow and tears."""
    store = FaultyStore(PrefixedStore(FileStore(tmp_path / "store"), "some/run"))
    for operation in ("put", "get", "head", "list", "delete", "copy"):
        store.fail(operation, nth=2).delay(operation, 0.5, nth=3, clock=clock)
    return store.tear(nth=4)


@pytest.mark.parametrize("kind", ["memory", "folder", "bucket"])
def test_no_fault_of_a_store_draws_from_a_global_generator(kind: str, tmp_path: Path) -> None:
    """Refusals, lost answers, delays and torn writes cost the script's generators no number."""
    clock = FakeClock()
    stores: dict[str, Callable[[], ObjectStore]] = {
        "memory": lambda: FaultyStore(MemoryStore()).fail("put").fail("get"),
        "folder": lambda: faulty_store(tmp_path, clock),
        "bucket": lambda: faulty_bucket(clock),
    }
    store = stores[kind]()
    with untouched():
        use(store)
    assert kind != "bucket" or clock.slept, "nothing was tried again"


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_no_refusal_of_a_vendors_draws_from_a_global_generator(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a 503, a 429, a 500 or a broken connection that a vendor's own package hears."""
    clock = FakeClock()
    forget_accounts(monkeypatch)
    for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(name, value)
    statuses = iter([503, 429, 500, 502, 504, 503] * 200)
    with contextlib.ExitStack() as open_:
        bucket: Any
        if kind == "s3":
            at = open_.enter_context(scripted_server(lambda _: Reply(next(statuses))))
            bucket = S3Bucket(f"s3://b/runs?endpoint={at.endpoint}&region=eu-north-1")
        elif kind == "gs":
            fake = open_.enter_context(FakeGcs())
            fake.faults.extend(Fault(next(statuses)) for _ in range(200))
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.endpoint)
            bucket = open_gcs(f"gs://{fake.bucket}/runs")
        else:
            canned = open_.enter_context(Canned(*[CannedReply(next(statuses)) for _ in range(200)]))
            bucket = AzureBucket(replace(PLACE, endpoint=canned.endpoint, key="c2VjcmV0", sas=""))
        store = RemoteStore(bucket, clock=clock, patience_s=20.0)
        with untouched():
            use(store)
    assert len(clock.slept) > 3, "nothing was tried again"


def test_logins_that_are_renewed_draw_from_no_global_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the vendors' packages draw for their own pauses comes from generators of their own.

    These are their calls that draw: for a role's credentials that are late, for a token service
    that refuses, for when a token is next renewed.
    """
    forget_accounts(monkeypatch)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with untouched():
        S3Bucket("s3://b/runs?region=eu-north-1")._session.client("sts", region_name="eu-north-1")
        retryhandler: Any = importlib.import_module("botocore.retryhandler")
        standard: Any = importlib.import_module("botocore.retries.standard")
        retryhandler.delay_exponential("rand", 2, 3)
        for attempt in range(1, 4):
            context = SimpleNamespace(attempt_number=attempt, http_response=None)
            standard.ExponentialBackoff().delay_amount(context)
        with FakeGcs() as fake:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.endpoint)
            with contextlib.suppress(StoreError):
                RemoteStore(open_gcs(f"gs://{fake.bucket}/runs")).head("none")
        from google.api_core.retry import exponential_sleep_generator

        backoff: Any = importlib.import_module("google.auth._exponential_backoff")
        list(backoff.ExponentialBackoff(total_attempts=3, initial_wait_seconds=1e-6))
        pauses = exponential_sleep_generator(0.1, 1.0)
        [next(pauses) for _ in range(3)]
        from spotguard.storage.azure.access import connect

        connect(PLACE)
        tokens: Any = importlib.import_module("azure.core.pipeline.policies._authentication")
        [tokens.random.randint(0, 60) for _ in range(3)]


@pytest.mark.parametrize("vendor", VENDORS)
def test_all_modules_of_a_vendor_that_draw_are_known(vendor: str) -> None:
    """A new version of a vendor's package that draws in another module is noticed here."""
    found = set()
    for package in VENDORS[vendor]:
        with contextlib.suppress(ImportError):
            folder = Path(next(iter(importlib.import_module(package).__path__)))
            for file in folder.rglob("*.py"):
                if DRAWS_ELSEWHERE.search(str(file)):
                    continue
                text = file.read_text(encoding="utf-8", errors="replace")
                if re.search(
                    r"^\s*(import random\b|from random )|np\.random|numpy\.random", text, re.M
                ):
                    inner = file.relative_to(folder).with_suffix("").parts
                    parts = inner[:-1] if inner[-1] == "__init__" else inner
                    found.add(".".join((package, *parts)))
    assert found <= set(MODULES[vendor])
