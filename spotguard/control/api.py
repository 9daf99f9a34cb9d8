"""What commands ask of the controller. Every function blocks briefly and prints nothing.

Functions that only look take a run's id, or its place in a store (`STORE/RUN_ID`): then its store
alone is read, and this machine need not know it.

Wishes (stop, down, resume) are written into the journal, where the controller reads them. Reading
commands fold the journal and need neither the controller nor the store nor a cloud.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from spotguard.control.journal.fold import fold, newest_record
from spotguard.control.journal.journal import making_sense
from spotguard.control.journal.record import Kind
from spotguard.control.journal.stored.controller_nodes import moved_place, place_in
from spotguard.control.journal.stored.logs import LogLine, LogQuery
from spotguard.control.run_folder import (
    RunFolder,
    find_run,
    folder_of,
    is_place,
    known_runs,
    runs_folder,
)
from spotguard.control.status.history_words import SILENT, history_lines, newest_lines
from spotguard.control.status.view import RunSummary, RunView, Story
from spotguard.control.status.watch import Watch, lost_run, picture
from spotguard.control.supervisor.logs import RunLog
from spotguard.errors import Detached, JournalDamaged, StoreError, UsageError
from spotguard.spec.home_folder import spotguard_home
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from spotguard.control.handover.not_in_store import Private
    from spotguard.control.handover.stored_job import Ask
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.report.document import ReportDocument
    from spotguard.control.report.fleet import Fleet
    from spotguard.control.report.measures import RunMeasures
    from spotguard.control.report.stored import StoredRun, StoredWatch
    from spotguard.control.status.view import HistoryLine, UnreadableRun
    from spotguard.control.supervisor.logs import ReadsLog
    from spotguard.control.without_journal import Left
    from spotguard.launch.base import Launcher, Survey
    from spotguard.launch.workdir.snapshot import Snapshot
    from spotguard.policy.plan.forecast import CostForecast
    from spotguard.spec.model import JobSpec
    from spotguard.spec.nodes import NodeRange
    from spotguard.storage.base import ObjectStore

__all__ = [
    "LogLine",
    "adopt",
    "create_run",
    "down_alone",
    "ensure_controlled",
    "exit_code",
    "find_any_run",
    "find_run",
    "fleet",
    "foretold",
    "history",
    "home_news",
    "is_place",
    "job_of",
    "launcher_for",
    "list_runs",
    "list_stored_runs",
    "logs",
    "measures",
    "move",
    "move_plan",
    "now",
    "place_of",
    "plan_forecast",
    "report",
    "request_down",
    "request_stop",
    "resume",
    "settled",
    "start_controller",
    "stop_alone",
    "view",
    "watch",
    "what_is_left",
    "who_controls",
]

_LOG_POLL_S = 0.2
_BUCKET_POLL_S = 2.0
"""Each look at a bucket costs money, and what is printed is stored every three seconds."""


# ---------------------------------------------------------------- starting


def create_run(
    spec: JobSpec,
    found: Survey | Sequence[Survey] | None = None,
    *,
    code: Snapshot | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Create a run for the job and return its id; nothing is launched yet. As `admit.create_run`.

    `found` is where the nodes can be had, if the caller has asked: the clouds take seconds to say.
    """
    from spotguard.control import create_run as admit

    return admit.create_run(spec, found, code=code, tell=tell)


def start_controller(run_id: str) -> None:
    """Start the run's controller in the background; return once it is in control.

    Raises:
        EnvironmentFailure: it did not start; says what it printed.
    """
    from spotguard.control.controller import start

    start.start(folder_of(run_id))


def ensure_controlled(run_id: str) -> bool:
    """Make sure that an unsettled run has a controller; True if it had none and was repaired."""
    from spotguard.control.controller.start import lacks_controller, tell_repair

    folder = folder_of(run_id)
    if folder.controller_pid() is not None:
        return False
    with folder.journal() as journal:
        if not lacks_controller(folder, journal):
            return False
        tell_repair(folder, journal)
    start_controller(run_id)
    return True


def home_news() -> str:
    """Return one sentence if it is found only now that this home is a copy; else nothing."""
    from spotguard.control import home_name

    return home_name.home_news(spotguard_home())


def launcher_for(spec: JobSpec, run_dir: Path) -> Launcher:
    """Return the launcher that the job asks for; it keeps its own files below `run_dir`."""
    from spotguard.control.controller import one_run

    return one_run.launcher_for(spec, run_dir)


# ---------------------------------------------------------------- looking


def view(run_id: str) -> RunView:
    """Return the picture of a run as it is now."""
    folder = _looked_at(run_id)
    controlled = folder.is_controlled()
    return picture(folder, _record(folder), controlled=controlled)


def foretold(run_id: str) -> RunView:
    """Return the picture of a run with its forecast, which takes up to a second to make."""
    from spotguard.control.journal.market_log import market_path, read_market
    from spotguard.control.status.forecast import run_forecast

    folder = _looked_at(run_id)
    controlled = folder.is_controlled()
    record = _record(folder)
    seen = picture(folder, record, controlled=controlled)
    made = run_forecast(record, read_market(market_path()), now=folder.clock().now())
    return seen if made is None else replace(seen, forecast=made)


def plan_forecast(spec: JobSpec, found: Survey, state_bytes: float = 0.0) -> CostForecast | None:
    """Return what a job is expected to cost if it began now; None for nodes of this machine.

    `state_bytes` is the size of its checkpoints, each of which a start reads; 0 is unknown.
    """
    from spotguard.control.journal.market_log import market_path, read_market
    from spotguard.control.status.forecast import plan_forecast as made

    begins_at = max(time.time(), spec.start_at or 0.0)
    return made(
        spec, found.offers, read_market(market_path()), now=begins_at, state_bytes=state_bytes
    )


def team_outlook(spec: JobSpec) -> str:
    """Return what of the team's budget is left for a new run, in words; empty without one.

    Raises:
        SpecError: the team's budget does not allow the run's.
        EnvironmentFailure: the store, or what stands there of it, cannot be read.
    """
    from spotguard.control.journal.team.membership import outlook
    from spotguard.storage import open_store

    return outlook(
        open_store(spec.store).url,
        spec.team.budget,
        budget_usd=spec.budget_usd,
        allow_unknown_price=spec.allow_unknown_price,
    )


def report(run_id: str) -> ReportDocument:
    """Return all that is told of a run in one document; lists the checkpoints in its store."""
    from spotguard.control.report.document import make_report

    return make_report(_looked_at(run_id))


def fleet(stores: Sequence[str] = (), tell: Callable[[str], None] = lambda _: None) -> Fleet:
    """Return what looks at all runs of this machine and of these stores again and again.

    Raises:
        UsageError, StoreError: a store makes no sense or cannot be read.
    """
    from spotguard.control.report.fleet import Fleet
    from spotguard.control.report.mirror import Mirror

    return Fleet([Mirror(url) for url in stores], tell)


def measures(stores: Sequence[str] = ()) -> list[RunMeasures]:
    """Return the numbers of all runs of this machine and of these stores, for monitoring."""
    looked_at = fleet(stores)
    looked_at.refresh()
    return looked_at.measures()


def watch(run_id: str) -> Watch | StoredWatch:
    """Return what looks at a run again and again, each time at the price of what is new."""
    if not is_place(run_id):
        return Watch(folder_of(run_id))
    from spotguard.control.report.stored import StoredWatch

    return StoredWatch(_stored_run(run_id))


def history(run_id: str, *, newest: int | None = None) -> Story:
    """Return what happened to a run, oldest first, each line with its reason and cost by then.

    Args:
        run_id: the run.
        newest: how many lines at most. None is all of them, read as they are asked for.
    """
    folder = _looked_at(run_id)
    if newest is None:
        return Story(lines=_whole_story(folder), earlier=0)
    with folder.journal() as journal, making_sense(journal.path):
        lines, earlier = newest_lines(journal, newest)
    return Story(lines=lines, earlier=earlier)


def _whole_story(folder: RunFolder) -> Iterator[HistoryLine]:
    with folder.journal() as journal, making_sense(journal.path):
        yield from history_lines(journal.read(without=SILENT))


def list_runs() -> list[RunSummary]:
    """Return all runs of this machine, newest first; one with a damaged journal as lost."""
    from spotguard.control.report.numbers_at_rest import run_line

    summaries = []
    for run_id in known_runs():
        folder = RunFolder(runs_folder() / run_id)
        try:
            summaries.append(run_line(folder))
        except JournalDamaged as problem:
            summaries.append(lost_run(folder, problem.message))
    return summaries


def list_stored_runs(
    stores: Sequence[str], tell: Callable[[str], None] = lambda _: None
) -> tuple[list[RunSummary], list[UnreadableRun]]:
    """Return the runs of these stores, whoever controls them, and what cannot be read there.

    Needs nothing of this machine and writes nothing. `tell` hears how far a long list is.

    Raises:
        UsageError, StoreError: a store makes no sense or cannot be read.
    """
    from spotguard.control.report.stored import list_stored

    told: list[RunSummary] = []
    unreadable: list[UnreadableRun] = []
    for url in stores:
        found, lost = list_stored(url, tell)
        told += found
        unreadable += lost
    return told, unreadable


def who_controls(place: str) -> str | None:
    """Return who has a run of a store, in words; None if its store does not say."""
    holder = _stored_run(place).holder()
    return None if holder is None else holder.words(time.time())


def find_any_run(text: str | None) -> str:
    """Return what names the run that the user means: its whole id, or its place as a URL.

    Raises:
        UsageError: there is none, or several begin like that.
        StoreError: the store cannot be read.
    """
    if text is not None and is_place(text):
        return _stored_run(text).url
    run_id = find_run(text)
    with contextlib.suppress(JournalDamaged):
        return moved_place(_record(folder_of(run_id))) or run_id
    return run_id


def place_of(run_id: str) -> str:
    """Return where the run is, for any machine: `STORE/RUN_ID`.

    Raises:
        UsageError: there is no such run.
    """
    return _stored_run(run_id).url if is_place(run_id) else place_in(_record(folder_of(run_id)))


def job_of(run_id: str) -> JobSpec:
    """Return a run's job as it is where the run is now."""
    return _spec_of(_record(_looked_at(run_id)))


def now(run_id: str) -> float:
    """Return what time it is in a run: this machine's, as if no jump of its clock had been."""
    return _looked_at(run_id).clock().now()


def settled(picture: RunView) -> bool:
    """Return whether nothing more happens to the run unless the user asks for it."""
    return picture.state.settled


def exit_code(run_id: str) -> int:
    """Return the exit code of a command that followed the run: 75 while it goes on."""
    record = _record(_looked_at(run_id))
    return Detached.exit_code if record.settled is None else record.settled.exit_code


def logs(run_id: str, follow: bool = False, query: LogQuery | None = None) -> Iterator[LogLine]:
    """Yield what the job printed: attempt after attempt, the ranks of one by time.

    With `follow`, goes on until the run settles.

    Raises:
        UsageError: the run has no such attempt.
    """
    folder = _looked_at(run_id)
    record = _record(folder)
    query = query or LogQuery()
    _refuse_unknown_attempt(record, query.attempt, follow=follow)
    printed = RunLog(_log_source(run_id, folder, record), _store_of(record), query)
    while True:
        # The record is read before the logs, so that nothing printed before its end is missed.
        last = not follow or record.settled is not None
        yield from printed.lines(record, last=last)
        if last:
            return
        time.sleep(_LOG_POLL_S if is_folder(record.store_root) else _BUCKET_POLL_S)
        if is_place(run_id):
            _stored_run(run_id).refresh()
            record = _record(folder)
        else:
            record = _caught_up(folder, record)


def _log_source(run_id: str, folder: RunFolder, record: RunRecord) -> ReadsLog:
    """Return who is asked for what is not in the run store."""
    if is_place(run_id):
        from spotguard.control.report.stored import NoLauncher

        return NoLauncher()
    return launcher_for(_spec_of(record), folder.path)


def _refuse_unknown_attempt(record: RunRecord, wanted: int | None, *, follow: bool) -> None:
    numbers = [attempt.number for attempt in record.attempts]
    if wanted is not None and wanted not in numbers and not follow:
        known = f"it has {', '.join(map(str, numbers))}" if numbers else "it has none yet"
        raise UsageError(f"--attempt {wanted}: {record.run_id} has no such attempt", hint=known)


def _store_of(record: RunRecord) -> ObjectStore | None:
    """Return the run's own store; None if it cannot be opened here: then the launcher is asked."""
    from spotguard.storage import PrefixedStore, open_store

    try:
        return PrefixedStore(open_store(record.store_root), record.run_id)
    except StoreError:
        return None


# ---------------------------------------------------------------- steering


def request_stop(run_id: str) -> bool:
    """Ask the run to save, then stop; False if it had settled already. Returns at once.

    One whose controller has a node of its own is asked through its store, which takes seconds.
    """
    return _wish(run_id, Kind.USER_STOP)


def request_down(run_id: str) -> bool:
    """Ask the run to release its nodes at once; False if it had settled. Returns at once."""
    return _wish(run_id, Kind.USER_DOWN)


def what_is_left(run_id: str) -> Left | None:
    """Return what can be told of a run without its journal; None if nothing.

    Raises:
        LaunchesDamaged: what is written down of its launches cannot be read.
    """
    from spotguard.control import without_journal

    return without_journal.what_is_left(folder_of(run_id))


def down_alone(run_id: str, tell: Callable[[str], None]) -> None:
    """End every cluster that a run may have, without its journal; return once none is left.

    A living controller is ended first. `tell` hears of each cluster that is gone.

    Raises:
        UsageError: another machine has the run, or had it since.
        EnvironmentFailure: the controller does not end.
        LauncherFailure: some clusters could not be ended; says which.
    """
    from spotguard.control import without_journal

    without_journal.down(folder_of(run_id), tell)


def stop_alone(run_id: str, tell: Callable[[str], None]) -> int | None:
    """Have a run's job save and leave, then do the same; return the step that is saved.

    Raises:
        EnvironmentFailure: the job cannot be asked; nothing was released.
    """
    from spotguard.control import without_journal

    return without_journal.stop(folder_of(run_id), tell)


def resume(
    run_id: str,
    *,
    budget_usd: float | None = None,
    deadline_s: float | None = None,
    nodes: NodeRange | str | int | None = None,
    same_code: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Let a settled run go on from its last save, under a new controller.

    Arguments and errors are those of `create_run.admit_resume`.
    """
    if is_place(run_id):
        from spotguard.control.handover.through_store import ask_to_go_on

        # The controller there has the run's copy alone: no other code can come in.
        ask_to_go_on(_stored_run(run_id).url, budget_usd, deadline_s, nodes)
        _stored_runs.clear()  # what they saw is old
        return
    from spotguard.control import create_run as admit

    given = {"budget_usd": budget_usd, "deadline_s": deadline_s, "nodes": nodes}
    admit.admit_resume(run_id, **given, same_code=same_code, tell=tell)  # type: ignore[arg-type]
    start_controller(run_id)


def move_plan(run_id: str, place: Mapping[str, Any]) -> JobSpec:
    """Return a run's job as it would be elsewhere; `place` is as for `move`.

    Raises:
        UsageError: the run has finished.
        SpecError: it cannot be there.
    """
    from spotguard.control import create_run as admit

    return admit.move_plan(run_id, place)


def move(
    run_id: str,
    place: Mapping[str, Any],
    *,
    found: Survey | None = None,
    budget_usd: float | None = None,
    deadline_s: float | None = None,
    same_code: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Let a settled run go on from its last save in another place, under a new controller.

    Arguments and errors are those of `create_run.admit_move`.
    """
    from spotguard.control import create_run as admit

    limits = {"budget_usd": budget_usd, "deadline_s": deadline_s}
    admit.admit_move(run_id, place, found=found, **limits, same_code=same_code, tell=tell)
    start_controller(run_id)


def adopt(
    url: str,
    tell: Callable[[str], None] = lambda _: None,
    *,
    private: Private | None = None,
    given: Mapping[str, str] | None = None,
    ask: Ask | None = None,
) -> str:
    """Rebuild a run's journal from its store alone and return the run's id.

    A damaged journal is moved aside. A controller sees to nodes that may live; without any, the run
    rests at once. The arguments are those of `adopt_run`.

    Raises:
        UsageError: there is no run at `url`, or its journal is whole.
    """
    from spotguard.control.handover.adopt import adopt_run

    folder = adopt_run(url, tell, private=private, given=given, ask=ask)
    if ensure_controlled(folder.run_id):
        tell("its nodes live, or may: a controller of this machine looks after them")
    return folder.run_id


_stored_runs: dict[str, StoredRun] = {}
"""Those that this process looks at, by what names them."""


def _stored_run(place: str) -> StoredRun:
    from spotguard.control.report.stored import StoredRun

    if place not in _stored_runs:
        found = StoredRun(place)
        _stored_runs[place] = _stored_runs[found.url] = found
    return _stored_runs[place]


def _looked_at(run_id: str) -> RunFolder:
    """Return the folder of a run by its whole id, or by its place: then with all that is new."""
    if not is_place(run_id):
        return folder_of(run_id)
    found = _stored_run(run_id)
    found.refresh()
    return found.folder


def _record(folder: RunFolder) -> RunRecord:
    with folder.journal() as journal:
        return newest_record(journal)


def _caught_up(folder: RunFolder, record: RunRecord) -> RunRecord:
    """Return the record with what is new in the journal, at the price of that."""
    with folder.journal(again=True) as journal, making_sense(journal.path):
        return fold(journal.read(record.seq), record)


def _spec_of(record: RunRecord) -> JobSpec:
    from spotguard.spec.model import JobSpec

    return JobSpec.from_json(record.spec)


def _wish(run_id: str, kind: Kind) -> bool:
    if is_place(run_id):
        from spotguard.control.handover.through_store import ask_to_end

        return ask_to_end(_stored_run(run_id).url, kind, view(run_id))
    folder = folder_of(run_id)
    with folder.journal() as journal:
        if newest_record(journal).settled is not None:
            return False
        journal.append(kind.value, at=folder.clock().now())
    ensure_controlled(run_id)
    return True
