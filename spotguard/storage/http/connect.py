"""Connections opened within one time limit, however many addresses a name has.

`socket.create_connection` begins its time-out anew with each address, and lets the name service
take as long as it likes: eight dead addresses are eight time-outs.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any

_LEAST_S = 2.0
"""For one address, if so much is left: what is lost on the way is sent again after a second."""
_SHORTEST_S = 0.05


def dial(address: tuple[str, int], timeout_s: float, _source: object = None) -> socket.socket:
    """Return a socket that is connected; its own time-out is what is left of `timeout_s`.

    The time is shared by the addresses that are left, so that a dead one leaves some to a living.

    Raises:
        OSError: no address answers, or none in time.
    """
    end = time.monotonic() + timeout_s
    found = _addresses(*address, timeout_s)
    problems: list[OSError] = []
    for index, place in enumerate(found):
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        try:
            return _opened(place, max(left_s / (len(found) - index), min(left_s, _LEAST_S)), end)
        except OSError as problem:
            problems.append(problem)
    try:
        raise problems[-1] if problems else TimeoutError
    finally:
        problems.clear()  # else an error and its frame hold each other


def _opened(place: Any, wait_s: float, end: float) -> socket.socket:
    family, kind, protocol, _, where = place
    opened = socket.socket(family, kind, protocol)
    try:
        opened.settimeout(wait_s)
        opened.connect(where)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.settimeout(max(end - time.monotonic(), _SHORTEST_S))
    except BaseException:
        opened.close()
        raise
    return opened


def _addresses(host: str, port: int, timeout_s: float) -> list[Any]:
    """Return what the name service says; it is asked in a thread, for it knows no time-out."""
    said: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            said.put(socket.getaddrinfo(host.strip("[]"), port, 0, socket.SOCK_STREAM))
        except UnicodeError:
            said.put(socket.gaierror(socket.EAI_NONAME, "no host can be called so"))
        except OSError as problem:
            said.put(problem)

    try:
        threading.Thread(target=ask, name="spotguard-name", daemon=True).start()
    except RuntimeError:  # there are no threads any more: the process is ending
        ask()
    try:
        answer = said.get(timeout=timeout_s)
    except queue.Empty:
        raise socket.gaierror(socket.EAI_AGAIN, "the name service does not answer") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
