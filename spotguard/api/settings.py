"""Settings: what was asked for, and where each value comes from."""

from __future__ import annotations

from spotguard.spec.file_schema import file_schema
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.infra import LOCAL
from spotguard.spec.model import JobSpec
from spotguard.spec.model.sweep import points_of
from spotguard.spec.setting_catalogue import catalogue
from spotguard.spec.sources import (
    ConfigValue,
    Resolved,
    SettingsDocument,
    places_named,
    resolve,
    resolve_launch,
)
from spotguard.spec.starter import starter_files

__all__ = [
    "catalogue",
    "ConfigValue",
    "file_schema",
    "JobSpec",
    "LOCAL",
    "places_named",
    "points_of",
    "resolve",
    "resolve_launch",
    "Resolved",
    "SettingsDocument",
    "spotguard_home",
    "starter_files",
]
