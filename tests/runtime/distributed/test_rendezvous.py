from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from torch._C._distributed_c10d import TCPStore

from spotguard.events import env, message_seal
from spotguard.events.message_seal import Lives, Seal
from spotguard.launch.ranks.store import listening
from spotguard.runtime.distributed import rendezvous
from spotguard.runtime.distributed.rendezvous import Alone, LostContact, Rendezvous
from spotguard.runtime.process.surroundings import speaks_of_peers
from spotguard.testing import FakeRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.runtime.distributed.rendezvous import Coordinator


def server() -> TCPStore:
    """Return a TCP store on a free port, as torchrun runs one.

    Its own client must outlast the 5 s that a name lookup takes where no name service answers.
    """
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


@pytest.fixture(params=["alone", "fake", "tcp"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Coordinator]]:
    """Give each rank a coordinator, of every kind in turn."""
    if request.param == "alone":
        alone = Alone()
        yield lambda _: alone
    elif request.param == "fake":
        words = FakeRendezvous()
        yield words.rank
    else:
        store = server()
        yield lambda _: Rendezvous("127.0.0.1", store.port, "test")


def test_the_first_connection_waits_for_a_store_that_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process may need longer than any answer may take: torch is imported there, too."""
    monkeypatch.setattr(rendezvous, "_PATIENCE_S", 0.0)
    made: list[Rendezvous] = []
    with listening("127.0.0.1") as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        rank = threading.Thread(target=lambda: made.append(Rendezvous.from_environment()))
        rank.start()
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
        rank.join(30.0)
    assert made
    made[0].close(5.0)
    del store


def test_what_one_rank_says_the_others_hear(connect: Any) -> None:
    """Set, then get or peek from another rank and from another thread's connection."""
    one, other = connect(0), connect(1)
    one.set("key", "wörd")

    assert other.get("key", 1.0) == "wörd"
    assert other.peek("key") == "wörd"
    assert other.connect().get("key", 1.0) == "wörd"
    one.set("key", "later")
    assert other.peek("key") == "later"


def test_a_word_that_is_not_said_in_time_is_none(connect: Any) -> None:
    """A silent rank is no error: the caller decides what it means. No time at all is fine too."""
    rank = connect(0)

    assert rank.get("never", 0.02) is None
    assert rank.get("never", 0.0) is None
    assert rank.get("never", -5.0) is None
    assert rank.peek("never") is None


def test_the_first_word_stands(connect: Any) -> None:
    """Of ranks that speak at once exactly one wins, and all learn which."""
    ranks = [connect(rank) for rank in range(4)]
    stands: list[str] = [""] * 4

    def speak(index: int) -> None:
        stands[index] = ranks[index].first("stop", f"rank {index}")

    threads = [threading.Thread(target=speak, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert len(set(stands)) == 1
    assert stands[0].startswith("rank ")
    assert ranks[0].peek("stop") == stands[0]
    assert ranks[1].first("stop", "too late") == stands[0]


def test_a_waiting_rank_hears_at_once(connect: Any) -> None:
    """Nobody polls: the word wakes who waits for it."""
    one, other = connect(0), connect(1)
    heard: list[Any] = []
    waiting = threading.Thread(target=lambda: heard.append(other.get("key", 10.0)))
    waiting.start()
    one.set("key", "now")
    waiting.join(5)

    assert heard == ["now"]


def test_a_word_that_comes_as_time_is_up_confuses_nobody() -> None:
    """Heard now or at the next look: torch's own wait loses the thread there, in one of fifty."""
    store = server()
    listener, speaker = (Rendezvous("127.0.0.1", store.port, "test") for _ in range(2))
    chance = random.Random(0)
    for number in range(300):
        later = threading.Timer(chance.uniform(0.002, 0.004), speaker.set, [f"{number}", "word"])
        later.start()
        end = time.monotonic() + 10
        while listener.get(f"{number}", 0.003) is None:
            assert time.monotonic() < end, "it was never heard"
        later.join()


def test_rounds_do_not_hear_each_other() -> None:
    """A restart under the same torchrun begins with nothing said."""
    store = server()
    Rendezvous("127.0.0.1", store.port, "spotguard/0").set("stop", "yes")

    assert Rendezvous("127.0.0.1", store.port, "spotguard/1").peek("stop") is None


@pytest.mark.slow
def test_a_closed_connection_ends_all_that_came_of_it() -> None:
    """No thread of a run that is over stays, whoever still holds its connections."""
    store, before = server(), set(threading.enumerate())
    words = Rendezvous("127.0.0.1", store.port, "test")
    others = [words.connect(), words.connect().connect()]
    assert len(set(threading.enumerate()) - before) == 4
    words.close(60.0)
    assert set(threading.enumerate()) <= before
    assert others


def test_a_dead_store_is_lost_contact() -> None:
    """The store lives with the first node; when it is gone every call says so, in one way.

    A `set` waits for no answer, so the first one after the end may go unnoticed.
    """
    store = server()
    rank = Rendezvous("127.0.0.1", store.port, "test")
    rank.set("key", "word")
    del store
    calls: list[Callable[[], object]] = [
        lambda: rank.peek("key"),
        lambda: rank.get("key", 0.1),
        lambda: rank.first("a", "b"),
        lambda: rank.set("a", "b"),
    ]

    for call in calls:
        with pytest.raises(ConnectionError):
            call()


def test_a_frozen_store_is_lost_contact() -> None:
    """Its machine was cut off: no call hangs, and after the first one none waits any more.

    If it comes back, so does the contact: a process that stood still must not be deaf for ever.
    """
    listening, told = os.pipe()
    host = os.fork()
    if not host:
        store = server()
        os.write(told, str(store.port).encode())
        signal.pause()
    try:
        rank = Rendezvous("127.0.0.1", int(os.read(listening, 10)), "test")
        rank.set("key", "word")
        os.kill(host, signal.SIGSTOP)
        rank.hurry(0.1)
        calls: tuple[Callable[[], object], ...] = (
            lambda: rank.get("never", 0.1),
            lambda: rank.peek("key"),
            lambda: rank.set("key", "other"),
            lambda: rank.first("key", "other"),
        )
        for call in calls:
            with pytest.raises(LostContact, match="does not answer") as caught:
                call()
            assert speaks_of_peers(caught.value)
        os.kill(host, signal.SIGCONT)
        end = time.monotonic() + 10
        while not _answers(rank):
            assert time.monotonic() < end, "it is deaf for ever"
    finally:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
        os.close(listening)
        os.close(told)


def _answers(rank: Rendezvous) -> bool:
    try:
        return rank.peek("key") is not None
    except ConnectionError:
        return False


def test_the_fake_loses_contact_on_cue() -> None:
    """Also in the middle of a wait, and only for the ranks that were named."""
    words = FakeRendezvous()
    heard: list[Any] = []

    def wait() -> None:
        try:
            words.rank(1).get("never", 10.0)
        except ConnectionError as problem:
            heard.append(problem)

    waiting = threading.Thread(target=wait)
    waiting.start()
    words.lose(1)
    waiting.join(5)

    assert len(heard) == 1
    words.rank(0).set("key", "word")
    with pytest.raises(ConnectionError):
        words.rank(1).connect()


def test_the_fake_mutes_and_delays_on_cue() -> None:
    """A muted rank notices nothing; `before` sees every operation ahead of its effect."""
    seen: list[tuple[int, str, str]] = []
    words = FakeRendezvous(patience_s=0.01, before=lambda *call: seen.append(call))
    words.mute(1)
    words.rank(1).set("key", "unheard")

    assert words.rank(1).first("other", "mine") == "mine"
    assert words.rank(0).get("key", 60.0) is None, "its patience is short, whatever it was given"
    assert seen == [(1, "set", "key"), (1, "first", "other"), (0, "get", "key")]


KEY = "0f" * 32


def sealed(store: TCPStore, key: str = KEY, attempt: str = "1") -> Rendezvous:
    """Return a rank's client of the store, as a launched job has it."""
    return Rendezvous("127.0.0.1", store.port, "test", Seal(key, "run-1", attempt))


def stranger(store: TCPStore) -> Rendezvous:
    """Return the client of somebody who can reach the port, and knows all but the key."""
    return Rendezvous("127.0.0.1", store.port, "test")


def test_ranks_with_the_key_hear_each_other() -> None:
    """Also who was first, and words with spaces, newlines and letters of all sorts."""
    store = server()
    one, other = sealed(store), sealed(store)
    one.set("key", "wörd with\nspaces ")
    assert other.get("key", 5.0) == other.peek("key") == "wörd with\nspaces "
    assert one.connect().first("vote", "40") == "40"
    assert other.first("vote", "41") == "40"


def test_a_stranger_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word is looked for many times a second: the log is not filled by who forges one."""
    warnings: list[object] = []
    monkeypatch.setattr(message_seal.log, "warning", lambda *words: warnings.append(words[1]))
    mine = Seal(KEY)
    assert [mine.open("request", "forged") for _ in range(100)] == [None] * 100
    assert mine.open("peers/1", "forged") is None
    assert warnings == ["request", "peers/1"]


def test_a_strangers_word_is_not_heard() -> None:
    """Nobody stops a job, moves its stop or joins its ring by writing into torch's store."""
    store = server()
    rank = sealed(store)
    for forged in ("40", "", " 40", f"{'0' * 64} 40", "\x00", "é" * 70):
        stranger(store).set("stop/entered/1", forged)
        assert rank.peek("stop/entered/1") is None
        assert rank.get("stop/entered/1", 0.0) is None
    sealed(store).set("stop/entered/1", "41")  # the rank itself comes later
    assert rank.get("stop/entered/1", 5.0) == "41"
    stranger(store).first("request", "{}")
    with pytest.raises(LostContact, match="a stranger"):
        rank.first("request", "mine")


@pytest.mark.parametrize(
    "changed",
    [env.RUN_ID, env.ATTEMPT, env.KEY, "TORCHELASTIC_RESTART_COUNT", "life", "name", "sender"],
)
@pytest.mark.parametrize("name", ["stop/entered/1", "save/40/periodic/1", "ring/1/2", "peers/1"])
def test_a_recorded_word_is_not_heard_again(
    name: str, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said once is worth nothing in another run, attempt or round, or from another rank.

    The ring's greetings are proved by the same seal.
    """
    environ = {env.RUN_ID: "a-run", env.ATTEMPT: "1", env.KEY: KEY}
    recorded = Seal.from_environment(environ).close(name, "word")
    assert Seal.from_environment(environ).open(name, recorded) == "word"
    if changed == "sender":
        name = f"{name[:-1]}3"
    elif changed == "name":
        name = f"restore/1/{name}"
    elif changed == "life":
        monkeypatch.setattr(Lives, "over", 1)
    else:
        environ[changed] = "7"
    assert Seal.from_environment(environ).open(name, recorded) is None


@pytest.mark.parametrize("where", ["another key", "another name", "another attempt"])
def test_a_word_that_was_overheard_is_worth_nothing_elsewhere(where: str) -> None:
    """A true word, copied to another name or kept for the next attempt, is not heard there."""
    store = server()
    said_with = KEY if where != "another key" else "1e" * 32
    sealed(store, said_with, "1").set("stop/entered/1", "7")
    overheard = stranger(store).peek("stop/entered/1")
    assert overheard is not None
    assert overheard.endswith("7")
    name = "stop/entered/1" if where != "another name" else "stop/entered/2"
    stranger(store).set(name, overheard)
    hearer = sealed(store, KEY, "2" if where == "another attempt" else "1")
    assert hearer.peek(name) is None
