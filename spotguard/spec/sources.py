"""`resolve`: one spec out of all the places where settings can stand, each value with its origin.

    flag > SPOTGUARD_* > the script's own block > ./spotguard.toml > user file > default

A relative path is meant as seen from the file in which it stands; on the command line and in
variables, from the folder in which you are.
"""

from __future__ import annotations

import os
from collections import ChainMap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from spotguard.errors import EnvironmentFailure, SpecError
from spotguard.shared.json_documents import document
from spotguard.shared.paths import home_folder
from spotguard.spec.home_folder import default_store, spotguard_home
from spotguard.spec.infra import LOCAL, gpu_count
from spotguard.spec.model import PLACE_FIELDS, JobSpec, build_spec
from spotguard.spec.script import Script, check_runtime, read_script
from spotguard.spec.setting import DEFAULT_TOPICS, sanitized_name
from spotguard.spec.setting_catalogue import TABLES, ConfigField, catalogue
from spotguard.spec.setting_layers import (
    Given,
    Layer,
    absolute,
    block_layer,
    file_layer,
    flag_layer,
    variable_layer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCHEMA: Final = 1
PROJECT_FILE = "spotguard.toml"
USER_FILE = "config.toml"
HIDDEN = "***"
"""Stands for each value of the job's variables, and for webhooks."""


@dataclass(frozen=True, kw_only=True)
class ConfigValue:
    """One setting's value and who gave it."""

    field: str
    """The config key; one row `env.NAME` for each of the job's variables."""
    value: Any
    """As a file would hold it, ready for JSON; never the value of a variable of the job's."""
    origin: str
    """`flag --budget`, `env SPOTGUARD_BUDGET`, `job.py line 3`, `spotguard.toml line 1`, …"""

    @property
    def text(self) -> str:
        """The value for a human."""
        if self.value is None or self.value == []:
            return "not set"
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return ", ".join(self.value) if isinstance(self.value, list) else str(self.value)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A spec and how it came about."""

    spec: JobSpec
    values: list[ConfigValue]
    batches: tuple[int, int] | None
    """Global batch and micro-batch, where the script states both as plain numbers."""

    def to_json(self) -> dict[str, Any]:
        """Return the object of `config show --json`."""
        return document(SettingsDocument(script=self.spec.script, values=self.values))


@dataclass(frozen=True, kw_only=True)
class SettingsDocument:
    """What `config show --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    script: str
    """Its absolute path."""
    values: list[ConfigValue]
    """All settings, in the order of the reference page; then the job's variables."""


def resolve(
    script: str | Path,
    *,
    flags: Mapping[str, object],
    args: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Resolved:
    """Return the spec for `script`, and where each of its values comes from.

    Args:
        script: path of the training script, seen from `cwd`.
        flags: by config key (`budget`, `local.mtbf`), as typed; None is 'not given'.
        args: the script's own arguments.
        environ: this process's environment unless given.
        cwd: this process's folder unless given.

    Raises:
        SpecError: something is wrong with the script or a setting; nothing was changed.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    job = read_script(Path(str(absolute(str(script), cwd))))
    home = spotguard_home(environ)
    given = ChainMap(
        flag_layer(flags, cwd),
        variable_layer(environ, cwd),
        block_layer(job.path, job.source),
        file_layer(cwd / PROJECT_FILE, PROJECT_FILE),
        file_layer(home / USER_FILE, _short(home / USER_FILE)),
        _dependent_defaults(job, cwd, home),
    )
    spec = _spec(job, args, given)
    if not spec.trust_script:
        check_runtime(job)
    return Resolved(spec=spec, values=_values(spec, given), batches=job.batches)


def resolve_launch(
    script: str | Path,
    *,
    flags: Mapping[str, object],
    args: Sequence[str] = (),
) -> Resolved:
    """Return what `resolve` does, for a job that is to be launched or priced.

    Raises:
        SpecError: something is wrong with the script or a setting; or GPUs are asked for while
            processes of this machine would play the nodes, so nobody would get any.
    """
    found = resolve(script, flags=flags, args=args)
    spec, origins = found.spec, {value.field: value.origin for value in found.values}
    # Asked for in this command, or nobody has said where to run. A file's GPUs are for the place
    # that the same file names, and `--infra local` beside them is a trial.
    meant = origins["gpus"].startswith("flag") or origins["infra"] == "default"
    if spec.gpus and spec.infra == LOCAL and not spec.phases and meant:
        count = gpu_count(spec.gpus)
        raise SpecError(
            "gpus",
            f"given {spec.gpus!r} ({origins['gpus']}), but infra is local: processes of this "
            "machine play the nodes, and have the GPUs that this machine has",
            hint="for nodes with GPUs say where: --infra aws (or gcp, azure, kubernetes, slurm); "
            f"to try it here, --nproc-per-node {count} without --gpus",
        )
    return found


def places_named(
    infra: str | None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> tuple[str, ...]:
    """Return where jobs shall run by the settings of this folder and user, without any script.

    `infra`, if given, stands for all of them.

    Raises:
        SpecError: a setting is wrong.
    """
    if infra is not None:
        given: Mapping[str, Given] = {"infra": Given(infra, "flag --infra")}
    else:
        environ = os.environ if environ is None else environ
        cwd = Path.cwd() if cwd is None else cwd
        home = spotguard_home(environ)
        given = ChainMap(
            variable_layer(environ, cwd),
            file_layer(cwd / PROJECT_FILE, PROJECT_FILE),
            file_layer(home / USER_FILE, _short(home / USER_FILE)),
        )
    return tuple(_parsed(key, given[key]) for key in ("infra", "on_demand_infra") if key in given)


def place_of(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return what settings say of where a job runs, parsed, by the fields of `JobSpec`.

    Args:
        settings: by config key, as typed; None is 'not given'.

    Raises:
        SpecError: one makes no sense, or says nothing of that.
    """
    keys = {catalogue_key: field.path[-1] for catalogue_key, field in catalogue().items()}
    place: dict[str, Any] = {}
    for key, value in settings.items():
        if value is None:
            continue
        if keys.get(key) not in PLACE_FIELDS:
            known = [each for each, name in keys.items() if name in PLACE_FIELDS]
            raise SpecError(key, f"is not of a place; those are {', '.join(known)}")
        place[keys[key]] = _read(key, flag_layer({key: value}, Path.cwd())[key])
    return place


def alerts_named(
    *, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return who is told and of what, by the settings of this folder and user, without any script.

    Raises:
        SpecError: a setting is wrong; URLs, which are secrets, are not repeated.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    home = spotguard_home(environ)
    given = ChainMap(
        variable_layer(environ, cwd),
        file_layer(cwd / PROJECT_FILE, PROJECT_FILE),
        file_layer(home / USER_FILE, _short(home / USER_FILE)),
    )
    found: dict[str, tuple[str, ...]] = {"notify": (), "notify_on": DEFAULT_TOPICS}
    for key in found.keys() & given.keys():
        found[key] = tuple(_read(key, given[key], secret=key == "notify"))
    return found["notify"], found["notify_on"]


def _parsed(key: str, given: Given) -> str:
    return str(_read(key, given))


def _read(key: str, given: Given, *, secret: bool = False) -> Any:
    setting = catalogue()[key].setting
    try:
        return setting.parse(given.value)
    except ValueError:
        value = "something else" if secret else repr(given.value)
        raise SpecError(
            key, f"given {value} ({given.origin}); allowed: {setting.allowed}"
        ) from None


def _dependent_defaults(job: Script, cwd: Path, home: Path) -> Layer:
    values = {
        "name": sanitized_name(job.path.stem),
        "workdir": str(cwd),
        "store": str(default_store(home)),
    }
    return {key: Given(value, "default") for key, value in values.items()}


def _spec(job: Script, args: Sequence[str], given: Mapping[str, Given]) -> JobSpec:
    values: dict[str, Any] = {"script": str(job.path), "args": tuple(args)}
    values.update({table: {} for table in TABLES})
    for key, found in given.items():
        if key.startswith("env."):
            values["env"][key.removeprefix("env.")] = found.value
        else:
            *above, name = catalogue()[key].path
            (values[above[0]] if above else values)[name] = found.value
    spec = build_spec(values, {key: found.origin for key, found in given.items()})
    if "nproc_per_node" not in given and spec.gpus:
        spec = spec.replace(nproc_per_node=gpu_count(spec.gpus))
    if not Path(spec.workdir).is_dir():
        origin = given["workdir"].origin
        raise SpecError(
            "workdir", f"given {spec.workdir!r} ({origin}), but there is no such folder"
        )
    return spec


def _values(spec: JobSpec, given: Mapping[str, Given]) -> list[ConfigValue]:
    rows = []
    for known in catalogue().values():
        if known.key == "env":
            continue
        origin = given[known.key].origin if known.key in given else "default"
        value = known.written(_value_at(spec, known))
        if known.key == "notify" and value:
            value = HIDDEN
        rows.append(ConfigValue(field=known.key, value=value, origin=origin))
    hidden = {f"env.{name}": given[f"env.{name}"].origin for name in spec.env}
    return rows + [ConfigValue(field=k, value=HIDDEN, origin=o) for k, o in hidden.items()]


def _value_at(spec: JobSpec, field: ConfigField) -> object:
    value: object = spec
    for name in field.path:
        value = getattr(value, name)
    return value


def _short(path: Path) -> str:
    try:
        return f"~/{path.relative_to(home_folder())}"
    except (ValueError, EnvironmentFailure):
        return str(path)
