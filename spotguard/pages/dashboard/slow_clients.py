"""Lets no client hold a connection that asks for nothing: there are only so many.

uvicorn waits for the rest of a request for ever. Any process of this machine could so take all
connections, without the token: the guard sees whole requests alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

PATIENCE_S = 10.0
"""For the head of a request, from the moment at which a connection has none under way."""


class ImpatientProtocol(H11Protocol):
    """Ends a connection whose client takes too long to say what it wants."""

    _ends_at: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait_for_a_request()

    def data_received(self, data: bytes) -> None:
        """Take what has come; a request that is whole is waited for no more."""
        super().data_received(data)
        if self._has_a_request():
            self._wait_no_more()
        elif self._ends_at is None:
            self._wait_for_a_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _has_a_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_a_request(self) -> None:
        self._ends_at = self.loop.call_later(PATIENCE_S, self._end_if_it_has_none)

    def _wait_no_more(self) -> None:
        if self._ends_at is not None:
            self._ends_at.cancel()
            self._ends_at = None

    def _end_if_it_has_none(self) -> None:
        self._ends_at = None
        if not self._has_a_request():
            self.transport.abort()
