"""The store in which ranks meet, in a process of its own on the first node.

    python -m spotguard.launch.ranks.store DESCRIPTOR PORT

No rank keeps it, so the others still have it when any of them dies. It listens on a socket that it
inherits: whoever connects before torch is imported here waits, and is not refused. It ends with its
standard input, and by no signal: a node that is told to leave still saves.
"""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_ANY: Final = ""
_BACKLOG: Final = 1024


def listening(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at a free port, or this one, for all who may call it `host`.

    Raises:
        OSError: somebody else listens there.
    """
    if host in ("127.0.0.1", "localhost"):
        return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
    with suppress(OSError, ValueError):  # a machine without IPv6
        return socket.create_server(
            (_ANY, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server((_ANY, port), backlog=_BACKLOG)


def _opened(descriptor: int, port: int) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    def opened(use_libuv: bool) -> TCPStore:
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            use_libuv=use_libuv,
            master_listen_fd=descriptor,
        )

    try:
        return opened(use_libuv=True)
    except NotImplementedError:
        return opened(use_libuv=False)  # the new server of an earlier torch takes no socket


def main() -> None:
    """Keep the store until standard input ends."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN)
    descriptor, port = map(int, sys.argv[1:])
    store = _opened(descriptor, port)
    sys.stdin.read()
    del store


if __name__ == "__main__":
    main()
