"""Which of the jobs in a run's store this machine knows: they were made here, or confirmed here.

The list lies in the run's folder of the home, where nobody else may write: a digest of each job, as
`JobSpec.public_json` has it.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spotguard.spec.model import JobSpec

MADE, CONFIRMED = "made", "confirmed"
_LIST = "known-jobs"


def remember_made(folder: Path, job: JobSpec) -> None:
    """Note in a run's folder that its job was made on this machine."""
    note_job(folder, MADE, job.public_json())


def variables_of(job: Mapping[str, Any]) -> list[str]:
    """Return the names of the variables that a stored job asks for."""
    found = job.get("env_names")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def digest_of(job: Mapping[str, Any]) -> str:
    """Return what tells a stored job from any other."""
    body = {**job, "env_names": sorted(variables_of(job))}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def known_jobs(folder: Path) -> dict[str, str]:
    """Return by its digest how each job came to be known here."""
    try:
        lines = (folder / _LIST).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = [line.split() for line in lines]
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2}


def note_job(folder: Path, word: str, job: Mapping[str, Any]) -> None:
    """Note how a stored job came to be known here."""
    descriptor = os.open(folder / _LIST, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a") as file:
        file.write(f"{word} {digest_of(job)}\n")
