"""JSON documents: what `--json` prints of the pictures that commands show.

A picture is a dataclass, and its fields are the document's, in their order. So its types and the
strings below its fields are also what the published schemas are made from.
"""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from spotguard.shared.units import to_iso

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Form(Enum):
    """How a field stands in a document."""

    AS_IT_IS = "as it is"
    INSTANT = "instant"
    """Epoch seconds, as ISO 8601 in UTC."""
    HIDDEN = "hidden"
    """Not at all."""
    INLINE = "inline"
    """A picture, whose fields stand among those of the document that it is in."""


INSTANT: Final = {"form": Form.INSTANT}
HIDDEN: Final = {"form": Form.HIDDEN}
INLINE: Final = {"form": Form.INLINE}
_YEAR_9999: Final = 253_370_764_800.0
"""An instant beyond it, or before 1970, is one that nobody can have meant: it is unknown."""
_PLAIN: Final = {str, int, float, bool, type(None)}


def document(picture: DataclassInstance) -> dict[str, Any]:
    """Return the JSON object of a picture. What is unknown is null."""
    body: dict[str, Any] = {}
    for name, form in forms(type(picture)).items():
        value = getattr(picture, name)
        if form is Form.INSTANT:
            body[name] = to_iso(value) if value is not None and 0 <= value < _YEAR_9999 else None
        elif form is Form.INLINE:
            body |= document(value)
        elif form is Form.AS_IT_IS:
            body[name] = _plain(value)
    return body


@cache
def forms(kind: type[DataclassInstance]) -> dict[str, Form]:
    """Return the fields of a kind of picture, each with its form."""
    return {field.name: field.metadata.get("form", Form.AS_IT_IS) for field in fields(kind)}


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return document(value)
    if hasattr(value, "_asdict"):  # a named tuple
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
