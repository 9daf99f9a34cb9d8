"""The fold: what each journal event changes in a `RunRecord`. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from spotguard.control.journal import cost
from spotguard.control.journal.alert_rules import rules_of
from spotguard.control.journal.fold_attempt import CHANGES_OF_ATTEMPT, end_attempt
from spotguard.control.journal.journal import making_sense
from spotguard.control.journal.nodes.controller_node import ControllerNode
from spotguard.control.journal.nodes.lost_launch import LostLaunch, with_lost
from spotguard.control.journal.nodes.offer import offer_from_json
from spotguard.control.journal.nodes.search import Search
from spotguard.control.journal.record import (
    JOB_PREFIX,
    Allotment,
    AttemptRecord,
    BudgetOf,
    Course,
    Kind,
    Limits,
    Placing,
    RunRecord,
    Settled,
    Tiding,
)
from spotguard.control.journal.snapshot import newest_snapshot
from spotguard.errors import BudgetExhausted
from spotguard.events.event import JobEvent
from spotguard.events.states import EndReason, RunState
from spotguard.events.untrusted import (
    amount,
    an_object,
    integer,
    needed,
    number,
    objects,
    seconds,
    text,
)
from spotguard.policy.plan import money
from spotguard.spec.infra import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from spotguard.control.journal.journal import Entry, Journal

_MAX_WARNINGS = 20
_STOP = Kind.USER_STOP.value
_FAILED_SAVE = re.compile(r"attempt \d+: the save at step (\d{1,18}) failed: ")
_BUDGETS = {each.value: each for each in BudgetOf}
_MAX_UNTOLD = 20
_MAX_NOTED = 200
_LONGEST_WARNING = 2000


def fold(entries: Iterable[Entry], record: RunRecord | None = None) -> RunRecord:
    """Return what the whole journal says; it must begin with `run_created`.

    With a `record`, that is what all entries before these say.

    Raises:
        ValueError: it does not.
    """
    for entry in entries:
        if record is not None:
            record = apply(record, entry)
        elif entry.kind == Kind.CREATED.value:
            record = _created(entry)
        else:
            break
    if record is None:
        raise ValueError("it does not begin with the creation of a run")
    return record


def read_record(journal: Journal) -> RunRecord:
    """Return what an open journal says; `JournalDamaged` if it makes no sense."""
    with making_sense(journal.path):
        record = newest_snapshot(journal)
        return fold(journal.read(record.seq if record else 0), record)


_known: dict[Path, tuple[tuple[int, int] | None, RunRecord]] = {}
"""What this process has read last: of one run."""


def newest_record(journal: Journal) -> RunRecord:
    """Return what `read_record` does, at the price of what is new since the last call here.

    For commands, which look at one run several times; a journal is only ever added to.
    """
    file, known = _known.get(journal.path, (None, None))
    with making_sense(journal.path):
        if known is None or file != journal.file or journal.start_of_newest(1) < known.seq:
            known = newest_snapshot(journal)
        record = fold(journal.read(known.seq if known else 0), known)
    _known.clear()
    _known[journal.path] = (journal.file, record)
    return record


def apply(record: RunRecord, entry: Entry) -> RunRecord:
    """Return the record after one more event. Unknown kinds change nothing."""
    change = _ON_RUN.get(entry.kind)
    if change is not None:
        record = change(record, entry)
    change_attempt = CHANGES_OF_ATTEMPT.get(entry.kind)
    if change_attempt is not None:
        attempts = _changed(record.attempts, entry.attempt, change_attempt, entry)
        ahead = record.ahead
        if ahead is not None and ahead.number == entry.attempt:
            ahead = change_attempt(ahead, entry)
        return _quick(record, attempts=attempts, ahead=ahead, seq=entry.seq)
    return _quick(record, seq=entry.seq)


def _quick(record: RunRecord, **changes: Any) -> RunRecord:
    """Return what `replace` does; that one sets each of forty fields anew, for each entry."""
    changed = object.__new__(RunRecord)
    changed.__dict__.update(record.__dict__, **changes)
    return changed


def _changed(
    attempts: tuple[AttemptRecord, ...],
    number: int | None,
    change: Callable[[AttemptRecord, Entry], AttemptRecord],
    entry: Entry,
) -> tuple[AttemptRecord, ...]:
    """Return the attempts with one of them changed, which is mostly the last."""
    for at in range(len(attempts) - 1, -1, -1):
        if attempts[at].number == number:
            return (*attempts[:at], change(attempts[at], entry), *attempts[at + 1 :])
    return attempts


def limits_to_json(limits: Limits) -> dict[str, Any]:
    """Return the limits as the journal holds them."""
    return dict(limits.__dict__)


def allotment_to_json(allotment: Allotment) -> dict[str, Any]:
    """Return what an attempt may use as the journal holds it."""
    return {**asdict(allotment), "down_reason": allotment.down_reason.value}


def _created(entry: Entry) -> RunRecord:
    data = entry.data
    return RunRecord(
        run_id=needed(text(data, "run_id"), "run_id"),
        name=needed(text(data, "name"), "name"),
        created_at=entry.at,
        store_root=needed(text(data, "store_root"), "store_root"),
        spec=an_object(data.get("spec"), "its spec"),
        job=an_object(data.get("job") or {}, "its phases"),
        sweep=an_object(data.get("sweep") or {}, "its sweep"),
        code=an_object(data.get("code") or {}, "its code"),
        limits=Limits(**data["limits"]),
        seq=entry.seq,
    )


def _intended(record: RunRecord, entry: Entry) -> RunRecord:
    data, before = entry.data, record.attempts
    allotment = dict(data["allotment"])
    allotment["down_reason"] = EndReason(allotment["down_reason"])
    attempt = AttemptRecord(
        number=int(entry.attempt or 0),
        cluster=data["cluster"],
        nodes=data["nodes"],
        offer=offer_from_json(data["offer"]),
        intended_at=entry.at,
        allotment=Allotment(**allotment),
        members=tuple(data["members"]) if data.get("members") else None,
        demo_price=_is_demo(record, data["offer"]),
        course=Course(
            waiting_since=record.waiting_since,
            after_resume=bool(before) and before[-1].number == record.resumed_after,
        ),
    )
    record = replace(record, next_number=attempt.number + 1, retry_at=None, queued="")
    if data.get("ahead") is True:
        return replace(record, ahead=attempt)
    return replace(record, attempts=(*before, attempt))


def _is_demo(record: RunRecord, offer: dict[str, Any]) -> bool:
    """Tell whether nodes are this machine's, at a price that nobody gave."""
    return offer.get("infra") == LOCAL and record.spec.get("price_usd_per_h") is None


def _took_over(record: RunRecord, _: Entry) -> RunRecord:
    if record.ahead is None:
        return record
    return replace(record, attempts=(*record.attempts, record.ahead), ahead=None)


def _given_up(record: RunRecord, entry: Entry) -> RunRecord:
    lost = _lost(record, entry)
    return replace(_without_ahead(record, int(entry.attempt or 0)), lost_launches=lost)


def _without_ahead(record: RunRecord, number: int) -> RunRecord:
    """Return the record without nodes asked for ahead, of which the current attempt has no more."""
    if record.ahead is None or record.ahead.number != number:
        return record
    current = record.current
    return replace(record, ahead=None, asked_ahead_of=current.number if current else 0)


def _went_on(record: RunRecord, entry: Entry) -> RunRecord:
    """Give the verdict on the attempt before, and begin this one: one event, or half is lost."""
    data, record = entry.data, _quota_freed(record, entry)
    ended = replace(entry, attempt=data["after"], data=data["ended"])
    attempts = _changed(record.attempts, data["after"], end_attempt, ended)
    record = _intended(replace(record, attempts=attempts), entry)
    begun = replace(record.attempts[-1], intended_at=data["at"], launched=True)
    return _launched(replace(record, attempts=(*record.attempts[:-1], begun)), entry)


def _launched(record: RunRecord, _: Entry) -> RunRecord:
    search = Search(
        tried=record.tried,
        full=record.full,
        quota_refusal=record.quota_refusal,
        mendable=record.mendable,
        rounds=record.rounds,
        waiting_since=record.waiting_since,
        quota_until=record.quota_until,
    )
    record = replace(record, tried=(), full=(), mendable=False, refusal="", quota_refusal="")
    record = replace(record, rounds=0, waiting_since=None, retry_at=None, search=search)
    return replace(record, quota_until=None, offers_problem="", unlisted_since=None)


def _no_capacity(record: RunRecord, entry: Entry) -> RunRecord:
    refused = int(entry.attempt or 0)
    attempt = record.attempt(refused)
    asked = [] if attempt is None else [attempt.intended_at]
    if entry.data.get("late") and record.search is not None:  # it had counted as launched
        search = record.search
        record = replace(
            record,
            tried=search.tried,
            full=search.full,
            quota_refusal=search.quota_refusal,
            mendable=search.mendable,
            rounds=search.rounds,
            waiting_since=search.waiting_since,
            quota_until=search.quota_until,
        )
    is_ahead = record.ahead is not None and record.ahead.number == refused
    place = (entry.data["nodes"], entry.data["place"])
    problem, is_full = entry.data.get("problem", ""), entry.data.get("quota_full")
    return replace(
        record,
        attempts=_without(record, refused),
        ahead=None if is_ahead else record.ahead,
        next_number=refused,
        refused=record.refused + 1,
        lost_launches=_lost(record, entry),
        tried=(*record.tried, place),
        full=(*record.full, place) if is_full else record.full,
        quota_refusal=problem if is_full else record.quota_refusal,
        mendable=record.mendable or not entry.data.get("lasting"),
        refusal=problem,
        offers_problem="",
        unlisted_since=None,
        # A cloud may need a minute to say no. While an attempt trains nothing is waited for.
        waiting_since=min([entry.at, *asked])
        if record.waiting_since is None and not is_ahead
        else record.waiting_since,
    )


def _quota_freed(record: RunRecord, _: Entry) -> RunRecord:
    """Forget what full quotas refused while an attempt lived: its own nodes filled them."""
    tried = tuple(place for place in record.tried if place not in record.full)
    search = record.search
    if search is not None:
        left = tuple(place for place in search.tried if place not in search.full)
        search = replace(search, tried=left, full=())
    return replace(record, tried=tried, full=(), search=search)


def _lost(record: RunRecord, entry: Entry) -> tuple[LostLaunch, ...]:
    """Return the launches that may have cost money, with this one if it may."""
    paid_s = number(entry.data, "paid_s")
    attempt = record.attempt(int(entry.attempt or 0))
    if paid_s is None or attempt is None:
        return record.lost_launches
    rate = money.rate_usd_per_h(attempt.offer.price_usd_per_h, attempt.nodes)
    usd, unseen_s = money.cost_usd(rate, paid_s), amount(entry.data, "unseen_s") or 0.0
    unseen_usd = money.cost_usd(rate, unseen_s) or 0.0
    new = LostLaunch(
        at=attempt.billed_from, paid_s=paid_s, usd=usd, unseen_s=unseen_s, unseen_usd=unseen_usd
    )
    return with_lost(record.lost_launches, new)


def _adopted(record: RunRecord, entry: Entry) -> RunRecord:
    """Take over what launches cost of which the store has nothing else, and how the run rests."""
    for each in objects(entry.data, "lost_launches"):
        at, paid_s = seconds(each, "at"), number(each, "paid_s")
        if at is not None and paid_s is not None:
            new = LostLaunch(
                at=at,
                paid_s=paid_s,
                usd=amount(each, "usd"),
                unseen_s=amount(each, "unseen_s") or 0.0,
                unseen_usd=amount(each, "unseen_usd") or 0.0,
            )
            record = replace(record, lost_launches=with_lost(record.lost_launches, new))
    if record.current is not None or record.ahead is not None:
        return record  # it goes on on the nodes that it has
    return replace(record, rests=text(entry.data, "rests") or "")


def _controller_node(record: RunRecord, entry: Entry) -> RunRecord:
    """Take over what is new of one, or that there is one more."""
    node = ControllerNode(**{name: entry.data[name] for name in ControllerNode.__annotations__})
    others = tuple(each for each in record.controller_nodes if each.number != node.number)
    return replace(record, controller_nodes=(*others, node))


def _dropped(record: RunRecord, entry: Entry) -> RunRecord:
    number = int(entry.attempt or 0)
    record = _without_ahead(record, number)
    return replace(record, attempts=_without(record, number))


def _waiting(record: RunRecord, entry: Entry) -> RunRecord:
    if entry.data.get("team") is True:  # not for nodes: what is waited for those begins anew
        record = _wait_over(record, entry)
        return replace(record, queued=str(entry.data["why"]), rounds=0)
    since = entry.at if record.waiting_since is None else record.waiting_since
    problem, unlisted_since = entry.data.get("problem", ""), record.unlisted_since
    return replace(
        record,
        tried=(),
        full=(),
        mendable=False,
        rounds=record.rounds + 1,
        quota_until=number(entry.data, "quota_until"),
        retry_at=entry.data["retry_at"],
        offers_problem=problem,
        unlisted_since=(entry.at if unlisted_since is None else unlisted_since)
        if problem
        else None,
        waiting_since=since,
        queued="",
    )


def _wait_over(record: RunRecord, entry: Entry) -> RunRecord:
    """Give up a wait that led to no launch: what it took stays in the total."""
    waited_s = cost.waited_s(record, entry.at)
    record = replace(record, offers_problem="", unlisted_since=None)
    return replace(record, waited_s=waited_s, waiting_since=None, quota_until=None)


def _settled(record: RunRecord, entry: Entry) -> RunRecord:
    data = entry.data
    settled = Settled(
        at=entry.at,
        state=RunState(data["state"]),
        detail=data["detail"],
        exit_code=data["exit_code"],
        lacks_budget_of=_lacks_budget_of(record, data),
    )
    words = f"the run is {settled.state.value}: {settled.detail}"
    record = replace(record, settled=settled)
    return _untold(record, entry, words) if rules_of(record.spec).ended else record


def _lacks_budget_of(record: RunRecord, data: dict[str, Any]) -> BudgetOf | None:
    """Return whose budget is used up, as a run says that comes to rest."""
    if "lacks_budget_of" in data:
        return _BUDGETS.get(text(data, "lacks_budget_of") or "")
    if data["exit_code"] != BudgetExhausted.exit_code:
        return None
    # Earlier versions did not say whose it is. Who is queued was refused by its sweep.
    return BudgetOf.SWEEP if record.queued else BudgetOf.RUN


def _wished(record: RunRecord, entry: Entry) -> RunRecord:
    # A later "stop" does not soften an earlier "down", nor is it the reason for what goes on.
    if record.wish is Kind.USER_DOWN or record.wish is Kind(entry.kind):
        return record
    return replace(record, wish=Kind(entry.kind), wish_why="")


def _compared(record: RunRecord, entry: Entry) -> RunRecord:
    if entry.data.get("stop") is not True:
        if record.looks is None:
            return record
        looks = integer(entry.data, "looks", low=1) or 0
        return replace(record, looks=max(record.looks + 1, looks))
    # Who lets it go on after all is not to be contradicted.
    if record.wish is not None:
        return replace(record, looks=None)
    why = str(entry.data.get("why") or "its sweep")
    return replace(_wished(record, replace(entry, kind=_STOP)), looks=None, wish_why=why)


def _resumed(record: RunRecord, entry: Entry) -> RunRecord:
    return replace(
        _wait_over(record, entry),
        limits=Limits(**entry.data["limits"]),
        code=an_object(entry.data.get("code") or record.code, "its code"),
        resumed_after=record.attempts[-1].number if record.attempts else 0,
        wish=None,
        wish_why="",
        settled=None,
        rests="",
        is_away=False,
        alerted=(),
        tried=(),
        full=(),
        mendable=False,
        refusal="",
        quota_refusal="",
        rounds=0,
        queued="",
        retry_at=None,
    )


def _moved(record: RunRecord, entry: Entry) -> RunRecord:
    return _placed(_resumed(record, entry), entry)


def _placed(record: RunRecord, entry: Entry) -> RunRecord:
    """Take over where the run is from here on; what was refused elsewhere says nothing here."""
    data, before = entry.data, record.placing
    placing = Placing(
        number=1 if before is None else before.number + 1,
        kind=entry.kind,
        at=entry.at,
        after=record.attempts[-1].number if record.attempts else 0,
    )
    return replace(
        _wait_over(record, entry),
        spec=an_object(data.get("spec"), "its spec"),
        job=an_object(data.get("job") or {}, "its phases"),
        phase=needed(integer(data, "phase", low=0), "phase"),
        limits=Limits(**data["limits"]),
        placing=placing,
        tried=(),
        full=(),
        mendable=False,
        refusal="",
        quota_refusal="",
        rounds=0,
        retry_at=None,
        search=None,
    )


def _alerted(record: RunRecord, entry: Entry) -> RunRecord:
    percent = entry.data["percent"]
    record = replace(record, alerted=(*record.alerted, percent))
    if percent not in rules_of(record.spec).shares:
        return record
    return _untold(record, entry, f"{percent} % of the budget are spent")


def _noted(record: RunRecord, entry: Entry) -> RunRecord:
    record = replace(record, noted=(*record.noted, entry.data["key"])[-_MAX_NOTED:])
    return _untold(record, entry, entry.data["text"])


def _untold(record: RunRecord, entry: Entry, words: str) -> RunRecord:
    tiding = Tiding(seq=entry.seq, kind=entry.kind, text=words)
    return replace(record, untold=(*record.untold, tiding)[-_MAX_UNTOLD:])


def _told(record: RunRecord, entry: Entry) -> RunRecord:
    left = tuple(each for each in record.untold if each.seq != entry.data["seq"])
    return replace(record, untold=left)


def _total_steps(record: RunRecord, entry: Entry) -> RunRecord:
    total = integer(entry.data, "total_steps")
    record = record if total is None else replace(record, total_steps=total)
    for skipped in objects(entry.data, "skipped"):
        record = _warn(
            record,
            f"attempt {entry.attempt}: checkpoint {skipped.get('checkpoint')} was passed over: "
            f"{skipped.get('problem')}",
        )
    return record


def _job_warning(record: RunRecord, entry: Entry) -> RunRecord:
    return _warn(record, f"attempt {entry.attempt}: {entry.data.get('message')}")


def _set_aside(record: RunRecord, entry: Entry) -> RunRecord:
    data = entry.data
    return _warn(
        record, f"attempt {entry.attempt}: {data['key']} was passed over: {data['problem']}"
    )


def _save_failed(record: RunRecord, entry: Entry) -> RunRecord:
    step = integer(entry.data, "step")
    saved = (save.step for each in record.attempts for save in each.saves)
    if step is not None and any(saved_step >= step for saved_step in saved):
        return record  # another rank could
    return _warn(
        record,
        f"attempt {entry.attempt}: the save at step {step} failed: {entry.data.get('problem')}",
    )


def _saved_after_all(record: RunRecord, entry: Entry) -> RunRecord:
    """Take back what was said of a failed save, once that step or a later one is saved."""
    if not record.warnings:
        return record
    step = integer(entry.data, "step") or 0

    def stands(warning: str) -> bool:
        failed = _FAILED_SAVE.match(warning)
        return failed is None or int(failed[1]) > step

    left = tuple(filter(stands, record.warnings))
    return record if len(left) == len(record.warnings) else replace(record, warnings=left)


def _warn(record: RunRecord, sentence: str) -> RunRecord:
    sentence = sentence[:_LONGEST_WARNING]
    if sentence in record.warnings:
        return record
    return replace(record, warnings=(*record.warnings, sentence)[-_MAX_WARNINGS:])


def _store_lost(record: RunRecord, entry: Entry) -> RunRecord:
    problem = str(entry.data.get("problem") or "no reason is known")
    since_at = record.store_silent_since or seconds(entry.data, "since_at") or entry.at
    return replace(record, store_problem=problem, store_silent_since=since_at)


def _store_back(record: RunRecord, _: Entry) -> RunRecord:
    return replace(record, store_problem=None, store_silent_since=None)


def _released(record: RunRecord, entry: Entry) -> RunRecord:
    if entry.data.get("unseen") is not True:
        return record
    return _warn(
        record,
        f"attempt {entry.attempt}: nobody could be asked whether its nodes live; look for them: "
        "spotguard doctor",
    )


def _without(record: RunRecord, number: int) -> tuple[AttemptRecord, ...]:
    return tuple(attempt for attempt in record.attempts if attempt.number != number)


_ON_RUN: dict[str, Callable[[RunRecord, Entry], RunRecord]] = {
    Kind.ADOPTED.value: _adopted,
    Kind.CONTROLLER_NODE.value: _controller_node,
    Kind.TAKEN_OVER.value: lambda record, _: replace(record, is_away=True),
    Kind.INTENDED.value: _intended,
    Kind.LAUNCHED.value: _launched,
    Kind.WENT_ON.value: _went_on,
    Kind.TOOK_OVER.value: _took_over,
    Kind.GIVEN_UP.value: _given_up,
    Kind.NO_CAPACITY.value: _no_capacity,
    Kind.ATTEMPT_ENDED.value: _quota_freed,
    Kind.DROPPED.value: _dropped,
    Kind.WAITING.value: _waiting,
    Kind.SETTLED.value: _settled,
    Kind.USER_STOP.value: _wished,
    Kind.USER_DOWN.value: _wished,
    Kind.COMPARED.value: _compared,
    Kind.RESUMED.value: _resumed,
    Kind.MOVED.value: _moved,
    Kind.PHASE_BEGUN.value: _placed,
    Kind.ALERT.value: _alerted,
    Kind.NOTED.value: _noted,
    Kind.TOLD.value: _told,
    Kind.STORE_LOST.value: _store_lost,
    Kind.STORE_BACK.value: _store_back,
    Kind.RELEASED.value: _released,
    Kind.SET_ASIDE.value: _set_aside,
    Kind.PROGRESS.value: _total_steps,
    JOB_PREFIX + JobEvent.STARTED.value: _total_steps,
    JOB_PREFIX + JobEvent.WARNING.value: _job_warning,
    JOB_PREFIX + JobEvent.SAVE_FAILED.value: _save_failed,
    JOB_PREFIX + JobEvent.SAVED.value: _saved_after_all,
}
