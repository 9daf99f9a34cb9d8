from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.runtime.preemption.signals import SignalWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def wait_for(condition: Callable[[], bool]) -> bool:
    """Return whether `condition` came true within five seconds."""
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.fixture
def restored() -> Iterator[None]:
    """SIGTERM as it was before the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.set_wakeup_fd(-1) == -1, "the wakeup fd was not given back"
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def watch(restored: None) -> Iterator[Callable[..., tuple[SignalWatch, list[str]]]]:
    """Start watches, with a handler that was there before, and close them in the end."""
    made: list[SignalWatch] = []

    def start(previous: Any = None) -> tuple[SignalWatch, list[str]]:
        heard: list[str] = []
        signal.signal(signal.SIGTERM, previous or (lambda *_: heard.append("handler")))
        made.append(SignalWatch(lambda: heard.append("watch")))
        return made[-1], heard

    yield start
    for one in reversed(made):
        one.close()


def test_who_leaves_is_not_killed_by_a_late_sigterm(restored: None) -> None:
    """Closed because the process ends, a SIGTERM that only the system would handle is ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    SignalWatch(lambda: None).close(leaving=True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    SignalWatch(lambda: None).close(leaving=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM], "the script's own handler hears it"


def test_a_raising_handler_is_dropped_only_while_it_is_held(watch: Any, restored: None) -> None:
    """In the loop it is called, once for each signal, and raises nothing; elsewhere it does.

    A handler that the script puts in ours' place later is called, too, and may chain to ours.
    """
    called: list[str] = []

    def first(*_: Any) -> None:
        called.append("first")
        raise SystemExit(0)

    held, _ = watch(first)
    ours: Any = signal.getsignal(signal.SIGTERM)

    def later(number: int, frame: Any) -> None:
        called.append("later")
        ours(number, frame)

    for put_in_place, expected in ((None, ["first"]), (later, ["later", "first"])):
        if put_in_place is not None:
            signal.signal(signal.SIGTERM, put_in_place)
        held.hold()
        called.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        assert called == expected
        held.let_go()
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
    held.close(leaving=True)
    os.kill(os.getpid(), signal.SIGTERM)


def test_who_watched_is_not_held_by_what_forks(restored: None) -> None:
    """What is registered for forks is never taken back, and a notebook may have many runs."""
    watch = SignalWatch(lambda: None)
    gone = weakref.ref(watch)
    watch.close()
    del watch
    gc.collect()
    assert gone() is None


def test_what_the_script_has_put_in_place_since_stays(restored: None) -> None:
    """Its own handler and wakeup fd are not taken away by the end of a run."""
    watch = SignalWatch(lambda: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.closing(socket.socket()) as mine:
        mine.setblocking(False)
        signal.set_wakeup_fd(mine.fileno())
        watch.close()
        assert signal.set_wakeup_fd(-1) == mine.fileno()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_sigterm_is_heard_and_passed_on(watch: Any) -> None:
    """The watch hears it, and the handler that the script had installed still runs."""
    _, heard = watch()
    os.kill(os.getpid(), signal.SIGTERM)

    assert wait_for(lambda: len(heard) == 2)
    assert sorted(heard) == ["handler", "watch"]


def reached(heard: list[str], count: int) -> bool:
    """Return whether so many things were heard."""
    return len(heard) >= count


def test_each_sigterm_is_heard(watch: Any) -> None:
    """SkyPilot and torchrun send it two or three times; none is lost, none does harm."""
    _, heard = watch()
    for _ in range(3):
        count = len(heard)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(partial(reached, heard, count + 2))

    assert heard.count("watch") == 3


def test_a_burst_of_signals_does_no_harm(watch: Any) -> None:
    """A thousand at once: the pipe may fill, the process lives and has heard at least one."""
    _, heard = watch()
    for _ in range(1000):
        os.kill(os.getpid(), signal.SIGTERM)

    assert wait_for(lambda: "watch" in heard)


def test_other_signals_are_none_of_its_business(watch: Any) -> None:
    """A SIGUSR1 wakes the same pipe, but says nothing about ending."""
    _, heard = watch()
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert wait_for(lambda: bool(seen))
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for(lambda: len(heard) == 2)
    signal.signal(signal.SIGUSR1, before)

    assert heard.count("watch") == 1


def test_a_taken_wakeup_is_noticed_and_taken_back(watch: Any) -> None:
    """`asyncio` clears it when a loop ends: each SIGTERM is still heard, once."""
    _, heard = watch()
    assert signal.set_wakeup_fd(-1) != -1
    for count in (2, 4):
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(partial(reached, heard, count))

    assert sorted(heard) == ["handler", "handler", "watch", "watch"]


def test_a_wakeup_in_use_is_left_to_its_owner(watch: Any) -> None:
    """While a loop of `asyncio` listens, both hear a SIGTERM, once each."""
    _, heard = watch()
    theirs, write = socket.socketpair()
    write.setblocking(False)
    mine = signal.set_wakeup_fd(write.fileno())
    for count in (2, 4):
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(partial(reached, heard, count))

    assert signal.set_wakeup_fd(mine) == write.fileno()
    assert theirs.recv(10) == bytes([signal.SIGTERM] * 2)
    assert heard.count("watch") == 2
    theirs.close()
    write.close()


def test_a_handler_that_is_called_after_closing_touches_nothing(restored: None) -> None:
    """A handler of the script's may still chain to it, when the wakeup is another's already."""
    heard: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("handler"))
    one = SignalWatch(lambda: heard.append("watch"))
    handler: Any = signal.getsignal(signal.SIGTERM)
    one.close()
    theirs, write = socket.socketpair()
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno())
    handler(signal.SIGTERM, None)

    assert signal.set_wakeup_fd(-1) == write.fileno()
    assert heard == ["handler"]
    theirs.close()
    write.close()


def test_draining_waits_until_all_that_came_is_acted_on(restored: None) -> None:
    """Who is about to end knows then whether it was told to."""
    heard: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: None)

    def act() -> None:
        time.sleep(0.05)
        heard.append("acted")

    one = SignalWatch(act)
    os.kill(os.getpid(), signal.SIGTERM)
    one.drain(5.0)
    assert heard == ["acted"]
    one.close()
    one.drain(5.0)


def test_closing_puts_the_handler_back(watch: Any) -> None:
    """After it, SIGTERM goes where it went before, and no file or thread is left."""

    def mine(*_: object) -> None:
        pass

    signal.signal(signal.SIGTERM, mine)
    one = SignalWatch(lambda: None)
    one.close()

    assert signal.getsignal(signal.SIGTERM) is mine
    assert wait_for(lambda: "spotguard-signals" not in {t.name for t in threading.enumerate()})
    assert wait_for(lambda: one._read.fileno() == one._write.fileno() == -1)


def run(script: str, seconds: float = 90.0) -> tuple[int, str]:
    """Run a script in a process of its own; return its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=seconds, check=False
    )
    return done.returncode, done.stdout + done.stderr


BLOCKED = """
import ctypes, os, signal, sys, threading, time
from spotguard.runtime.preemption.signals import SignalWatch

def told():
    os.write(1, b"told")
    os._exit(0)

SignalWatch(told)
lock = ctypes.create_string_buffer(64)  # a pthread mutex; taken twice, it blocks for ever
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
libc.pthread_mutex_lock(lock)
"""


@pytest.mark.e2e
def test_sigterm_is_heard_while_the_main_thread_is_blocked_in_c() -> None:
    """A collective holds the main thread for minutes; no Python handler would run meanwhile."""
    assert run(BLOCKED) == (0, "told")


ASYNCIO = """
import asyncio, os, signal, time
from spotguard.runtime.preemption.signals import SignalWatch

heard = []
watch = SignalWatch(lambda: heard.append(os.getpid()))

async def serve():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)

asyncio.run(serve())
os.kill(os.getpid(), signal.SIGTERM)
end = time.monotonic() + 10
while not heard and time.monotonic() < end:
    time.sleep(0.001)
assert heard == [os.getpid()], heard
print("ok")
"""


@pytest.mark.e2e
def test_sigterm_is_heard_after_a_loop_of_asyncio() -> None:
    """It had a signal handler of its own, and left no wakeup fd behind."""
    assert run(ASYNCIO) == (0, "ok\n")


FORKED = """
import os, signal, time
from spotguard.runtime.preemption.signals import SignalWatch

heard = []
watch = SignalWatch(lambda: heard.append(os.getpid()))
for its_own_handler in (False, True):
    ready, say = os.pipe()
    child = os.fork()
    if not child:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if its_own_handler:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.write(say, b".")
        time.sleep(30)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    expected = 7 if its_own_handler else -signal.SIGTERM
    assert os.waitstatus_to_exitcode(status) == expected, status
time.sleep(0.05)
assert heard == [], heard
os.kill(os.getpid(), signal.SIGTERM)
while not heard:
    time.sleep(0.001)
assert heard == [os.getpid()]
watch.close()
child = os.fork()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("ok")
"""


@pytest.mark.e2e
def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    """A DataLoader worker that gets SIGTERM dies of it, as ever; the parent hears nothing."""
    assert run(FORKED) == (0, "ok\n")


OWN_FD_IN_CHILD = """
import os, signal, socket
from spotguard.runtime.preemption.signals import SignalWatch

SignalWatch(lambda: None).close()
mine, write = socket.socketpair()
write.setblocking(False)
signal.set_wakeup_fd(write.fileno())
child = os.fork()
if not child:
    os._exit(0 if signal.set_wakeup_fd(-1) == write.fileno() else 1)
assert os.waitpid(child, 0)[1] == 0
signal.set_wakeup_fd(-1)
print("ok")
"""


@pytest.mark.e2e
def test_a_closed_watch_leaves_children_alone() -> None:
    """What the script installs after it (asyncio's wakeup fd) survives a fork."""
    assert run(OWN_FD_IN_CHILD) == (0, "ok\n")
