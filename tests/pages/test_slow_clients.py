"""A client that says half of what it wants holds no connection, and one that listens keeps its."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from spotguard.pages.dashboard.slow_clients import ImpatientProtocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

WHOLE = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Never answer: what is asked for goes on."""


class Timer:
    """What is to happen later, unless it is cancelled."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self.cancelled = False

    def cancel(self) -> None:
        """Let it not happen."""
        self.cancelled = True

    def fire(self) -> None:
        """Let the time be over."""
        if not self.cancelled:
            self._act()


class Loop:
    """An event loop in which time passes when a test says so, and no task runs."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, _: float, act: Callable[[], None]) -> Timer:
        """Remember it."""
        self.timers.append(Timer(act))
        return self.timers[-1]

    def create_task(self, task: Coroutine[Any, Any, None]) -> Loop:
        """Take it for one that has just begun."""
        task.close()
        return self

    def add_done_callback(self, _: Any) -> None:
        """It is never done."""

    def time_passes(self) -> None:
        """Let all happen that was to happen."""
        timers, self.timers = self.timers, []
        for timer in timers:
            timer.fire()


class Transport:
    """A connection."""

    ended = False

    def get_extra_info(self, _: str) -> None:
        """Nothing is known of it."""

    def abort(self) -> None:
        """It is ended."""
        self.ended = True


def _connected() -> tuple[Any, Loop, Transport]:
    loop, transport = Loop(), Transport()
    kept: Any = loop
    protocol = ImpatientProtocol(
        uvicorn.Config(_app, log_config=None, ws="none"), ServerState(), {}, kept
    )
    line: Any = transport
    protocol.connection_made(line)
    return protocol, loop, transport


@pytest.mark.parametrize("parts", [[], [b"G"], [b"GET / HTTP/1.1\r\n", b"host: a\r\n", b"x-a: "]])
def test_half_a_request_is_not_waited_for(parts: list[bytes]) -> None:
    """Nothing at all, a letter, a head that drips in: each counts from the connection's begin."""
    protocol, loop, transport = _connected()
    for part in parts:
        protocol.data_received(part)
    loop.time_passes()
    assert transport.ended


def test_who_listens_may_take_its_time() -> None:
    """An answer that goes on for long is not cut: pages stay open for days."""
    protocol, loop, transport = _connected()
    protocol.data_received(WHOLE[:10])
    protocol.data_received(WHOLE[10:])
    loop.time_passes()
    assert not transport.ended


def test_half_a_second_request_is_not_waited_for_either() -> None:
    """Who was answered once may not hold the connection by another beginning."""
    protocol, loop, transport = _connected()
    protocol.data_received(WHOLE)
    loop.time_passes()
    protocol.cycle.response_complete = True
    protocol.conn.start_next_cycle = lambda: None
    protocol.conn.next_event = lambda: h11.NEED_DATA
    protocol.data_received(b"GET /")
    loop.time_passes()
    assert transport.ended
