"""Finding out at once that another rank is gone, with nothing to do in the training loop.

A collective whose peer has died may hang for its whole timeout: half an hour by default. So the
ranks form a ring of TCP connections, each to the rank after it, that a background thread keeps:

- A process that dies is known at once: its machine closes the connection.
- A machine that vanishes is known when the kernel's own probes stay unanswered (TCP_USER_TIMEOUT,
  Linux), however busy the process there was.
- A process that is frozen is known by its silence, which is given more time: a call that holds
  the interpreter's lock is silent, too. Only a training loop is expected to speak.

Who finds out tells the rest of the ring, so it takes one timeout for all. The ring needs neither
the rendezvous, which dies with the first node, nor the collectives.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from spotguard.events.message_seal import Seal
from spotguard.shared.net import address_towards

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.distributed.rendezvous import Coordinator

log = logging.getLogger("spotguard")

_FOUND_BY = 0.6
"""Part of the timeout after which a machine is given up; the rest is for leaving, saved."""
_SILENCE = 3.0
"""How many timeouts a process whose machine answers may be silent."""
_BEATS = 10
"""Signs of life in a timeout."""
_JOIN_S = 120.0
_LOOK_UP_S = 0.25

_ALIVE, _TRAINS, _BYE, _LOST = b"alive", b"trains", b"bye", b"lost"


@dataclass(eq=False)
class _Link:
    """A connection to a neighbour in the ring."""

    peer: int
    socket: socket.socket
    heard_at: float = field(default_factory=time.monotonic)
    trains: bool = False
    said_bye: bool = False
    unread: bytes = b""

    def say(self, *words: bytes) -> None:
        """Send a line, unless the other side is gone or does not read."""
        with contextlib.suppress(OSError):
            self.socket.send(b" ".join(words) + b"\n")

    def hear(self) -> list[list[bytes]] | None:
        """Return the lines that came since, each as its words; None if it is closed."""
        try:
            data = self.socket.recv(4096)
        except BlockingIOError:
            return []
        if not data:
            return None
        self.heard_at = time.monotonic()
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [line.split() for line in lines]


class Peers:
    """This rank's two places in the ring. Made by the job if there are other ranks."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        on_lost: Callable[[int, str], None],
        address: str = "127.0.0.1",
        seal: Seal | None = None,
    ) -> None:
        """Listen on a free port of `address`; `start` joins the ring.

        Args:
            rank: This rank.
            world_size: The number of ranks, 2 or more.
            timeout_s: Seconds in which all ranks should have left after a machine vanished.
            on_lost: Called as `on_lost(rank, why)` in the ring's thread, once for each rank.
            address: An address of this machine that the other ranks can reach.
            seal: Proves to a neighbour that this is a rank: its token can be read by strangers.
        """
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._links: list[_Link] = []
        self._lost: set[int] = set()
        self._trains = False
        self._closed = False
        self._token = secrets.token_hex(8)
        self._seal = seal or Seal()
        self._server = socket.create_server((address, 0), family=_family(address))
        self._server.settimeout(_LOOK_UP_S)
        self._address = address
        self._thread = threading.Thread(target=self._run, name="spotguard-peers", daemon=True)
        # What a worker process inherits would keep the connection open when this one has died.
        myself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(myself()))

    def start(self, coordinator: Coordinator) -> None:
        """Join the ring in the background; `coordinator` must be this thread's own."""
        word = {"host": self._address, "port": self._server.getsockname()[1], "token": self._token}
        coordinator.set(f"peers/{self._rank}", json.dumps(word))
        self._coordinator = coordinator
        self._thread.start()

    def train(self) -> None:
        """Say that the training loop begins: from here on silence means something."""
        self._trains = True
        self._say(_TRAINS)

    def close(self, timeout_s: float = 0.0) -> None:
        """Leave the ring in good order; blocks `timeout_s` at most."""
        self._say(_BYE)  # before the thread may see that it is over, and close the connections
        self._closed = True
        for link in list(self._links):
            with contextlib.suppress(OSError):  # it is closed already
                link.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _say(self, *words: bytes) -> None:
        for link in list(self._links):
            link.say(*words)

    # ------------------------------------------------------------------ the ring's thread

    def _run(self) -> None:
        try:
            self._join()
            if self._trains:  # it may have begun while the ring was being joined
                self._say(_TRAINS)
            with selectors.DefaultSelector() as selector:
                for link in self._links:
                    selector.register(link.socket, selectors.EVENT_READ, link)
                self._watch(selector)
        except (OSError, ValueError, KeyError) as problem:  # ConnectionError is an OSError
            if not self._closed:
                log.warning("rank %d cannot look after its peers: %s", self._rank, problem)
        finally:
            if self._closed:
                self._say_bye_to_who_came_late()
            self._server.close()
            for link in self._links:
                link.socket.close()

    def _join(self) -> None:
        """Connect to the rank after this one, and accept the one before it."""
        after = (self._rank + 1) % self._world_size
        before = (self._rank - 1) % self._world_size
        where = json.loads(self._hear_of(after))
        outward = socket.create_connection((where["host"], int(where["port"])), timeout=_JOIN_S)
        outward.sendall(self._greeting(self._rank, after, where["token"]))
        self._add(after, outward)
        expected = self._greeting(before, self._rank, self._token)
        end = time.monotonic() + _JOIN_S
        while not self._closed:
            try:
                inward, _ = self._server.accept()
            except TimeoutError:
                if time.monotonic() > end:
                    raise
                continue
            inward.settimeout(5.0)
            with contextlib.suppress(OSError):
                if hmac.compare_digest(_received(inward, len(expected)), expected):
                    self._add(before, inward)
                    return
            inward.close()  # a stranger, who does not know the token

    def _say_bye_to_who_came_late(self) -> None:
        """Say it to neighbours whose connections `close` did not know, or nobody has let in."""
        self._say(_BYE)
        self._server.setblocking(False)
        with contextlib.suppress(OSError):  # nobody else waits
            while True:
                inward, _ = self._server.accept()
                with contextlib.suppress(OSError), inward:
                    inward.settimeout(_LOOK_UP_S)
                    inward.sendall(_BYE + b"\n")
                    inward.shutdown(socket.SHUT_WR)
                    inward.recv(4096)  # with words unread, closing would cut off ours

    def _greeting(self, peer: int, to: int, token: str) -> bytes:
        """Return what a rank says first to the one after it: good for this connection only."""
        proof = self._seal.proof(f"ring/{peer}/{to}", token) or token
        return f"{peer} {proof}\n".encode()

    def _hear_of(self, peer: int) -> str:
        """Return where a peer listens, once it has said so."""
        end = time.monotonic() + _JOIN_S
        while not self._closed and time.monotonic() < end:
            word = self._coordinator.get(f"peers/{peer}", _LOOK_UP_S)
            if word is not None:
                return word
        raise ConnectionError(f"rank {peer} did not say where it listens")

    def _add(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            limit_ms = int(1000 * _FOUND_BY * self._timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        self._links.append(_Link(peer, connection))

    def _watch(self, selector: selectors.BaseSelector) -> None:
        beat_s = self._timeout_s / _BEATS
        beat_at = time.monotonic()
        while not self._closed and self._links:
            for key, _ in selector.select(max(beat_at - time.monotonic(), 0.0)):
                self._hear(key.data, selector)
            now = time.monotonic()  # one instant for all: this thread may be held up anywhere
            if now < beat_at:
                continue
            if now - beat_at > beat_s:  # it was us who slept: what came meanwhile is not read yet
                for link in self._links:
                    link.heard_at = now
            beat_at = now + beat_s
            self._say(_ALIVE)
            for link in list(self._links):
                silent_s = now - link.heard_at
                if self._trains and link.trains and silent_s > _SILENCE * self._timeout_s:
                    self._gone(link, selector, f"its process is silent for {silent_s:.0f} s")

    def _hear(self, link: _Link, selector: selectors.BaseSelector) -> None:
        try:
            lines = link.hear()
        except ConnectionError:
            lines = None
        except OSError as problem:
            self._gone(link, selector, f"its machine does not answer: {problem.strerror}")
            return
        if lines is None:
            self._gone(link, selector, "its process has died")
            return
        for word, *rest in filter(None, lines):
            link.trains = link.trains or word == _TRAINS
            link.said_bye = link.said_bye or word == _BYE
            if word == _LOST:
                self._tell(int(rest[0]), b" ".join(rest[1:]).decode())

    def _gone(self, link: _Link, selector: selectors.BaseSelector, why: str) -> None:
        selector.unregister(link.socket)
        self._links.remove(link)
        link.socket.close()
        if not link.said_bye and not self._closed:
            self._tell(link.peer, why)

    def _tell(self, peer: int, why: str) -> None:
        """Pass it on around the ring, then act on it: the latter may not return."""
        if peer in self._lost:
            return
        self._lost.add(peer)
        self._say(_LOST, str(peer).encode(), why.encode())
        self._on_lost(peer, why)


def join_ring(
    coordinator: Coordinator,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    on_lost: Callable[[Coordinator, int, str], None],
) -> Peers | None:
    """Begin to look after the other ranks, if they can be reached.

    `on_lost` is told of the ring's own connection, too: only its thread may use that.
    """
    try:
        words = coordinator.connect()
        peers = Peers(
            rank,
            world_size,
            timeout_s=timeout_s,
            on_lost=partial(on_lost, words),
            address=address_towards(os.environ["MASTER_ADDR"]),
            seal=Seal.from_environment(),
        )
        peers.start(words)
    except OSError as problem:
        log.warning("ranks that vanish cannot be looked for: %s", problem)
        return None
    return peers


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _received(connection: socket.socket, size: int) -> bytes:
    """Return the first `size` bytes that come, or fewer if it is closed."""
    got = b""
    while len(got) < size and (data := connection.recv(size - len(got))):
        got += data
    return got


def _forget(peers: Peers | None) -> None:
    """In a forked child: the connections are its parent's."""
    if peers is not None:
        peers._closed = True
        peers._server.close()
        for link in peers._links:
            link.socket.close()
