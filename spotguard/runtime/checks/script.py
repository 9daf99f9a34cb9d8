"""What a training script's frames hold while our loop is being asked for its next step."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spotguard.runtime.checks.hashes import PLAIN
from spotguard.runtime.checks.liveness import live_names

if TYPE_CHECKING:
    import types

_OURS = Path(__file__).parents[1]
_NOT_HELD = (torch.Tensor, dict, list, tuple, set, *PLAIN)
_INSTALLED = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")]


def frame_of_script() -> types.FrameType | None:
    """Return the innermost frame of the script: neither ours nor an installed package's.

    Where all the others are installed, as is the script itself then, the innermost of them.
    """
    others: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _lies_in(frame, _OURS):
            others.append(frame)
        frame = frame.f_back
    own = [each for each in others if not any(_lies_in(each, folder) for folder in _INSTALLED)]
    return next(iter(own or others), None)


def has_loop_of_its_own(frame: types.FrameType) -> bool:
    """Return whether the script asks for steps itself, and no installed framework for it."""
    inner: types.FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        if not _lies_in(inner, _OURS):
            return False
        inner = inner.f_back
    return True


def visible(frame: types.FrameType | None) -> list[tuple[str, Any]]:
    """Return the variables that the script may still read: of the loop's function and its callers.

    Then those of the module. A framework whose loop it is holds what it was given, whatever becomes
    of the script's own name for it: behind that only plain values and tensors can be dead.
    """
    if frame is None:
        return []
    file, scope = frame.f_code.co_filename, frame.f_globals
    is_own = has_loop_of_its_own(frame)
    variables: list[tuple[str, Any]] = []
    live_globals: frozenset[str] | None = None
    current: types.FrameType | None = frame
    while current is not None:
        if current.f_code.co_filename == file:
            live = live_names(current)
            if current.f_locals is current.f_globals:
                live_globals = live
            else:
                variables += _alive(current.f_locals, live, is_own=is_own)
        current = current.f_back
    own = {name: value for name, value in list(scope.items()) if not name.startswith("__")}
    return [*variables, *_alive(own, live_globals, is_own=is_own)]


def _alive(
    values: dict[str, Any], live: frozenset[str] | None, *, is_own: bool
) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in values.items()
        if live is None or name in live or not (is_own or isinstance(value, _NOT_HELD))
    ]


def _lies_in(frame: types.FrameType, folder: Path) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(folder)
