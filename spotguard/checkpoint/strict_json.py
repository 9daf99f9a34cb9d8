"""JSON that means one thing: written one way, read without trust.

Standard JSON has no NaN or infinity, so they travel as `{"$float": "nan"}`; a user's own key that
looks like the tag gets one more `$`.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from typing import Any, NoReturn, TypeAlias

from spotguard.errors import DamagedCheckpoint, UnsupportedState

Json: TypeAlias = Any
"""None, bool, int, float, str, or lists and str-keyed dicts of them."""

_TAG = "$float"
_TAG_LIKE = re.compile(r"\$+float")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_DIGITS = 400  # longer integers take quadratic time to read


class Encoded:
    """A large value that does not change any more: `dumps` makes JSON of it only once."""

    def __init__(self, value: Json) -> None:
        self.value = value
        self._raw: bytes | None = None

    def raw(self, what: str) -> bytes:
        """Return the value as `dumps` writes it."""
        if self._raw is None:
            self._raw = dumps(self.value, what=what)
        return self._raw


def dumps(value: Json, *, what: str) -> bytes:
    """Return `value` as compact ASCII JSON; dicts keep their order, which may mean something.

    It may hold `Encoded` parts.

    Raises:
        UnsupportedState: it holds something JSON has no word for; `what` names the whole.
    """
    try:
        parts: dict[str, Encoded] = {}
        plain = _tagged(value, what, parts)
        text = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
        return _spliced(text, parts, what)
    except RecursionError:
        raise UnsupportedState(f"{what} is nested too deeply, or holds itself") from None


def loads(raw: bytes | bytearray | memoryview, *, what: str) -> Json:
    """Return what `dumps` wrote.

    Raises:
        DamagedCheckpoint: it is not strict JSON; `what` names it.
    """
    return _loads(raw, what, _untagged)


def loads_plain(raw: bytes | bytearray | memoryview, *, what: str) -> Json:
    """Return strict JSON of others: the same checks, but no meaning given to `$float`."""
    return _loads(raw, what, _unique)


def _loads(raw: bytes | bytearray | memoryview, what: str, as_dict: Any) -> Json:
    try:
        return json.loads(
            str(raw, "utf-8"),
            object_pairs_hook=as_dict,
            parse_constant=_no_constant,
            parse_int=_integer,
        )
    except (ValueError, RecursionError) as problem:
        raise DamagedCheckpoint(f"{what} is not valid JSON: {str(problem)[:200]}") from problem


def _spliced(text: bytes, parts: dict[str, Encoded], what: str) -> bytes:
    """Put the encoded parts where their words stand."""
    if not parts:
        return text
    found = re.split(b"(%s)" % b"|".join(b'"%s"' % word.encode() for word in parts), text)
    return b"".join(
        parts[piece[1:-1].decode()].raw(what) if at % 2 else piece for at, piece in enumerate(found)
    )


def _tagged(value: Json, where: str, parts: dict[str, Encoded]) -> Json:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        if abs(value) >= 10**_MAX_DIGITS:
            raise UnsupportedState(f"{where} is an integer of more than {_MAX_DIGITS} digits")
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: str(float(value))}
    if isinstance(value, (list, tuple)):
        return [_tagged(item, where, parts) for item in value]
    if isinstance(value, dict):
        return {
            _key(key, where): _tagged(item, f"{where}.{key}", parts) for key, item in value.items()
        }
    if isinstance(value, Encoded):
        word = secrets.token_hex(16)  # which no text of the user's can hold
        parts[word] = value
        return word
    raise UnsupportedState(f"{where} holds a {type(value).__name__}, which JSON cannot")


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise UnsupportedState(f"{where} has the key {key!r}: JSON keys are strings")
    return f"${key}" if _TAG_LIKE.fullmatch(key) else key


def _untagged(pairs: list[tuple[str, Json]]) -> Json:
    found = _unique(pairs)
    if len(found) == 1 and _TAG in found:
        if not isinstance(found[_TAG], str) or found[_TAG] not in _NOT_FINITE:
            raise ValueError(f"{_TAG} is not one of {', '.join(_NOT_FINITE)}")
        return _NOT_FINITE[found[_TAG]]
    for key in found:
        if key.endswith("float") and _TAG_LIKE.fullmatch(key):
            break
    else:  # nearly always
        return found
    return {key[1:] if _TAG_LIKE.fullmatch(key) else key: item for key, item in found.items()}


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not standard JSON")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS + 1:
        raise ValueError("an integer has too many digits")
    return int(text)
