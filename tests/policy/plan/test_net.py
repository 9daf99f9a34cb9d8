"""This machine's addresses and ports."""

from __future__ import annotations

import socket

from spotguard.shared.net import free_port


def test_a_free_port_is_none_that_outgoing_connections_are_given() -> None:
    """Else a connection of anybody's could have it before who asked listens there."""
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    assert all(15_000 <= port < 30_000 for port in ports)


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    """Two that ask at one time get two ports, once the first listens."""
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        taken.listen()
        assert taken.getsockname()[1] not in {free_port() for _ in range(200)}
