"""Runs the dashboard's server until Ctrl-C, on loopback alone."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from typing import TYPE_CHECKING

from spotguard.errors import EnvironmentFailure, MissingExtra, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.control.report.fleet import Fleet

DEFAULT_PORT = 8650
_ADDRESS = "127.0.0.1"
_SHORTEST_TOKEN = 16


def token_in(path: Path | None) -> str:
    """Return the token that a file holds; a file that is not there is made. None makes one up.

    Raises:
        UsageError: others may read the file, or it holds no token.
        EnvironmentFailure: it can be neither read nor made.
    """
    if path is None:
        return secrets.token_urlsafe(32)
    try:
        with contextlib.suppress(FileExistsError):
            made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(made, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        if path.stat().st_mode & 0o077:
            raise UsageError(
                f"--token-file: others may read {path}", hint=f"chmod 600 {path}, and a new token"
            )
        token = path.read_text("utf-8").strip()
    except OSError as problem:
        raise EnvironmentFailure(
            f"--token-file: {path} cannot be used: {problem.strerror}."
        ) from problem
    except UnicodeDecodeError:
        token = ""
    if (
        len(token) < _SHORTEST_TOKEN
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise UsageError(
            f"--token-file: {path} holds no token of {_SHORTEST_TOKEN} characters or more",
            hint="delete the file, and a new one is made",
        )
    return token


def serve(
    fleet: Fleet, *, port: int, token: str, read_only: bool, ready: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; `ready` hears the address, with the token, once it listens.

    Raises:
        MissingExtra: starlette or uvicorn is not installed.
        EnvironmentFailure: the port is taken.
    """
    try:
        import uvicorn

        from spotguard.pages.dashboard.app import dashboard
        from spotguard.pages.dashboard.feed import Feed
        from spotguard.pages.dashboard.slow_clients import ImpatientProtocol
    except ImportError as problem:
        raise MissingExtra(
            "the dashboard needs the packages starlette and uvicorn",
            hint="pip install 'spotguard[dashboard]'",
        ) from problem

    class Server(uvicorn.Server):
        """Ends in peace on a signal: the pages that are open are told."""

        def handle_exit(self, sig: int, frame: object) -> None:
            """Note that it is to end; a second Ctrl-C waits for nothing."""
            self.force_exit = self.should_exit and sig == signal.SIGINT
            self.should_exit = True
            feed.end()

    listening = _listen(port)
    feed = Feed(fleet, read_only=read_only)
    feed.prepare()
    with listening:
        port = listening.getsockname()[1]
        config = uvicorn.Config(
            dashboard(feed, token=token, port=port, read_only=read_only),
            access_log=False,  # addresses hold the token, once
            log_level="warning",
            http=ImpatientProtocol,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=16_384,
            limit_concurrency=1024,
        )
        ready(f"http://{_ADDRESS}:{port}/?token={token}")
        Server(config).run(sockets=[listening])


def _listen(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((_ADDRESS, port))
        listening.listen(128)
    except OSError as problem:
        listening.close()
        raise EnvironmentFailure(
            f"Port {port} of {_ADDRESS} cannot be used: {problem.strerror}.",
            hint="choose another one: --port PORT, or --port 0 for a free one",
        ) from problem
    return listening
