"""Runs of earlier versions, kept as archives: packed, placed on this machine, and looked at."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tarfile
from pathlib import Path
from typing import Any, Final

from tests.e2e.lab.lab_jobs import Lab, Status, final_weights, store_of

FOLDER: Final = Path(__file__).parent / "runs"
JOB: Final = Path(__file__).parent / "jobs" / "dyadic.py"
PLACEHOLDER: Final = "/where-the-run-was-made"
_PARTS = ("home", "store")


def pack(lab: Lab, archive: Path) -> None:
    """Keep the home and store of a machine on which nothing lives any more, not where they were."""
    folder = lab.home.parent
    (lab.home / "machine-id").write_text(
        _name_of_home(lab) + "\n"
    )  # as the first versions wrote it
    for path in folder.rglob("*"):
        if path.is_symlink():  # to a folder of the nodes, gone with them
            shutil.rmtree(path.readlink(), ignore_errors=True)
            path.unlink()
            path.symlink_to(folder / "gone")
    _rewrite(folder, str(folder), PLACEHOLDER)
    with tarfile.open(archive, "w:gz") as tar:
        for part in _PARTS:
            tar.add(folder / part, part, filter=_of_nobody)


def place(archive: Path, lab: Lab, *, only_store: bool = False) -> str:
    """Bring a kept run to this machine; return its id."""
    folder = lab.home.parent
    with tarfile.open(archive) as tar:
        kept = [each for each in tar if each.name.split("/")[0] in _PARTS[only_store:]]
        # Python 3.14 has a stricter one of its own; the first releases of 3.10 and 3.11 have none.
        tar.extraction_filter = getattr(tarfile, "tar_filter", None)
        tar.extractall(folder, kept)
    _rewrite(folder, PLACEHOLDER, str(folder))
    (lab.work / JOB.name).write_bytes(JOB.read_bytes())
    [run_json] = folder.glob("store/*/run.json")
    return run_json.parent.name


def kept_at(version: Path) -> float:
    """Return the epoch seconds at which the runs of a version were kept."""
    newest = 0.0
    for archive in version.glob("*.tar.gz"):
        with tarfile.open(archive) as tar:
            newest = max(newest, *(each.mtime for each in tar))
    return newest


def outcome(status: Status) -> dict[str, Any]:
    """Return what a finished run made of its state: weights to the last bit, and all it counts."""
    last = max(store_of(status).glob("checkpoints/*/manifest.json"))
    state = json.loads(last.read_bytes())["manifest"]["state"]
    weights = final_weights(status)
    digests = {name: hashlib.sha256(raw).hexdigest() for name, (_, _, raw) in weights.items()}
    return {
        "weights": dict(sorted(digests.items())),
        "dice": hashlib.sha256(json.dumps(state["dice"]).encode()).hexdigest(),
        "seen": state["seen"],
        "learning rates": state["scheduler"]["_last_lr"],
    }


def _name_of_home(lab: Lab) -> str:
    return (lab.home / "machine-id").read_text().splitlines()[0]


def _rewrite(folder: Path, old: str, new: str) -> None:
    """Put one path in the place of another in all files: they hold where they are."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            target = str(path.readlink()).replace(old, new)
            path.unlink()
            path.symlink_to(target)
        elif path.name == "journal.db":
            _rewrite_journal(path, old, new)
        elif path.is_file():
            raw, before = path.read_bytes(), path.stat()
            path.write_bytes(raw.replace(old.encode(), new.encode()))
            os.utime(path, (before.st_atime, before.st_mtime))  # a lease is as old as its file


def _rewrite_journal(path: Path, old: str, new: str) -> None:
    journal = sqlite3.connect(path)
    triggers = journal.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
    with journal:
        guards = triggers.fetchall()  # which let nobody change what was written
        for name, _ in guards:
            journal.execute(f"DROP TRIGGER {name}")
        journal.execute("UPDATE events SET data = replace(data, ?, ?)", (old, new))
        for _, statement in guards:
            journal.execute(statement)
    journal.close()


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
