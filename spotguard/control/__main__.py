"""`python -m spotguard.control NAME`: the process that looks after the runs of one environment."""

from __future__ import annotations

import sys

from spotguard.control.controller.process import look_after_all
from spotguard.control.controller.roster import Roster
from spotguard.control.controller.run_logs import log_by_run
from spotguard.control.report.at_rest import keep_at_rest
from spotguard.spec.home import spotguard_home


def main() -> int:
    """Look after all runs of the roster until each is at rest; return the process's exit code."""
    log_by_run()
    look_after_all(Roster(spotguard_home() / "controllers" / sys.argv[1]), settled=keep_at_rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
