"""On the path of a controller: it dies once before, and once after, each kind of outside act.

Python imports a module of this name when it starts. `CONTROLLERS_DEATHS` is a folder; each death
leaves a file there that says where it was, and is not died again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_STARTS_FOR_S = 5.0
"""At its very start the lease is taken while somebody waits and is told of a death."""
_born = time.monotonic()


def die_around(folder: Path, owner: type, method: str, act_of: Callable[..., str]) -> None:
    """Make each process die around the first of each of the acts that `method` does."""
    real = getattr(owner, method)

    def mortal(self: object, *args: Any, **more: Any) -> Any:
        act = act_of(*args)
        _die_once(folder / f"{act}.before", act)
        try:
            return real(self, *args, **more)
        finally:  # also where it failed: the answer is lost
            _die_once(folder / f"{act}.after", act)

    setattr(owner, method, mortal)


def _die_once(mark: Path, act: str) -> None:
    if act == "put controller" and time.monotonic() - _born < _STARTS_FOR_S:
        return
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _main(folder: Path) -> None:
    from spotguard.launch.skypilot.sdk import SkySdk
    from spotguard.storage.prefixed import PrefixedStore

    die_around(folder, SkySdk, "submit", lambda *_: "submit")
    die_around(folder, SkySdk, "down", lambda *_: "down")
    for method in ("put", "delete"):
        die_around(
            folder, PrefixedStore, method, lambda key, *_, verb=method: f"{verb} {Path(key).stem}"
        )


if "CONTROLLERS_DEATHS" in os.environ and "spotguard.control" in sys.orig_argv:
    _main(Path(os.environ["CONTROLLERS_DEATHS"]))
