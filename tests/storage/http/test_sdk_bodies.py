"""What the vendors' clients are given promises."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import requests

from spotguard.errors import StoreError, StoreUnavailable
from spotguard.shared.net import free_port
from spotguard.storage.deadline import give_up_after
from spotguard.storage.http.requests_adapter import keep_to_deadline
from spotguard.storage.http.sdk_bodies import Incoming, Outgoing, PerProcess, broken
from spotguard.testing import FakeClock
from tests.storage.harness.canned import Canned, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_body_can_be_sent_twice() -> None:
    """A body is all its views in order, as often as it is gone through; its length is known."""
    body = Outgoing([memoryview(b"12"), memoryview(b""), memoryview(bytes(600_000))])

    assert len(body) == 600_002
    for _ in range(2):
        assert b"".join(body) == b"12" + bytes(600_000)
    assert max(map(len, body)) <= 256 << 10


def test_requests_sends_a_body_as_it_is() -> None:
    """The body has its length told, and is not sent in chunks of unknown number."""
    body: Any = Outgoing([memoryview(bytes(600_000))])
    with Canned() as server, requests.Session() as session:
        session.put(server.endpoint, data=body, timeout=10)

    assert server.heard[0].size_bytes == 600_000
    assert "transfer-encoding" not in server.heard[0].headers


def test_what_arrives_fills_the_views_in_order() -> None:
    """However the pieces are cut, each byte gets where it belongs, and none beyond the end."""
    into = bytearray(10)
    view = memoryview(into)
    incoming = Incoming([view[:3], view[3:3], view[3:4], view[4:]])
    for piece in (b"0", b"1234567", b"8"):
        assert incoming.write(piece) == len(piece)
    assert (bytes(into), incoming.missing_bytes) == (b"012345678\0", 1)

    with pytest.raises(ValueError, match="more bytes"):
        incoming.write(b"9a")


def test_nothing_is_sent_after_the_deadline() -> None:
    """Once the caller's time is up, the rest of a body stays here."""
    clock = FakeClock()

    def body() -> Iterator[bytes]:
        yield b"first"
        clock.advance(6.0)
        yield b"second"

    with (
        Canned() as server,
        keep_to_deadline(requests.Session()) as session,
        give_up_after(5.0, clock),
        pytest.raises(requests.ConnectionError, match="TimeoutError"),
    ):
        session.put(server.endpoint, data=body(), headers={"Content-Length": "11"}, timeout=10)


def test_nothing_is_received_after_the_deadline() -> None:
    """What has not arrived when the caller's time is up is not waited for."""
    clock = FakeClock()
    with (
        Canned(Reply(body=bytes(1 << 20))) as server,
        keep_to_deadline(requests.Session()) as session,
        give_up_after(5.0, clock),
        session.get(server.endpoint, stream=True, timeout=10) as answer,
    ):
        clock.advance(6.0)
        with pytest.raises(requests.ConnectionError, match="timed out"):
            answer.content  # noqa: B018 - it is read by being looked at


def test_names_are_left_at_the_deadline(dead: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many addresses a name has, and however long the name service thinks."""
    began = time.monotonic()
    with keep_to_deadline(requests.Session()) as session, give_up_after(0.3):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: dead * 100)
        with pytest.raises(requests.ConnectionError) as caught:
            session.get("http://account.test", timeout=10)
        assert str(broken(caught.value, "box")) == "box did not answer in time"
    with keep_to_deadline(requests.Session()) as session, give_up_after(0.3):
        asked = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: asked.wait())
        with pytest.raises(requests.ConnectionError) as caught:
            session.get("http://account.test", timeout=10)
        asked.set()
        assert "the name box is not known" in str(broken(caught.value, "box"))

    assert time.monotonic() - began < 15.0, "100 times 0.3 s would be half a minute"


def test_proxies_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a company's proxy the same holds: after the deadline, it is not asked either."""
    with Canned() as proxy, keep_to_deadline(requests.Session()) as session:
        monkeypatch.setenv("HTTPS_PROXY", proxy.endpoint)
        with (
            give_up_after(-1.0),
            pytest.raises(requests.RequestException, match=r"TimeoutError|timed out"),
        ):
            session.get("https://account.invalid", timeout=10)


def test_a_forked_child_makes_a_client_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is made once a process: a child never takes its parent's sockets."""
    made = PerProcess(object)
    parents = made()
    assert made() is parents

    monkeypatch.setattr(os, "getpid", lambda: -1)
    childs = made()
    assert childs is not parents
    assert made.pop() is childs
    assert made.pop() is None


def test_why_there_was_no_answer_is_told_without_the_url() -> None:
    """A name nobody knows, a time-out, a refusal, a certificate: each is told as what it is."""
    url = f"http://127.0.0.1:{free_port()}/?sig=secret"
    with pytest.raises(requests.ConnectionError) as caught:
        requests.get(url, timeout=5)
    refused = broken(caught.value, "box")
    unknown = broken(socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "box")
    untrusted = ssl.SSLCertVerificationError(1, "certificate verify failed")
    untrusted.verify_message = "self-signed certificate"

    assert str(refused) == "the connection to box broke: Connection refused"
    assert type(unknown) is StoreUnavailable
    assert str(unknown) == "the name box is not known: Name or service not known"
    assert str(broken(requests.ReadTimeout(url), "box")) == "box did not answer in time"
    assert type(broken(untrusted, "box")) is StoreError
    assert "REQUESTS_CA_BUNDLE" in broken(untrusted, "box").hint
