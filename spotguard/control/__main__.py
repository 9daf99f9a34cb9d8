"""`python -m spotguard.control NAME`: the process that looks after the runs of one environment."""

from __future__ import annotations

import contextlib
import resource
import sys

from spotguard.control.controller.process import look_after_all
from spotguard.control.controller.roster import Roster
from spotguard.control.controller.run_logs import log_by_run
from spotguard.control.report.numbers_at_rest import keep_at_rest
from spotguard.spec.home_folder import spotguard_home

_FILES = 8192


def main() -> int:
    """Look after all runs of the roster until each is at rest; return the process's exit code."""
    log_by_run()
    _allow_many_files()
    look_after_all(Roster(spotguard_home() / "controllers" / sys.argv[1]), settled=keep_at_rest)
    return 0


def _allow_many_files() -> None:
    """Raise this process's limit of open files: each run has half a dozen."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now != resource.RLIM_INFINITY and now < _FILES:
        wanted = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


if __name__ == "__main__":
    sys.exit(main())
