"""Runs known by their store alone: no home is needed, and nothing is written into the store.

A list costs one request for each run: its controller's lease tells how the run stands. One whose
lease does not say, or whose controller died without a word, is rebuilt from what it left, as is
each run that is looked at more closely, in a folder that goes with this process.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.control.journal.fold import read_record
from spotguard.control.report.mirror import Mirror, is_controlled, room
from spotguard.control.run_folder import RunFolder, split_place
from spotguard.control.status.published_line import read_told
from spotguard.control.status.view import RunSummary, UnreadableRun
from spotguard.control.status.watch import Watch, summary
from spotguard.control.supervisor.lease import read_word
from spotguard.errors import NotFound, SpotguardError
from spotguard.events import keys
from spotguard.events.untrusted import Refused
from spotguard.launch.base import LogChunk, LogGone
from spotguard.storage import PrefixedStore, open_existing
from spotguard.storage.urls import below, is_folder, whole_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.status.view import HistoryLine, Look
    from spotguard.control.supervisor.lease import Holder
    from spotguard.storage.base import ObjectStore

_READS = 64
"""Runs that are read side by side."""
_LOOK_EVERY_S, _LOOK_AT_BUCKET_EVERY_S = 1.0, 20.0
"""Each look at a bucket costs money, and a controller renews its word every 20 s."""
_TELL_EVERY = 100


@dataclass(frozen=True)
class StoredFolder(RunFolder):
    """Where a run of a store was rebuilt."""

    store: ObjectStore
    """The run's own."""

    def is_controlled(self) -> bool:
        """Return whether a controller, wherever it is, may look after the run now."""
        return is_controlled(self.store)


class StoredRun:
    """One run of a store. Not thread-safe; methods block."""

    def __init__(self, url: str) -> None:
        """Open the run at `url` (`STORE/RUN_ID`).

        Raises:
            UsageError: there is no run at `url`, or it makes no sense.
            StoreError: the store cannot be read.
        """
        root, run_id = split_place(url)
        self._mirror = Mirror(root, room())
        self._run_id = run_id
        self.url = below(self._mirror.url, run_id)
        self._every_s = _LOOK_EVERY_S if is_folder(self.url) else _LOOK_AT_BUCKET_EVERY_S
        self._look_at = float("-inf")
        store = PrefixedStore(open_existing(root), run_id)
        self.folder = StoredFolder(self._mirror.folder(run_id).path, store)
        self._look_at = time.monotonic() + self._every_s

    def refresh(self) -> None:
        """Read what is new, unless that was done a moment ago.

        Raises:
            StoreError: the store cannot be read.
        """
        if time.monotonic() >= self._look_at:
            self._mirror.folder(self._run_id)
            self._look_at = time.monotonic() + self._every_s

    def holder(self) -> Holder | None:
        """Return who controls it, or did last; None if nobody can tell."""
        with contextlib.suppress(SpotguardError, Refused):
            return read_word(self.folder.store)
        return None


class StoredWatch:
    """Looks at a run of a store again and again; tells each happening once."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._watch = Watch(run.folder)
        self._told: set[tuple[float, int | None, str, str]] = set()

    def look(self) -> Look:
        """Return how the run stands, and what happened since the last look.

        Raises:
            StoreError: the store cannot be read.
        """
        self._run.refresh()
        look = self._watch.look()
        # A journal that was rebuilt tells all that happened once more.
        news = tuple(line for line in look.news if _sign(line) not in self._told)
        earlier = 0 if self._told else look.earlier
        self._told |= {_sign(line) for line in news}
        return replace(look, news=news, earlier=earlier)


def _sign(line: HistoryLine) -> tuple[float, int | None, str, str]:
    return (line.at, line.attempt, line.kind, line.text)


class NoLauncher:
    """Stands for the launcher of a run of another machine, which alone can ask it."""

    def read_log(self, cluster: str, node: int, offset: int) -> LogChunk:
        """Raise `LogGone`: what is not in the store is not to be had."""
        raise LogGone(f"{cluster} is another machine's to ask")


def list_stored(
    url: str, tell: Callable[[str], None] = lambda _: None
) -> tuple[list[RunSummary], list[UnreadableRun]]:
    """Return the runs of a store, newest first, and what looks like one and cannot be read.

    `tell` hears how far a long list is.

    Raises:
        UsageError, StoreError: the store makes no sense or cannot be read.
    """
    store = open_existing(whole_url(url))
    named = [name.rstrip("/") for name in store.list_folders("")]
    run_ids = [name for name in named if keys.is_run_folder(name)]
    told: list[RunSummary] = []
    unreadable: list[UnreadableRun] = []
    mirror = Mirror(store.url, room())
    with ThreadPoolExecutor(_READS, thread_name_prefix="spotguard-runs") as crew:
        words = crew.map(lambda run_id: _word(store, run_id), run_ids)
        for number, (run_id, word) in enumerate(zip(run_ids, words, strict=True), start=1):
            try:
                told.append(_line(mirror, store, run_id, word))
            except (SpotguardError, Refused) as problem:
                said = problem.message if isinstance(problem, SpotguardError) else str(problem)
                unreadable.append(UnreadableRun(store=below(store.url, run_id), problem=said))
            if number % _TELL_EVERY == 0 and number < len(run_ids):
                tell(f"reading {store.url}: {number} of {len(run_ids)} runs")
    told.sort(key=lambda run: (run.created_at, run.run_id), reverse=True)
    return told, unreadable


def _word(store: ObjectStore, run_id: str) -> Holder | SpotguardError | None:
    """Return what a run's lease says; None if there is none or it makes no sense."""
    try:
        return read_word(PrefixedStore(store, run_id))
    except (NotFound, Refused):
        return None
    except SpotguardError as problem:
        return problem


def _line(
    mirror: Mirror, store: ObjectStore, run_id: str, word: Holder | SpotguardError | None
) -> RunSummary:
    if isinstance(word, SpotguardError):
        raise word
    lives = word is not None and word.lives(time.time())
    line = _told_line(word, run_id)
    # Who died without a word left what was true then: what it did not tell is in the store.
    if line is None or not (lives or line.state.settled):
        folder = mirror.folder(run_id)
        with folder.journal() as journal:
            line = summary(folder, read_record(journal))
    return replace(
        line,
        store=below(store.url, run_id),
        controlled_by=word.host if lives and word is not None else None,
        heard_at=None if word is None else word.renewed_at,
    )


def _told_line(word: Holder | None, run_id: str) -> RunSummary | None:
    with contextlib.suppress(Refused):
        return None if word is None or word.told is None else read_told(word.told, run_id)
    return None
