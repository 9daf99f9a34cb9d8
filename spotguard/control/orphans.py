"""Orphans: clusters that spotguard launched, that cost money, and that no run wants any more.

A cluster is wanted while its run has a living controller: on this machine (the lock of the run's
folder) or on another one (the lease in the run's store). Where neither can be told, it is neither
wanted nor an orphan, and is left alone.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from spotguard.control.fold import read_record
from spotguard.control.folder import RunFolder, runs_folder
from spotguard.control.lease import read_holder
from spotguard.control.leftovers import Fate, Findings, Leftover, Verdict
from spotguard.control.news import read_beats
from spotguard.control.process import run_store
from spotguard.errors import JournalDamaged, LauncherFailure, SpotguardError
from spotguard.events import keys
from spotguard.storage.deadline import give_up_after
from spotguard.storage.urls import is_folder
from spotguard.units import SystemClock, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.control.lease import Holder
    from spotguard.control.record import RunRecord
    from spotguard.launch.skypilot.books import OurCluster
    from spotguard.storage.base import ObjectStore
    from spotguard.units import Clock

_STORE_S = 20.0
"""How long one run's store may take to answer."""
_BEAT_FRESH_S = 60.0
_DOWN_PATIENCE_S = 400.0
"""SkyPilot needs some minutes to end nodes in a cloud."""
_DOWN_POLL_S = 1.0


class Books(Protocol):
    """What is asked of SkyPilot; `launch.skypilot.sdk.SkySdk` answers."""

    def ours(self, names: Sequence[str] | None = None, *, fresh: bool = False) -> list[OurCluster]:
        """Return spotguard's clusters, as last seen or with `fresh` as the clouds say now."""
        ...

    def end(self, cluster: str) -> None:
        """Have a cluster terminated; return when it is."""
        ...


def find_leftovers(books: Books, now: Callable[[], float] = time.time) -> Findings:
    """Return the clusters of spotguard's that no living controller looks after.

    Blocks for seconds. What SkyPilot only believes to be there is asked for in its cloud first.
    """
    try:
        listed = books.ours()
        verdicts = {cluster.name: judge(cluster, now()) for cluster in listed}
        doubtful = [name for name, verdict in verdicts.items() if verdict.fate is not Fate.WANTED]
        there = books.ours(doubtful, fresh=True) if doubtful else []
    except SpotguardError as problem:
        return Findings(asked=True, problem=problem.message)
    leftovers = [
        Leftover(
            cluster=cluster,
            verdict=verdicts[cluster.name],
            looked_at=now(),
            training_at_step=_training_at(cluster, now()),
        )
        for cluster in there
        if cluster.name in verdicts
    ]
    dearest_first = sorted(leftovers, key=lambda each: -(each.usd_per_h or 0.0))
    wanted = len(listed) - len(doubtful)
    return Findings(asked=True, wanted=wanted, leftovers=tuple(dearest_first))


def skypilot_books() -> Books | None:
    """Return SkyPilot's; None where it is not installed or was never used."""
    from spotguard.launch.skypilot.sdk import SkySdk
    from spotguard.launch.skypilot.vendor import in_use

    return SkySdk() if in_use() else None


# ---------------------------------------------------------------- judging


def judge(cluster: OurCluster, now: float) -> Verdict:
    """Return whether anybody wants a cluster, and how that is known."""
    folder = RunFolder(runs_folder() / cluster.run_id)
    if folder.controller_pid() is not None:
        return Verdict(fate=Fate.WANTED, why="its controller lives on this machine")
    record = _record(folder)
    over = _over(record, cluster.name) if record is not None else ""
    if over:  # its name is never used again, so nobody else can mean it either
        return Verdict(fate=Fate.ORPHAN, why=over)
    try:
        with give_up_after(_STORE_S):
            store = run_store(cluster.store, cluster.run_id)
            found = read_holder(store)
            known = store.head(keys.RUN) is not None
    except SpotguardError as problem:
        return Verdict(fate=Fate.UNSURE, why=f"its run's store cannot be asked: {problem.message}")
    holder = found[0] if found and found[0].machine else None
    return _by_lease(cluster, record, holder, now, in_store=known)


def _by_lease(
    cluster: OurCluster,
    record: RunRecord | None,
    holder: Holder | None,
    now: float,
    *,
    in_store: bool,
) -> Verdict:
    if holder is not None and holder.lives(now):
        return Verdict(fate=Fate.WANTED, why=holder.words(now))
    current = record.current if record is not None else None
    goes_on = current is not None and current.cluster == cluster.name
    adoptable = record is None and in_store
    if record is not None and record.settled is not None:
        why = f"its run is {record.settled.state.label}"
    elif holder is not None and not holder.released:
        silent = format_duration(max(0.0, now - holder.renewed_at))
        why = f"its controller on {holder.host} has been silent for {silent}"
    elif record is None and not in_store and is_folder(cluster.store):
        why = f"its run's store, {cluster.store}, is not on this machine"
        return Verdict(fate=Fate.UNSURE, why=why)
    elif record is None and not in_store:
        why = "its run is known neither here nor in its store"
    else:
        why = "its run has no controller"
    return Verdict(fate=Fate.ORPHAN, why=why, run_goes_on=goes_on, adoptable=adoptable)


def _record(folder: RunFolder) -> RunRecord | None:
    """Return what this machine knows of a run; None if nothing, or if its journal is damaged."""
    if not folder.journal_path.exists():
        return None
    try:
        with folder.journal() as journal:
            return read_record(journal)
    except JournalDamaged:
        return None


def _over(record: RunRecord, name: str) -> str:
    """Return why a cluster's time is over by this machine's journal; empty if it is not."""
    attempts = [attempt for attempt in record.attempts if attempt.cluster == name]
    if not attempts or any(attempt.end is None for attempt in attempts):
        return ""
    end = attempts[-1].end
    assert end is not None
    if record.settled is not None:
        return f"its run is {record.settled.state.label}"
    return f"its attempt ended: {end.reason.label}"


def _training_at(cluster: OurCluster, now: float) -> int | None:
    try:
        with give_up_after(_STORE_S):
            return _newest_beat(run_store(cluster.store, cluster.run_id), now)
    except SpotguardError:
        return None


def _newest_beat(store: ObjectStore, now: float) -> int | None:
    """Return the step of a sign of life in the newest attempt that is not a minute old."""
    listed = [keys.parse_attempt(folder) for folder in store.list_folders(keys.ATTEMPTS)]
    newest = max((number for number in listed if number is not None), default=None)
    beats = [] if newest is None else read_beats(store, newest)
    fresh = [beat.step for beat in beats if now - beat.at < _BEAT_FRESH_S]
    return max(fresh, default=None)


# ---------------------------------------------------------------- ending


def end_orphans(
    found: Findings, books: Books, tell: Callable[[str], None], clock: Clock | None = None
) -> Findings:
    """Return the findings once each orphan is ended, or has a reason why it is not.

    Blocks for minutes. What is not known to be an orphan is left alone.
    """
    leftovers = []
    for leftover in found.leftovers:
        if leftover.is_orphan:
            tell(f"ending {leftover.cluster.name}")
            leftover = end_leftover(books, leftover, clock)
        leftovers.append(leftover)
    return replace(found, leftovers=tuple(leftovers))


def end_leftover(books: Books, leftover: Leftover, clock: Clock | None = None) -> Leftover:
    """Return the leftover once it is ended, or with the reason why it is not. Blocks for minutes.

    Looks again first: a controller may have come back meanwhile.
    """
    clock = clock or SystemClock()
    again = judge(leftover.cluster, clock.now())
    if again.fate is not Fate.ORPHAN:
        return replace(leftover, problem=f"left alone: {again.why}")
    try:
        if again.run_goes_on:
            _down(leftover.cluster.run_id, clock)
        else:
            books.end(leftover.cluster.name)
    except SpotguardError as problem:
        return replace(leftover, problem=problem.message)
    return replace(leftover, ended=True)


def _down(run_id: str, clock: Clock) -> None:
    """Let a run's own controller, which is started for it, take its nodes down; wait for that."""
    from spotguard.control import api

    api.request_down(run_id)
    give_up_at = clock.monotonic() + _DOWN_PATIENCE_S
    while not api.view(run_id).state.settled:
        if clock.monotonic() >= give_up_at:
            raise LauncherFailure(f"not gone yet; look: spotguard status {run_id} --watch")
        clock.sleep(_DOWN_POLL_S)
