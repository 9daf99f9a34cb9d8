"""What a run launched and is not known to be gone, in a file of its own beside its journal.

`down` and `stop` work from it where the journal cannot be read. A cluster is named here before the
launcher is asked for it, and no more once nothing is left of it; so nothing that costs money is
missing, wherever the controller dies. The file is small, and each change replaces it as a whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.record import Kind
from spotguard.errors import DiskFailure, LaunchesDamaged, UsageError
from spotguard.events.untrusted import (
    MOST_BYTES,
    Refused,
    an_object,
    integer,
    needed,
    parse_object,
    text,
)
from spotguard.spec.model import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord

log = logging.getLogger(__name__)

SCHEMA = 1
_WISHES = {kind.value: kind for kind in (Kind.USER_STOP, Kind.USER_DOWN)}


class Launches:
    """One run's file of launches. Only for who holds the controller's lock, or before any does."""

    def __init__(
        self,
        path: Path,
        *,
        store_root: str,
        spec: JobSpec,
        clusters: dict[str, int] | None = None,
        wish: Kind | None = None,
    ) -> None:
        self.path = path
        self.run_id = path.parent.name
        self.store_root = store_root
        self.spec = spec
        """The job, for its launcher; without its variables, which a launcher's end needs not."""
        self.clusters = dict(clusters or {})
        """The attempt that each cluster was launched for; oldest first."""
        self.wish = wish
        """What the user asked for while the journal could not be written."""

    @classmethod
    def of(cls, path: Path, record: RunRecord) -> Launches:
        """Return what the record and the file know together, and write it.

        What is named in the file stays unless the record knows its end: the journal may be older.
        One that makes no sense is moved aside.
        """
        spec = JobSpec.from_json({**record.spec, "env": {}, "notify": []})
        launches = cls(path, store_root=record.store_root, spec=spec)
        try:
            known = cls.read(path)
        except LaunchesDamaged as problem:
            log.warning("%s", problem)
            path.replace(path.with_suffix(".damaged"))
            known = None
        if known is not None:
            launches.clusters, launches.wish = known.clusters, known.wish
        living = {each.cluster: each.number for each in record.attempts if each.end is None}
        living |= {each.cluster: each.number for each in record.leaving}
        if record.ahead is not None:
            living[record.ahead.cluster] = record.ahead.number
        for ended in {each.cluster for each in record.attempts} - set(living):
            launches.clusters.pop(ended, None)
        launches.clusters |= living
        launches._write()
        return launches

    @classmethod
    def read(cls, path: Path) -> Launches | None:
        """Return what the file says; None if there is none.

        Raises:
            LaunchesDamaged: it makes no sense. Nothing was changed.
        """
        try:
            with path.open("rb") as file:
                body = parse_object(file.read(MOST_BYTES + 1), "it")
            return cls._of_json(path, body)
        except FileNotFoundError:
            return None
        except (Refused, UsageError, OSError) as problem:
            run_id = path.parent.name
            raise LaunchesDamaged(
                f"The launches of run {run_id} at {path} cannot be read: {problem}. "
                "Nothing was changed.",
                hint="see which clusters are left: spotguard doctor",
            ) from problem

    @classmethod
    def _of_json(cls, path: Path, body: dict[str, Any]) -> Launches:
        run_id, wish = path.parent.name, body.get("wish")
        if body.get("schema") != SCHEMA or body.get("run_id") != run_id:
            raise Refused("it is of another run, or of another version of spotguard")
        if not (wish is None or (isinstance(wish, str) and wish in _WISHES)):
            raise Refused("it has no wish that makes sense")
        return cls(
            path,
            store_root=needed(text(body, "store_root") or None, "store_root"),
            spec=JobSpec.from_json(an_object(body.get("spec"), "its spec"), environ={}),
            clusters=_clusters(an_object(body.get("clusters"), "its list of clusters"), run_id),
            wish=None if wish is None else _WISHES[wish],
        )

    def remember(self, cluster: str, attempt: int) -> None:
        """Have a cluster on disk that is about to be launched.

        Raises:
            DiskFailure: it cannot be written; so it must not be launched.
        """
        if self.clusters.get(cluster) != attempt:
            self.clusters[cluster] = attempt
            self._write()

    def forget(self, cluster: str) -> None:
        """Name a cluster no more of which nothing is left; one name too many does no harm."""
        if self.clusters.pop(cluster, None) is not None:
            try:
                self._write()
            except DiskFailure as problem:
                log.warning("%s", problem)

    def ask(self, wish: Kind | None) -> None:
        """Keep for the next controller what the user wants; None takes it back."""
        if self.wish is not wish:
            self.wish = wish
            self._write()

    def _write(self) -> None:
        body = {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "store_root": self.store_root,
            "spec": self.spec.to_json(),
            "clusters": self.clusters,
            "wish": None if self.wish is None else self.wish.value,
        }
        try:
            _replace(self.path, json.dumps(body, indent=1).encode())
        except OSError as problem:
            raise DiskFailure(
                f"The launches of run {self.run_id} cannot be written to {self.path}: "
                f"{problem.strerror}.",
                hint="free some space, then repeat the command",
            ) from problem


def forget_wish(path: Path) -> None:
    """Take back what the user had asked for while the journal could not be written.

    A file that makes no sense holds no wish: the next controller moves it aside.
    """
    with contextlib.suppress(LaunchesDamaged):
        known = Launches.read(path)
        if known is not None:
            known.ask(None)


def _clusters(body: dict[str, Any], run_id: str) -> dict[str, int]:
    """Return the clusters; each must be of this run, for its name is what gets ended."""
    ours = re.compile(rf"{re.escape(run_id)}-\d{{1,9}}(r\d{{1,9}})?", re.ASCII)
    for name in body:
        if not ours.fullmatch(name):
            raise Refused(f"{name[:100]!a} is no cluster of this run")
    return {name: needed(integer(body, name, low=1), f"attempt of {name}") for name in body}


def _replace(path: Path, body: bytes) -> None:
    """Put a whole file, that only this user can read, in the place of another one; durably."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
