"""The sample log: which samples each rank trained on at each step (`SPOTGUARD_TRACE_SAMPLES`).

A rank writes its line before its gradients are synchronised, so a step that any rank finished
has the lines of all ranks. Where an attempt begins, the lines of earlier ones end: what these had
done beyond it was lost, and is done again. `spotguard.testing.read_sample_trace` reads the log by
that rule.
"""

from __future__ import annotations

import json
import os
from typing import Any


class SampleTrace:
    """Appends one JSON line per step; a line is one write, so ranks can share the file."""

    def __init__(self, path: str, **constants: Any) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._constants = constants

    def write(self, **fields: Any) -> None:
        """Append one line."""
        line = json.dumps({**self._constants, **fields}) + "\n"
        os.write(self._file, line.encode())

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
