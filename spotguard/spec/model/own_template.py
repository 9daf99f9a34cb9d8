"""A task template of the user's own: a YAML file that is merged into a shipped one, as data.

It may say what of a node no setting says. What spotguard itself fills in is refused by its name,
and so is what looks like a secret: a template is shown by `plan --yaml`.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from spotguard.errors import SpecError
from spotguard.shared.typo_guess import did_you_mean
from spotguard.spec.setting import text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 256 << 10
_KEYS = ("resources", "envs", "file_mounts", "volumes", "config")
_OURS = {
    "name": "use --name",
    "num_nodes": "use --nodes",
    "workdir": "use the setting workdir",
    "setup": "use --setup, which comes before Python's packages are installed",
    "run": "the script of the job is what runs",
    "secrets": "put them into env, by --env NAME for a variable of this shell",
}
_OUR_RESOURCES = {
    **dict.fromkeys(("infra", "cloud", "region", "zone"), "use --infra"),
    **dict.fromkeys(("any_of", "ordered"), "use --infra and --gpus with several, as in aws,gcp"),
    "accelerators": "use --gpus",
    "instance_type": "use node.instance_type",
    "cpus": "use node.cpus, by which places are looked up",
    "memory": "use node.memory, by which places are looked up",
    "use_spot": "use --market",
    "autostop": "it is what ends nodes that nobody looks after",
    "job_recovery": "spotguard recovers the job",
    "spot_recovery": "spotguard recovers the job",
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(r"(?:SKYPILOT|SKY|JOB|SPOTGUARD)_")
_SECRET_NAME = re.compile(
    r"(?i)secret|token|passw|credential|private|(?:api|access|auth|account)_?key|connection_?string"
)
_SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[opsu]_[A-Za-z0-9]{30,}"
    r"|\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abp]-[A-Za-z0-9-]{10,}|://[^/\s:@]+:[^/\s@]+@"
)


def is_own_template(name: str) -> bool:
    """Tell whether a template is named by where it is, and not by its name."""
    return "/" in name or os.sep in name or name.lower().endswith(_SUFFIXES)


class TemplateName:
    """A parser of a shipped template's name, or of the path of one's own."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, raw: Any) -> str:
        """Return it."""
        word = text(raw)
        if word not in self.names and not is_own_template(word):
            raise ValueError("no such template")
        return word


def read_own_template(path: str, *, taken: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a user's template says; it is to be merged into a shipped one.

    Nothing may be put into the `taken` folders of a node.

    Raises:
        SpecError: it cannot be read, is no such YAML, or says what is not its to say.
    """
    body = _parsed(Path(path))
    for key in body:
        if key in _OURS:
            raise _refused(path, key, _OURS[key])
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS)
            raise _wrong(path, f"has the key {key!r}; allowed: {', '.join(_KEYS)}", hint)
    resources = _table(path, body, "resources")
    for key in resources:
        if key in _OUR_RESOURCES:
            raise _refused(path, f"resources.{key}", _OUR_RESOURCES[key])
    _check_variables(path, _table(path, body, "envs"))
    for name in ("file_mounts", "volumes"):
        _check_places(path, name, _table(path, body, name), taken)
    for where, value in _texts(body, ""):
        if _SECRET_VALUE.search(value):
            raise _secret(path, where)
    return body


def local_sources(path: str) -> list[str]:
    """Return the files and folders of this machine that a user's template puts on the nodes.

    Raises:
        SpecError: it cannot be read, or is no template.
    """
    found = []
    for given in read_own_template(path).get("file_mounts", {}).values():
        source = given.get("source") if isinstance(given, dict) else given  # a bucket of SkyPilot's
        several = source if isinstance(source, list) else [source]
        found += [each for each in several if isinstance(each, str) and "://" not in each]
    return [posixpath.normpath(each) for each in found]


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as problem:
        raise SpecError(
            "template", f"{path} cannot be read: {problem.strerror or problem}"
        ) from problem
    if len(raw) > _MOST_BYTES:
        raise _wrong(str(path), f"is larger than {_MOST_BYTES} bytes, which no template is")
    try:
        body = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as problem:
        first = str(problem).strip().partition("\n")[0]
        raise _wrong(str(path), f"is no valid YAML: {first}") from problem
    if not isinstance(body, dict) or not body:
        raise _wrong(str(path), "is no table of a SkyPilot task")
    return body


def _table(path: str, body: dict[str, Any], key: str) -> dict[str, Any]:
    found = body.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise _wrong(path, f"has {key} that is no table")
    return found


def _check_variables(path: str, variables: dict[str, Any]) -> None:
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name) or _RESERVED.match(name):
            raise _refused(path, f"envs.{name}", "choose another name")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise _wrong(path, f"has envs.{name} that is no text")
        if _SECRET_NAME.search(name) and value not in ("", 0):
            raise _secret(path, f"envs.{name}")


def _check_places(path: str, table: str, places: dict[str, Any], taken: Sequence[str]) -> None:
    for place, source in places.items():
        plain = posixpath.normpath(place)
        if any(f"{plain}/".startswith(f"{folder}/") for folder in taken):
            raise _refused(path, f"{table}.{place}", "choose another place")
        relative = isinstance(source, str) and "://" not in source
        if table == "file_mounts" and relative and not Path(source).is_absolute():
            raise _wrong(
                path,
                f"has file_mounts.{place} from {source!r}, of which nobody knows the folder",
                "give an absolute path, or use --file-mount",
            )


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield each text in it, with the keys that lead there."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, where)


def _wrong(path: str, words: str, hint: str = "") -> SpecError:
    return SpecError("template", f"{path} {words}", hint=hint)


def _refused(path: str, key: str, hint: str) -> SpecError:
    return _wrong(path, f"has {key}, which is spotguard's own to say", hint)


def _secret(path: str, where: str) -> SpecError:
    # The text itself stays unsaid.
    return _wrong(
        path,
        f"has a secret in {where}, for all that can be seen, and a template is shown to everybody",
        "put it into env: --env NAME for a variable of this shell",
    )
