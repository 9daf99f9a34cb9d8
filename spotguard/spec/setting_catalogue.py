"""The list of all settings, read from the model: what files, flags and the reference page go by."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from inspect import cleandoc
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic_core import PydanticUndefined

from spotguard.events.env import JOB_VARIABLES
from spotguard.spec.complaint import setting_of
from spotguard.spec.home_folder import HOME_VARIABLE
from spotguard.spec.model import JobSpec, LocalSpec, NodeSpec, PhaseSpec, SmokeSpec, TeamSpec
from spotguard.spec.setting import Setting, seconds_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

TABLES = ("local", "node", "smoke", "team", "env")
"""Keys that hold a table in a file; all others are plain."""
PREFIX = "SPOTGUARD_"
DEBUG_VARIABLE = "SPOTGUARD_DEBUG"
OTHER_VARIABLES = JOB_VARIABLES | {HOME_VARIABLE, DEBUG_VARIABLE}
"""`SPOTGUARD_*` variables that mean something, though no setting."""


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One setting as a user meets it."""

    key: str
    """As in a file: `budget`, or `local.mtbf` below the table `[local]`."""
    path: tuple[str, ...]
    """Where it is in a JobSpec."""
    setting: Setting
    default: object
    """None also where the default depends on the machine; `doc` says so."""
    doc: str

    @property
    def variable(self) -> str | None:
        """The environment variable that sets it; the table `env` has none."""
        if self.key == "env":
            return None
        return (
            self.setting.variable
            or PREFIX + self.key.removeprefix("local.").replace(".", "_").upper()
        )

    @property
    def flag(self) -> str | None:
        """The option that sets it."""
        return self.setting.flag

    def written(self, value: object) -> object:
        """Return a value of this field as a file would hold it, ready for JSON."""
        if self.setting.is_duration and isinstance(value, float):
            return seconds_text(value)
        if isinstance(value, tuple):
            return [_phase(item) if isinstance(item, PhaseSpec) else item for item in value]
        if value is None or isinstance(value, (bool, int, float, dict)):
            return value
        return str(value)


def _phase(phase: PhaseSpec) -> str:
    """Return a phase in one line, as TOML."""
    until = {} if phase.until_step is None else {"until_step": phase.until_step}
    said = {**until, **phase.model_dump(mode="json", include=set(phase.place))}
    keys = {name: (found.key if found else "") or name for name in said
            for found in [setting_of(JobSpec, name)]}  # fmt: skip
    written = {**said, **({"nodes": str(phase.nodes)} if phase.nodes is not None else {})}
    return "{ " + ", ".join(f"{keys[n]} = {json.dumps(v)}" for n, v in written.items()) + " }"


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, ConfigField]:
    """Return all settings by their key, in the order of the model."""
    fields = [
        *_fields_of(JobSpec, ()),
        *_fields_of(LocalSpec, ("local",)),
        *_fields_of(NodeSpec, ("node",)),
        *_fields_of(SmokeSpec, ("smoke",)),
        *_fields_of(TeamSpec, ("team",)),
    ]
    return MappingProxyType({field.key: field for field in fields})


@lru_cache(maxsize=1)
def by_variable() -> Mapping[str, ConfigField]:
    """Return the settings that an environment variable can set, by its name."""
    return MappingProxyType({f.variable: f for f in catalogue().values() if f.variable})


def _fields_of(model: type[BaseModel], above: tuple[str, ...]) -> list[ConfigField]:
    fields = []
    for name, info in model.model_fields.items():
        setting = setting_of(model, name)
        if setting is None:
            continue
        default = info.get_default(call_default_factory=True)
        fields.append(
            ConfigField(
                key=".".join((*above, setting.key or name)),
                path=(*above, name),
                setting=setting,
                default=None if default is PydanticUndefined else default,
                doc=cleandoc(info.description or ""),
            )
        )
    return fields
