"""Frozen dataclasses as JSON and back, by their own types: for files that only we write.

What is read back has to be proven whole by who reads it, as by a checksum beside it, and to be of
this very `form`: the fields are not checked one by one.
"""

from __future__ import annotations

import json
import types
from dataclasses import fields, is_dataclass
from enum import Enum, EnumMeta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = TypeVar("_T")


class TypedJson(Generic[_T]):
    """Writes and reads values of one dataclass, which may hold others, enums and tuples."""

    def __init__(self, kind: type[_T], names: Mapping[str, Any]) -> None:
        """`names` are those that the modules of its parts import for the type checker only."""
        self._kind = kind
        self._names = dict(names)
        self._known: dict[type, dict[str, Any]] = {}

    @cached_property
    def form(self) -> str:
        """A text that changes with every field of the dataclass and of those in it."""
        return self._form(self._kind)

    def text(self, value: _T) -> str:
        """Return a value as JSON."""
        return json.dumps(_plain(value), sort_keys=True)

    def read(self, text: str) -> _T:
        """Return what `text` was given. What another form wrote raises anything."""
        made: _T = self._made(self._kind, json.loads(text))
        return made

    def _form(self, kind: Any) -> str:
        if isinstance(kind, type) and is_dataclass(kind):
            inner = (f"{name}:{self._form(each)}" for name, each in self._hints(kind).items())
            return f"{kind.__qualname__}({','.join(inner)})"
        if get_args(kind):
            return f"{get_origin(kind)}[{','.join(map(self._form, get_args(kind)))}]"
        return str(kind)

    def _made(self, kind: Any, value: Any) -> Any:
        if value is None or kind is Any:
            return value
        if isinstance(kind, type) and is_dataclass(kind):
            hints = self._hints(kind)
            return kind(**{name: self._made(hints[name], each) for name, each in value.items()})
        args = get_args(kind)
        if get_origin(kind) in (Union, types.UnionType):
            return self._made(next(each for each in args if each is not type(None)), value)
        if get_origin(kind) is tuple:
            if args[-1] is Ellipsis:
                return tuple(self._made(args[0], item) for item in value)
            return tuple(self._made(each, item) for each, item in zip(args, value, strict=True))
        return kind(value) if isinstance(kind, EnumMeta) else value

    def _hints(self, kind: type) -> dict[str, Any]:
        if kind not in self._known:
            self._known[kind] = get_type_hints(kind, localns=self._names)
        return self._known[kind]


def _plain(value: Any) -> Any:
    """Return a value, or part of one, as JSON has it."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
