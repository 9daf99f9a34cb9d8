"""The shape of JSON documents: each field's path, and the types that its values had."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def shape(documents: Iterable[Any], *, maps: Collection[str] = ()) -> dict[str, str]:
    """Return the types of each field by its path: `attempts[].zone` is `null | string`.

    A field that only some of the documents have ends in `(not always)`; of `schema`, the version
    of a document's form, the value is told.

    Args:
        documents: of one kind.
        maps: paths of objects whose keys are names that a user or a run gave, such as `counters`.
    """
    shape = _Shape(maps)
    for document in documents:
        shape.add(document, "")
    return {path: shape.told(path) for path in sorted(shape.types) if path}


class _Shape:
    def __init__(self, maps: Collection[str]) -> None:
        self.types: defaultdict[str, set[str]] = defaultdict(set)
        self._maps = maps
        self._objects: Counter[str] = Counter()
        self._fields: Counter[str] = Counter()
        self._within: dict[str, str] = {}

    def add(self, value: Any, path: str) -> None:
        """Take in one value and all that is in it."""
        self.types[path].add(f"{value}" if path == "schema" else _type(value))
        if isinstance(value, list):
            for item in value:
                self.add(item, f"{path}[]")
        elif isinstance(value, dict):
            self._objects[path] += 1
            for name, item in value.items():
                below = f"{path}.{'*' if path in self._maps else name}".removeprefix(".")
                self._fields[below] += 1
                self._within[below] = path
                self.add(item, below)

    def told(self, path: str) -> str:
        """Return the types of a field in words."""
        types = self.types[path]
        if "number" in types:
            types = types - {"integer"}
        words = " | ".join(sorted(types))
        above = self._within.get(path)
        if above is None or above in self._maps or self._fields[path] == self._objects[above]:
            return words
        return f"{words} (not always)"


def _type(value: Any) -> str:
    if isinstance(value, str):
        return "instant" if _INSTANT.fullmatch(value) else "string"
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")
