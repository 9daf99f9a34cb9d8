from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.events.message_seal import Seal
from spotguard.runtime.preemption import peer_monitor as module
from spotguard.runtime.preemption.peer_monitor import Peers
from spotguard.shared import net
from spotguard.shared.net import address_towards
from spotguard.testing import FakeRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 10.0


class Ring:
    """The ranks of a ring in one process, and what each was told."""

    def __init__(
        self, world_size: int, *, timeout_s: float = 60.0, key: str = "", kind: type[Peers] = Peers
    ) -> None:
        self.words = FakeRendezvous()
        self.told: list[list[tuple[int, str]]] = [[] for _ in range(world_size)]
        self._changed = threading.Condition()
        self.ranks = [
            kind(
                rank,
                world_size,
                timeout_s=timeout_s,
                on_lost=self._listener(rank),
                seal=Seal(key, "run-1", "1"),
            )
            for rank in range(world_size)
        ]

    def _listener(self, rank: int) -> Callable[[int, str], None]:
        def lost(peer: int, why: str) -> None:
            with self._changed:
                self.told[rank].append((peer, why))
                self._changed.notify_all()

        return lost

    def start(self, *, train: bool = True) -> Ring:
        """Join all, and wait until every rank has both its neighbours."""
        for rank, peers in enumerate(self.ranks):
            peers.start(self.words.rank(rank))
        until(lambda: all(len(peers._links) == 2 for peers in self.ranks))
        for peers in self.ranks:
            if train:
                peers.train()
        if train:
            until(lambda: all(link.trains for peers in self.ranks for link in peers._links))
        return self

    def wait_told(self, ranks: set[int], *lost: int) -> None:
        """Return once these ranks, and no others, know who is lost."""
        with self._changed:
            known = self._changed.wait_for(
                lambda: all({p for p, _ in self.told[r]} >= set(lost) for r in ranks), PATIENCE_S
            )
        assert known, self.told
        assert all(sorted(p for p, _ in self.told[r]) == sorted(lost) for r in ranks), self.told

    def die(self, *ranks: int) -> None:
        """End ranks as the kernel does: their connections are closed, without a word."""
        links = [link for rank in ranks for link in self.ranks[rank]._links]
        for rank in ranks:
            self.ranks[rank]._links.clear()  # the dead say nothing
            self.ranks[rank]._closed = True
        for link in links:
            with contextlib.suppress(OSError):  # its thread was quicker
                link.socket.shutdown(socket.SHUT_RDWR)
        for rank in ranks:
            self.ranks[rank]._thread.join(PATIENCE_S)
        for link in links:
            link.socket.close()

    def close(self) -> None:
        """Leave in good order."""
        for peers in self.ranks:
            peers.close(PATIENCE_S)


def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


@pytest.fixture
def rings() -> Iterator[Callable[..., Ring]]:
    """Make rings that are closed at the end."""
    made: list[Ring] = []

    def make(world_size: int, **over: Any) -> Ring:
        made.append(Ring(world_size, **over))
        return made[-1]

    yield make
    for ring in made:
        ring.close()


@pytest.mark.parametrize("world_size", [2, 3, 4, 9])
def test_a_death_is_told_to_all(rings: Callable[..., Ring], world_size: int) -> None:
    """Two neighbours see it, and pass it on around the ring; each rank is told once."""
    ring = rings(world_size).start()
    ring.die(1)
    ring.wait_told(set(range(world_size)) - {1}, 1)
    assert "its process has died" in ring.told[0][0][1]


def test_the_death_of_a_whole_node_leaves_a_chain(rings: Callable[..., Ring]) -> None:
    """Four neighbours at once: the ends of what is left are told to everybody in it."""
    ring = rings(9).start()
    ring.die(3, 4, 5, 6)
    ring.wait_told({0, 1, 2, 7, 8}, 3, 6)


def test_leaving_in_good_order_is_no_loss(rings: Callable[..., Ring]) -> None:
    """A rank that is done says so before its connections close."""
    ring = rings(3).start()
    ring.ranks[1].close(PATIENCE_S)
    until(lambda: all(len(ring.ranks[r]._links) == 1 for r in (0, 2)))
    assert ring.told == [[], [], []]


def test_a_goodbye_comes_before_the_end_of_the_connection(rings: Callable[..., Ring]) -> None:
    """A rank that is done is not called dead, however its two threads take turns in leaving.

    Here the ring's thread is given all the time to go first.
    """

    class Hesitates(Peers):
        def _say(self, *words: bytes) -> None:
            if words == (b"bye",) and threading.current_thread() is not self._thread:
                self._thread.join(0.3)
            super()._say(*words)

    ring = rings(3, timeout_s=0.1, kind=Hesitates)
    ring.start(train=False)
    ring.ranks[2].close(PATIENCE_S)
    until(lambda: all(len(peers._links) == 1 for peers in ring.ranks[:2]))

    assert ring.told == [[], [], []]


def test_who_is_done_before_the_ring_is_joined_is_not_dead(rings: Callable[..., Ring]) -> None:
    """A training that has no step left to do may end before its neighbours have been let in."""
    ring = rings(3)
    for rank in (0, 1):
        ring.ranks[rank].start(ring.words.rank(rank))
    until(lambda: len(ring.ranks[0]._links) == 1)
    ring.ranks[1].close(PATIENCE_S)  # it waited for rank 2, and has not yet let in rank 0
    ring.ranks[2].start(ring.words.rank(2))
    until(lambda: [link.peer for link in ring.ranks[0]._links] == [2])

    assert ring.told == [[], [], []]


def test_a_machine_that_does_not_answer_is_lost(
    rings: Callable[..., Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gave up sending: TCP_USER_TIMEOUT is set, and its error is told as such."""
    ring = rings(2, timeout_s=10.0).start()
    link = ring.ranks[0]._links[0]
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000

    def hear(heard: module._Link) -> list[list[bytes]] | None:
        if heard is link:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        return []

    monkeypatch.setattr(module._Link, "hear", hear)
    ring.ranks[1].train()  # any word, to wake the thread
    ring.wait_told({0}, 1)
    assert ring.told[0] == [(1, "its machine does not answer: Connection timed out")]


def test_silence_is_judged_in_training_only(
    rings: Callable[..., Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen process: lost after three timeouts, but not before both are in their loops.

    Loading data or compiling may hold the interpreter's lock for long.
    """
    ring = rings(2, timeout_s=0.1).start(train=False)
    say, mute = module._Link.say, ring.ranks[1]._links
    monkeypatch.setattr(
        module._Link,
        "say",
        lambda link, *words: None if link in mute and words == (b"alive",) else say(link, *words),
    )
    ring.ranks[0].train()
    until(lambda: all(link.trains for link in ring.ranks[1]._links))
    heard_at = ring.ranks[0]._links[0].heard_at
    until(lambda: time.monotonic() > heard_at + 0.5)
    assert ring.told == [[], []], "rank 1 trains not yet"

    ring.ranks[1].train()
    ring.wait_told({0}, 1)
    assert "its process is silent for 0 s" in ring.told[0][0][1]


def test_who_slept_accuses_nobody(
    rings: Callable[..., Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was frozen itself hears what came meanwhile before it judges."""
    ring = rings(2, timeout_s=0.1).start()
    ring.ranks[1]._trains = False  # it judges nobody
    asleep, awake = threading.Event(), threading.Event()
    say, mine = module._Link.say, ring.ranks[0]._links

    def sleepy(link: module._Link, *words: bytes) -> None:
        if link in mine and not awake.is_set():
            asleep.set()
            awake.wait(PATIENCE_S)
        say(link, *words)

    monkeypatch.setattr(module._Link, "say", sleepy)
    assert asleep.wait(PATIENCE_S)
    slept_at = time.monotonic()
    until(lambda: time.monotonic() > slept_at + 0.5)
    awake.set()
    until(lambda: any(link.heard_at > slept_at + 0.7 for link in mine))
    assert ring.told == [[], []]


def test_strangers_are_not_let_in(rings: Callable[..., Ring]) -> None:
    """Who does not know the token of the rendezvous is no peer, and keeps nobody out."""
    ring = rings(2)
    port = ring.ranks[0]._server.getsockname()[1]
    for words in (b"1 0123456789abcdef\n", b"x" * 1000, b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
    ring.start()
    assert ring.told == [[], []]


def test_who_reads_the_token_is_still_a_stranger(rings: Callable[..., Ring]) -> None:
    """Whoever reaches the rendezvous can read tokens in it; the key is not in it."""
    ring = rings(2, key="0f" * 32)
    port, token = ring.ranks[0]._server.getsockname()[1], ring.ranks[0]._token
    overheard = ring.ranks[0]._greeting(0, 1, token)  # of another connection
    for words in (f"1 {token}\n".encode(), overheard):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
    ring.start()
    assert ring.told == [[], []]
    ring.die(1)
    ring.wait_told({0}, 1)


def test_a_forked_worker_does_not_keep_a_dead_rank_alive(rings: Callable[..., Ring]) -> None:
    """What a DataLoader's worker inherits is closed there, so that its parent's death shows."""
    ring = rings(2).start()
    descriptors = [link.socket.fileno() for peers in ring.ranks for link in peers._links]
    child = os.fork()
    if not child:
        left = 0
        for descriptor in descriptors:
            try:
                os.fstat(descriptor)
                left += 1
            except OSError:
                pass
        os._exit(left)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert all(link.socket.fileno() >= 0 for peers in ring.ranks for link in peers._links)


def test_the_address_is_the_one_on_the_way() -> None:
    """On one machine it is loopback: nobody else can connect."""
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("localhost") in ("127.0.0.1", "::1")


def test_a_name_of_its_own_is_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many machines know their own name as 127.0.1.1, where no other machine finds them."""
    ways: dict[str, str] = {"127.0.1.1": "127.0.1.1", "192.0.2.1": "10.0.0.7"}

    def own(_: int, towards: tuple[str, int]) -> str:
        if towards[0] not in ways:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        return ways[towards[0]]

    entry = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entry)
    monkeypatch.setattr(net, "_own_address", own)
    assert address_towards("127.0.1.1") == "127.0.1.1"
    assert address_towards("node-0") == "10.0.0.7"
    del ways["192.0.2.1"]
    assert address_towards("node-0") == "127.0.1.1", "without a network there are no others"
