"""Text that others wrote, without what controls a terminal."""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_INVISIBLE = re.compile(
    "[\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)
"""What turns text around or hides in it: a job's words must not look like others."""
_BREAKS = re.compile("[\n\t\u2028\u2029]+")


def clean(text: str) -> str:
    """Return `text` without terminal control: a job's output must not move our cursor."""
    return _INVISIBLE.sub("", _CONTROLS.sub("", _ESCAPES.sub("", text)))


def one_line(text: str) -> str:
    """Return cleaned `text` on one line: what others wrote must not look like a line of ours."""
    return clean(_BREAKS.sub(" ", text.replace("\r\n", "\n"))).strip()
