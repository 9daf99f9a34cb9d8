"""Rebuilds a run's journal from its store alone.

For a machine that never saw the run, and for a journal that was damaged. The store has the job,
what was launched, when it was gone, and all that the job reported. What only the journal knew is
lost: waiting for capacity, your wishes, and limits that a `resume` changed (give them again).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.lineage import read_claim
from spotguard.control.actions import Alert, Settle
from spotguard.control.allot import Policy
from spotguard.control.fold import read_record
from spotguard.control.folder import RunFolder, runs_folder
from spotguard.control.journal import Journal
from spotguard.control.machine import EXIT_UNFINISHED, Observation, decide
from spotguard.control.news import JobNews, journal_data
from spotguard.control.process import launcher_for, run_store
from spotguard.control.record import JOB_PREFIX, Allotment, Kind
from spotguard.control.request import cluster_name
from spotguard.control.untrusted import integer, text
from spotguard.control.untrusted import number as number_in
from spotguard.control.verdict import judge
from spotguard.errors import JournalDamaged, NotFound, UsageError
from spotguard.events import keys
from spotguard.events.states import Market, RunState
from spotguard.launch.base import ClusterState
from spotguard.launch.regroup import read_group
from spotguard.spec.model import JobSpec
from spotguard.storage import open_store
from spotguard.units import from_iso

if TYPE_CHECKING:
    from spotguard.launch.base import Launcher
    from spotguard.storage.base import ObjectStore

_PLACE_FIELDS = (
    "infra",
    "region",
    "zone",
    "instance_type",
    "price_usd_per_h",
    "on_demand_usd_per_h",
)


def adopt_run(url: str) -> RunFolder:
    """Rebuild the journal of the run at `url` (`STORE/RUN_ID`) and return its folder.

    A damaged journal is moved aside. A run without living nodes is settled.

    Raises:
        UsageError: there is no run at `url`, or this machine has a whole journal of it.
    """
    store_url, _, run_id = url.rstrip("/").rpartition("/")
    if not store_url or not keys.RUN_ID_PATTERN.fullmatch(run_id):
        raise UsageError(f"{url!r} does not name a run.", hint="give it as STORE/RUN_ID")
    store_root = open_store(store_url).url
    store = run_store(store_root, run_id)
    body = _run_json(store, url)
    spec = JobSpec.from_json(body["spec"])
    folder = RunFolder(runs_folder() / run_id)
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with folder.control(patience_s=1.0) as alone:
        if not alone:
            raise UsageError(
                f"Run {run_id} has a living controller, so there is nothing to adopt.",
                hint=f"look: spotguard status {run_id}",
            )
        _move_aside(folder)
        draft = folder.path / "journal.new"
        draft.unlink(missing_ok=True)
        with Journal.create(draft) as journal:
            created = {
                "run_id": run_id,
                "name": body["name"],
                "store_root": store_root,
                "limits": body["limits"],
                "spec": spec.to_json(),
            }
            journal.append(Kind.CREATED.value, at=body["created_at"], data=created)
            _Rebuild(journal, store, launcher_for(spec, folder.path), run_id).attempts()
            journal.append(Kind.ADOPTED.value, at=time.time(), data={"store": store_root})
            _settle(journal)
        draft.rename(folder.journal_path)
    return folder


def _run_json(store: ObjectStore, url: str) -> dict[str, Any]:
    try:
        body = json.loads(store.get(keys.RUN))
        if body["schema"] != 1:
            raise UsageError(f"The run at {url} was written by another version of spotguard.")
        found = {name: body[name] for name in ("name", "limits", "spec")}
        return {**found, "created_at": from_iso(body["created_at"])}
    except NotFound as problem:
        raise UsageError(
            f"There is no run at {url}: it has no {keys.RUN}.",
            hint="give the run's own place, as in `store` of `spotguard status --json`",
        ) from problem
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise UsageError(f"The run at {url} has a {keys.RUN} that makes no sense.") from problem


def _move_aside(folder: RunFolder) -> None:
    """Move a damaged journal, with SQLite's helper files, out of the way; refuse a whole one."""
    if not folder.journal_path.exists():
        return
    try:
        with folder.journal() as journal:
            read_record(journal)
    except JournalDamaged:
        suffix = f".damaged-{time.strftime('%y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
        for helper in ("", "-wal", "-shm"):
            path = folder.path / f"journal.db{helper}"
            if path.exists():
                path.rename(folder.path / f"journal.db{helper}{suffix}")
        return
    raise UsageError(
        f"The journal of {folder.run_id} on this machine is whole; there is nothing to adopt.",
        hint=f"go on with it: spotguard resume {folder.run_id}",
    )


class _Rebuild:
    """Writes each attempt of a run into a new journal."""

    def __init__(
        self, journal: Journal, store: ObjectStore, launcher: Launcher, run_id: str
    ) -> None:
        self._journal = journal
        self._store = store
        self._launcher = launcher
        self._run_id = run_id
        self._news = JobNews(store, set())

    def attempts(self) -> None:
        """Rebuild all attempts, oldest first; only the newest one may still live."""
        found = [keys.parse_attempt(prefix) for prefix in self._store.list_folders(keys.ATTEMPTS)]
        numbers = [number for number in found if number is not None]
        for number in numbers:
            cluster, last_at = self._launch(number)
            self._end(number, cluster, last_at, newest=number == numbers[-1])

    def _launch(self, number: int) -> tuple[str, float]:
        """Write down what was launched and what its job reported; return (cluster, last sign)."""
        claim, group = read_claim(self._store, number), read_group(self._store, number)
        known = self._read(keys.launch(number)) or (dict(claim.extra) if claim else {})
        events = list(self._news.events(number, all_of_them=True))
        beats = self._news.beats(number)
        signs = [event.at for _, event in events] + [beat.at for beat in beats]
        signs += [claim.claimed_at] if claim else []
        at = number_in(known, "intended_at") or min(signs, default=time.time())
        intent = {
            "cluster": text(known, "cluster") or cluster_name(self._run_id, number),
            "nodes": integer(known, "nodes") or 1,
            "members": list(group.nodes) if group else None,
            "offer": {
                **{name: known.get(name) for name in _PLACE_FIELDS},
                "infra": text(known, "infra") or "unknown",
                "market": text(known, "market") or Market.SPOT.value,
            },
            "allotment": {**asdict(Allotment()), "down_reason": Allotment().down_reason.value},
        }
        self._journal.append(Kind.INTENDED.value, at=at, attempt=number, data=intent)
        self._journal.append(Kind.LAUNCHED.value, at=at, attempt=number)
        for key, event in events:
            data = journal_data(key, event, seen_at=event.at)
            self._journal.append(JOB_PREFIX + event.kind, at=event.at, attempt=number, data=data)
        for beat in beats:
            self._journal.append(Kind.PROGRESS.value, at=beat.at, attempt=number, data=asdict(beat))
        return str(intent["cluster"]), max(signs, default=at)

    def _end(self, number: int, cluster: str, last_at: float, *, newest: bool) -> None:
        """Give the verdict, unless the launcher still knows living nodes of the newest attempt."""
        view = self._launcher.observe(cluster)
        gone = view.state in (ClusterState.GONE, ClusterState.ABSENT)
        end = self._read(keys.end(number))
        if end is None:
            if newest and not gone:
                return
            attempt = read_record(self._journal).attempts[-1]
            verdict = judge(attempt)
            following = read_group(self._store, number + 1)
            gone_at = following.at if following else view.gone_at
            end = {
                **asdict(verdict),
                "reason": verdict.reason.value,
                "gone_at": last_at if gone_at is None else gone_at,
                "last_step": attempt.last_step,
                "training_ended_at": attempt.job_end.at if attempt.job_end else last_at,
            }
        self._journal.append(
            Kind.ATTEMPT_ENDED.value, at=float(end["gone_at"]), attempt=number, data=end
        )

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            body = json.loads(self._store.get(key))
        except (NotFound, ValueError):
            return None
        return body if isinstance(body, dict) else None


def _settle(journal: Journal) -> None:
    """Bring a run to rest that has no living nodes: the user decides whether it goes on."""
    if read_record(journal).current is not None:
        return
    now = time.time()
    action = decide(read_record(journal), Observation(), now, Policy())
    while isinstance(action, Alert):
        journal.append(Kind.ALERT.value, at=now, data={"percent": action.percent})
        action = decide(read_record(journal), Observation(), now, Policy())
    if not isinstance(action, Settle):
        action = Settle(
            state=RunState.PAUSED,
            detail="adopted from its store; `spotguard resume` goes on",
            exit_code=EXIT_UNFINISHED,
        )
    data = {**asdict(action), "state": action.state.value}
    journal.append(Kind.SETTLED.value, at=now, data=data)
