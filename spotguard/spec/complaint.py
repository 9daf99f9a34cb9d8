"""Turn what pydantic says of a wrong value into one sentence for the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from spotguard.errors import SpecError
from spotguard.shared.typo_guess import did_you_mean
from spotguard.spec.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import ValidationError

_LONGEST = 80
"""Characters of a wrong value that a message repeats."""


class SaysItAll(ValueError):
    """What a parser raises whose own words say what is wrong better than `Setting.allowed`."""

    def __init__(self, words: str, *, hint: str = "") -> None:
        super().__init__(words)
        self.hint = hint


def setting_of(model: type[BaseModel], field: str) -> Setting | None:
    """Return the `Setting` in a field's annotation; None for a field that no key sets."""
    info = model.model_fields.get(field)
    return next((m for m in info.metadata if isinstance(m, Setting)), None) if info else None


def spec_error(
    problem: ValidationError, model: type[BaseModel], origins: Mapping[str, str]
) -> SpecError:
    """Return the first complaint, naming the field by its key, what was given and what is allowed.

    Args:
        problem: what pydantic raised.
        model: the model that was being built.
        origins: who gave each value, by config key, as far as it is known.
    """
    error = problem.errors(include_url=False)[0]
    above, model, field = _place(model, [str(part) for part in error["loc"]])
    setting = setting_of(model, field)
    key = ".".join((*above, (setting.key if setting else "") or field))
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(field, model.model_fields)
        return SpecError(key, "there is no such setting", hint=hint)
    if error["type"] == "missing" or setting is None:
        return SpecError(key, str(error["msg"]))
    by = f" ({origins[key]})" if key in origins else ""
    said = error.get("ctx", {}).get("error")
    if isinstance(said, SaysItAll):
        return SpecError(key, f"{said}{by}", hint=said.hint)
    return SpecError(
        key,
        f"given {_shown(field, error)}{by}; allowed: {setting.allowed}",
        hint=_guess(error["input"], setting),
    )


def _place(model: type[BaseModel], path: list[str]) -> tuple[tuple[str, ...], type[BaseModel], str]:
    """Return the tables above a field, the model that holds it, and its name."""
    info = model.model_fields.get(path[0])
    inner = info.annotation if info else None
    # Asked by the metaclass: to Python 3.10 `tuple[str, ...]` is a class that has no subclasses.
    if len(path) > 1 and isinstance(inner, type(BaseModel)):
        above, model, field = _place(inner, path[1:])
        return (path[0], *above), model, field
    return (), model, path[0]


def _shown(field: str, error: Mapping[str, Any]) -> str:
    if field in ("env", "notify"):  # secrets, maybe; the parser's own words hold none
        return str(error["msg"]).removeprefix("Value error, ")
    shown = repr(error["input"])
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


def _guess(given: object, setting: Setting) -> str:
    if setting.choices and isinstance(given, str):
        return did_you_mean(given, setting.choices)
    return ""
