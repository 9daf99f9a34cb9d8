"""The folder of one run below spotguard's home, and who may be its controller.

runs/<run_id>/journal.db         what happened
runs/<run_id>/launches.json    the clusters that may live, for when the journal cannot be read
runs/<run_id>/controller.lock    held (flock) by the controller for as long as it has the run
runs/<run_id>/controller.log     what the controller did
runs/<run_id>/live.json          the newest progress; a cache
runs/<run_id>/at-rest.json       the numbers of a run that has settled; a cache
runs/<run_id>/clock.json         where this machine's clock stood, so that no jump of it counts
runs/<run_id>/cache.key          by which nodes know what earlier ones kept of their folders
runs/<run_id>/known-jobs         which of the jobs in its store were made or confirmed here
runs/<run_id>/private.json       what is secret of the job, while its controller moves to a node
runs/<run_id>/going-on           there while a run is adopted that is to go on by itself
runs/<run_id>/local/             the local launcher's clusters
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.journal.journal import Journal
from spotguard.errors import SpotguardError, UsageError
from spotguard.events import keys
from spotguard.shared.steady_clock import CLOCK_FILE, clock_kept_at
from spotguard.shared.typo_guess import nearest
from spotguard.spec.home_folder import spotguard_home
from spotguard.storage.urls import split_last, whole_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from spotguard.shared.steady_clock import SteadyClock

log = logging.getLogger("spotguard")

_RETRY_S = 0.05
_NEWEST = 20
"""So many entries of the journal are looked at for the last one: nodes tell of what was before."""
_MADE_AT = re.compile(r"-(\d{6}-\d{6})-[0-9a-f]{4}(-\d\d)?$")


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what this machine knows of it."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def journal_path(self) -> Path:
        """The journal's file."""
        return self.path / "journal.db"

    @property
    def launches_path(self) -> Path:
        """What was launched and is not known to be gone."""
        return self.path / "launches.json"

    @property
    def lock_path(self) -> Path:
        """The file that the controller holds locked."""
        return self.path / "controller.lock"

    @property
    def log_path(self) -> Path:
        """What the controller did, for this run."""
        return self.path / "controller.log"

    def note_look(self) -> None:
        """Leave a sign that its controller has looked just now; who is not heard of may be frozen.

        Nothing is written but the file's own time, so that a full disk does not stop it.
        """
        with contextlib.suppress(OSError):
            self._looked_path.touch()

    def looked_at(self) -> float | None:
        """Return when its controller looked last, by the run's clock; None if it never did."""
        try:
            age_s = time.time() - self._looked_path.stat().st_mtime
        except OSError:
            return None
        return self.clock().now() - age_s

    @property
    def _looked_path(self) -> Path:
        return self.path / "looked"

    @property
    def live_path(self) -> Path:
        """The newest progress, for watchers; a cache, lost without harm."""
        return self.path / "live.json"

    @property
    def at_rest_path(self) -> Path:
        """The numbers of a run that has settled; a cache, lost without harm."""
        return self.path / "at-rest.json"

    def cache_key(self) -> str | None:
        """Return the secret that seals what nodes keep of their folders; made when first asked for.

        It is in no store: who can write there cannot make a node believe it. On another machine the
        run gets a new one, and begins with empty folders once. None if this machine cannot keep
        one: then nodes keep nothing. Only the controller asks, of which there is one.
        """
        path = self.path / "cache.key"
        try:
            if path.exists() and (found := path.read_text().strip()):
                return found
            fresh = path.with_name(".cache.key.new")
            fresh.unlink(missing_ok=True)
            fresh.touch(0o600)
            fresh.write_text(secrets.token_hex(32))
            fresh.replace(path)
            return path.read_text()
        except (OSError, UnicodeDecodeError) as problem:
            log.warning("cached folders are not kept: %s", problem)
            return None

    def clock(self) -> SteadyClock:
        """Return the clock by which this machine keeps the run, whatever is done to its own."""
        return clock_kept_at(self.path / CLOCK_FILE, self._last_told)

    def _last_told(self) -> float | None:
        """Return what time it was when something was last written down; None if nothing is."""
        if not self.journal_path.exists():
            return None
        try:
            with self.journal(again=True) as journal:
                newest = journal.read(journal.start_of_newest(_NEWEST) - 1)
                return max((entry.at for entry in newest), default=None)
        except (SpotguardError, OSError):  # who opens it for more than this says what is wrong
            return None

    def journal(self, *, again: bool = False) -> Journal:
        """Open the run's journal; `again` as in `Journal.open`."""
        return Journal.open(self.journal_path, again=again)

    def identity(self) -> int | None:
        """Return what tells the journal's file from one that takes its place; None if none is."""
        try:
            return self.journal_path.stat().st_ino
        except OSError:
            return None

    def controller_pid(self) -> int | None:
        """Return the process id of the living controller; None if there is none."""
        return lock_holder(self.lock_path)

    def is_controlled(self) -> bool:
        """Return whether a living controller looks after the run."""
        return self.controller_pid() is not None

    def control(self, *, patience_s: float, says_who: bool = True) -> AbstractContextManager[bool]:
        """Hold the controller's lock inside the block; yields False if another one keeps it.

        The patience is for a predecessor that is about to leave, and for commands that look.
        Without `says_who` nobody hears which process it is until `say_who_controls`.
        """
        return lock_held(self.lock_path, patience_s=patience_s, says_who=says_who)

    def say_who_controls(self) -> None:
        """Say that this process, which holds the controller's lock, looks after the run."""
        self.lock_path.write_text(str(os.getpid()))


def lock_holder(path: Path) -> int | None:
    """Return the id of the process that holds a lock file, 0 if it has not said; None if none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # A shared lock: two commands that look at once do not take each other for it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.read(descriptor, 32).strip()
        return int(written) if written.isdigit() else 0
    else:
        return None
    finally:
        os.close(descriptor)


@contextmanager
def lock_held(path: Path, *, patience_s: float, says_who: bool = True) -> Iterator[bool]:
    """Hold a lock file; yields False if another one keeps it.

    This process's id is in it from the beginning if it `says_who`, and goes before the lock does:
    who holds the lock next, and has not said it, is not taken for this one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _flock(descriptor, patience_s) or not _is_at(descriptor, path):
            yield False
            return
        os.ftruncate(descriptor, 0)
        if says_who:
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        try:
            yield True
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def runs_folder() -> Path:
    """Return the folder that holds all runs; it need not exist."""
    return spotguard_home() / "runs"


def folder_of(run_id: str) -> RunFolder:
    """Return the folder of a run by its whole id; `UsageError` if there is none."""
    if keys.RUN_ID_PATTERN.fullmatch(run_id) and (runs_folder() / run_id).is_dir():
        return RunFolder(runs_folder() / run_id)
    if is_place(run_id):
        raise UsageError(
            f"{run_id} is a place in a store: a run can be looked at there, and not steered.",
            hint=f"take it over, then steer it: spotguard adopt {run_id}",
        )
    raise UsageError(f"There is no run {run_id!r} on this machine.", hint=_guess(run_id))


def known_runs() -> list[str]:
    """Return the ids of all runs of this machine, newest first."""
    root = runs_folder()
    if not root.is_dir():
        return []
    found = [path.name for path in root.iterdir() if keys.RUN_ID_PATTERN.fullmatch(path.name)]
    return sorted(found, key=_made_at, reverse=True)


def find_run(text: str | None) -> str:
    """Return the id of the run that the user means: an id, a unique beginning, None the newest.

    Raises:
        UsageError: there is none, or several begin like that.
    """
    if text is not None and is_place(text):
        return folder_of(text).run_id
    runs = known_runs()
    if not runs:
        raise UsageError(
            f"There is no run on this machine yet (in {runs_folder()}).",
            hint="start one: spotguard up job.py",
        )
    if text is None:
        return runs[0]
    matches = [run_id for run_id in runs if run_id.startswith(text)] if text else []
    if text in matches or len(matches) == 1:
        return text if text in matches else matches[0]
    if matches:
        raise UsageError(
            f"{len(matches)} runs begin with {text!r}: {', '.join(matches[:5])}.",
            hint=f"give more of its id; the newest of them is {matches[0]}",
        )
    raise UsageError(f"There is no run {text!r} on this machine.", hint=_guess(text))


def is_place(text: str) -> bool:
    """Return whether the user names a run by where it is, and not by its id."""
    return "/" in text or text in (".", "..")


def split_place(text: str) -> tuple[str, str]:
    """Return the URL of the store, and the run's id in it; a folder's URL is its absolute path.

    Raises:
        UsageError: it is no STORE/RUN_ID.
    """
    root, run_id = split_last(whole_url(text)) if is_place(text) else ("", text)
    if not root or not keys.RUN_ID_PATTERN.fullmatch(run_id):
        raise UsageError(f"{text!r} does not name a run.", hint="give it as STORE/RUN_ID")
    return root, run_id


def _made_at(run_id: str) -> tuple[str, str]:
    match = _MADE_AT.search(run_id)
    return (match[1] if match else "", run_id)


def _guess(text: str) -> str:
    close = nearest(text, known_runs())
    return f"did you mean {close}?" if close else "list them: spotguard runs"


def _is_at(descriptor: int, path: Path) -> bool:
    """Return False for a lock that was removed while it was waited for: it locks nothing."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _flock(descriptor: int, patience_s: float) -> bool:
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(_RETRY_S)
        else:
            return True
