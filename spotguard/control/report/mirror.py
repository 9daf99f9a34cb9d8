"""Runs that other machines control, as their store tells them: looked at, never touched.

Each run's journal is rebuilt below spotguard's home, in `watched/`, whenever something new lies in
the store. It launches and stops nothing, writes nothing into the store, and may be deleted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard.checkpoint.lineage import attempt_numbers
from spotguard.control.handover.adopt import Rebuild, settle
from spotguard.control.handover.run_json import read_run_json
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind
from spotguard.control.journal.snapshot import keep_snapshot
from spotguard.control.journal.stored.places import raw_place_data
from spotguard.control.run_folder import RunFolder
from spotguard.control.supervisor.lease import read_holder
from spotguard.errors import SpotguardError, StoreError, UsageError
from spotguard.events import keys
from spotguard.events.untrusted import Refused
from spotguard.launch.base import ClusterState, ClusterView
from spotguard.shared.paths import scratch_folder
from spotguard.spec.home_folder import spotguard_home
from spotguard.storage import PrefixedStore, open_existing
from spotguard.storage.urls import below, is_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.journal.record import RunRecord
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

_LOOK_EVERY_S, _LOOK_AT_BUCKET_EVERY_S = 5.0, 60.0
"""Each look at a bucket costs some requests for each of its runs."""
_MOST_RUNS = 500
_MOST_LISTED = 4
"""Attempts of a run that are listed at each look: each costs a request."""


@cache
def _scratch() -> str:
    """Return a folder of this process, which is removed at its end."""
    return str(scratch_folder("spotguard-looks-"))


def room() -> Path:
    """Return a folder for the runs of one store, which goes with this process."""
    return Path(tempfile.mkdtemp(dir=_scratch()))


def _kept_below(folder: Path) -> Path:
    """Return the folder, made if need be; another one where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return room()
    return folder if os.access(folder, os.W_OK) else room()


class Mirror:
    """The runs of one store. Not thread-safe; methods block."""

    def __init__(self, url: str, root: Path | None = None) -> None:
        """Open the store; `UsageError` or `StoreError` if that cannot be.

        The journals are kept below `root`; without one, below spotguard's home, and as long as this
        process lives where that cannot be written.
        """
        self._store = open_existing(url)
        self.url = self._store.url
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._root = root or _kept_below(spotguard_home() / "watched" / name)
        self._seen: dict[str, tuple[str, ...]] = {}
        self._over: dict[str, set[int]] = {}
        """By run, the attempts that its controller has given a verdict on: nothing follows."""
        self._folders: tuple[RunFolder, ...] = ()
        self.problems: dict[str, str] = {}
        """By run, why it could not be read at the last look."""
        self._every_s = _LOOK_EVERY_S if is_folder(self.url) else _LOOK_AT_BUCKET_EVERY_S
        self._look_at = float("-inf")

    def known(self) -> tuple[RunFolder, ...]:
        """Return the runs of the last look."""
        return self._folders

    def folders(
        self, *, without: frozenset[str], tell: Callable[[str], None] = lambda _: None
    ) -> tuple[RunFolder, ...]:
        """Return the folders of the store's runs but for some, rebuilt where something is new.

        One that cannot be read has its reason in `problems`, and hides none of the others.

        Raises:
            StoreError: the store cannot be listed.
        """
        if time.monotonic() < self._look_at:
            return self._folders
        named = [name.rstrip("/") for name in self._store.list_folders("")]
        runs = [name for name in named if keys.is_run_folder(name)]
        wanted = [run_id for run_id in sorted(runs, reverse=True) if run_id not in without]
        found = []
        problems = {}
        for number, run_id in enumerate(wanted[:_MOST_RUNS], start=1):
            folder = RunFolder(self._root / run_id)
            try:
                self.folder(run_id)
            except SpotguardError as problem:
                if not folder.journal_path.exists() and not self._is_run(run_id):
                    continue  # a folder of something else
                problems[run_id] = problem.message
                if self.problems.get(run_id) != problem.message:
                    log.warning("%s: %s", below(self.url, run_id), problem.message)
                folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            found.append(folder)
            if number % 20 == 0:
                tell(f"reading {self.url}: {number} of {len(wanted)} runs")
        self._folders, self.problems = tuple(found), problems
        self._look_at = time.monotonic() + self._every_s
        return self._folders

    def _is_run(self, run_id: str) -> bool:
        """Return whether there is anything of a run; a store that cannot say it may be one."""
        try:
            store = PrefixedStore(self._store, run_id)
            found = store.head(keys.RUN) or store.head(keys.LEASE)
            return found is not None or bool(store.list_folders(keys.ATTEMPTS))
        except StoreError:
            return True

    def folder(self, run_id: str) -> RunFolder:
        """Return the folder of one run, rebuilt if something is new.

        Raises:
            UsageError: there is no such run, or it makes no sense.
            StoreError: the store cannot be read.
        """
        folder = RunFolder(self._root / run_id)
        self._bring_up_to_date(folder, run_id)
        return folder

    def _bring_up_to_date(self, folder: RunFolder, run_id: str) -> None:
        store = PrefixedStore(self._store, run_id)
        signs = _signs(store, self._over.setdefault(run_id, set()))
        if self._seen.get(run_id) == signs and folder.journal_path.exists():
            return
        body = read_run_json(store, below(self.url, run_id))
        try:
            begun = raw_place_data(body["spec"], 0, body["limits"])
            places = [
                (place, raw_place_data(place.job, place.phase, place.limits))
                for place in body["places"]
            ]
        except Refused as problem:
            raise UsageError(
                f"What {below(self.url, run_id)} says of where it runs makes no sense: {problem}.",
                hint="a newer version of spotguard may have written it",
            ) from problem
        folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = folder.path / "journal.new"
        draft.unlink(missing_ok=True)
        with Journal.create(draft) as journal:
            created = {
                "run_id": run_id,
                "name": body["name"],
                "store_root": self.url,
                "limits": body["limits"],
                "spec": begun["spec"],
                "job": begun["job"],
                "sweep": body["sweep"],
            }
            with journal.all_or_nothing():
                journal.append(Kind.CREATED.value, at=body["created_at"], data=created)
                rebuild = Rebuild(journal, _Nobody(), run_id, by_word_alone=True)
                rebuild.places = places
                rebuild.controller_nodes = body["controller_nodes"]
                rebuild.attempts(store)
                if rebuild.lost_launches or rebuild.chunks_left:
                    told = {
                        "chunks_left": rebuild.chunks_left,
                        "lost_launches": rebuild.lost_launches,
                    }
                    # At an instant that is the same each time: it is told once.
                    journal.append(Kind.ADOPTED.value, at=body["created_at"], data=told)
                record = read_record(journal)
                keep_snapshot(journal, record, None, now=time.time())
                if not is_controlled(store):
                    words = "nobody controls it; `spotguard adopt` takes it over"
                    settle(journal, words, at=_rest_at(record))
        draft.rename(folder.journal_path)
        self._seen[run_id] = signs


class _Nobody:
    """Stands for a launcher where none may be asked: another machine's clusters are its own."""

    def observe(self, cluster: str, *, heard: bool = False) -> ClusterView:
        """Return that nothing is known."""
        return ClusterView(state=ClusterState.UNREACHABLE)


def _rest_at(record: RunRecord) -> float:
    """Return when the last of a run's attempts was gone: looking at it later changes nothing."""
    ends = [attempt.end.gone_at for attempt in record.attempts if attempt.end is not None]
    return max([record.created_at, *ends])


def is_controlled(store: ObjectStore) -> bool:
    """Return whether a controller may look after a run; `store` is the run's own."""
    try:
        found = read_holder(store)
    except StoreError:
        return True
    return found is not None and found[0].lives(time.time())


def _signs(store: ObjectStore, over: set[int]) -> tuple[str, ...]:
    """Return what changes when something happens to a run.

    These are all keys of its newest attempt, and of those before it that have no verdict yet: two
    may overlap, and nodes may be released for minutes. `over` are those that have one.
    """
    numbers = attempt_numbers(store)
    newest = max(numbers, default=0)
    signs = [str(newest)]
    signs += [f"{info.key} {info.etag}" for info in store.list(keys.CONTROLLER_NODES)]
    for number in sorted(set(numbers) - over)[-_MOST_LISTED:]:
        listed = list(store.list(keys.attempt(number)))
        if number != newest and any(info.key == keys.end(number) for info in listed):
            over.add(number)
        else:
            signs += (f"{info.key} {info.etag}" for info in listed)
    return (*signs, *map(str, sorted(over)))
