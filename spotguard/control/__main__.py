"""`python -m spotguard.control RUN_ID`: the controller's background process."""

from __future__ import annotations

import logging
import sys

from spotguard.control.controller_process import control
from spotguard.control.report.at_rest import keep_at_rest
from spotguard.control.run_folder import folder_of
from spotguard.errors import SpotguardError


def main() -> int:
    """Control the run until it settles; return the process's exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        folder = folder_of(sys.argv[1])
        control(folder)
        keep_at_rest(folder)
    except SpotguardError as problem:
        sys.stderr.write(f"{problem.message} {problem.hint}".rstrip() + "\n")
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
