"""This machine's addresses and ports, as other machines of its cluster see them."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from typing import Any

_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): the way there is the way to any other machine."""
_PORTS = range(15_000, 30_000)
"""Above those that services are known by, below Kubernetes' node ports and all ephemeral ones."""


def address_towards(host: str) -> str:
    """Return this machine's own address on the way to `host`; nothing is sent.

    Where `host` is this machine's own name, which often stands for loopback on the machine itself,
    it is the address by which others see it, if there is a network.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    address = _own_address(where[0], where[4])
    if host == "localhost" or _is_address(host) or not ipaddress.ip_address(address).is_loopback:
        return address
    try:
        return _own_address(socket.AF_INET, _ELSEWHERE)
    except OSError:  # no network, so nobody else either
        return address


def _own_address(family: int, towards: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(towards)  # of datagrams: it only chooses the way
        return str(probe.getsockname()[0])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def free_port() -> int:
    """Return a TCP port that nobody listens on now; somebody may, a moment later.

    It is none of those that the system gives to outgoing connections: on a busy machine one of
    these could take it before the caller listens.
    """
    for port in random.SystemRandom().sample(_PORTS, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
