"""Names that others build on: keys of the run store, variables, exit codes, public Python names."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import spotguard
from spotguard import errors
from spotguard.checkpoint.shard import shard_file
from spotguard.cli import main
from spotguard.control.checkpoints.commands import Validity
from spotguard.control.doctor.checks import Status
from spotguard.control.journal.record import Kind
from spotguard.control.supervisor.decide import EXIT_UNFINISHED
from spotguard.events import env, keys
from spotguard.events.event import JobEvent
from spotguard.events.states import (
    EXIT_CODE_OF_JOB_TOLD_TO_STOP,
    CheckpointKind,
    EndReason,
    Market,
    RunState,
)
from spotguard.spec.setting_catalogue import OTHER_VARIABLES, by_variable
from spotguard.storage.keys import RESERVED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from enum import Enum

PACKAGE = Path(spotguard.__file__).parent
TEMPLATES = PACKAGE.parent / "task_templates"
PUBLIC = ("spotguard", "spotguard.api", "spotguard.runtime", "spotguard.testing")
MADE_BY_THE_RUNTIME = ("Run", "Step", "ElasticLoader")
"""Classes that a script gets, and never makes."""
_SPECIAL = ("__init__", "__iter__", "__len__", "__call__", "__enter__", "__exit__")

_VOCABULARIES: dict[str, type[Enum]] = {
    "state of a run": RunState,
    "reason of an end": EndReason,
    "kind of a checkpoint": CheckpointKind,
    "condition of a checkpoint": Validity,
    "market": Market,
    "result of a doctor's check": Status,
    "happening in a job": JobEvent,
    "happening in a run": Kind,
}

# ---------------------------------------------------------------- keys of the run store

_KEY_ARGUMENTS: dict[str, Any] = {
    "number": 7,
    "machine": "5f5f5f5f",
    "node": 3,
    "rank": 2,
    "step": 40,
    "at": 1_700_000_000.125,
    "count": 5,
    "profile": 1,
    "word": "3f3f3f3f",
    "digest": "3f" * 32,
    "folder": "attempts/000007/logs/",
    "owner": 3,
    "name": "sweeps",
    "run_id": "train-261125-101500-0c1f-03",
    "sweep_id": "train-261125-101500-0c1f",
    "world_size": 4,
    "last_event": "attempts/000007/events/1700000000125-00003-00002-000005.json",
    "checkpoint_prefix": "checkpoints/000000000040-000007/",
}
_KEYS_TO_READ = (
    "attempts/000007/events/1700000000125-00003-00002-000005.json",
    "attempts/000007/events/1700000000125-00003-00002-000005.jsonl",
    "checkpoints/000000000040-000007/manifest.json",
    "attempts/000007/logs/00003-1700000000125-000007-0000005.jsonl.gz",
    "cache/listings/000007-00003",
    "values/train-261125-101500-0c1f-03.json",
    "attempts/000007/profiles/000001/00002.json",
)


def store_keys() -> dict[str, Any]:
    """Return what each function of `events.keys` makes of the same arguments, and its constants."""
    record: dict[str, Any] = {"RESERVED": RESERVED, "shard_file": _made(shard_file)}
    for name, value in vars(keys).items():
        if name.startswith("_"):
            continue
        if inspect.isfunction(value) and value.__module__ == keys.__name__:
            record[name] = _made(value)
        elif isinstance(value, re.Pattern):
            record[name] = value.pattern
        elif isinstance(value, (str, int)):
            record[name] = value
    return dict(sorted(record.items()))


def _made(function: Callable[..., Any]) -> Any:
    parameters = list(inspect.signature(function).parameters)
    if parameters == ["key"]:  # it reads one
        return {key: function(key) for key in _KEYS_TO_READ}
    return function(**{name: _KEY_ARGUMENTS[name] for name in parameters})


# ---------------------------------------------------------------- environment variables

_ALL_CAPITALS = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")
_IN_SHELL = re.compile(r"\$\{?([A-Z][A-Z0-9_]+)|export ([A-Z][A-Z0-9_]+)=")
_NO_VARIABLES = {
    *("ARCHIVE", "COPY", "CRC32C", "DEEP_ARCHIVE", "ENABLED", "GLACIER", "HOST", "POST"),
    *("REPLACE", "SECONDS", "STANDARD", "TCP_USER_TIMEOUT"),
    *("DURATION", "EVERY", "FILE", "NAME", "PATH", "PLACE", "RULE", "TEXT", "WHAT"),
}
"""Other words in capitals that stand in modules which look at the environment."""


def variables() -> dict[str, Any]:
    """Return the names of all variables that are read or set here, by whose they are."""
    found = set(_in_templates())
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if re.search(r"environ|getenv|envs", text):
            found |= set(_in_module(text))
    settings = {name: field.key for name, field in sorted(by_variable().items())}
    others = found - set(settings) - OTHER_VARIABLES - _NO_VARIABLES
    return {
        "settings": settings,
        "of jobs": sorted(env.JOB_VARIABLES),
        "of the command line": sorted(OTHER_VARIABLES - env.JOB_VARIABLES),
        "others": sorted(others),
    }


def _in_module(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if len(name) > 3 and _ALL_CAPITALS.fullmatch(name):
                yield name


def _in_templates() -> Iterator[str]:
    for path in TEMPLATES.rglob("*.yaml"):
        text = path.read_text()
        yield from (used or exported for used, exported in _IN_SHELL.findall(text))
        yield from (yaml.safe_load(text) or {}).get("envs") or {}


# ---------------------------------------------------------------- exit codes


def exit_codes() -> dict[str, Any]:
    """Return the code of each error, and those that the command line and the job have besides."""
    return {
        "errors": {
            name: value.exit_code
            for name, value in sorted(vars(errors).items())
            if inspect.isclass(value) and issubclass(value, errors.SpotguardError)
        },
        "command line: its output pipe was closed": main.CLOSED_PIPE_EXIT_CODE,
        "command line: cut off by Ctrl-C": main.INTERRUPTED_EXIT_CODE,
        "followed run: stopped by the user, or adopted": EXIT_UNFINISHED,
        "job: saved and told to stop": EXIT_CODE_OF_JOB_TOLD_TO_STOP,
    }


# ---------------------------------------------------------------- words in documents


def words() -> dict[str, Any]:
    """Return the words by which programs decide, each list by what its words are of."""
    return {name: sorted(word.value for word in kind) for name, kind in _VOCABULARIES.items()}


# ---------------------------------------------------------------- public Python names


def public_names() -> dict[str, Any]:
    """Return what the public packages export: functions and classes with all that is in them."""
    return {name: _exported(name) for name in PUBLIC}


def _exported(module: str) -> dict[str, Any]:
    package = import_module(module)
    return {name: _described(getattr(package, name)) for name in package.__all__}


def _described(value: Any) -> Any:
    if not inspect.isclass(value):
        return _signature(value) if callable(value) else type(value).__name__
    ours = [kind for kind in value.__mro__ if kind.__module__.split(".")[0] == "spotguard"]
    names = {name for kind in ours for name in vars(kind) if _is_public(value, name)}
    members = {name: _member(inspect.getattr_static(value, name)) for name in names}
    attributes = {name: "attribute" for kind in ours for name in _attributes(kind)}
    return dict(sorted((attributes | members).items()))


def _is_public(value: type, name: str) -> bool:
    if name == "__init__":
        return value.__name__ not in MADE_BY_THE_RUNTIME
    return name in _SPECIAL or not name.startswith("_")


def _member(value: Any) -> Any:
    if isinstance(value, property):
        return f"property -> {inspect.signature(value.fget).return_annotation}"  # type: ignore[arg-type]
    if isinstance(value, (classmethod, staticmethod)):
        return f"{type(value).__name__} {_signature(value.__func__)}"
    return _signature(value) if callable(value) else "attribute"


def _attributes(value: type) -> set[str]:
    """Return the public attributes that the class's own methods give to an instance."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    targets = (
        target
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
        if not target.attr.startswith("_")
    }


def _signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    given = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    told = [_parameter(parameter) for parameter in given]
    return f"({', '.join(told)}) -> {_annotation(signature.return_annotation)}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = ""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
    only = " (keyword)" if parameter.kind is parameter.KEYWORD_ONLY else ""
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}: {_annotation(parameter.annotation)}{default}{only}"


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return "?"
    return (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", str(annotation))
    )
