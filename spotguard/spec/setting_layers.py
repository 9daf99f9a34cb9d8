"""The places where settings can stand: flags, variables, the script's own block, files.

Each is read into a flat layer, config key → `Given`, which knows who said it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.errors import SpecError, UsageError
from spotguard.shared.paths import expanded
from spotguard.shared.typo_guess import did_you_mean
from spotguard.spec.model.own_template import is_own_template
from spotguard.spec.setting import VARIABLES_FOR_USERS
from spotguard.spec.setting_catalogue import OTHER_VARIABLES, PREFIX, TABLES, by_variable, catalogue
from spotguard.storage.urls import is_url

if TYPE_CHECKING:
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST_BYTES = 256 << 10
"""Of a file of settings; TOML's own readers take quadratic time for some."""
_BLOCK = re.compile(r"(?m)^# /// script$\n((?:^#(?:| .*)$\n)+)^# ///$")
"""PEP 723's own expression, for blocks of the type `script`."""
_LINE = re.compile(r"\s*(?:\[(?P<table>[^\[\]]+)\]|(?P<key>[\w.\"'-]+)\s*=)")


@dataclass(frozen=True)
class Given:
    """A raw value and who gave it."""

    value: object
    origin: str


Layer = dict[str, Given]


def flag_layer(flags: Mapping[str, object], cwd: Path) -> Layer:
    """Return what the command line gave; None and empty lists are 'not given'."""
    layer: Layer = {}
    for key, value in flags.items():
        if value is None or value in ((), [], {}):
            continue
        if key == "env":
            pairs = value.items() if isinstance(value, Mapping) else _pairs(value)
            layer.update({f"env.{name}": Given(text, "flag --env") for name, text in pairs})
        else:
            _refuse_unknown(key, "the command line")
            origin = f"flag {catalogue()[key].flag or key}"
            layer[key] = Given(_based(key, value, cwd), origin)
    return layer


def variable_layer(environ: Mapping[str, str], cwd: Path) -> Layer:
    """Return what `SPOTGUARD_*` variables give; an empty one is 'not given'.

    Those of the job's variables that users may set, such as SPOTGUARD_TRACE_SAMPLES, go to the job.

    Raises:
        SpecError: a variable looks like spotguard's but is none.
    """
    layer: Layer = {}
    for name in sorted(environ):
        if field := by_variable().get(name):
            if environ[name].strip():
                value = _based(field.key, environ[name], cwd)
                layer[field.key] = Given(value, f"env {name}")
        elif name in VARIABLES_FOR_USERS:
            layer[f"env.{name}"] = Given(environ[name], f"env {name}")
        elif name.startswith(PREFIX) and name not in OTHER_VARIABLES:
            raise SpecError(
                name,
                "is set in the environment, but there is no such variable",
                hint=did_you_mean(name, [*by_variable(), *OTHER_VARIABLES]),
            )
    return layer


def block_layer(script: Path, source: str) -> Layer:
    """Return what the script's own `# /// script` block says under `[tool.spotguard]`."""
    toml = _block(script.name, source)
    table: Any = _parsed(toml, script.name)
    for name in ("tool", "spotguard"):
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise SpecError(script.name, f"given {table!r} as {name}; allowed: a table")
    return _table_layer(table, toml, script.name, script.parent, "tool.spotguard")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a script says that it needs, in its PEP 723 block."""

    dependencies: tuple[str, ...] = ()
    """Requirements, as pip takes them."""
    python: str | None = None
    """Versions of Python, such as `>=3.11`."""
    index: str | None = None
    """The index that it names instead of PyPI."""
    folders: tuple[str, ...] = ()
    """Projects of the user's own, seen from the script's folder; `-e ` before an editable one."""


def script_needs(script: Path, source: str) -> Needs:
    """Return the `dependencies` and `requires-python` of the script's own block.

    Raises:
        SpecError: the block is no TOML, or one of the two is not what PEP 723 says.
    """
    table: Any = _parsed(_block(script.name, source), script.name)
    dependencies, python = table.get("dependencies", []), table.get("requires-python")
    if not isinstance(dependencies, list) or not all(map(_is_line, dependencies)):
        raise SpecError(script.name, "given other `dependencies` than a list of requirements")
    if python is not None and not _is_line(python):
        raise SpecError(script.name, "given another `requires-python` than a text")
    uv = table.get("tool", {}).get("uv", {}) if isinstance(table.get("tool", {}), dict) else {}
    index = _index_of(script.name, uv)
    lines, folders = _from_sources(script.name, tuple(dependencies), uv)
    return Needs(dependencies=lines, python=python, index=index, folders=folders)


_UV_WAY_OUT = (
    "write a requirements file (node.requirements in spotguard.toml) whose --index-url has all "
    "that the job needs, or install it by --setup"
)


def _index_of(script: str, uv: Any) -> str | None:
    """Return the address of the one index that counts instead of PyPI; pip cannot rank several.

    Raises:
        SpecError: there are others: pip would ask PyPI for the same names, and take the newest.
    """
    indexes = uv.get("index", []) if isinstance(uv, dict) else []
    if not isinstance(indexes, list) or not all(isinstance(each, dict) for each in indexes):
        raise SpecError(script, "given another `tool.uv.index` than a list of tables")
    for index in indexes:
        if index.get("default") is not True or index.get("explicit") is True or len(indexes) > 1:
            raise SpecError(
                script,
                f"its block names the index {str(index.get('name', 'without a name'))!r} "
                "([[tool.uv.index]]) beside PyPI, which nodes' pip cannot ask for some packages "
                "alone: it would take others of the same name from PyPI",
                hint=_UV_WAY_OUT,
            )
    url = indexes[0].get("url") if indexes else None
    if indexes and not _is_line(url):
        raise SpecError(script, "given another `url` in [[tool.uv.index]] than a text")
    return url


def _from_sources(
    script: str, dependencies: tuple[str, ...], uv: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the requirements with what `[tool.uv.sources]` says of some, and folders among them.

    Raises:
        SpecError: a source is of a kind that pip has no words for.
    """
    sources = uv.get("sources", {}) if isinstance(uv, dict) else {}
    if not isinstance(sources, dict):
        raise SpecError(script, "given another `tool.uv.sources` than a table")
    by_name = {_plain_name(name): source for name, source in sources.items()}
    lines, folders = [], []
    for line in dependencies:
        match = _NAME.match(line)
        source = by_name.get(_plain_name(match[0])) if match else None
        if source is None:
            lines.append(line)
            continue
        assert match is not None
        marker = line.partition(";")[2].strip()
        said = _source_said(source)
        if said is None:
            raise SpecError(
                script,
                f"its block takes {match[0]} from {source!r} ([tool.uv.sources]), which nodes' pip "
                "has no words for: it would take another one of that name from PyPI",
                hint=_UV_WAY_OUT,
            )
        if said.startswith(("-e ", "./", "../")):
            folders.append(said + (match[1] or ""))
        else:
            lines.append(f"{match[0]} @ {said}{f' ; {marker}' if marker else ''}")
    return tuple(lines), tuple(folders)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?P<extras>\[[^\]]*\])?")


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower()


def _source_said(source: object) -> str | None:
    """Return a source of uv's as pip reads it; None if it has no words for it."""
    if not isinstance(source, dict) or not all(isinstance(v, (str, bool)) for v in source.values()):
        return None
    keys = set(source)
    if "git" in keys and keys <= {"git", "rev", "tag", "branch", "subdirectory"}:
        at = [str(source[key]) for key in ("rev", "tag", "branch") if key in keys]
        below = f"#subdirectory={source['subdirectory']}" if "subdirectory" in keys else ""
        if len(at) <= 1:
            address = str(source["git"]).removeprefix("git+")
            return f"git+{address}{f'@{at[0]}' if at else ''}{below}"
    if keys == {"url"}:
        return str(source["url"])
    path = source.get("path")
    if keys <= {"path", "editable"} and isinstance(path, str) and not path.startswith("/"):
        seen = path if path.startswith(("./", "../")) else f"./{path}"
        return f"-e {seen}" if source.get("editable") is True else seen
    return None


def _is_line(value: object) -> bool:
    # A requirement that begins with '-' would be an option of pip's.
    return isinstance(value, str) and value.isprintable() and value.strip()[:1] not in ("", "-")


def _block(name: str, source: str) -> str:
    """Return the TOML in a script's block, its line numbers being the script's; "" without one."""
    blocks = list(_BLOCK.finditer(source))
    if not blocks:
        return ""
    if len(blocks) > 1:
        raise SpecError(name, "has more than one `# /// script` block; PEP 723 allows one")
    above = source.count("\n", 0, blocks[0].start(1))
    return "\n" * above + re.sub(r"(?m)^# ?", "", blocks[0][1])


def file_layer(path: Path, label: str) -> Layer:
    """Return what a TOML file says; nothing if there is no such file."""
    try:
        toml = _small_text(path, label)
    except (FileNotFoundError, NotADirectoryError):  # the latter: a home that cannot exist
        return {}
    except (OSError, UnicodeDecodeError) as problem:
        raise SpecError(label, f"cannot be read: {_reason(problem)}") from problem
    return _table_layer(_parsed(toml, label), toml, label, path.parent, "")


def _small_text(path: Path, label: str) -> str:
    """Return what a file of settings holds; a pipe has no end, and a huge file none in time."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise SpecError(label, "cannot be read: it is no file")
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise SpecError(label, f"is larger than {_MOST_BYTES} bytes, which no settings are")
    return raw.decode()


def _table_layer(
    table: Mapping[str, object], toml: str, label: str, base: Path, above: str
) -> Layer:
    layer: Layer = {}
    for key, value in _flattened(table, label):
        _refuse_unknown(key, label)
        line = _line_of(f"{above}.{key}".lstrip("."), toml)
        origin = f"{label} line {line}" if line else label
        layer[key] = Given(_based(key, value, base), origin)
    return layer


def _flattened(table: Mapping[str, object], label: str) -> Iterable[tuple[str, object]]:
    for key, value in table.items():
        if key not in TABLES:
            yield key, value
        elif isinstance(value, dict):
            yield from ((f"{key}.{below}", inner) for below, inner in value.items())
        else:
            given = "a value" if key == "env" else repr(value)
            raise SpecError(key, f"given {given} ({label}); allowed: a table [{key}]")


def _parsed(toml: str, label: str) -> dict[str, object]:
    try:
        table: dict[str, object] = tomllib.loads(toml)
        return table
    except (ValueError, RecursionError) as problem:  # ValueError: an integer of 4300 digits
        raise SpecError(label, f"is not valid TOML: {_reason(problem)}") from problem


def _refuse_unknown(key: str, label: str) -> None:
    if key in catalogue() or key.startswith("env."):
        return
    table = next((table for table in TABLES if f"{table}.{key}" in catalogue()), None)
    hint = f"{key} belongs below [{table}]" if table else did_you_mean(key, catalogue())
    raise SpecError(key, f"given by {label}, but there is no such setting", hint=hint)


def _pairs(texts: object) -> Iterable[tuple[str, str]]:
    for text in [texts] if isinstance(texts, str) else texts:  # type: ignore[attr-defined]
        name, equals, value = str(text).partition("=")
        if not equals:
            # The text itself stays unsaid: it may be a secret that lost its name.
            raise SpecError("env", "given a text without '=' (flag --env); allowed: NAME=VALUE")
        yield name, value


def _based(key: str, value: object, base: Path) -> object:
    field = catalogue().get(key)
    if key == "phases" and isinstance(value, list):
        return [_based_phase(phase, base) for phase in value]
    if not field or not field.setting.is_path:
        return value
    if field.setting.choices and isinstance(value, str) and not is_own_template(value.strip()):
        return value  # the name of something, and no path
    if isinstance(value, Mapping):
        return {place: absolute(source, base) for place, source in value.items()}
    if isinstance(value, (list, tuple)):
        return [_based_pair(item, base) for item in value]
    if key == "store" and isinstance(value, str) and _is_no_path(value):
        return value  # the setting's parser says what is wrong with it
    return absolute(value, base)


def _is_no_path(store: str) -> bool:
    try:
        return is_url(store)
    except UsageError:
        return True


def _based_phase(phase: object, base: Path) -> object:
    if not isinstance(phase, Mapping) or "template" not in phase:
        return phase
    return {**phase, "template": _based("template", phase["template"], base)}


def _based_pair(item: object, base: Path) -> object:
    if not isinstance(item, str) or "=" not in item:
        return item
    place, _, source = item.partition("=")
    return f"{place}={absolute(source, base)}"


def absolute(value: object, base: Path) -> object:
    """Return a path as an absolute one, seen from `base`; URLs and non-texts stay as they are."""
    if not isinstance(value, str) or not value.strip() or "://" in value:
        return value
    return os.path.normpath(base / expanded(value.strip()))


def _line_of(key: str, toml: str) -> int | None:
    """Return the line that sets `key`, or the table that it is in, if it is written plainly."""
    table = ""
    lines: dict[str, int] = {}
    for number, line in enumerate(toml.splitlines(), start=1):
        if match := _LINE.match(line):
            if match["table"]:
                table = match["table"].strip() + "."
            name = table.rstrip(".") if match["table"] else table + match["key"]
            lines.setdefault(re.sub("[\"']", "", name), number)
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return lines.get(key)


def _reason(problem: BaseException) -> str:
    if isinstance(problem, OSError):
        return problem.strerror or str(problem)
    return "it is not UTF-8" if isinstance(problem, UnicodeDecodeError) else str(problem)
