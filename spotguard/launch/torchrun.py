"""torchrun, silent about ranks that saved and left because they were told to.

    python -m spotguard.launch.torchrun --nnodes=2 ... job.py ...

torchrun takes every exit code but 0 for a failure, and a signal of its own for a crash: after a
clean save it prints a table that says FAILED, and a traceback. What else it says is left as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spotguard.errors import Detached
from spotguard.events import env
from spotguard.shared.saves_first import LEFT

if TYPE_CHECKING:
    from collections.abc import MutableMapping

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


def main() -> None:
    """Be torchrun; after a clean leave it exits with 1 as ever, but without its report."""
    look_after_workers(os.environ)
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
