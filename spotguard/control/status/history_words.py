"""The run's story: each journal event as one sentence for `spotguard history`."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from spotguard.control.journal import cost
from spotguard.control.journal.fold import fold
from spotguard.control.journal.record import JOB_PREFIX, Kind
from spotguard.control.journal.snapshot import snapshot_before
from spotguard.control.status.recovery import recoveries
from spotguard.control.status.view import HistoryLine
from spotguard.events.event import JobEvent
from spotguard.events.states import EndReason, RunState
from spotguard.events.untrusted import instant, integer, number, text
from spotguard.shared.units import format_bytes, format_duration, format_usd, to_iso
from spotguard.spec.infra import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from spotguard.control.journal.journal import Entry, Journal
    from spotguard.control.journal.record import RunRecord

SILENT = (
    # The second halves of acts whose first half is told, and what `status` shows better. Nothing
    # of it changes what the run costs, so a story can be told without reading them.
    Kind.PROGRESS.value,
    Kind.STOP_WRITTEN.value,
    Kind.DOWN_SENT.value,
    Kind.CHUNK_READ.value,
    Kind.NOTED.value,
    Kind.TOLD.value,
    Kind.SNAPSHOT.value,
)
_FIRST_STEP = JOB_PREFIX + JobEvent.FIRST_STEP.value
_NODE_LEFT = (Kind.NODE_ENDED.value, JOB_PREFIX + JobEvent.NODE_EXITED.value)
_TOLD_TO_LEAVE = (
    EndReason.PREEMPTED,
    EndReason.TERMINATED,
    EndReason.RESIZED,
    EndReason.MOVED,
    EndReason.PHASE_DONE,
    EndReason.BUDGET,
    EndReason.DEADLINE,
    EndReason.STOPPED,
)
_STOPPED = EndReason.STOPPED.value
_LATE = 10_000
"""Lines that are held back to put them in order: the job's events are journaled a moment after they
happened, and hardly ever later than so many others."""


class Teller:
    """Tells events one after the other, each with what the run had cost by then."""

    def __init__(self, record: RunRecord | None = None) -> None:
        """`record` is what all events before the first one say."""
        self.record = record

    def tell(self, entry: Entry) -> HistoryLine | None:
        """Take in the next event, and return its line; None if it is not told."""
        self.record = fold([entry], self.record)
        if entry.kind in SILENT:
            return None
        sentence, colour = (
            _trains_again(self.record, entry)
            or _left_as_told(self.record, entry)
            or _launching(self.record, entry)
            or _stopped_by_sweep(self.record, entry)
            or _tell(entry)
        )
        return HistoryLine(
            at=entry.at,
            attempt=entry.attempt,
            kind=entry.kind.removeprefix(JOB_PREFIX),
            text=sentence,
            colour=colour,
            cost_usd=cost.spent_usd(self.record, entry.at),
            demo_prices=cost.demo_prices(self.record),
            data=_public(entry),
        )

    def tell_all(self, entries: Iterable[Entry]) -> Iterator[HistoryLine]:
        """Take in the next events, and yield the lines of those that are told."""
        for entry in entries:
            line = self.tell(entry)
            if line is not None:
                yield line


def history_lines(entries: Iterable[Entry]) -> Iterator[HistoryLine]:
    """Yield the story of a whole journal by time, in little memory however long it is."""
    held: list[tuple[float, int, HistoryLine]] = []
    for order, line in enumerate(Teller().tell_all(entries)):
        heappush(held, (line.at, order, line))
        if len(held) > _LATE:
            yield heappop(held)[-1]
    while held:
        yield heappop(held)[-1]


def newest_lines(
    journal: Journal, count: int, *, until: int | None = None
) -> tuple[list[HistoryLine], int]:
    """Return the last lines by time, and how many there are before them.

    Costs what these lines do, not what the journal does.

    Args:
        journal: where they are.
        count: how many lines at most.
        until: number of the last event that is looked at.
    """
    last = journal.start_of_newest(1) if until is None else until
    teller = Teller(snapshot_before(journal, journal.start_of_newest(count, without=SILENT)))
    entries = journal.read(teller.record.seq if teller.record else 0, without=SILENT)
    told = teller.tell_all(takewhile(lambda entry: entry.seq <= last, entries))
    lines = deque(told, maxlen=count)
    return by_time(lines), journal.count(before=last + 1, without=SILENT) - len(lines)


def by_time(lines: Iterable[HistoryLine]) -> list[HistoryLine]:
    """Return the lines in order."""
    return sorted(lines, key=lambda line: line.at)


def _trains_again(record: RunRecord, entry: Entry) -> tuple[str, str] | None:
    """Return how long the recovery took that ends with this event, if it is one and known."""
    if entry.kind != _FIRST_STEP:
        return None
    for recovery in recoveries(record):
        if recovery.attempt == entry.attempt and recovery.total_s is not None:
            took = format_duration(recovery.total_s)
            return _plain(f"trains again, {took} after attempt {recovery.ended} had ended", "green")
    return None


def _left_as_told(record: RunRecord, entry: Entry) -> tuple[str, str] | None:
    """Return how a node left whose job had saved as it was told; a node returns 1 after that."""
    if entry.kind not in _NODE_LEFT or entry.data.get("exit_code") != 1:
        return None
    ends = [attempt.job_end for attempt in record.attempts if attempt.number == entry.attempt]
    if not any(end is not None and end.warned and end.reason in _TOLD_TO_LEAVE for end in ends):
        return None
    return _plain(f"node {entry.data.get('node')} left, as it was told")


def _stopped_by_sweep(record: RunRecord, entry: Entry) -> tuple[str, str] | None:
    """Tell what was done because other points of the run's sweep did better: no word of the user.

    None if it was for something else.
    """
    attempt = None if entry.attempt is None else record.attempt(entry.attempt)
    if attempt is None or not attempt.by_sweep or entry.data.get("reason") != _STOPPED:
        return None
    teller = _ENDS.get(entry.kind)
    return None if teller is None else teller(entry, by_sweep=True)


def _tell(entry: Entry) -> tuple[str, str]:
    teller = _TELLERS.get(entry.kind)
    if teller is None:
        return entry.kind.removeprefix(JOB_PREFIX).replace("_", " "), "default"
    return teller(entry)


def _public(entry: Entry) -> dict[str, Any]:
    """Return the event's data without the job itself, which holds the values of variables."""
    return {name: value for name, value in entry.data.items() if name not in ("spec", "job")}


def _plain(text: str, colour: str = "default") -> tuple[str, str]:
    return text, colour


def _adopted(entry: Entry) -> tuple[str, str]:
    left = integer(entry.data, "chunks_left")
    words = f"; {left} bundles of old events were left there" if left else ""
    return _plain(f"the journal was rebuilt from the run's store{words}")


def _created(entry: Entry) -> tuple[str, str]:
    limits = entry.data["limits"]
    budget = limits["budget_usd"]
    words = "no budget" if budget is None else f"a budget of {format_usd(budget)}"
    return _plain(f"run created, on {_node_range(limits)}, with {words}")


def _node_range(limits: dict[str, Any]) -> str:
    least, most = limits["nodes_min"], limits["nodes_max"]
    return _nodes(most) if least == most else f"{least} to {most} nodes"


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _clock_moved(entry: Entry) -> tuple[str, str]:
    by_s = entry.data["by_s"]
    way = "forward" if by_s > 0 else "back"
    return _plain(
        f"the clock of the controller's machine jumped {way} by {format_duration(abs(by_s))}; "
        "the run's own time goes on without it",
        "yellow",
    )


def _launching(record: RunRecord, entry: Entry) -> tuple[str, str] | None:
    """Return where a launch is made, and at which price; one that is played says so."""
    if entry.kind != Kind.INTENDED.value:
        return None
    offer = entry.data["offer"]
    names = (offer["infra"], offer["region"], offer["zone"], offer["instance_type"])
    place = "/".join(name for name in names if name)
    price = offer["price_usd_per_h"]
    rate = "at an unknown price" if price is None else f"at {format_usd(price)} per node and hour"
    if price is not None and _is_demo(record, entry.attempt):
        rate = f"{rate} (demo)"
    ahead = ", while these still train: both are paid" if entry.data.get("ahead") is True else ""
    words = f"launching {_nodes(entry.data['nodes'])} in {place} {rate}{ahead}{_why(entry)}"
    return _plain(words, "cyan")


def _is_demo(record: RunRecord, number: int | None) -> bool:
    attempt = None if number is None else record.attempt(number)
    return attempt is not None and attempt.demo_price


def _why(entry: Entry) -> str:
    """Return the reason that the journal gives; journals of older versions give none."""
    why = entry.data.get("why")
    return f": {why}" if isinstance(why, str) and why else ""


def _launched(entry: Entry) -> tuple[str, str]:
    if entry.data.get("found"):
        return _plain("the launch had been made before the controller was restarted", "cyan")
    return _plain("the launch was accepted", "cyan")


def _waiting(entry: Entry) -> tuple[str, str]:
    if entry.data.get("team") is True:
        return _plain(f"waits: {entry.data['why']}", "yellow")
    wait_s = max(0.0, entry.data["retry_at"] - entry.at)
    again = f"asking again in {format_duration(wait_s)}"
    if entry.data.get("problem"):
        told = f"where nodes are to be had cannot be looked up ({entry.data['problem']}), {again}"
        return _plain(told, "yellow")
    what, until_at = "capacity", number(entry.data, "quota_until")
    if until_at is not None:
        what = f"room in a full quota, until {to_iso(until_at)}"
    words = f"waiting for {what}, {again}{_why(entry)}"
    return _plain(words, "yellow")


def _node_ended(entry: Entry) -> tuple[str, str]:
    data = entry.data
    if data["end"] == "lost":
        name = f"node {data['node']}"
        in_doubt = data.get("in_doubt") is True
        lost = f"a node was lost, maybe {name}" if in_doubt else f"{name} was lost"
        return _plain(f"{lost}: {data['detail'] or 'taken'}", "yellow")
    return _plain(f"node {data['node']} ended its part with exit code {data['exit_code']}")


def _asked(prefix: str) -> Callable[..., tuple[str, str]]:
    def tell(entry: Entry, *, by_sweep: bool = False) -> tuple[str, str]:
        words = EndReason(entry.data["reason"]).told(None, by_sweep=by_sweep)
        detail = entry.data.get("detail")
        return _plain(f"{prefix}: {words}{f' ({detail})' if detail else ''}", "cyan")

    return tell


def _attempt_ended(entry: Entry, *, by_sweep: bool = False) -> tuple[str, str]:
    reason = EndReason(entry.data["reason"])
    detail = entry.data["detail"]
    words = reason.told(entry.data.get("saved"), by_sweep=by_sweep)
    latest_at = number(entry.data, "gone_latest_at")
    unseen_s = 0.0 if latest_at is None else latest_at - float(entry.data["gone_at"])
    unseen = f"; nobody saw its nodes go within {format_duration(unseen_s)}" if unseen_s else ""
    told = f"attempt ended: {words}{f' ({detail})' if detail else ''}{unseen}"
    return _plain(told, reason.colour)


def _went_on(entry: Entry) -> tuple[str, str]:
    ended = entry.data["ended"]
    words = EndReason(ended["reason"]).told(ended.get("saved"))
    nodes = _nodes(entry.data["nodes"])
    return _plain(
        f"attempt {entry.data['after']} ended: {words}; {nodes} that stayed go on in place",
        "cyan",
    )


def _settled(entry: Entry) -> tuple[str, str]:
    state = RunState(entry.data["state"])
    return _plain(f"the run is {state.label}: {entry.data['detail']}", state.colour)


def _resumed(entry: Entry) -> tuple[str, str]:
    limits = entry.data["limits"]
    budget = limits["budget_usd"]
    words = "" if budget is None else f", with a budget of {format_usd(budget)}"
    code = _new_code(entry.data)
    return _plain(f"resumed by you, on {_node_range(limits)}{words}{code}", "cyan")


def _new_code(data: dict[str, Any]) -> str:
    """Return which files came in with a resume, in words; empty if none did."""
    files = data.get("changed_files")
    if not isinstance(files, list) or not files:
        return ""
    shown = ", ".join(str(each) for each in files[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f", with other code: {shown}{more}"


def _moved(entry: Entry) -> tuple[str, str]:
    budget = entry.data["limits"]["budget_usd"]
    words = "" if budget is None else f", with a budget of {format_usd(budget)} over all places"
    code = _new_code(entry.data)
    return _plain(f"moved by you: goes on in {_where(entry.data)}{words}{code}", "cyan")


def _phase_begun(entry: Entry) -> tuple[str, str]:
    data = entry.data
    until = integer(data, "until_step")
    ends = "to the end" if until is None else f"until step {until}"
    count = integer(data, "phases")
    of = f" of {count}" if count else ""
    return _plain(f"phase {data['phase'] + 1}{of} begins, {ends}: {_where(data)}", "cyan")


def _where(data: dict[str, Any]) -> str:
    """Return a place in words: `aws on 2 nodes with A100:8`."""
    spec = data["spec"]
    gpus = spec.get("gpus")
    having = f" with {gpus}" if gpus and spec.get("infra") != LOCAL else ""
    return f"{spec.get('infra')} on {_node_range(data['limits'])}{having}"


def _started(entry: Entry) -> tuple[str, str]:
    step = integer(entry.data, "resumed_step")
    begin = f"goes on after step {step}" if step else "starts at the beginning"
    world = integer(entry.data, "world_size")
    return _plain(f"training {begin}{f' on {world} process(es)' if world else ''}", "green")


def _notice(entry: Entry) -> tuple[str, str]:
    deadline_at = instant(entry.data, "deadline_at")
    words = "" if deadline_at is None else f", in {format_duration(deadline_at - entry.at)}"
    source = entry.data.get("source")
    return _plain(
        f"notice: node {entry.data.get('node')} will be taken{words} ({source})", "yellow"
    )


def _saved(entry: Entry) -> tuple[str, str]:
    data = entry.data
    size, took = (
        format_bytes(number(data, "size_bytes")),
        format_duration(number(data, "duration_s")),
    )
    return _plain(
        f"saved step {data.get('step')} ({data.get('checkpoint_kind')}, {size} in {took})"
    )


def _cache_restored(entry: Entry) -> tuple[str, str]:
    data = entry.data
    size = format_bytes(number(data, "size_bytes"))
    took = format_duration(number(data, "duration_s"))
    problems = integer(data, "problems", low=0)
    words = f"; {problems} could not be had" if problems else ""
    node = entry.data.get("node")
    where = "" if node is None else f" on node {node}"
    files = integer(data, "files", low=0)
    what = f"1 cached file ({size}) is" if files == 1 else f"{files} cached files ({size}) are"
    return _plain(f"{what} back{where} after {took}{words}")


def _job_ended(entry: Entry, *, by_sweep: bool = False) -> tuple[str, str]:
    data = entry.data
    try:
        reason = EndReason(str(data.get("reason")))
    except ValueError:
        return _plain(f"the job reports its end: {data.get('reason')}")
    message = f" ({data['message']})" if data.get("message") else ""
    saved = data["saved"] if isinstance(data.get("saved"), bool) else None
    words = reason.told(saved, by_sweep=by_sweep)
    return _plain(f"the job reports its end: {words}{message}", reason.colour)


def _cluster_up(entry: Entry) -> tuple[str, str]:
    since_at = number(entry.data, "at")
    if since_at is None:
        return _plain("the nodes are up")
    charged = format_duration(max(0.0, entry.at - since_at))
    return _plain(f"the nodes are up, and charged for since {charged}")


def _refused(entry: Entry) -> tuple[str, str]:
    """Say what was in the way, and what the launch may have cost all the same."""
    data = entry.data
    what = f"no capacity for {data['nodes']} node(s)"
    if data.get("busy"):
        what = f"the cloud could not launch {data['nodes']} node(s) just then"
    elif data.get("quota_full"):
        what = f"a quota has no room for {data['nodes']} node(s)"
    elif data.get("lasting"):
        what = f"the cloud refused {data['nodes']} node(s)"
    said = f"{what}: {data.get('problem', '')}"
    paid_s = number(data, "paid_s")
    if paid_s is not None:
        said += f"; nodes may have run, so {_charged(paid_s, data)} are charged"
    return said, "yellow"


def _charged(paid_s: float, data: dict[str, Any]) -> str:
    """Return for how long nodes are charged; where nobody saw them go, between what and what."""
    unseen_s = number(data, "unseen_s")
    if not unseen_s:
        return format_duration(paid_s)
    most = format_duration(paid_s + unseen_s)
    return f"between {format_duration(paid_s)} and {most} (nobody saw them go)"


def _nodes_gone(entry: Entry) -> tuple[str, str]:
    """Say that nothing is paid any more, though the verdict is to come."""
    gone_at, latest_at = number(entry.data, "gone_at"), number(entry.data, "gone_latest_at")
    when = "" if gone_at is None else f" since {to_iso(gone_at)}"
    if gone_at is not None and latest_at is not None:
        when = f", some time between {to_iso(gone_at)} and {to_iso(latest_at)}"
    return f"its nodes are gone{when}; what its job wrote last cannot be read yet", "yellow"


def _compared(entry: Entry) -> tuple[str, str]:
    why = str(entry.data.get("why") or "")
    return (why, "cyan") if entry.data.get("stop") is True else (f"{why}: it goes on", "default")


def _given_up(entry: Entry) -> tuple[str, str]:
    paid_s = number(entry.data, "paid_s")
    charged = "" if paid_s is None else f"; {_charged(paid_s, entry.data)} of them are charged"
    why = entry.data.get("why") or "they came to nothing"
    return f"the nodes asked for ahead were given up: {why}{charged}", "yellow"


def _controller_node(entry: Entry) -> tuple[str, str]:
    """Say where the controller is to live, and for how much; or that it needs its node no more."""
    data = entry.data
    if data.get("until") is not None:
        return f"the controller's node {data['cluster']} was told to go", "default"
    price = number(data, "price_usd_per_h")
    cost = "an unknown price" if price is None else f"{format_usd(price)} an hour"
    return f"a node for the controller is asked for in {data['place']}, at {cost}", "default"


def _of(text: str, colour: str = "default") -> Callable[[Entry], tuple[str, str]]:
    """Return a teller of a text whose {names} stand in the event's data."""

    def tell(entry: Entry) -> tuple[str, str]:
        known = {
            "attempt": entry.attempt,
            "node": None,
            "exit_code": None,
            "step": None,
            "stop_step": None,
            "problem": "",
            "message": "",
            "source": "",
            "reason": "",
        }
        return text.format_map({**known, **entry.data}), colour

    return tell


def _store_lost(entry: Entry) -> tuple[str, str]:
    """Say since when the store does not answer, and what happens to the run meanwhile."""
    since_at, effect = number(entry.data, "since_at"), text(entry.data, "effect")
    silent_s = 0.0 if since_at is None else entry.at - since_at
    since = f" for {format_duration(silent_s)}" if silent_s >= 1.0 else ""
    said = f"the run's store cannot be read{since}: {entry.data.get('problem', '')}"
    return f"{said}; {effect}" if effect else said, "yellow"


def _released(entry: Entry) -> tuple[str, str]:
    if entry.data.get("unseen") is True:
        unknown = f"nobody could be asked whether the nodes of attempt {entry.attempt} live"
        return f"{unknown}; look for them: spotguard doctor", "yellow"
    return f"the nodes of attempt {entry.attempt} are gone", "default"


_ENDS: dict[str, Callable[..., tuple[str, str]]] = {
    Kind.STOP_ASKED.value: _asked("asking the job to save and stop"),
    Kind.DOWN_ASKED.value: _asked("taking the nodes down"),
    Kind.ATTEMPT_ENDED.value: _attempt_ended,
    JOB_PREFIX + JobEvent.ENDED.value: _job_ended,
}
"""What tells of an end, or is done for one."""

_TELLERS: dict[str, Callable[[Entry], tuple[str, str]]] = {
    **_ENDS,
    Kind.CREATED.value: _created,
    Kind.ADOPTED.value: _adopted,
    Kind.CONTROLLER_STARTED.value: _of("the controller started (process {pid})"),
    Kind.CONTROLLER_REPAIRED.value: _of("the controller was gone and is started again", "yellow"),
    Kind.CONTROLLER_NODE.value: _controller_node,
    Kind.TAKEN_OVER.value: _of("the run was taken over by {by}", "yellow"),
    Kind.CLOCK_MOVED.value: _clock_moved,
    Kind.LAUNCHED.value: _launched,
    Kind.CLUSTER_UP.value: _cluster_up,
    Kind.NODES_GONE.value: _nodes_gone,
    Kind.NO_CAPACITY.value: _refused,
    Kind.LAUNCH_FAILED.value: _of("the launch failed: {problem}", "red"),
    Kind.DROPPED.value: _of("the launch was given up: {why}"),
    Kind.WAITING.value: _waiting,
    Kind.NODE_ENDED.value: _node_ended,
    Kind.CONTACT_LOST.value: _of("contact lost: {detail}; nothing is killed", "yellow"),
    Kind.CONTACT_BACK.value: _of("contact is back", "green"),
    Kind.CLOUD_SILENT.value: _of("{detail}; the job gives signs of life", "yellow"),
    Kind.CLOUD_BACK.value: _of("the cluster can be asked again", "green"),
    Kind.STORE_LOST.value: _store_lost,
    Kind.STORE_BACK.value: _of("the run's store can be read again", "green"),
    Kind.DOWN_FAILED.value: _of("the nodes could not be taken down yet: {problem}", "yellow"),
    Kind.RELEASED.value: _released,
    Kind.WENT_ON.value: _went_on,
    Kind.TOOK_OVER.value: _of("its nodes were asked for ahead, and take over", "cyan"),
    Kind.GIVEN_UP.value: _given_up,
    Kind.ALERT.value: _of("{percent} % of the budget are spent", "yellow"),
    Kind.SETTLED.value: _settled,
    Kind.USER_STOP.value: _of("you asked to save and stop", "cyan"),
    Kind.USER_DOWN.value: _of("you asked to release the nodes at once", "cyan"),
    Kind.COMPARED.value: _compared,
    Kind.RESUMED.value: _resumed,
    Kind.MOVED.value: _moved,
    Kind.PHASE_BEGUN.value: _phase_begun,
    Kind.SET_ASIDE.value: _of("{key} was passed over: {problem}", "yellow"),
    JOB_PREFIX + JobEvent.STARTED.value: _started,
    _FIRST_STEP: _of("the first step is done", "green"),
    JOB_PREFIX + JobEvent.NOTICE.value: _notice,
    JOB_PREFIX + JobEvent.NODE_EXITED.value: _of("node {node} left with exit code {exit_code}"),
    JOB_PREFIX + JobEvent.GIVEN_BACK.value: _of("its node had Slurm end the whole allocation"),
    JOB_PREFIX + JobEvent.WITHDRAWN.value: _of("the notice was withdrawn ({source})", "green"),
    JOB_PREFIX + JobEvent.AGREED.value: _of("all ranks stop after step {stop_step} ({reason})"),
    JOB_PREFIX + JobEvent.SAVED.value: _saved,
    JOB_PREFIX + JobEvent.SAVE_FAILED.value: _of("saving step {step} failed: {problem}", "red"),
    JOB_PREFIX + JobEvent.FITS.value: _of("{message}"),
    JOB_PREFIX + JobEvent.PEER_LOST.value: _of(
        "a peer was lost at step {step}: {problem}", "yellow"
    ),
    JOB_PREFIX + JobEvent.CACHE_RESTORED.value: _cache_restored,
    JOB_PREFIX + JobEvent.RESCALED.value: _of("{message}", "cyan"),
    JOB_PREFIX + JobEvent.HYPERPARAMETERS.value: _of("{message}", "cyan"),
    JOB_PREFIX + JobEvent.WARNING.value: _of("{message}", "yellow"),
}
