"""Runs a script as Python would, and writes down by what it was left, and where it hangs.

    python -m spotguard.launch.local.smoke_driver FOLDER INSTANT LIFELINE SCRIPT ARGUMENT...

The parent reads FOLDER afterwards, also of a process that it had to kill: the stacks of all threads
are written by a thread of C at that instant (epoch seconds), whatever the script does to signals.
The lifeline is a descriptor that reads as ended once the parent is gone: the script ends then, too,
as nobody is left who would stop it after its last step.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBLEM_FILE: Final = "problem.json"
MODULES_FILE: Final = "modules.json"
STACKS_FILE: Final = "stacks.txt"
_MOST_CHARS = 10_000
_MOST_FRAMES = 200


def main(arguments: Sequence[str]) -> None:
    """Run the script; leaves by whatever it leaves by."""
    folder, at, script = Path(arguments[0]), float(arguments[1]), arguments[3]
    lifeline = int(arguments[2])
    threading.Thread(target=end_with_parent, args=(lifeline,), daemon=True).start()
    stacks = (folder / STACKS_FILE).open("w")  # open until the end: C writes into it
    faulthandler.enable(stacks)
    # Counted from the parent's start: on a busy machine Python needs seconds to come here.
    faulthandler.dump_traceback_later(max(0.1, at - time.time()), file=stacks)
    sys.argv = [script, *arguments[4:]]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as problem:
        (folder / PROBLEM_FILE).write_text(json.dumps(_told(problem)))
        raise
    finally:
        (folder / MODULES_FILE).write_text(json.dumps(_imported(Path.cwd())))


def _imported(workdir: Path) -> dict[str, str]:
    """Return the top modules that were imported, and all that lie in the workdir, by their files.

    A package without a file of its own is known by its first folder.
    """
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            places = list(getattr(module, "__path__", []))
            file = f"{places[0]}/__init__.py" if places and "." not in name else None
        if file and ("." not in name or file.startswith(f"{workdir}/")):
            found[name] = file
    return found


def end_with_parent(lifeline: int) -> None:
    """Wait until nobody has the pipe's other end, also after `kill -9`; end this process's group.

    The parent made it the leader of one.
    """
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _told(problem: BaseException) -> dict[str, Any]:
    """Return what left the script: its kind and words, the exit code, and the way to it."""
    frames = _frames(problem)
    code = problem.code if isinstance(problem, SystemExit) else None
    cause = problem.__context__ if isinstance(problem, SystemExit) else None
    # An error of ours has become an exit by now.
    if cause is not None and isinstance(code, int) and getattr(cause, "exit_code", None) == code:
        problem = cause
        frames += _frames(cause)
    if isinstance(problem, SyntaxError) and problem.filename and problem.lineno:
        frames.append((problem.filename, problem.lineno))
    hint = getattr(problem, "hint", "")
    return {
        "kind": type(problem).__name__,
        "message": str(problem)[:_MOST_CHARS],
        "hint": hint if isinstance(hint, str) else "",
        "is_exit": isinstance(problem, SystemExit),
        "exit_code": code if isinstance(code, int) else None,
        "frames": [list(frame) for frame in frames[-_MOST_FRAMES:]],
    }


def _frames(problem: BaseException) -> list[tuple[str, int]]:
    """Return file and line of each frame, the innermost last."""
    return [
        (frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(problem.__traceback__)
    ]
