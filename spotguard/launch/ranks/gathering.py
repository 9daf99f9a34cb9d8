"""How the nodes of a job begin and end together, before and after their ranks.

The first node listens. Each of the others connects, says which node it is, and is told, once all
are there, at which port the ranks meet: so no rank waits for one that has not been started. The
connections stay until their nodes' ranks have ended, for the first node keeps the store that they
need, and its own ranks may be done before.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.events.message_seal import Seal

_PATIENCE_S: Final = 900.0
"""How long nodes wait for each other, at the beginning; torchrun's default, too."""
_SAYS_AFTER_S: Final = 30.0
_SAYS_EVERY_S: Final = 60.0
_END_PATIENCE_S: Final = 300.0
"""How long the first node waits for the others at the end; torchrun's default, too."""
_LOOK_S: Final = 0.5
"""Between looks whether this node was told to leave."""
_CONNECT_S: Final = 10.0
_AGAIN_S: Final = 0.2
_LONGEST: Final = 512
"""Of what a node says. Whoever says more is none."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds and tries, after which a machine that is gone is taken for gone."""

NODE, PORT = "node", "port"


class NotGathered(Exception):
    """The nodes did not come together; says which are missing, or who left."""


class _Wait:
    """A wait for other nodes, of which the log hears when it takes long."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._says_at = self._began + _SAYS_AFTER_S

    def is_over(self) -> bool:
        return time.monotonic() > self._began + _PATIENCE_S

    def say(self, for_what: str) -> None:
        """Tell for what, once it has taken half a minute, and each minute from then on."""
        now = time.monotonic()
        if now >= self._says_at:
            self._says_at = now + _SAYS_EVERY_S
            sys.stderr.write(
                f"spotguard: has waited {now - self._began:.0f} s for {for_what}; "
                f"gives up after {_PATIENCE_S / 60:g} min\n"
            )
            sys.stderr.flush()


class FirstNode:
    """The first node's side. Used by one thread."""

    def __init__(self, server: socket.socket, nodes: int, seal: Seal) -> None:
        """Gather the others at a socket that listens."""
        self._server = server
        self._nodes = nodes
        self._seal = seal
        self._there: dict[int, socket.socket] = {}
        self._words: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def gather(self, meeting_port: int, *, leaves: Callable[[], bool]) -> bool:
        """Block until all nodes are there and know where their ranks meet; False if it leaves.

        Raises:
            NotGathered: not all came within a quarter of an hour.
        """
        wait = _Wait()
        while len(self._there) < self._nodes - 1:
            if leaves():
                return False
            wait.say(self._missing())
            if wait.is_over():
                raise NotGathered(f"{self._missing()} did not come within {_PATIENCE_S / 60:g} min")
            for ready in self._ready():
                self._hear(ready)
        said = self._seal.close(PORT, str(meeting_port)).encode() + b"\n"
        for node in self._there.values():
            with contextlib.suppress(OSError):  # it is gone again: its ranks will be missed
                node.sendall(said)
        return True

    def wait_for_others(self, *, leaves: Callable[[], bool]) -> None:
        """Block until the ranks of all other nodes have ended, for five minutes at most."""
        give_up_at = time.monotonic() + _END_PATIENCE_S
        while self._there and not leaves() and time.monotonic() < give_up_at:
            for ready in self._ready():
                self._hear(ready)

    def close(self) -> None:
        """Let all others go."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _ready(self) -> Iterator[socket.socket]:
        for key, _ in self._selector.select(_LOOK_S):
            assert isinstance(key.fileobj, socket.socket)
            yield key.fileobj

    def _hear(self, ready: socket.socket) -> None:
        if ready is self._server:
            self._accept()
            return
        try:
            heard = ready.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        self._words[ready] = words = self._words.get(ready, b"") + heard
        node = self._node_of(words)
        if not heard or len(words) > _LONGEST or (b"\n" in words and node is None):
            self._forget(ready)
        elif node is not None and self._there.get(node) is not ready:
            if node in self._there:  # it begins anew
                self._forget(self._there[node])
            self._there[node] = ready

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            other, _ = self._server.accept()
            other.setblocking(False)
            keep_alive(other)
            self._selector.register(other, selectors.EVENT_READ)

    def _node_of(self, words: bytes) -> int | None:
        said, end, _ = words.partition(b"\n")
        word = self._seal.open(NODE, said.decode(errors="replace")) if end else None
        if word is None or not (word.isascii() and word.isdigit()):
            return None
        return int(word) if 0 < int(word) < self._nodes else None

    def _forget(self, gone: socket.socket) -> None:
        self._selector.unregister(gone)
        self._words.pop(gone, None)
        self._there = {node: other for node, other in self._there.items() if other is not gone}
        gone.close()

    def _missing(self) -> str:
        missing = [str(node) for node in range(1, self._nodes) if node not in self._there]
        return f"node{'s' if len(missing) > 1 else ''} {', '.join(missing)}"


def join(
    host: str, port: int, node: int, seal: Seal, *, leaves: Callable[[], bool]
) -> tuple[socket.socket, int] | None:
    """Block until all nodes are there; None if this one leaves before.

    Return the connection to the first node, to be kept as long as this node has ranks, and the port
    of the first node where all ranks meet.

    Raises:
        NotGathered: the first node does not answer, or has left.
    """
    first = _connected(host, port, leaves)
    if first is None:
        return None
    try:
        first.sendall(seal.close(NODE, str(node)).encode() + b"\n")
        heard = _heard(first, leaves)
        word = None if heard is None else seal.open(PORT, heard)
        if heard is not None and not (word and word.isascii() and word.isdigit()):
            raise NotGathered(f"what answers at {host}:{port} is not this job's first node")
    except BaseException:
        first.close()
        raise
    if word is None:
        first.close()
        return None
    return first, int(word)


def _heard(first: socket.socket, leaves: Callable[[], bool]) -> str | None:
    """Return the line that the first node says; None if this one leaves before."""
    first.settimeout(_LOOK_S)
    heard = b""
    wait = _Wait()
    while b"\n" not in heard:
        if leaves():
            return None
        wait.say("other nodes, which the log of the first one names")
        try:
            more = first.recv(_LONGEST)
        except TimeoutError:
            continue
        except OSError:
            more = b""
        if not more or len(heard) > _LONGEST:
            raise NotGathered("the first node left before all had come")
        heard += more
    return heard.partition(b"\n")[0].decode(errors="replace")


def _connected(host: str, port: int, leaves: Callable[[], bool]) -> socket.socket | None:
    wait = _Wait()
    while not leaves():
        try:
            first = socket.create_connection((host, port), timeout=_CONNECT_S)
        except OSError as problem:
            words = f"{host}:{port}: {problem}"
            if wait.is_over():
                raise NotGathered(f"the first node does not answer at {words}") from problem
            wait.say(f"the first node, which does not answer at {words}")
            time.sleep(_AGAIN_S)
        else:
            keep_alive(first)
            return first
    return None


def keep_alive(connection: socket.socket) -> None:
    """Have a connection end when the machine at its other end is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # a Mac has other names
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
