"""What people want to hear of, and what of it is due. Pure functions over the record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.control.journal import cost
from spotguard.shared.units import format_duration, format_usd, parse_duration_s
from spotguard.spec.setting import BUDGET_TOPIC, BURN_TOPIC, DEFAULT_TOPICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from spotguard.control.journal.record import AttemptRecord, RunRecord


@dataclass(frozen=True, kw_only=True)
class AlertRules:
    """What a run's user chose; None is not told of."""

    shares: tuple[int, ...] = ()
    """Of the budget, in percent."""
    burn_usd_per_h: float | None = None
    preempted: bool = False
    waiting_s: float | None = None
    no_save_s: float | None = None
    contact_lost: bool = False
    ended: bool = False


def rules_of(spec: Mapping[str, Any]) -> AlertRules:
    """Return what `notify_on` of a job says; of one that is older than it, what was told then."""
    limits = dict(str(topic).partition(" ")[::2] for topic in spec.get("notify_on", DEFAULT_TOPICS))
    burn, waiting, no_save = (limits.get(name) for name in (BURN_TOPIC, "waiting", "no-save"))
    shares = limits.get(BUDGET_TOPIC)
    return AlertRules(
        shares=tuple(int(share) for share in shares.split(",")) if shares else (),
        burn_usd_per_h=None if burn is None else float(burn),
        preempted="preempted" in limits,
        waiting_s=None if waiting is None else parse_duration_s(waiting),
        no_save_s=None if no_save is None else parse_duration_s(no_save),
        contact_lost="contact-lost" in limits,
        ended="ended" in limits,
    )


@dataclass(frozen=True, kw_only=True)
class Due:
    """Something to tell, once: what has the same key was told."""

    key: str
    text: str


def due(record: RunRecord, now: float) -> tuple[Due, ...]:
    """Return what is to be told now and was not; shares and ends have events of their own."""
    if record.settled is not None:
        return ()
    rules = rules_of(record.spec)
    found = (
        *_of_money(record, rules),
        *_of_attempts(record, rules, now),
        *_of_waits(record, rules, now),
    )
    return tuple(each for each in found if each.key not in record.noted)


def _of_money(record: RunRecord, rules: AlertRules) -> Iterator[Due]:
    rate = cost.rate_usd_per_h(record)
    if rules.burn_usd_per_h is not None and rate is not None and rate > rules.burn_usd_per_h:
        yield Due(
            key=f"burn-rate {record.resumed_after}",
            text=f"it costs {format_usd(rate)}/h, more than {format_usd(rules.burn_usd_per_h)}/h",
        )


def _of_attempts(record: RunRecord, rules: AlertRules, now: float) -> Iterator[Due]:
    last = record.last_ended
    if rules.preempted and last is not None and last.end is not None and last.end.reason.retried:
        words = last.end.reason.told(last.saved)
        yield Due(key=f"preempted {last.number}", text=f"attempt {last.number} ended: {words}")
    attempt = record.current
    if attempt is None:
        return
    if rules.contact_lost and attempt.contact_lost_at is not None:
        yield Due(
            key=f"contact-lost {attempt.number} {attempt.contact_lost_at:.0f}",
            text=f"nothing is heard of attempt {attempt.number}; nothing is killed",
        )
    since = _trains_unsaved_since(attempt)
    if rules.no_save_s is not None and since is not None and now - since > rules.no_save_s:
        yield Due(
            key=f"no-save {attempt.number} {since:.0f}",
            text=f"nothing was saved for {format_duration(now - since)} (attempt {attempt.number})",
        )


def _trains_unsaved_since(attempt: AttemptRecord) -> float | None:
    save = attempt.last_save
    return attempt.started_at if save is None else save.at


def _of_waits(record: RunRecord, rules: AlertRules, now: float) -> Iterator[Due]:
    since = record.waiting_since
    if rules.waiting_s is not None and since is not None and now - since > rules.waiting_s:
        why = record.offers_problem or record.refusal
        said = f" ({why})" if why else ""
        yield Due(
            key=f"waiting {since:.0f}",
            text=f"it waits for capacity for {format_duration(now - since)}{said}",
        )
