"""This machine's addresses and ports, as other machines of its cluster see them."""

from __future__ import annotations

import socket


def address_towards(host: str) -> str:
    """Return this machine's own address on the way to `host`; nothing is sent.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def free_port() -> int:
    """Return a TCP port that nobody listens on now; somebody may, a moment later."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
