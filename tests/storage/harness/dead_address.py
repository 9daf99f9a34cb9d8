"""An address where nobody answers, not even to refuse."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_CALLERS = 4


@pytest.fixture
def dead() -> Iterator[list[Any]]:
    """Such an address, as the name service says it: its queue is full, so what comes is lost."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(_CALLERS):
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                caller.connect(listener.getsockname())
        yield [(socket.AF_INET, socket.SOCK_STREAM, 6, "", listener.getsockname())]
