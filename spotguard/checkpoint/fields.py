"""A JSON object read field by field, with one sentence for whatever is wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

from spotguard.errors import DamagedCheckpoint
from spotguard.shared.units import from_iso, to_iso

if TYPE_CHECKING:
    from spotguard.checkpoint.strict_json import Json

LARGEST = 2**63 - 1
MAX_DIMENSIONS = 64


class Fields:
    """The fields of one JSON object; `where` names it in messages."""

    def __init__(self, value: Json, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise DamagedCheckpoint(f"{where} is {_shown(value)}, expected an object")
        self._value: dict[str, Json] = value

    def json(self, name: str) -> Json:
        """Return the field as it is; `DamagedCheckpoint` if it is missing."""
        if name not in self._value:
            raise DamagedCheckpoint(f"{self.where} lacks the field {name!r}")
        return self._value[name]

    def text(self, name: str, pattern: str = r"[\s\S]*") -> str:
        """Return a string that matches `pattern` wholly."""
        value = self.json(name)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            self.refuse(name, "a string" if pattern.startswith("[\\s") else f"like {pattern}")
        return value

    def integer(self, name: str, *, low: int = 0, high: int = LARGEST) -> int:
        """Return an integer from `low` to `high`."""
        value = self.json(name)
        if not _is_integer(value) or not low <= value <= high:
            self.refuse(name, f"an integer from {low} to {high}")
        return int(value)

    def instant(self, name: str) -> float:
        """Return an ISO 8601 instant as seconds since the epoch."""
        try:
            instant = from_iso(self.text(name))
            to_iso(instant)  # else nobody could show it: in UTC its year may be 0 or 10000
            return instant
        except (ValueError, OverflowError):
            self.refuse(name, "an ISO 8601 instant with a zone")

    def maybe_text(self, name: str, pattern: str) -> str | None:
        """Return like `text`, or None if the field is null."""
        return None if self.json(name) is None else self.text(name, pattern)

    def later_text(self, name: str, pattern: str) -> str | None:
        """Return like `text`, or None if there is no such field: earlier versions wrote none."""
        return self.text(name, pattern) if name in self._value else None

    def later_flag(self, name: str) -> bool:
        """Return a boolean, False if there is no such field: earlier versions wrote none."""
        value = self._value.get(name, False)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def items(self, name: str) -> list[Json]:
        """Return a list."""
        value = self.json(name)
        if not isinstance(value, list):
            self.refuse(name, "a list")
        return list(value)

    def object(self, name: str) -> dict[str, Json]:
        """Return an object."""
        value = self.json(name)
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return dict(value)

    def texts(self, name: str) -> dict[str, str]:
        """Return an object whose values are strings."""
        value = self.object(name)
        if not all(isinstance(item, str) for item in value.values()):
            self.refuse(name, "an object of strings")
        return value

    def texts_like(self, name: str, pattern: str) -> tuple[str, ...]:
        """Return a list of strings that match `pattern` wholly as a tuple."""
        found = self.items(name)
        fits = re.compile(pattern).fullmatch
        if not all(isinstance(item, str) and fits(item) for item in found):
            self.refuse(name, f"a list of strings like {pattern}")
        return tuple(found)

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise `DamagedCheckpoint` that names the field, what it is and what it should be."""
        given = _shown(self._value.get(name))
        raise DamagedCheckpoint(f"{self.where}: {name} is {given}, expected {expected}")


def _is_integer(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Json) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
