"""What a run's store would have this machine run, and whether this machine knows it.

A store is data of whoever may write to it: its `run.json` names a script, arguments, folders of
this machine, set-up commands and variables. So this machine keeps a list of the jobs that were made
here, or confirmed here. Any other is shown in full and asked about, and gets no variable of this
machine but those that are given for it now.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from spotguard.control.handover.not_in_store import Private
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.stored.known_jobs import (
    CONFIRMED,
    MADE,
    digest_of,
    known_jobs,
    note_job,
    variables_of,
)
from spotguard.errors import SpecError, SpotguardError, UsageError
from spotguard.events.masking import shown_arguments
from spotguard.shared.plain_text import one_line
from spotguard.spec.model import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from spotguard.control.run_folder import RunFolder

_ALWAYS = ("script", "args", "workdir", "infra", "store")
"""Shown whatever they are; of the others, what is not the default."""
_NEVER = ("name", "notify", "env", "phases")


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """What a run that was not made here would run on this machine, or on nodes that it pays for."""

    place: str
    """`STORE/RUN_ID`."""
    settings: tuple[tuple[str, str], ...]
    """Name and value of each setting that is not the default, and of those that always matter."""
    variables: tuple[str, ...]
    """Names of the variables that it asks for."""
    given: tuple[str, ...]
    """Those of them that are given now."""


Ask: TypeAlias = "Callable[[StoredJob], bool]"


def admitted(
    folder: RunFolder,
    place: str,
    jobs: Iterable[Mapping[str, Any]],
    *,
    given: Mapping[str, str],
    ask: Ask | None,
) -> Private:
    """Return what is in no store of a run's job: which variables it gets here.

    Args:
        folder: of the run, on this machine.
        place: `STORE/RUN_ID`.
        jobs: as the store has them, as `JobSpec.public_json` wrote them; the newest is the last.
        given: variables that are given for this run now.
        ask: is shown a job that is not known here; None refuses it.

    Raises:
        UsageError: it is not confirmed, or nobody can be asked.
        SpecError: it makes no sense, or one of its variables is not given.
    """
    known = known_jobs(folder.path) or _in_journal(folder)
    jobs = list(jobs)
    words = [known.get(digest_of(job)) for job in jobs]
    if all(word == MADE for word in words):
        return Private(env={**os.environ, **given})
    if not all(words):
        stored = _described(place, jobs, given)
        if ask is None:
            raise UsageError(
                f"{place} was not made on this machine: what its store says would run here.",
                hint=f"look at it, and confirm it: spotguard adopt {place}; in Python by `ask`",
            )
        if not ask(stored):
            raise UsageError(f"{place} was not confirmed; nothing was changed.")
    missing = sorted({name for job in jobs for name in variables_of(job) if name not in given})
    if missing:
        raise SpecError(
            "env",
            f"{place} was not made on this machine, so it gets no variable by itself, "
            f"and these are not given: {', '.join(map(one_line, missing))}",
            hint="give those that it may have: "
            + " ".join(f"--env {shlex.quote(one_line(name))}" for name in missing),
        )
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    for job in jobs:
        if digest_of(job) not in known:
            note_job(folder.path, CONFIRMED, job)
    return Private(env=dict(given))


def _described(place: str, jobs: list[Mapping[str, Any]], given: Mapping[str, str]) -> StoredJob:
    settings: dict[tuple[str, str], None] = {}
    names: dict[str, None] = {}
    for job in reversed(jobs):  # where it is now comes first
        spec = Private(env=dict.fromkeys(variables_of(job), "")).job(job)
        each = [spec.in_phase(index) for index in range(len(spec.phases))] or [spec]
        settings.update(dict.fromkeys(line for part in each for line in _lines(part)))
        names.update(dict.fromkeys(variables_of(job)))
    return StoredJob(
        place=place,
        settings=tuple(settings),
        variables=tuple(map(one_line, names)),
        given=tuple(name for name in names if name in given),
    )


def _lines(spec: JobSpec) -> list[tuple[str, str]]:
    """Return all settings that are not the default: what a later version adds cannot hide."""
    body = spec.model_dump(mode="json")
    default = JobSpec.model_construct().model_dump(mode="json", warnings=False)
    found: list[tuple[str, str]] = []
    for name in (*_ALWAYS, *(each for each in body if each not in (*_ALWAYS, *_NEVER))):
        value, usual = body[name], default.get(name)
        if name == "args":
            found.append((name, one_line(shlex.join(shown_arguments(value))) or "none"))
        elif isinstance(value, dict) and isinstance(usual, dict):
            found += [
                (f"{name}.{key}", _word(each))
                for key, each in value.items()
                if each != usual.get(key)
            ]
        elif name in _ALWAYS or value != usual:
            found.append((name, _word(value)))
    return found


def _word(value: object) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _in_journal(folder: RunFolder) -> dict[str, str]:
    """Return the job of a run that an earlier version made here: its journal has it, if whole."""
    try:
        with folder.journal() as journal:
            record = read_record(journal)
        job = JobSpec.from_json(record.job or record.spec)
    except (SpotguardError, OSError):
        return {}
    return {digest_of(job.public_json()): MADE}
