"""The connections of `requests`, made so that each wait ends at the caller's deadline.

By itself a time-out begins anew with every byte, and a line that trickles has no end.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from spotguard.storage.deadline import time_left_s
from spotguard.storage.http.connect import dial
from spotguard.storage.http.connections import CONNECT_S, SILENCE_S, TimedResponse

if TYPE_CHECKING:
    import socket

    from requests import Session
    from requests.adapters import HTTPAdapter
    from urllib3 import HTTPConnectionPool, PoolManager, ProxyManager

    AnySession = TypeVar("AnySession", bound=Session)

_CONNECTIONS = 32
"""The usual ten would be opened anew all the time."""


def keep_to_deadline(session: AnySession) -> AnySession:
    """Return the session; it has connections for all threads of a store now, which are timed."""
    for scheme in ("https://", "http://"):
        session.mount(scheme, _adapter_class()(pool_maxsize=_CONNECTIONS))
    return session


@functools.cache
def _adapter_class() -> type[HTTPAdapter]:
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **options: Any) -> None:
            super().init_poolmanager(*args, **options)
            _time(self.poolmanager)

        def proxy_manager_for(self, *args: Any, **options: Any) -> ProxyManager:
            pools: ProxyManager = super().proxy_manager_for(*args, **options)
            _time(pools)
            return pools

    return Adapter


def _time(pools: PoolManager) -> None:
    pools.pool_classes_by_scheme = _pool_classes()


@functools.cache
def _pool_classes() -> dict[str, type[HTTPConnectionPool]]:
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

    class Plain(HTTPConnection):
        response_class = TimedResponse

        def _new_conn(self) -> socket.socket:
            usual_s = self.timeout if isinstance(self.timeout, (int, float)) else CONNECT_S
            try:
                return dial((self._dns_host, self.port), time_left_s(usual_s))
            except TimeoutError as problem:
                raise ConnectTimeoutError(self, f"{self.host} timed out") from problem
            except OSError as problem:
                raise NewConnectionError(self, f"{self.host} is not reached") from problem

        def send(self, data: Any) -> None:
            wait_s = time_left_s(SILENCE_S)
            if self.sock is not None:  # to be opened it has a time-out of its own
                self.sock.settimeout(wait_s)
            super().send(data)

    class Tls(Plain, HTTPSConnection):
        pass

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class TlsPool(HTTPSConnectionPool):
        ConnectionCls = Tls

    return {"http": PlainPool, "https": TlsPool}
