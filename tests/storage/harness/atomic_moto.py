"""moto's server, keeping a condition as S3 does: the look and the write are one.

moto looks whether there is an object and then makes one, so that of two at once both win.
"""

from __future__ import annotations

import argparse
import threading
from typing import TYPE_CHECKING, Any

from moto.moto_server import werkzeug_app
from werkzeug.serving import run_simple

if TYPE_CHECKING:
    from collections.abc import Iterable

_CONDITIONS = ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH")


class OneConditionAtATime:
    """moto, as a WSGI application that lets requests with a condition in one after another."""

    def __init__(self) -> None:
        self._moto: Any = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)
        self._conditional = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer as moto does."""
        if not any(condition in environ for condition in _CONDITIONS):
            return self._answer(environ, start_response)
        with self._conditional:
            return self._answer(environ, start_response)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.storage.harness.atomic_moto")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    where = parser.parse_args()
    run_simple(
        where.host,
        where.port,
        OneConditionAtATime(),
        threaded=True,
        request_handler=werkzeug_app.MotoRequestHandler,
    )


if __name__ == "__main__":
    main()
