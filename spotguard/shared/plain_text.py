"""Text that others wrote, without what controls a terminal."""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Return `text` without terminal control: a job's output must not move our cursor."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))
