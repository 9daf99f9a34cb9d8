"""JSON schemas of all that `--json` prints and of spotguard.toml, made from the types themselves.

Write them with `python -m spotguard.cli.schemas docs/schemas`; a test fails when they are old.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from dataclasses import is_dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from spotguard.api.checkpoints import (
    ArchiveDocument,
    CheckpointDocument,
    CheckpointRow,
    CheckpointsDocument,
    VerificationDocument,
)
from spotguard.api.doctor import (
    DoctorDocument,
    DrillReport,
    ListedClusters,
    LoaderReport,
    TriedStore,
)
from spotguard.api.documents import (
    BatchCurve,
    CostForecast,
    Factor,
    Footprint,
    HistoryDocument,
    HistoryLine,
    JobPlan,
    LogDocument,
    PriceSource,
    ProfileDocument,
    Recovery,
    ReportDocument,
    RunFootprint,
    RunsDocument,
    RunView,
    Skipped,
    Smoke,
    SweepDocument,
    Unchecked,
)
from spotguard.api.market import MarketDocument
from spotguard.api.settings import SettingsDocument, file_schema
from spotguard.api.simulation import Simulation
from spotguard.api.states import CheckpointKind, EndReason, Market, RunState
from spotguard.api.team import TeamDocument
from spotguard.shared.json_documents import Form, forms

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
PLACE: Final = "https://raw.githubusercontent.com/spotguard/spotguard/main/docs/schemas"
DOCUMENTS: Final[dict[str, type]] = {
    "status": RunView,
    "history": HistoryDocument,
    "logs": LogDocument,
    "runs": RunsDocument,
    "team": TeamDocument,
    "sweep": SweepDocument,
    "report": ReportDocument,
    "profile": ProfileDocument,
    "plan": JobPlan,
    "simulate": Simulation,
    "market show": MarketDocument,
    "config show": SettingsDocument,
    "checkpoints ls": CheckpointsDocument,
    "checkpoints show": CheckpointDocument,
    "checkpoints verify": VerificationDocument,
    "checkpoints archive": ArchiveDocument,
    "drill": DrillReport,
    "doctor": DoctorDocument,
}
"""What each command prints with `--json`; `up` and `resume` print what `status` does."""
LIKE_STATUS: Final = ("up", "resume")
LIKE_MARKET_SHOW: Final = ("market refresh",)
SETTINGS: Final = "settings"

_NAMES: Final = {
    kind.__name__: kind
    for kind in (
        *(CheckpointKind, EndReason, Market, RunState),
        *(
            BatchCurve,
            ListedClusters,
            LoaderReport,
            PriceSource,
            Recovery,
            Skipped,
            Smoke,
            TriedStore,
            Unchecked,
        ),
        *(
            CheckpointRow,
            CostForecast,
            Factor,
            Footprint,
            HistoryLine,
            LogDocument,
            RunFootprint,
            RunView,
        ),
    )
}
"""Types that some modules name for the type checker only."""
_SIMPLE: Final = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_IN_JSON: Final = {"None": "null", "True": "true", "False": "false"}


def schemas() -> dict[str, dict[str, Any]]:
    """Return all schemas by the name of their file, without `.json`."""
    made = {SETTINGS: file_schema()}
    for command, kind in DOCUMENTS.items():
        made[file_name(command)] = {"title": f"spotguard {command} --json", **_Schema().of(kind)}
    return {
        name: {"$schema": DIALECT, "$id": f"{PLACE}/{name}.json", **schema}
        for name, schema in made.items()
    }


def file_name(command: str) -> str:
    """Return the name of the file, without `.json`, with the schema of what a command prints."""
    command = "market show" if command in LIKE_MARKET_SHOW else command
    return "status" if command in LIKE_STATUS else command.replace(" ", "/")


class _Schema:
    """One schema in the making, with the parts that it refers to."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Any]] = {}

    def of(self, kind: type) -> dict[str, Any]:
        """Return the schema of a document."""
        whole = self._object(kind)
        return {**whole, "$defs": dict(sorted(self._parts.items()))} if self._parts else whole

    def _object(self, kind: type) -> dict[str, Any]:
        properties = self._properties(kind)
        return {
            "description": _in_json(inspect.cleandoc(kind.__doc__ or "")),
            "type": "object",
            "properties": properties,
            "required": list(properties),
        }

    def _properties(self, kind: type) -> dict[str, Any]:
        hints, words = get_type_hints(kind, localns=_NAMES), _words_below_fields(kind)
        stand = forms(kind) if is_dataclass(kind) else dict.fromkeys(hints, Form.AS_IT_IS)
        properties: dict[str, Any] = {}
        for name, form in stand.items():
            if form is Form.INLINE:
                properties |= self._properties(hints[name])
            elif form is not Form.HIDDEN:
                schema = self._value(hints[name], instant=form is Form.INSTANT)
                described = {"description": words[name]} if name in words else {}
                properties[name] = {**described, **schema}
        return properties

    def _value(self, hint: Any, *, instant: bool = False) -> dict[str, Any]:
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            each = [self._value(part, instant=instant and part is not NoneType) for part in inner]
            return _any_of(each)
        if instant:
            return {"type": "string", "format": "date-time"}
        if origin is Literal:
            return {"const": inner[0]}
        if origin in (list, tuple):
            return {"type": "array", "items": self._value(inner[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self._value(inner[1])}
        if hint in _SIMPLE:
            return {"type": _SIMPLE[hint]}
        return {} if hint is Any else self._named(hint)

    def _named(self, kind: type) -> dict[str, Any]:
        if issubclass(kind, Enum):
            return {"type": "string", "enum": [word.value for word in kind]}
        if kind.__name__ not in self._parts:
            self._parts[kind.__name__] = self._object(kind)
        return {"$ref": f"#/$defs/{kind.__name__}"}


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema for what one of them takes: as short as it can be written."""
    *first, last = schemas
    if len(first) == 1 and last == {"type": "null"}:
        [other] = first
        if "enum" in other:
            return {"type": ["string", "null"], "enum": [*other["enum"], None]}
        if isinstance(other.get("type"), str):
            return {**other, "type": [other["type"], "null"]}
    return {"anyOf": schemas}


def _words_below_fields(kind: type) -> dict[str, str]:
    """Return the strings that stand below fields of a class, by the field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        ast.unparse(field.target): _in_json(inspect.cleandoc(below.value.value))
        for field, below in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _in_json(words: str) -> str:
    """Return words on one line, with the names that values have in JSON."""
    return re.sub(r"\b(None|True|False)\b", lambda name: _IN_JSON[name[0]], " ".join(words.split()))


def main(folder: str) -> None:
    """Write all schemas into a folder."""
    for name, schema in schemas().items():
        path = Path(folder, f"{name}.json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(as_text(schema), encoding="utf-8")


def as_text(schema: dict[str, Any]) -> str:
    """Return a schema as it is published."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main(sys.argv[1])
