"""What the machine can decide to do. Each action is journaled before it touches the world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from spotguard.events.states import EndReason

if TYPE_CHECKING:
    from spotguard.control.journal.record import Allotment, BudgetOf
    from spotguard.events.regrouping import Group
    from spotguard.events.states import RunState
    from spotguard.launch.base import Offer


@dataclass(frozen=True)
class Gone:
    """When the last node of a cluster went."""

    at: float
    """When it went; where nobody saw that, when it was last known to be there."""
    latest_at: float | None = None
    """By when it was gone for certain, where nobody saw when; None: `at` is known."""


@dataclass(frozen=True)
class Wait:
    """Nothing is to be done now."""


@dataclass(frozen=True, kw_only=True)
class Intend:
    """Write down that an attempt will be launched. `Launch` follows."""

    nodes: int
    offer: Offer
    allotment: Allotment
    why: str = ""
    """Why these nodes, as a sentence."""
    ahead: bool = False
    """The current attempt still trains: this one waits for its turn."""


@dataclass(frozen=True)
class Launch:
    """Launch the attempt that was intended; may be repeated, the launcher is idempotent."""


@dataclass(frozen=True)
class NoteLaunched:
    """The cluster exists although nobody wrote it down: the controller died in between."""


@dataclass(frozen=True)
class NoteUp:
    """Write down when the nodes began to cost."""

    at: float


@dataclass(frozen=True)
class NoteRefused:
    """The launch was taken, and then the nodes were not to be had: try the next place."""

    problem: str
    lasting: bool = False
    """No wait will mend it."""
    busy: bool = False
    """The cloud could not just then, and said nothing of capacity."""
    quota_full: bool = False
    """A quota of the account is full, maybe only until nodes that have ended count no more."""
    gone: Gone | None = None
    """When its nodes went; None: none was started, so that none cost money."""


@dataclass(frozen=True)
class Drop:
    """Forget an intent that provably started nothing and is too old to follow."""

    why: str


@dataclass(frozen=True)
class TakeOver:
    """The attempt whose nodes were asked for ahead takes the place of the one that ended."""


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """Nodes that were asked for ahead are gone, and their attempt never had its turn."""

    why: str
    gone: Gone | None
    """When they went; None: none was started, so that none cost money."""


@dataclass(frozen=True)
class OnAhead:
    """Do this with the attempt whose nodes were asked for ahead, not with the current one."""

    action: Action


@dataclass(frozen=True)
class BackOff:
    """No place has even the smallest number of nodes: try again at `retry_at`."""

    retry_at: float
    why: str = ""
    """Why nothing is bought until then, as a sentence."""
    problem: str = ""
    """Why the places could not be looked up, so that none was asked; empty if they could."""
    quota_until: float | None = None
    """Until when a full quota is waited for; None: it is not what is waited for."""


@dataclass(frozen=True)
class BeginPhase:
    """The steps of a phase are done, and nothing of it is left: go on in the next one."""

    phase: int
    """From 0."""


@dataclass(frozen=True)
class AskToStop:
    """Write down that the job shall save and stop. `WriteStop` follows."""

    reason: EndReason


@dataclass(frozen=True)
class WriteStop:
    """Put the stop request where the job sees it; may be repeated."""

    reason: EndReason


@dataclass(frozen=True)
class AskDown:
    """Write down that the nodes shall go, and why. `SendDown` follows."""

    reason: EndReason
    detail: str


@dataclass(frozen=True)
class SendDown:
    """Tell the launcher to take the nodes down; may be repeated."""

    attempt: int | None = None
    """Of an attempt that has ended already; None is the current one."""


@dataclass(frozen=True, kw_only=True)
class Conclude:
    """The cluster is gone, or on its way: write down the verdict on the attempt."""

    reason: EndReason
    detail: str
    gone_at: float
    gone_latest_at: float | None = None
    """By when, where nobody saw it: then `gone_at` is when they were last known to be there."""
    training_ended_at: float
    traceback: str | None = None
    leaving: bool = False
    """Its nodes have been told to go; the next attempt need not wait until they are gone."""


@dataclass(frozen=True)
class NoteGone:
    """Its nodes are gone and cost nothing more; its verdict waits for what its job wrote last."""

    gone: Gone


@dataclass(frozen=True, kw_only=True)
class NoteReleased:
    """The nodes of an attempt that has ended before are gone."""

    attempt: int
    gone: Gone
    unseen: bool = False
    """Nobody says so: it is not waited for an answer any longer."""


@dataclass(frozen=True, kw_only=True)
class GoOn:
    """Write down that the attempt ended and the next one began, in place, without us."""

    group: Group
    verdict: Conclude
    allotment: Allotment


@dataclass(frozen=True)
class LoseContact:
    """Say that nothing is seen of the attempt; kill nothing."""

    detail: str


@dataclass(frozen=True)
class RegainContact:
    """Say that it was seen again."""


@dataclass(frozen=True)
class LoseSight:
    """Say that the launcher cannot be asked of the attempt, though its job is heard."""

    detail: str


@dataclass(frozen=True)
class RegainSight:
    """Say that the launcher answers again."""


@dataclass(frozen=True)
class Alert:
    """Say that this share of the budget is spent."""

    percent: int


@dataclass(frozen=True, kw_only=True)
class Settle:
    """The run comes to rest."""

    state: RunState
    detail: str
    exit_code: int
    lacks_budget_of: BudgetOf | None = None
    """Whose budget is used up, so that a larger one lets it go on."""


Action: TypeAlias = (
    Wait
    | Intend
    | Launch
    | NoteLaunched
    | NoteUp
    | NoteRefused
    | Drop
    | TakeOver
    | GiveUp
    | OnAhead
    | BackOff
    | BeginPhase
    | AskToStop
    | WriteStop
    | AskDown
    | SendDown
    | Conclude
    | NoteGone
    | NoteReleased
    | GoOn
    | LoseContact
    | RegainContact
    | LoseSight
    | RegainSight
    | Alert
    | Settle
)


_ENDS_THE_RUN = (EndReason.STOPPED, EndReason.BUDGET, EndReason.DEADLINE)


def needs_no_store(action: Action) -> bool:
    """Return whether a controller does this also while it can't show that the run is its own.

    A lease that was not renewed for long may be another machine's by now. Such a controller begins
    nothing and moves nothing, but it still ends what this run's own clusters cost: by the wish of
    the user, at the limits that were set at the launch, and where an end was ordered before.
    """
    match action:
        case OnAhead():
            return needs_no_store(action.action)
        case Intend() | Launch() | GoOn() | BeginPhase() | BackOff():
            return False
        case AskToStop():
            return action.reason in _ENDS_THE_RUN
        case _:
            return True
