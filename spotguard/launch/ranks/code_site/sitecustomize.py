"""Python runs this first on nodes of this machine: code comes from the run's copy, not the folder.

Such nodes work in the user's own folder, with its data and results; only what Python imports from
below it is taken from the copy that was made when the run began. `__file__`, tracebacks, `inspect`
and the paths of packages are those of the folder. A file that the copy has not (made since, or
compiled) is imported from the folder. Our place in PYTHONPATH stays, for processes that the script
starts import code, too. Nothing of spotguard is imported here: a script may start another Python.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import io
import linecache
import os
import sys
from contextlib import suppress
from typing import Any

_FOLDERS = os.environ.get("SPOTGUARD_CODE_OF", "").split(os.pathsep)
_COPIES = os.environ.get("SPOTGUARD_CODE", "").split(os.pathsep)
_TOPS = [
    (top, copy)
    for folder, copy in zip(_FOLDERS, _COPIES)  # noqa: B905 - Python 3.9 may run this, too
    if folder and os.path.isdir(copy)  # noqa: PTH112
    for top in dict.fromkeys([folder, os.path.realpath(folder)])
]
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - no pathlib this early
_SOURCE: Any = importlib.machinery.SourceFileLoader
_real_get_data, _real_path_stats = _SOURCE.get_data, _SOURCE.path_stats
_real_set_data, _real_open_code = _SOURCE.set_data, io.open_code
_real_updatecache: Any = linecache.updatecache
_Finder = importlib.machinery.FileFinder


def in_copy(path: object) -> str | None:
    """Return where the copy has a file or folder of the user's folder; None if it has not."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    whole = os.fsdecode(path)
    if not whole.startswith(os.sep):
        whole = os.path.abspath(whole)  # noqa: PTH100
    for top, copy in _TOPS:
        if whole == top or whole.startswith(top + os.sep):
            there = copy + whole[len(top) :]
            if os.path.exists(there) or _is_compiled(there):  # noqa: PTH110
                return there
    return None


def _is_compiled(there: str) -> bool:
    """Tell whether it is what Python compiles of a file that the copy has."""
    try:
        return os.path.exists(importlib.util.source_from_cache(there))  # noqa: PTH110
    except (ValueError, NotImplementedError):
        return False


def _get_data(self: object, path: str) -> bytes:
    data: bytes = _real_get_data(self, in_copy(path) or path)
    return data


def _path_stats(self: object, path: str) -> object:
    return _real_path_stats(self, in_copy(path) or path)


def _set_data(self: object, path: str, data: bytes, *, _mode: int = 0o666) -> None:
    _real_set_data(self, in_copy(path) or path, data, _mode=_mode)


def _open_code(path: str) -> Any:
    """Open code to run, as `runpy` does with the script in processes that are spawned."""
    return _real_open_code(in_copy(path) or path)


def _updatecache(filename: str, module_globals: object = None) -> Any:
    """Have tracebacks and `inspect.getsource` see the lines that run, not those of the folder."""
    there = in_copy(filename)
    if there is None:
        return _real_updatecache(filename, module_globals)
    lines = _real_updatecache(there)
    if lines:  # without a time nothing compares it with the file in the folder
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return lines


class _CopyFinder:
    """Finds modules of one folder as the copy has them, and else as the folder has them."""

    def __init__(self, path: str) -> None:
        copy = in_copy(path)
        if copy is None or not os.path.isdir(copy):  # noqa: PTH112
            raise ImportError(path)
        self._path, self._copy = path, copy
        self._in_copy = _Finder(copy, (_SOURCE, [".py"]))
        self._in_folder = _standard(path)

    def find_spec(self, name: str, target: object = None) -> object:
        """Return the module's spec, with the paths of the user's folder."""
        del target
        found = self._in_copy.find_spec(name)
        if found is None or found.loader is None:
            other = self._in_folder.find_spec(name) if self._in_folder is not None else None
            if found is None or (other is not None and other.loader is not None):
                return other
        places = found.submodule_search_locations
        if places is not None:
            found.submodule_search_locations = [self._there(place) for place in places]
        if found.origin is not None and isinstance(found.loader, _SOURCE):
            whole = self._there(found.origin)
            found.origin = found.loader.path = whole
            found.cached = None
        return found

    def _there(self, path: str) -> str:
        return self._path + path[len(self._copy) :]

    def invalidate_caches(self) -> None:
        """Look again at what is there."""
        self._in_copy.invalidate_caches()
        if self._in_folder is not None:
            self._in_folder.invalidate_caches()


def _finder(path: str) -> Any:
    return _CopyFinder(path)


def _standard(path: str) -> importlib.machinery.FileFinder | None:
    """Return what else would look there; None of a folder that is gone."""
    for hook in sys.path_hooks:
        if hook is not _finder:
            try:
                found = hook(path)
            except ImportError:
                continue
            if isinstance(found, _Finder):
                return found
    return None


def _begin() -> None:
    for name, ours in (
        ("get_data", _get_data),
        ("path_stats", _path_stats),
        ("set_data", _set_data),
    ):
        setattr(_SOURCE, name, ours)
    io.open_code = _open_code
    linecache.updatecache = _updatecache
    sys.path_hooks.insert(0, _finder)
    sys.path_importer_cache.clear()


def _go_on() -> None:
    """Run the `sitecustomize` that Python would have run without us."""
    place = next((n for n, folder in enumerate(sys.path) if folder == _HERE), None)
    if place is not None:
        del sys.path[place]
    ours = sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    if ours is not None:
        sys.modules.setdefault("sitecustomize", ours)


if _TOPS:
    _begin()
_go_on()
