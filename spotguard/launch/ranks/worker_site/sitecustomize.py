"""Python runs this first in each process that torchrun starts: is the script spotguard's?

A script that trains in a loop of its own can neither be stopped in time nor resumed, and nothing
of ours may be imported in it that could notice. So a hook waits for torch's optimizers. Our folder
leaves the environment at once: what the script itself starts is its own affair.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = str(Path(__file__).parent)
_OPTIMIZERS = "torch.optim.optimizer"
_WATCH = "spotguard.runtime.process.outside_loop"


class _Waiting(importlib.abc.MetaPathFinder):
    """Looks on as torch's optimizers are imported, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the others find, with our hook behind it."""
        if name != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hook(module: ModuleType) -> None:
                execute(module)
                module.register_optimizer_step_post_hook(lambda *_: _look[0]())

            spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    """Have all steps looked at; ours is imported at the first one, when torch is whole."""
    _look[0] = importlib.import_module(_WATCH).outside_loop.stepped_without_run
    _look[0]()


_look: list[Callable[[], None]] = [_begin]
"""What is called after each step of an optimizer; the hook itself stays, for it cannot remove
itself while torch goes through its hooks."""


def _go_on() -> None:
    """Make way for the `sitecustomize` that Python would have run without us."""
    sys.path[:] = [folder for folder in sys.path if folder != _HERE]
    rest = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [folder for folder in rest if folder != _HERE]
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)
    ours = sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    if ours is not None:
        sys.modules.setdefault("sitecustomize", ours)


_go_on()
if os.environ.get("RANK") == "0":
    sys.meta_path.insert(0, _Waiting())
