"""Runs scripts as `python script.py` does, each in a fork of a process that has torch loaded.

Importing torch takes a second or two; the tests start dozens of jobs. Reads one JSON request a
line and answers each with one number: `{"run": ...}` with the pid, `{"poll": pid}` with the exit
code, or 1000 while it runs. SIGUSR1 makes a job print where its threads are. Its arguments are
further modules to load for all jobs.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import numpy
import torch.utils.data

import spotguard.runtime  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable

RUNNING = 1000


def begin(request: dict[str, Any]) -> None:
    """Become the job: its folder, environment and output."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [request["script"], *request["arguments"]]
    nothing = os.open(os.devnull, os.O_RDONLY)
    said = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, target in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(fd, target)
    os.close(nothing)
    os.close(said)
    faulthandler.register(signal.SIGUSR1)
    numpy.random.seed()  # else all forks would draw alike, as no two processes do
    torch.default_generator.seed()
    sys.path[0] = os.path.dirname(request["script"])  # noqa: PTH120 - was the server's own


def serve() -> dict[str, Any] | None:
    """Answer requests until there are no more; in a job's process, return its request."""
    while line := os.read(0, 1 << 16):
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else RUNNING
        else:
            answer = os.fork()
            if not answer:
                begin(request["run"])
                return dict(request["run"])
        os.write(1, f"{answer}\n".encode())
    return None


def run_to_the_end(request: dict[str, Any]) -> None:
    """Run a script and end as Python does, but for tearing down a thousand modules: a second."""
    code = 0
    ended: Callable[[int], None] | None = None
    try:
        if request.get("prelude"):
            ended = importlib.import_module(request["prelude"]).begin()
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter's own top does
        code = 1
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            code = int(str(end.code))
    if ended is not None:
        try:
            ended(code)
        except Exception:  # noqa: BLE001 - what it could not tell is missing
            traceback.print_exc()
            code = code or 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for more in sys.argv[1:]:
        importlib.import_module(more)
    torch.optim.AdamW([torch.zeros(1)])  # the first optimizer imports a second's worth of torch
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()
    request = serve()
    if request is not None:
        run_to_the_end(request)
