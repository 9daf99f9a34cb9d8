"""Imports every module named on the command line where none of what they need is installed.

Run by a bare interpreter of the oldest supported version. Whatever is neither Python's nor ours is
played by a stand-in, so what is tried is our own code: each module's body runs, and with it base
classes, default values, decorators and module-level expressions. Prints the traceback of each
module that cannot be imported and exits with their number.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import traceback
import types
from typing import Any


class _Anything(type):
    """A class that has every attribute, takes every call and index, and decorates everything."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: Any, **_: Any) -> _Anything:
        return super().__new__(mcs, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: Any, **_: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __getitem__(cls, _: Any) -> Any:
        return StandIn

    def __call__(cls, *args: Any, **_: Any) -> Any:
        decorates = len(args) == 1 and isinstance(args[0], (types.FunctionType, type))
        return args[0] if decorates else StandIn


class StandIn(metaclass=_Anything):
    """What stands for everything that a missing package has."""


class _Missing(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, so that `import a.b` goes on

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top == "spotguard" or top in sys.stdlib_module_names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Missing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it empty: it has everything already."""


def main(modules: list[str]) -> int:
    """Import them; return how many could not be."""
    sys.meta_path.append(_StandIns())
    # Versions of what is stood in for are not to be had.
    installed = importlib.import_module("spotguard.integrations.installed")
    installed.check_installed = lambda extra, **oldest: None  # type: ignore[attr-defined]
    wrong = 0
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 - it is the answer
            wrong += 1
            traceback.print_exc()
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
