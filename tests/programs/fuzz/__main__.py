"""Gives every reader many mutated documents: `python -m tests.programs.fuzz --seed 1`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.programs.fuzz.readers import READERS


def main() -> int:
    """Fuzz all readers; return 1 if one of them let something through, and say what."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs for each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(READERS), help="one reader instead of all")
    given = parser.parse_args()
    failed = 0
    sys.stdout.write(f"seed {given.seed}, {given.count} inputs for each reader\n")
    for name in [given.only] if given.only else READERS:
        began = time.monotonic()
        try:
            said = f"{READERS[name].fuzz(given.count, given.seed)} read, all others refused"
        except AssertionError as problem:
            failed, said = 1, f"FAILED: {problem}"
        sys.stdout.write(f"{name:16} {said} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(main())
