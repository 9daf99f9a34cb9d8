"""torchrun, silent about ranks that saved and left because they were told to.

    python -m spotguard.launch.torchrun --nnodes=2 ... job.py ...

torchrun takes every exit code but 0 for a failure, and a signal of its own for a crash: after a
clean save it prints a table that says FAILED, and a traceback. What else it says is left as it is.

A job of one process has no ranks to meet: it is started here, without torchrun, which would first
import torch itself. That takes seconds of each start, and 200 MB of the node all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotguard.errors import Detached
from spotguard.events import env
from spotguard.shared.saves_first import LEFT

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

_SITE: Final = Path(__file__).with_name("worker_site")
MODULE: Final = "torch.distributed.run"
_LEFT: Final = (Detached.exit_code, -signal.SIGTERM)
"""How ranks end that saved, or that torchrun then told to leave."""
_TELLERS: Final = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)
_OF_LEAVING: Final = re.compile(
    rf"death signal|closing signal|failed \(exitcode: ({_LEFT[0]}|{_LEFT[1]})\)"
)


FAILED: Final = "spotguard: the script failed (exitcode: "
"""Begins what is said of an only rank that failed; the script has said why before."""
_DIED: Final = "spotguard: the script died of "
_STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What torchrun passes on to its workers."""
_LAST_SAVE_S: Final = 30.0
"""How long torchrun waits for workers that it told to end, before it kills them."""


def main() -> None:
    """Be torchrun; after a clean leave it exits with 1 as ever, but without its report."""
    look_after_workers(os.environ)
    only = OnlyRank.of(sys.argv[1:])
    if only is None:
        _be_torchrun()
    else:
        only.run()


def _be_torchrun() -> None:
    for name in _TELLERS:
        logging.getLogger(name).addFilter(_is_of_interest)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
    except SignalException:
        _leave()
    except ChildFailedError as problem:
        if any(failure.exitcode not in _LEFT for failure in problem.failures.values()):
            raise
        _leave()


class OnlyRank:
    """The one process of a job, told and ended as torchrun does it. Main thread only."""

    def __init__(self, host: str, port: int, script: Sequence[str], log_dir: str | None) -> None:
        self._told = only_rank(host, port)
        self._command = [sys.executable, "-u", *script]
        self._log_dir = log_dir
        self._signal: int | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, arguments: Sequence[str]) -> OnlyRank | None:
        """Return what torchrun's arguments ask for, or None if there are several ranks."""
        parser = argparse.ArgumentParser()
        for flag in ("--nnodes", "--nproc-per-node", "--master-port"):
            parser.add_argument(flag, type=int, required=True)
        for flag in ("--node-rank", "--master-addr", "--max-restarts", "--redirects", "--log-dir"):
            parser.add_argument(flag)
        parser.add_argument("script", nargs=argparse.REMAINDER)
        given = parser.parse_args(arguments)
        if given.nnodes * given.nproc_per_node > 1:
            return None
        return cls(given.master_addr, given.master_port, given.script, given.log_dir)

    def run(self) -> None:
        """Run the script to its end, and exit as torchrun would."""
        for each in _STOPS:
            signal.signal(each, self._on_stop)
        with contextlib.ExitStack() as files:
            out, err = self._outputs(files)
            # A session of its own, as torchrun's: a signal to this process's group comes from here.
            self._child = child = subprocess.Popen(
                self._command,
                env={**os.environ, **self._told},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        if self._signal is not None:  # it came before there was a child
            self._pass_on(child, self._signal)
        code = child.wait()
        if self._signal is not None or code in _LEFT:
            _leave()
        if code != 0:
            sys.stderr.write(f"{_words_of(code)}\n")
            sys.exit(1)

    def _outputs(self, files: contextlib.ExitStack) -> tuple[Any, Any]:
        """Return where the script prints: into the files that torchrun would make, if any."""
        if self._log_dir is None:
            return None, None
        folder = Path(self._log_dir) / "only" / "attempt_0" / "0"
        folder.mkdir(parents=True, exist_ok=True)
        out, err = (folder / f"{stream}.log" for stream in ("stdout", "stderr"))
        return files.enter_context(out.open("wb")), files.enter_context(err.open("wb"))

    def _on_stop(self, number: int, _: object) -> None:
        is_first, self._signal = self._signal is None, number
        if self._child is not None and is_first:
            self._pass_on(self._child, number)

    def _pass_on(self, child: subprocess.Popen[bytes], number: int) -> None:
        """Tell the script and what it started, as torchrun does, and kill them if they stay."""
        _tell(child, number)
        late = threading.Timer(_LAST_SAVE_S, _tell, (child, signal.SIGKILL))
        late.daemon = True  # this process ends with the script, and does not wait for it
        late.start()


def _tell(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the whole session of a process, unless it has ended."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


def only_rank(host: str, port: int) -> dict[str, str]:
    """Return what torchrun tells the only rank of a job, which meets nobody there."""
    return {
        **{"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0"},
        **{"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"},
        **{"ROLE_WORLD_SIZE": "1", "ROLE_NAME": "default"},
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
        **{"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"},
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _words_of(code: int) -> str:
    if code > 0:
        return f"{FAILED}{code})"
    with contextlib.suppress(ValueError):
        return f"{_DIED}{signal.Signals(-code).name} (exitcode: {code})"
    return f"{_DIED}signal {-code} (exitcode: {code})"


def _leave() -> None:
    """End as torchrun does, after telling the agent that no rank was torn from its work."""
    saving = os.environ.get(env.SAVING)
    if saving:
        with contextlib.suppress(OSError):
            Path(saving + LEFT).touch()
    sys.exit(1)


def look_after_workers(given: MutableMapping[str, str]) -> None:
    """Have each worker's Python look whether its script trains in a loop of spotguard."""
    before = given.get("PYTHONPATH")
    given["PYTHONPATH"] = os.pathsep.join([str(_SITE), *([before] if before else [])])


def _is_of_interest(record: logging.LogRecord) -> bool:
    return not _OF_LEAVING.search(record.getMessage())


if __name__ == "__main__":
    main()
