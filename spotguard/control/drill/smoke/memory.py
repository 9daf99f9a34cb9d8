"""What passed is not tried again: a key of all that a smoke depends on, and what it measured."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spotguard.events.untrusted import (
    Refused,
    integer,
    needed,
    number,
    parse_object,
)
from spotguard.launch.workdir.copy_rules import GIT_EXCLUDE, GITIGNORE, SKYIGNORE
from spotguard.launch.workdir.requirements_file import plain_requirements
from spotguard.policy.plan.smoke import Smoke
from spotguard.shared.version import __version__
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.infra import LOCAL
from spotguard.spec.script import local_files, read_script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.spec.model import JobSpec

SCHEMA: Final = 1
_MOST_KEPT = 200
_MOST_BYTES = 1 << 20
"""Of a file that an argument names: settings, and no data."""


def key_of(spec: JobSpec) -> str:
    """Return what is the same only for the same code, arguments, variables and packages.

    Files that arguments name count by what is in them if they are small. Data do not count.
    """
    digest = hashlib.sha256()
    for part in _parts(spec):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:32]


def _parts(spec: JobSpec) -> Iterator[bytes]:
    yield f"{SCHEMA} {__version__} {sys.version} {spec.smoke.steps}".encode()
    yield spec.workdir.encode("utf-8", "surrogateescape")
    for file in sorted(local_files(read_script(Path(spec.script)))):
        yield str(file).encode("utf-8", "surrogateescape")
        with contextlib.suppress(OSError):
            yield file.read_bytes()
    yield from _of_copies(spec)
    for argument in spec.args:
        yield argument.encode("utf-8", "surrogateescape")
        yield _small_file(Path(spec.workdir) / argument.rpartition("=")[2])
    yield json.dumps(spec.env, sort_keys=True).encode()
    yield "\n".join(sorted(_installed())).encode()


def _of_copies(spec: JobSpec) -> Iterator[bytes]:
    """Yield by what it is decided which files and packages the nodes get, if they are elsewhere."""
    if not leaves(spec):
        return
    top = Path(spec.workdir)
    folders = {top, *(file.parent for file in local_files(read_script(Path(spec.script))))}
    for folder in sorted(folders):
        for name in (SKYIGNORE, GITIGNORE, GIT_EXCLUDE):
            rules = folder / name
            yield f"{rules} {rules.exists()}".encode("utf-8", "surrogateescape")
            yield _small_file(rules)
    if spec.node.requirements is not None:
        for file in plain_requirements(Path(spec.node.requirements)).files:
            yield _small_file(file)
    yield f"{spec.node.image} {spec.node.setup}".encode("utf-8", "surrogateescape")


def leaves(spec: JobSpec) -> bool:
    """Tell whether some of the job's nodes are not this machine's."""
    places = [spec.in_phase(index) for index in range(max(1, len(spec.phases)))]
    return any(place.infra != LOCAL for place in places)


def _small_file(path: Path) -> bytes:
    with contextlib.suppress(OSError, ValueError):
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return path.read_bytes()
    return b""


def _installed() -> Iterator[str]:
    """Yield what is installed, as folders of metadata say it: names and versions."""
    for folder in map(Path, sys.path):
        with contextlib.suppress(OSError):
            yield from (p.name for p in folder.iterdir() if p.suffix in (".dist-info", ".egg-info"))


def remembered(key: str) -> Smoke | None:
    """Return what a smoke of this key measured when it passed; None if none has."""
    try:
        body = parse_object((_folder() / f"{key}.json").read_bytes(), "a smoke")
        if integer(body, "schema") != SCHEMA:
            return None
        return Smoke(
            state_bytes=needed(integer(body, "state_bytes", low=0), "size"),
            save_s=needed(number(body, "save_s"), "duration"),
            step_s=number(body, "step_s"),
            step_samples=integer(body, "step_samples", low=1),
            first_step_s=number(body, "first_step_s"),
            at=needed(number(body, "at"), "instant"),
        )
    except (OSError, Refused):
        return None


def remember(key: str, smoke: Smoke) -> None:
    """Keep what a smoke measured; one that cannot be kept is tried again."""
    folder = _folder()
    body = {"schema": SCHEMA, **replace(smoke, emergency_s=None, notice_s=None).__dict__}
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = folder / f"{key}.new"
        draft.write_text(json.dumps(body))
        draft.replace(folder / f"{key}.json")
        kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)


def _folder() -> Path:
    return spotguard_home() / "smokes"
