"""Runs commands that only look, each in a fork of a process that has the command line loaded.

A test that waits looks each second, and to begin a Python that loads the command line takes as long
on a slow machine: looking took the cores from what was waited for. What starts something is not
run here, but as a user does.

    python -m tests.e2e.lab.warm_commands SOCKET

Each connection is one command: a line of JSON with its words, folder, environment and the files for
its output, answered with its process id, and at its end with its exit code. The server ends with
its standard input.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOOKS = {"status", "history", "runs"}
_READY_S = 120.0


def only_looks(words: Sequence[str]) -> bool:
    """Return whether a command looks once and ends: it may be run here."""
    return words[0] in LOOKS and "--watch" not in words


class WarmCommands:
    """The tests' end of the server."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="spotguard-warm-"))
        self._socket = self._folder / "socket"
        command = [sys.executable, "-m", __name__, str(self._socket)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n", "the server of commands did not begin"

    def run(
        self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str, str]:
        """Run one command to its end; return its exit code and what it printed.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = {
                **{"words": [*words], "cwd": str(cwd), "env": dict(env)},
                **{"out": str(out), "err": str(err)},
            }
            code = self._ask(request, timeout_s)
            return code, out.read_text(), err.read_text()

    def _ask(self, request: dict[str, Any], timeout_s: float) -> int:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(self._socket))
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile() as answers:
                pid = int(answers.readline())
                try:
                    return int(answers.readline() or -signal.SIGKILL)
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(request["words"], timeout_s) from None

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(_READY_S)
        assert self._server.stdout is not None
        self._server.stdout.close()
        self._socket.unlink()
        self._folder.rmdir()


@cache
def warm_commands() -> WarmCommands:
    """Return the server of this test process, which is begun with the first command."""
    server = WarmCommands()
    atexit.register(server.close)
    return server


def _load_all() -> None:
    """Load what a look loads, and what it loads late."""
    for package in ("spotguard.cli", "spotguard.api", "spotguard.control", "spotguard.storage"):
        found = importlib.import_module(package)
        for module in pkgutil.walk_packages(found.__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def _serve(path: str) -> socket.socket | None:
    """Answer until there is nobody who asks; in a command's process, return its connection."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        print("ready", flush=True)  # noqa: T201
        while True:
            either: list[Any] = [0, server]
            asked, _, _ = select.select(either, [], [])
            if 0 in asked:
                return None
            connection, _ = server.accept()
            if not os.fork():
                return connection
            connection.close()


def _become(connection: socket.socket) -> None:
    """Take the folder, environment and output of a command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile() as lines:
        request = json.loads(lines.readline())
    connection.sendall(f"{os.getpid()}\n".encode())
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["spotguard", *request["words"]]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for fd, name in ((1, "out"), (2, "err")):
        opened = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, fd)
        os.close(opened)
    os.close(nothing)


def _run(connection: socket.socket) -> None:
    """Run the command and end as Python does, but for tearing down a thousand modules."""
    from spotguard.cli.main import main

    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(f"{code}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    _load_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()
    mine = _serve(sys.argv[1])
    if mine is not None:
        _become(mine)
        _run(mine)
