"""Which code a run has: the copy that was made of its folder, and how others know it again.

The journal names the copy, `code.json` in the run store lists what is in it. The files themselves
are in no store: whoever may write there would have code run here. So a machine that adopts a run
compares its own folder with the list, and goes on by itself only with the same code.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.errors import (
    EnvironmentFailure,
    NotFound,
    SpecError,
    SpotguardError,
    UsageError,
)
from spotguard.events import env, keys
from spotguard.events.untrusted import Refused, an_object, integer, needed, parse_object, text
from spotguard.launch.workdir.left_behind import missed_by_git, told
from spotguard.launch.workdir.requirements_file import plain_requirements
from spotguard.launch.workdir.snapshot import (
    ALL,
    CODE,
    Snapshot,
    Wanted,
    changed,
    keep_for,
    load,
    path_of,
    take,
)
from spotguard.shared.plain_text import clean
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.infra import LOCAL
from spotguard.spec.model.own_template import is_own_template
from spotguard.spec.script import local_files, read_script
from spotguard.storage.small_objects import get_small
from spotguard.storage.urls import folder_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from spotguard.spec.model import JobSpec
    from spotguard.storage.base import ObjectStore

    Tell = Callable[[str], None]

SCHEMA = 1
_MOST_LISTED = 20_000
"""Of more files the store has the copy's name alone."""
_MOST_BYTES = 8 << 20
_SHOWN = 5


def fix_code(job: JobSpec, tell: Tell) -> Snapshot:
    """Copy the job's folder as its nodes get it, from now on, and return the copy.

    Args:
        job: with all its phases.
        tell: hears what of the folder nodes will not have, and what of it is large.

    Raises:
        SpecError: it is too large, or the script or its requirements are not copied.
        EnvironmentFailure: it cannot be copied.
    """
    snapshot = take(_wanted(job), spotguard_home(), tell)
    if snapshot.kind == ALL:
        _check_needed(job, snapshot)
    missed = missed_by_git(snapshot, Path(job.workdir)) if snapshot.kind == ALL else []
    for sentence in told(snapshot, missed):
        tell(f"workdir: {sentence}")
    return snapshot


def code_data(snapshot: Snapshot) -> dict[str, Any]:
    """Return what the journal holds of a copy."""
    return {
        "digest": snapshot.digest,
        "kind": snapshot.kind,
        "files": len(snapshot.marks),
        "size_bytes": snapshot.size_bytes,
    }


def in_copy(spec: JobSpec, code: Mapping[str, Any]) -> JobSpec:
    """Return a job with the paths of the run's copy, from which nodes elsewhere get all files.

    `code` is the record's; of a run that an earlier version began it is empty, and the folder
    itself counts. Nodes of this machine work in the folder itself.

    Raises:
        EnvironmentFailure: the copy is not here.
    """
    if not code or spec.infra == LOCAL:
        return spec
    snapshot = load(spotguard_home(), str(code["digest"]))
    moved = in_folder(spec, snapshot.files)
    if is_own_template(spec.template):
        return moved.replace(template=str(snapshot.extra(Path(spec.template)) or spec.template))
    return moved


def in_folder(spec: JobSpec, folder: Path) -> JobSpec:
    """Return a job whose workdir is another folder, with the same files in it."""
    here = Path(spec.workdir)

    def there(path: str) -> str:
        whole = Path(path)
        return str(folder / whole.relative_to(here)) if whole.is_relative_to(here) else path

    changes: dict[str, Any] = {"workdir": str(folder), "script": there(spec.script)}
    if spec.node.requirements is not None:
        node = spec.node.model_dump()
        changes["node"] = {**node, "requirements": there(spec.node.requirements)}
    return spec.replace(**changes)


def local_variables(code: Mapping[str, Any], spec: JobSpec) -> dict[str, str]:
    """Return by which variables nodes of this machine know the run's own copy of the code.

    Raises:
        EnvironmentFailure: the copy is not here.
    """
    if not code:
        return {}
    copy = load(spotguard_home(), str(code["digest"]))
    pairs = [(spec.workdir, copy.files), (str(Path(spec.script).parent), copy.beside)]
    there = [(folder, str(path)) for folder, path in pairs if path.is_dir()]
    return {
        env.CODE_OF: os.pathsep.join(folder for folder, _ in there),
        env.CODE: os.pathsep.join(path for _, path in there),
    }


def code_to_go_on(
    job: JobSpec,
    code: Mapping[str, Any],
    tell: Tell,
    *,
    same_code: bool,
    listed: Callable[[], Mapping[str, str]],
) -> tuple[Snapshot, list[str]]:
    """Return the copy with which a run goes on that was at rest, and the files that are new in it.

    Args:
        job: as it goes on, with all its phases.
        code: the record's; empty for a run that an earlier version began.
        tell: hears which files have changed.
        same_code: what is in the folder now is not to count.
        listed: returns what the run's store lists of the old copy, for a machine without it.

    Raises:
        UsageError: the same code is asked for, and it is not on this machine.
        SpecError: the folder is too large, or the script is not copied.
        EnvironmentFailure: it cannot be copied.
    """
    old: Snapshot | None = None
    if code:
        with suppress(EnvironmentFailure):
            old = load(spotguard_home(), str(code["digest"]))
    kind = _kind(job)
    if same_code and old is not None and old.kind in (kind, ALL):
        return old, []
    marks = old.marks if old is not None else listed() if code else {}
    if not Path(job.workdir).is_dir():
        if old is not None and old.kind in (kind, ALL):
            tell(f"{job.workdir} is not here: the code stays what it was")
            return old, []
        raise UsageError(
            f"The code of the run is not on this machine, nor is its folder {job.workdir}.",
            hint="bring that folder here as it was, then repeat the command",
        )
    new = fix_code(job, tell)
    files = _changes(marks, new.marks, kind)
    is_other = new.digest != code.get("digest") and (bool(files) or not marks)
    if same_code and code and is_other:
        raise UsageError(
            f"The code of the run is not on this machine, and {job.workdir} has other code"
            + (f": {_named(files)}." if files else ", as far as is known."),
            hint="bring the folder here as it was; without --same-code its files count as they are",
        )
    if files and code:
        tell(
            f"code: {len(files)} {'file' if len(files) == 1 else 'files'} changed since: "
            f"{_named(files)}; resume --same-code keeps the old"
        )
    if old is not None and not files and old.kind in (kind, ALL):
        return old, []  # git's own files, and nothing else, have changed
    return new, files


def _changes(before: Mapping[str, str], after: Mapping[str, str], kind: str) -> list[str]:
    """Return which files differ; of a copy of the code alone, which of the code."""
    found = changed(before, after) if before else []
    if kind == CODE or not any(not path.endswith(".py") for path in before):
        return [path for path in found if path.endswith(".py")]
    return found


def _named(files: list[str]) -> str:
    shown = ", ".join(clean(path) for path in files[:_SHOWN])
    more = len(files) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _kind(job: JobSpec) -> str:
    places = [job.in_phase(index) for index in range(max(1, len(job.phases)))]
    return ALL if any(place.infra != LOCAL for place in places) else CODE


def _wanted(job: JobSpec) -> Wanted:
    places = [job.in_phase(index) for index in range(max(1, len(job.phases)))]
    goes_away = _kind(job) == ALL
    store = folder_at(job.store) or ("" if "://" in job.store else job.store)
    templates = [place.template for place in places if is_own_template(place.template)]
    return Wanted(
        workdir=Path(job.workdir),
        kind=_kind(job),
        script_folder=None
        if goes_away or Path(job.script).is_relative_to(job.workdir)
        else Path(job.script).parent,
        least=() if goes_away else tuple(local_files(read_script(Path(job.script)))),
        extra=tuple(map(Path, dict.fromkeys(templates))) if goes_away else (),
        skipped=(Path(store),) if store else (),
        mounted=(*job.node.file_mounts, *job.node.volumes),
    )


def _check_needed(job: JobSpec, snapshot: Snapshot) -> None:
    """Let pass a copy that has what each launch begins with."""
    top = Path(job.workdir)
    needed: list[tuple[str, Path]] = [("script", Path(job.script))]
    if job.node.requirements is not None:
        found = plain_requirements(Path(job.node.requirements))
        needed += [("node.requirements", Path(os.path.normpath(file))) for file in found.files]
        needed += [
            ("node.requirements", Path(os.path.normpath(top / folder))) for folder in found.folders
        ]
    for setting, path in needed:
        if not path.is_relative_to(top) or path == top:
            continue  # who carries it to nodes refuses it
        seen = path.relative_to(top).as_posix()
        if seen in snapshot.marks or any(each.startswith(f"{seen}/") for each in snapshot.marks):
            continue
        why = next((left for left in snapshot.left if f"{seen}/".startswith(f"{left.path}/")), None)
        by = "" if why is None else f", by line {why.line} of {why.rules}"
        raise SpecError(
            setting,
            f"{seen} is not copied to the nodes{by}",
            hint=".skyignore overrides .gitignore: an empty one has all copied"
            if why is None or not why.rules.endswith(".skyignore")
            else f"take that line out of {why.rules}",
        )


# ---------------------------------------------------------------- the run store


def publish_code(store: ObjectStore, snapshot: Snapshot) -> None:
    """Have the run store list what the run's copy holds; `store` is the run's own.

    Raises:
        StoreError: it cannot be written.
    """
    marks = snapshot.marks if len(snapshot.marks) <= _MOST_LISTED else {}
    body = {"schema": SCHEMA, **code_data(snapshot), "marks": marks}
    text_of = json.dumps(body, sort_keys=True)
    if len(text_of) > _MOST_BYTES:
        text_of = json.dumps({**body, "marks": {}}, sort_keys=True)
    store.put(keys.CODE, text_of.encode())


def read_code(store: ObjectStore) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the journal holds of a run's copy, and its list; both empty if there is none.

    Raises:
        Refused: it makes no sense.
        StoreError: the store cannot be read.
    """
    try:
        body = parse_object(get_small(store, keys.CODE, most_bytes=_MOST_BYTES), keys.CODE)
    except NotFound:
        return {}, {}
    if integer(body, "schema") != SCHEMA:
        raise Refused(f"{keys.CODE} was written by another version of spotguard")
    digest, kind = needed(text(body, "digest"), "digest"), needed(text(body, "kind"), "kind")
    if kind not in (ALL, CODE) or not (len(digest) == 32 and digest.isalnum()):
        raise Refused(f"{keys.CODE} names no copy")
    marks = an_object(body.get("marks"), "its files")
    data = {
        "digest": digest,
        "kind": kind,
        "files": needed(integer(body, "files", low=0), "files"),
        "size_bytes": needed(integer(body, "size_bytes", low=0), "size_bytes"),
    }
    return data, {str(path): str(mark) for path, mark in marks.items()}


def code_here(
    folder: Path,
    job: JobSpec,
    stored: tuple[Mapping[str, Any], Mapping[str, str]],
    tell: Tell,
) -> dict[str, Any]:
    """Return what the journal says of the code of a run that is adopted on this machine.

    The job's folder here is copied if it holds the same code. If it does not, or is not here, that
    is told: nodes that live go on, and nothing new is launched.

    Args:
        folder: the run's, below the home.
        job: as it is on this machine.
        stored: what `read_code` returned; empty of a run that an earlier version began.
        tell: hears of it.
    """
    data, marks = dict(stored[0]), stored[1]
    if not data:
        return {}
    if path_of(spotguard_home(), str(data["digest"])).is_dir():
        keep_for(folder, str(data["digest"]))
        return data
    try:
        found = take(_wanted(job), spotguard_home(), tell)
        same = found.kind == data["kind"] and not (changed(marks, found.marks) if marks else True)
        if found.digest == data["digest"] or same:
            keep_for(folder, found.digest)
            return code_data(found)
        other = changed(marks, found.marks) if marks else []
        why = f"differs: {_named(other)}" if other else "is not known to be the same"
    except SpotguardError:
        why = "is not here, or cannot be copied"
    tell(
        f"code: the run's is not on this machine, and what is in {job.workdir} {why}. Nodes that "
        "live go on; new ones get code only by `spotguard resume`, which takes what is there then"
    )
    return data


def sources_of(paths: Iterable[str], workdir: str, code: Mapping[str, Any]) -> dict[str, str]:
    """Return where this machine has what a job's paths name, of those that the copy stands for."""
    if not code:
        return {}
    snapshot = load(spotguard_home(), str(code["digest"]))
    if snapshot.kind != ALL:
        return {}
    kept = {path: snapshot.extra(Path(path)) for path in paths if is_own_template(path)}
    copied = {path: str(copy) for path, copy in kept.items() if copy is not None}
    return {**copied, workdir: str(snapshot.files)}
