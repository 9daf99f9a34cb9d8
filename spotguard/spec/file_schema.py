"""The JSON schema of `spotguard.toml`, made from the settings: for editors that check as you type.

It refuses nothing that spotguard takes. What it cannot say, such as that a place exists, stands in
each setting's description.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from spotguard.spec.infra import (
    at_least,
    gpu_names,
    image_name,
    machine_name,
    mounts,
    on_demand_rule,
    places,
    volume_names,
)
from spotguard.spec.model import PLACE_FIELDS, TeamCap
from spotguard.spec.model.own_template import TemplateName
from spotguard.spec.model.phases import UNTIL
from spotguard.spec.nodes import NodeRange
from spotguard.spec.setting import (
    IfGiven,
    OneOf,
    Whole,
    alert_topics,
    cache_folders,
    duration,
    hooks,
    instant,
    number,
    run_name,
    save_interval,
    store_url,
    switch,
    text,
    texts,
    usd,
    variables,
)
from spotguard.spec.setting_catalogue import catalogue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.spec.setting import Parser, Setting
    from spotguard.spec.setting_catalogue import ConfigField

_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": ["number", "string"]}
_TEXTS: Final = {"type": ["array", "string"], "items": _TEXT}
_PAIRS: Final = {
    "type": ["object", "array", "string"],
    "additionalProperties": _TEXT,
    "items": _TEXT,
}
_FORMS: Final[Mapping[Parser, dict[str, Any]]] = {
    **dict.fromkeys((text, run_name, machine_name, image_name, on_demand_rule, store_url), _TEXT),
    **dict.fromkeys((number, usd, duration, instant, save_interval, at_least), _NUMBER),
    **dict.fromkeys((texts, hooks, places, gpu_names, alert_topics, cache_folders), _TEXTS),
    switch: {"type": ["boolean", "string"]},
    variables: {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
    mounts: _PAIRS,
    volume_names: _PAIRS,
    NodeRange.parse: {"type": ["integer", "string", "object"]},
    TeamCap.parse: {"type": ["number", "string", "object"]},
}
"""What each parser takes from a file; a number may be written as a text, too."""


def file_schema() -> dict[str, Any]:
    """Return the schema of spotguard.toml, and of the user's own config.toml."""
    tables: dict[str, dict[str, Any]] = {"": {}}
    for field in catalogue().values():
        table, _, name = field.key.rpartition(".")
        tables.setdefault(table, {})[name] = _of_setting(field)
    return {
        "title": "spotguard.toml",
        "description": "Settings of spotguard; docs/configuration.md explains them.",
        **_table(tables.pop("") | {name: _table(each) for name, each in tables.items()}),
    }


def _table(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of_setting(field: ConfigField) -> dict[str, Any]:
    schema = {
        "description": f"{' '.join(field.doc.split())} Allowed: {field.setting.allowed}.",
        **form(field.setting.parse),
        "examples": [tomllib.loads(f"it = {field.setting.example}")["it"]],
    }
    default = field.written(field.default)
    return schema if default in (None, [], {}) else {**schema, "default": default}


def form(parse: Parser) -> dict[str, Any]:
    """Return a schema for what a parser takes from a file."""
    if isinstance(parse, IfGiven):
        return form(parse.parse)
    if isinstance(parse, TemplateName):
        return {"anyOf": [{"enum": sorted(parse.names)}, {**_TEXT, "pattern": r"/|\.ya?ml$"}]}
    if isinstance(parse, OneOf):
        spelt = {word.replace("_", dash) for word in parse.words for dash in "_-"}
        return {"enum": sorted(spelt)}
    if isinstance(parse, Whole):
        limits = {"minimum": parse.lowest, "maximum": parse.highest}
        if parse.highest == Whole.highest:
            del limits["maximum"]
        return {"type": ["integer", "string"], **limits}
    if parse is _phases_setting().parse:
        return _phases()
    return dict(_FORMS[parse])


def _phases_setting() -> Setting:
    return catalogue()["phases"].setting


def _phases() -> dict[str, Any]:
    fields = {field.path[-1]: field for field in catalogue().values() if len(field.path) == 1}
    phase = {UNTIL: {"type": ["integer", "string"], "minimum": 1}}
    phase |= {fields[name].key: form(fields[name].setting.parse) for name in PLACE_FIELDS}
    return {"type": ["array", "string"], "items": _table(phase)}
