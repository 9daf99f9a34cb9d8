"""What HTTP for large objects promises."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
import tracemalloc
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import spotguard.storage.http.connect as dialing
import spotguard.storage.http.connections as connections_module
from spotguard.errors import StoreError, StoreUnavailable
from spotguard.shared.net import free_port
from spotguard.storage import open_store
from spotguard.storage.deadline import give_up_after
from spotguard.storage.http.connections import Connections
from spotguard.testing import FakeClock
from tests.storage.harness.canned import Canned, Reply
from tests.storage.harness.certificates import make_certificate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MB = 1 << 20


def range_reply(body: bytes, total: int | None = None) -> Reply:
    """Return the answer to a request for a range."""
    size = len(body) if total is None else total
    return Reply(206, {"Content-Range": f"bytes 0-{len(body) - 1}/{size}"}, body)


def test_bodies_are_sent_from_where_they_are() -> None:
    """Sending 32 MB takes no memory of that size: nothing is joined, copied or kept."""
    body = memoryview(bytearray(32 * MB))
    with Canned(Reply(201)) as server:
        connections = Connections(server.endpoint)
        connections.ask("PUT", "/warm", {}, body=[body[:1]])
        tracemalloc.start()
        try:
            connections.ask("PUT", "/x", {}, body=[body[: 5 * MB + 3], body[5 * MB + 3 :]])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert server.heard[-1].size_bytes == 32 * MB
    assert peak < MB


def test_ranges_are_received_where_they_shall_be() -> None:
    """A range fills the views in order, however they cut it, without memory for a copy."""
    content = bytes(range(256)) * (8 * MB // 256)
    into = memoryview(bytearray(8 * MB))
    with Canned(range_reply(content)) as server:
        connections = Connections(server.endpoint)
        connections.ask("GET", "/x", {}, into=[into])
        into[:] = bytes(8 * MB)
        tracemalloc.start()
        try:
            answer = connections.ask("GET", "/x", {}, into=[into[: MB + 1], into[MB + 1 :]])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert (answer.filled_bytes, into == content) == (8 * MB, True)
    assert peak < MB


def test_connections_are_used_again() -> None:
    """Requests one after the other share a connection, also after an answer that is an error."""
    with Canned(Reply(404, {}, b"no"), range_reply(b"1234"), Reply()) as server:
        connections = Connections(server.endpoint)
        connections.ask("GET", "/1", {})
        connections.ask("GET", "/2", {}, into=[memoryview(bytearray(4))])
        connections.ask("PUT", "/3", {}, body=[memoryview(b"x")])

        assert server.connections == 1


def test_a_connection_that_has_ended_is_not_used_again() -> None:
    """A server that closes idle connections costs no failed request."""
    with Canned(Reply(200, {}, b"1", closes=True)) as server:
        connections = Connections(server.endpoint)
        for _ in range(3):
            assert connections.ask("GET", "/x", {}).body == b"1"
            idle = connections._idle[-1].sock
            select.select([idle], [], [], 10.0)  # until the end has arrived


def test_half_a_range_is_told_as_what_it_is() -> None:
    """An answer that ends early fills what it reaches, and its connection is not used again."""
    reply = Reply(206, {"Content-Length": "100"}, b"x" * 60, closes=True)
    with Canned(reply, range_reply(b"y" * 100)) as server:
        connections = Connections(server.endpoint)
        into = memoryview(bytearray(100))
        assert connections.ask("GET", "/x", {}, into=[into]).filled_bytes == 60
        assert connections.ask("GET", "/x", {}, into=[into]).filled_bytes == 100

    assert into == b"y" * 100


def test_more_than_was_asked_for_stays_away() -> None:
    """What is left of an answer is not taken for the next one."""
    into = memoryview(bytearray(4))
    with Canned(range_reply(b"123456789"), Reply(200, {}, b"next")) as server:
        connections = Connections(server.endpoint)
        assert connections.ask("GET", "/x", {}, into=[into]).filled_bytes == 4
        assert connections.ask("GET", "/y", {}).body == b"next"

    assert bytes(into) == b"1234"


def test_half_an_answer_is_worth_another_try() -> None:
    """A body that breaks off is not taken for the whole."""
    reply = Reply(200, {"Content-Length": "100"}, b"x" * 60, closes=True)
    with Canned(reply) as server, pytest.raises(StoreUnavailable, match="broke"):
        Connections(server.endpoint).ask("GET", "/x", {})


def test_what_a_server_says_before_it_hangs_up_is_heard() -> None:
    """A refusal that comes while a large body is still being sent reaches the caller."""
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(100)
            peer.sendall(b"HTTP/1.1 403 No\r\nContent-Length: 4\r\n\r\nnope")

    thread = threading.Thread(target=refuse)
    thread.start()
    port = listener.getsockname()[1]
    answer = Connections(f"http://127.0.0.1:{port}").ask(
        "PUT", "/x", {}, body=[memoryview(bytearray(8 * MB))]
    )
    thread.join()
    listener.close()

    assert (answer.status, answer.body) == (403, b"nope")


def test_no_server_is_worth_another_try() -> None:
    """Nobody listening is `StoreUnavailable`, by name of the host."""
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:\d+ broke: Connection refused"):
        Connections(f"http://127.0.0.1:{free_port()}").ask("GET", "/x?sig=secret", {})


def test_nothing_is_asked_after_the_deadline() -> None:
    """Once the caller's time is over, no request is made."""
    clock = FakeClock()
    with Canned() as server, give_up_after(5.0, clock):
        connections = Connections(server.endpoint)
        connections.ask("GET", "/x", {})
        clock.advance(6.0)
        with pytest.raises(StoreUnavailable, match="in time"):
            connections.ask("GET", "/x", {})
        assert len(server.heard) == 1


def test_a_silent_server_is_left_at_the_deadline() -> None:
    """Who does not answer is waited for until the deadline, not for the usual minute."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = Connections(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with give_up_after(0.2), pytest.raises(StoreUnavailable, match="in time"):
            connections.ask("GET", "/x", {})


def test_a_name_with_many_dead_addresses_is_left_at_the_deadline(
    dead: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to connect is that of all its addresses together."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: dead * 100)
    began = time.monotonic()
    with give_up_after(0.3), pytest.raises(StoreUnavailable, match="in time"):
        Connections("http://s3.test").ask("GET", "/", {})
    assert time.monotonic() - began < 15.0, "100 times 0.3 s would be half a minute"


def test_a_dead_address_leaves_time_for_a_living_one(
    dead: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network has no IPv6, but names have an address of it, and that comes first."""
    monkeypatch.setattr(dialing, "_LEAST_S", 0.1)
    with Canned(Reply(200, {}, b"1")) as server:
        port = int(server.endpoint.rpartition(":")[2])
        alive = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*dead, alive])
        with give_up_after(1.0):
            assert Connections("http://s3.test").ask("GET", "/", {}).body == b"1"


def test_a_name_service_that_is_silent_is_left_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has time-outs of its own, of half a minute and more."""
    asked = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: asked.wait())
    with give_up_after(0.2), pytest.raises(StoreUnavailable, match="name service") as caught:
        Connections("http://s3.test").ask("GET", "/", {})
    asked.set()

    assert "s3.test" in caught.value.message


def test_a_name_that_is_none_says_so() -> None:
    """A label that is empty is refused by Python itself, in words of its own."""
    with pytest.raises(StoreUnavailable, match=r"the name a\.\.b is not known"):
        Connections("http://a..b").ask("GET", "/", {})


def test_a_process_that_ends_still_finds_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python starts no threads then; a last word to a store is sent all the same."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialing.dial(listener.getsockname(), 5.0).close()


def test_a_forked_child_opens_connections_of_its_own() -> None:
    """Parent and child never talk on the same connection."""
    with Canned() as server:
        connections = Connections(server.endpoint)
        connections.ask("GET", "/parent", {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this child asks once and ends
            child = os.fork()
        if child == 0:
            status = connections.ask("GET", "/child", {}).status
            os._exit(0 if status == 200 else 1)
        _, code = os.waitpid(child, 0)
        connections.ask("GET", "/parent", {})

        assert (code, server.connections) == (0, 2)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself, with its key in the same file."""
    path = tmp_path / "tls.pem"
    make_certificate(path)
    return path


@pytest.fixture
def tls(certificate: Path) -> Iterator[Canned]:
    """A server that shows the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Canned(Reply(200, {}, b"1"), range_reply(bytes(5 * MB)), tls=context) as server:
        connections_module._trust.cache_clear()
        yield server
    connections_module._trust.cache_clear()


def test_tls_takes_large_bodies_both_ways(
    tls: Canned, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a certificate that SSL_CERT_FILE names, a request and its answer are as without TLS."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    connections = Connections(tls.endpoint)
    body = memoryview(bytearray(9 * MB))
    into = memoryview(bytearray(b"x" * 5 * MB))
    connections.ask("PUT", "/x", {}, body=[body])

    assert connections.ask("GET", "/x", {}, into=[into]).filled_bytes == 5 * MB
    assert bytes(into) == bytes(5 * MB)
    assert (tls.heard[0].size_bytes, tls.connections) == (9 * MB, 1)


@pytest.mark.parametrize("named_by", ["the variable", "the profile"])
def test_s3_trusts_what_aws_names_before_what_all_programs_trust(
    tls: Canned,
    certificate: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named_by: str,
) -> None:
    """AWS_CA_BUNDLE, or `ca_bundle` of the profile, wins over SSL_CERT_FILE, which conda sets."""
    import certifi

    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    if named_by == "the variable":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    else:
        monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
        (tmp_path / "config").write_text(f"[default]\nca_bundle = {certificate}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    assert open_store(f"s3://bucket?endpoint={tls.endpoint}").get("x") == b"1"


def test_certificates_that_are_not_there_are_named(
    tls: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistyped path is told as such, with the variables that may name it."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere.pem")
    with pytest.raises(StoreError, match=r"cannot be read from /nowhere\.pem") as caught:
        Connections(tls.endpoint).ask("GET", "/x", {})
    assert "AWS_CA_BUNDLE" in caught.value.hint


def test_a_certificate_nobody_signed_is_refused(tls: Canned) -> None:
    """A server that cannot prove its name hears nothing, and the hint is for company proxies."""
    with pytest.raises(StoreError, match="not trusted") as caught:
        Connections(tls.endpoint).ask("GET", "/x?sig=secret", {})

    assert type(caught.value) is StoreError
    assert "SSL_CERT_FILE" in caught.value.hint
    assert tls.heard == []


def test_an_unknown_name_says_so() -> None:
    """A host that does not exist may be a network that is down: worth another try, with a hint."""
    with pytest.raises(StoreUnavailable) as caught:
        Connections("https://account.invalid").ask("GET", "/x?sig=secret", {})

    assert "account.invalid" in caught.value.message
    assert "spelled right" in caught.value.hint


def test_a_proxy_is_asked_to_open_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTPS goes through HTTPS_PROXY, with its login, and its refusal is no answer of the store."""
    with Canned(Reply(407)) as proxy:
        login = proxy.endpoint.replace("http://", "http://user:p%40ss@")
        monkeypatch.setenv("HTTPS_PROXY", login)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with pytest.raises(StoreError) as caught:
            Connections("https://account.invalid").ask("GET", "/x", {})

    assert "p@ss" not in repr(caught.value) + str(caught.value.__cause__)


PAGE = b"\n<!DOCTYPE html><html><body>Please sign in</body></html>"
HTML = {"Content-Type": "text/html; charset=utf-8"}


@pytest.mark.parametrize(
    ("reply", "is_page"),
    [
        (Reply(200, HTML, PAGE), True),
        (Reply(403, HTML, PAGE), True),
        (Reply(302, {"Location": "http://login.hotel.example/"}), True),
        (Reply(503, HTML, PAGE), False),
        (Reply(200, HTML, b""), False),
        (Reply(200, {"Content-Type": "application/octet-stream"}, PAGE), False),
    ],
    ids=["sign-in", "firewall", "sent on", "busy", "an odd store", "an object"],
)
def test_a_web_page_is_no_answer_of_a_store(reply: Reply, is_page: bool) -> None:
    """No listing, no object and no refusal of a right is made of it; said is what is in between."""
    with Canned(reply) as server:
        connections = Connections(server.endpoint)
        if not is_page:
            assert connections.ask("GET", "/x", {}).status == reply.status
            return
        with pytest.raises(StoreUnavailable, match=r"web page .*sign-in page, a proxy") as told:
            connections.ask("GET", "/x", {})
        assert "sign in to this network" in str(told.value.hint)
