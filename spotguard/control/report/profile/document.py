"""What `spotguard profile` shows: what cost most in the recorded steps, and the lever for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from spotguard.control.report.profile import levers
from spotguard.control.report.profile.costs import costs_of
from spotguard.control.report.profile.trace import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from spotguard.control.report.profile.costs import Costs, Spent
    from spotguard.events.profile import ProfileAnswer

SCHEMA: Final = 1
MOST_COSTS: Final = 5
_EVEN = 0.1
"""Ranks whose own work differs by less than this share are called even."""
_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class ProfiledCost:
    """One of the things that cost most."""

    kind: str
    """A word: data, saving, ranks, optimizer, attention, products, copies, sync, small, other,
    python."""
    title: str
    """The same in words."""
    share_pct: float
    """Of the time of the recorded steps."""
    step_s: float
    """Seconds of each step."""
    lever: str
    """What to change."""
    operations: tuple[str, ...]
    """Those that took most of it."""
    calls_per_step: float


@dataclass(frozen=True, kw_only=True)
class ProfiledRank:
    """What a rank did in the recorded steps."""

    rank: int
    node: int
    steps: int
    step_s: float | None
    """Seconds of a step; None if none was recorded."""
    own_s: float | None
    """Seconds of a step without the wait for other ranks; None without its trace."""
    cores_busy: float | None
    """By its process, its loader's workers left out."""
    problem: str = ""
    """Why nothing is known of it, if so."""


@dataclass(frozen=True, kw_only=True)
class ProfileDocument:
    """What `profile --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    run_id: str
    attempt: int
    number: int
    """Of the attempt's profiles, from 1."""
    first_step: int
    """Steps done before the first recorded one."""
    steps: int
    rank: int
    """Whose time is told: the slowest if ranks differ, else the first."""
    step_s: float
    device: str
    """Its GPU, or `cpu`."""
    gpu_busy_pct: float | None
    """Of the time of the steps; None without a GPU."""
    cores_busy: float
    cores: int
    signature: str
    """What the use of GPU and processor says of the whole step."""
    balance: str
    """Which rank the others wait for, or that they are even; empty for one rank."""
    costs: tuple[ProfiledCost, ...]
    """Five at most, the largest first."""
    ranks: tuple[ProfiledRank, ...]
    trace: str
    """Where the trace of that rank lies in the run's store."""


def make_profile(
    run_id: str,
    attempt: int,
    number: int,
    answers: Sequence[ProfileAnswer],
    trace_of: Callable[[int], bytes],
    *,
    rank: int | None,
    trace_key: Mapping[int, str],
) -> ProfileDocument:
    """Return what the answers and traces of a profile say.

    Args:
        run_id: the run.
        attempt: whose profile it is.
        number: of the profile.
        answers: of the ranks, in their order.
        trace_of: returns a rank's trace, unpacked; called for one after the other, since each may
            take hundreds of megabytes.
        rank: whose time to tell, one with a trace; None: the slowest, or the first.
        trace_key: where each trace lies, by rank; one at least.

    Raises:
        Refused: a trace makes no sense.
    """
    recorded = {each.rank: each.steps for each in answers}
    costs = {each: costs_of(read_trace(trace_of(each), whole=recorded[each])) for each in trace_key}
    slowest = max(costs, key=lambda each: costs[each].own_us / costs[each].steps)
    even = _is_even([of.own_us / of.steps for of in costs.values()])
    chosen = rank if rank is not None else min(costs) if even else slowest
    mine = costs[chosen]
    answer = next(each for each in answers if each.rank == chosen)
    now = levers.StepEvidence(mine, answer)
    return ProfileDocument(
        run_id=run_id,
        attempt=attempt,
        number=number,
        first_step=answer.first_step,
        steps=mine.steps,
        rank=chosen,
        step_s=_seconds(mine.total_us / mine.steps),
        device=answer.device,
        gpu_busy_pct=None if now.gpu_busy is None else round(100 * now.gpu_busy, 1),
        cores_busy=round(now.busy_cores, 2),
        cores=answer.cores,
        signature=levers.signature(now),
        balance=_balance(costs, slowest, even=even),
        costs=tuple(_costs(now)),
        ranks=tuple(_rank(each, costs.get(each.rank)) for each in answers),
        trace=trace_key[chosen],
    )


def _costs(now: levers.StepEvidence) -> list[ProfiledCost]:
    spent = sorted(now.costs.spent.items(), key=lambda pair: -pair[1].us)
    steps, total_us = now.costs.steps, now.costs.total_us
    return [
        ProfiledCost(
            kind=kind.value,
            title=levers.title(kind, now),
            share_pct=round(100 * each.us / total_us, 1),
            step_s=_seconds(each.us / steps),
            lever=levers.lever(kind, now),
            operations=_operations(each),
            calls_per_step=round(each.calls / steps, 1),
        )
        for kind, each in spent[:MOST_COSTS]
        if each.us
    ]


def _operations(spent: Spent) -> tuple[str, ...]:
    names = sorted(spent.by_name, key=lambda name: -spent.by_name[name])
    return tuple(name for name in names[:_NAMES] if not name.startswith("spotguard/"))


def _rank(answer: ProfileAnswer, costs: Costs | None) -> ProfiledRank:
    steps, duration_s = answer.steps, answer.duration_s
    return ProfiledRank(
        rank=answer.rank,
        node=answer.node,
        steps=steps,
        step_s=round(duration_s / steps, 6) if steps else None,
        own_s=None if costs is None else _seconds(costs.own_us / costs.steps),
        cores_busy=round(answer.cpu_s / duration_s, 2) if duration_s else None,
        problem=answer.problem,
    )


def _is_even(own_us: Sequence[float]) -> bool:
    return max(own_us) - min(own_us) <= _EVEN * max(own_us)


def _balance(costs: Mapping[int, Costs], slowest: int, *, even: bool) -> str:
    if len(costs) < 2:
        return ""
    if even:
        return f"{len(costs)} ranks, even: their own work differs by less than {100 * _EVEN:.0f} %"
    own_s = {rank: of.own_us / of.steps / 1e6 for rank, of in costs.items()}
    others = [seconds for rank, seconds in own_s.items() if rank != slowest]
    return (
        f"{len(costs)} ranks, and the others wait for rank {slowest}: its own work takes "
        f"{own_s[slowest]:.3g} s of a step, theirs {sum(others) / len(others):.3g} s on average"
    )


def _seconds(us: float) -> float:
    return round(us / 1e6, 6)
