"""The nodes of a job come together: only they do, all of them, and nobody waits for ever."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, ClassVar

import pytest

from spotguard.events.message_seal import Seal
from spotguard.launch.ranks import gathering
from spotguard.launch.ranks.gathering import FirstNode, NotGathered, join
from spotguard.launch.ranks.store import listening

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = Seal("a key", "run", "1", "0")
MEETING = 4711


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A socket that listens on loopback."""
    with listening("127.0.0.1") as made:
        yield made


@pytest.fixture(autouse=True)
def _all_closed() -> Iterator[None]:
    """Close what nodes hold."""
    yield
    for node in Joining.all:
        node.join(30.0)
        if node.answer is not None:
            node.answer[0].close()
    Joining.all.clear()


def stays() -> bool:
    """Tell that no signal came."""
    return False


class Joining(threading.Thread):
    """Another node, which joins in a thread of its own."""

    all: ClassVar[list[Joining]] = []

    def __init__(self, server: socket.socket, node: int, seal: Seal = KEY) -> None:
        """Begin at once."""
        super().__init__(daemon=True)
        self._port = server.getsockname()[1]
        self._node, self._seal = node, seal
        self.answer: tuple[socket.socket, int] | None = None
        self.problem: Exception | None = None
        self.all.append(self)
        self.start()

    def run(self) -> None:
        """Join, and keep what came of it."""
        try:
            self.answer = join("127.0.0.1", self._port, self._node, self._seal, leaves=stays)
        except NotGathered as problem:
            self.problem = problem

    def joined(self) -> tuple[socket.socket, int]:
        """Return the answer, once it is there."""
        self.join(30.0)
        assert self.answer is not None, self.problem
        return self.answer


def test_three_nodes_come_together_and_the_first_one_leaves_last(server: socket.socket) -> None:
    """Each is told where ranks meet; who is done goes, and the first node waits for both."""
    with closing(FirstNode(server, 3, KEY)) as first:
        others = [Joining(server, node) for node in (2, 1)]
        assert first.gather(MEETING, leaves=stays)
        connections = [other.joined() for other in others]
        assert [port for _, port in connections] == [MEETING, MEETING]

        waiting = threading.Thread(target=lambda: first.wait_for_others(leaves=stays))
        waiting.start()
        connections[0][0].close()
        waiting.join(0.2)
        assert waiting.is_alive()
        connections[1][0].close()
        waiting.join(30.0)
        assert not waiting.is_alive()


def test_nobody_starts_before_the_last_one_is_there(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of three nodes, two wait, and say who is missing: before long, and when their time is up."""
    monkeypatch.setattr(gathering, "_SAYS_AFTER_S", 0.1)
    monkeypatch.setattr(gathering, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(gathering, "_LOOK_S", 0.05)
    first = FirstNode(server, 3, KEY)
    other = Joining(server, 2)
    with pytest.raises(NotGathered, match="node 1 did not come"), closing(first):
        first.gather(MEETING, leaves=stays)
    other.join(30.0)
    assert other.answer is None
    assert str(other.problem) == "the first node left before all had come"
    said = [line for line in capfd.readouterr().err.splitlines() if "has waited 0 s for" in line]
    assert len(said) == 2
    assert sum("for node 1;" in line for line in said) == 1


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"node 1\n",
        b"\xff\xfe\x00\n",
        b"x" * 5000,
        KEY.close("port", "1").encode() + b"\n",
        KEY.close("node", "0").encode() + b"\n",
        KEY.close("node", "7").encode() + b"\n",
        KEY.close("node", "-1").encode() + b"\n",
        KEY.close("node", "²").encode() + b"\n",
        Seal("a key", "run", "2", "0").close("node", "1").encode() + b"\n",
        b"",
    ],
)
def test_strangers_are_no_nodes(server: socket.socket, said: bytes) -> None:
    """Whatever they say, they are let go, and the node that comes after them is heard."""
    with closing(FirstNode(server, 2, KEY)) as first, ExitStack() as strangers:
        for _ in range(2):
            stranger = strangers.enter_context(socket.create_connection(server.getsockname()))
            stranger.sendall(said)
            if not said:
                stranger.close()
        node = Joining(server, 1)
        assert first.gather(MEETING, leaves=stays)
        assert node.joined()[1] == MEETING


def test_what_is_said_in_pieces_is_heard(server: socket.socket) -> None:
    """A word may come byte by byte."""
    with (
        closing(FirstNode(server, 2, KEY)) as first,
        socket.create_connection(server.getsockname()) as node,
    ):
        node.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def speak() -> None:
            for byte in KEY.close("node", "1").encode() + b"\n":
                node.sendall(bytes([byte]))

        threading.Thread(target=speak).start()
        assert first.gather(MEETING, leaves=stays)
        assert KEY.open("port", node.recv(1000).decode().strip()) == str(MEETING)


def test_a_node_that_begins_anew_counts_once(server: socket.socket) -> None:
    """Its last connection is the one that counts; it is not taken for two nodes."""
    said = KEY.close("node", "1").encode() + b"\n"
    with closing(FirstNode(server, 3, KEY)) as first, ExitStack() as stack:
        before, again = (
            stack.enter_context(socket.create_connection(server.getsockname())) for _ in range(2)
        )
        before.sendall(said)
        again.sendall(said)
        other: list[Joining] = []

        def leaves() -> bool:
            """Have the last node come only when the others have been heard."""
            if looks.pop(0):
                other.append(Joining(server, 2))
            return False

        looks = [False] * 3 + [True] + [False] * 1000
        assert first.gather(MEETING, leaves=leaves)
        assert other[0].joined()[1] == MEETING
        heard = {bool(each.recv(1000)) for each in (before, again)}
        assert heard == {True, False}


def test_another_jobs_first_node_is_not_believed(server: socket.socket) -> None:
    """What it says has no proof."""
    node = Joining(server, 1)
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"4711\n")
        node.join(30.0)
    assert "is not this job's first node" in str(node.problem)


def test_who_leaves_waits_for_nobody(server: socket.socket) -> None:
    """A signal ends the wait on both sides."""
    with closing(FirstNode(server, 2, KEY)) as first:
        assert not first.gather(MEETING, leaves=lambda: True)
        first.wait_for_others(leaves=lambda: True)
    nobody = ("127.0.0.1", server.getsockname()[1] if server.fileno() >= 0 else 9)
    assert join(*nobody, 1, KEY, leaves=lambda: True) is None


def test_a_first_node_that_never_answers_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its address, once half a minute is over, and when the patience is."""
    monkeypatch.setattr(gathering, "_SAYS_AFTER_S", 0.0)
    monkeypatch.setattr(gathering, "_AGAIN_S", 0.01)
    monkeypatch.setattr(gathering, "_PATIENCE_S", 0.05)
    with socket.socket() as silent:  # bound, and not listening: a connection is refused
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(NotGathered, match=f"does not answer at 127.0.0.1:{port}"):
            join("127.0.0.1", port, 1, KEY, leaves=stays)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1, "once a minute"
    assert f"the first node, which does not answer at 127.0.0.1:{port}" in said[0]


def test_a_machine_that_is_gone_without_a_word_is_missed(server: socket.socket) -> None:
    """The kernel asks after it, where it can be told how often."""
    with socket.create_connection(server.getsockname()) as connection:
        gathering.keep_alive(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
