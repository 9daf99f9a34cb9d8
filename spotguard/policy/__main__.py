"""`python -m spotguard.policy`: JSON lines in, one action a line out."""

from __future__ import annotations

import io
import json
import sys

from spotguard.errors import UsageError
from spotguard.policy.protocol import HELP, answered


def main() -> int:
    """Answer stdin; return the process's exit code."""
    if set(sys.argv[1:]) & {"-h", "--help"}:
        sys.stdout.write(HELP)
        return 0
    try:
        if isinstance(sys.stdin, io.TextIOWrapper):  # what is no UTF-8 is refused by its line
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        if sys.argv[1:]:
            raise UsageError(f"there is no argument {sys.argv[1]!r}: see --help")
        for line in answered(sys.stdin):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    except UsageError as problem:
        sys.stdout.write(json.dumps({"error": problem.message}) + "\n")
        sys.stdout.flush()
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
