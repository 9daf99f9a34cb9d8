"""The shipped task templates: SkyPilot YAML, read as data and never as text."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

import spotguard
from spotguard.errors import EnvironmentFailure, SpecError
from spotguard.shared.typo_guess import did_you_mean

BASE = "base"
"""The template that all others are put on top of."""


@lru_cache(maxsize=1)
def _folder() -> Path:
    package = Path(spotguard.__file__).parent
    # In a wheel the templates lie inside the package, in a checkout beside it.
    for folder in (package / "task_templates", package.parent / "task_templates"):
        if folder.is_dir():
            return folder
    raise EnvironmentFailure(
        "the task templates are missing from this installation",
        hint="reinstall it: pip install --force-reinstall spotguard",
    )


@lru_cache(maxsize=1)
def template_names() -> tuple[str, ...]:
    """Return the names that `--template` takes, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def load_template(name: str) -> dict[str, Any]:
    """Return a template as a whole SkyPilot task, fresh on every call: `base` with it on top.

    Raises:
        SpecError: there is no such template; names the nearest.
    """
    if name not in template_names():
        raise SpecError(
            "template",
            f"given {name!r}; allowed: one of {', '.join(template_names())}",
            hint=did_you_mean(name, template_names()),
        )
    base = _read(BASE)
    return base if name == BASE else merged(base, _read(name))


def load_controller_node() -> dict[str, Any]:
    """Return the task of a node that a run's controller has for itself, fresh on every call."""
    return _read("controller/node")


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return two task configurations as one: tables are merged, anything else is replaced."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return both


def _read(name: str) -> dict[str, Any]:
    return deepcopy(_parsed((_folder() / f"{name}.yaml").read_text(encoding="utf-8")))


@lru_cache(maxsize=16)
def _parsed(text: str) -> dict[str, Any]:
    """Return what a template says; parsing takes a hundred times as long as a copy."""
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded
