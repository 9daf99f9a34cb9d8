"""What `status` shows: one frozen picture of a run, and the JSON it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from spotguard.shared.json_documents import HIDDEN, INSTANT, document

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.control.status.footprint import Footprint, RunFootprint
    from spotguard.control.status.recovery import Recovery
    from spotguard.events.states import EndReason, RunState
    from spotguard.policy.plan.forecast import CostForecast

SCHEMA: Final = 1


def label_of(state: RunState, queued: object) -> str:
    """Return a state in a word: who waits for money is told from who finds no nodes."""
    return "queued" if queued else state.label


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One cluster's life inside a run. None means unknown, never zero."""

    attempt: int
    infra: str
    region: str | None
    zone: str | None
    instance_type: str | None
    market: str
    nodes: int
    in_place: bool
    """True if it began on what was left of the cluster of the attempt before."""
    price_usd_per_h: float | None
    """Of one node."""
    on_demand_usd_per_h: float | None
    gpus: str | None = None
    """What each node had of them, where the job asked for some."""
    demo_prices: bool = False
    """True if its money is played; beside attempts that cost some, it counts for nothing."""
    started_at: float = field(metadata=INSTANT)
    """Since when it is billed: when it was asked for."""
    ended_at: float | None = field(metadata=INSTANT)
    """When its last node was confirmed gone; None while it lives."""
    end_reason: EndReason | None
    by_sweep: bool = False
    """Whether its sweep had it stopped, because other points did better."""
    end_detail: str
    """The reason in words, with what the launcher or the job said."""
    saved: bool | None
    """Whether all that it did is saved; None while it lives, or if that is not known."""
    notice_s: float | None
    """Seconds of warning: from the first notice to the deadline it named; None without notice."""
    saved_before_end_s: float | None
    """Seconds between the last committed save and the end of training in this attempt."""
    steps_lost: int | None
    """Steps finished after the last save that counts; None while it lives or unknown."""
    first_step: int | None
    """Steps already done when it started."""
    last_step: int | None
    """Steps done when it ended, or now."""
    cost_usd: float | None
    train_s: float | None
    """Seconds in finished steps that still count."""
    carbon: Footprint
    """What its nodes drew, and caused."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One picture of a run: what `status`, `up` and `resume` print with `--json`."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    run_id: str
    name: str
    state: RunState
    state_detail: str
    """One sentence on what is going on or why it settled."""
    step: int | None
    """Steps done; while running it may be some seconds old."""
    total_steps: int | None
    loss: float | None
    step_s: float | None
    eta_s: float | None
    """Seconds until the last step is done, at this pace; None unless it trains."""
    store: str
    """URL of the run's own prefix, `<store>/<run_id>`."""
    known_at: float | None = field(default=None, metadata=INSTANT)
    """As of when all this is known, where that is older than it should be: its store does not
    answer, or its controller does not look. None: as of now."""
    created_at: float = field(metadata=INSTANT)
    finished_at: float | None = field(metadata=INSTANT)
    spent_usd: float | None
    spent_most_usd: float | None = None
    """What may be spent at most, where nobody saw when some nodes went; None: `spent_usd` is all
    that is."""
    budget_usd: float | None
    on_demand_usd: float | None
    """The same useful work bought on demand, undisturbed."""
    saved_pct: float | None
    """By how much less it cost than that; negative if it cost more."""
    goodput: float | None
    """Share (0..1) of billed wall time that went into steps that count."""
    saved_step: int | None
    """Steps done at the newest save that counts."""
    saved_at: float | None = field(metadata=INSTANT)
    warnings: tuple[str, ...]
    """Sentences the user should read: failed saves, skipped checkpoints, unmet expectations."""
    traceback: str | None
    """Of the job's own failure."""
    controller_alive: bool
    attempts: tuple[AttemptView, ...]
    recoveries: tuple[Recovery, ...] = ()
    on_demand_infra: str | None = None
    """Where nodes are bought on demand, if elsewhere than spot ones."""
    demo_prices: bool = False
    """True if the money is played: local nodes cost nothing, and their price was not given."""
    phase: int | None = None
    """In which phase it is, from 1; None without phases."""
    phases: int = 0
    """How many it has."""
    until_step: int | None = None
    """Steps done at which the phase ends; None: with the run."""
    rate_usd_per_h: float | None = None
    """What the run costs in an hour now; 0 while it has no nodes, None if a price is unknown."""
    next_alert: str | None = None
    """What it would be told of next as money is spent; None if of nothing."""
    carbon: RunFootprint
    """What its nodes drew, and caused."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest values by name: what the script logged by `run.log`; beginning with `spotguard/`
    what the runtime measured (docs/logs-and-metrics.md)."""
    forecast: CostForecast | None = None
    """What it is expected to cost in all, and when it is done; None for settled runs, for nodes of
    this machine, and where nobody looked."""
    queued: str | None = None
    """Why it waits for money of the team's budget or its sweep's turn; None if it does not."""
    exit_code: int | None = None
    """What it ended with, by docs/exit-codes.md; None while it goes on."""
    lacks_budget_of: str | None = None
    """Whose budget is used up, so that a larger one lets it go on: the run's id, or its sweep's;
    None if it is not that, as where a price is unknown."""

    @property
    def state_label(self) -> str:
        """Its state in a word."""
        return label_of(self.state, self.queued)

    def to_json(self) -> dict[str, Any]:
        """Return the object of `status --json`."""
        return document(self)


@dataclass(frozen=True, kw_only=True)
class HistoryLine:
    """One thing that happened, for `history`."""

    at: float = field(metadata=INSTANT)
    attempt: int | None
    kind: str
    """A journal or job event's kind."""
    text: str
    """One sentence for a human, with its reason."""
    colour: str = field(default="default", metadata=HIDDEN)
    cost_usd: float | None = None
    """What the run had cost by then, where it is known."""
    demo_prices: bool = False
    """True if that is played money."""
    data: dict[str, Any] | None = None
    """What the event holds, which depends on its kind."""


@dataclass(frozen=True, kw_only=True)
class HistoryDocument:
    """What `history --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    run_id: str
    earlier: int
    """How many happenings before these are left out; `--all` tells them, too."""
    history: tuple[HistoryLine, ...] = ()
    """What happened, by time."""


@dataclass(frozen=True, kw_only=True)
class LogDocument:
    """One line that `logs --json` prints: a line of a node's output."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    attempt: int
    node: int
    rank: int | None
    """None: nobody says, or no rank printed it but the launcher of a node's ranks."""
    at: float | None = field(metadata=INSTANT)
    """When it was printed; None is unknown."""
    stream: str | None
    """`stdout`, `stderr`, or `launcher`: what runs the ranks of a node; None is unknown."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Look:
    """What somebody sees who looks at a run again and again."""

    view: RunView
    """How it stands."""
    news: tuple[HistoryLine, ...]
    """What happened since the last look, by time; at the first one, the newest."""
    earlier: int = 0
    """How many happenings before them are not told: at the first look of a long run."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happened to a run."""

    lines: Iterable[HistoryLine]
    """By time. Can be gone through once."""
    earlier: int
    """How many lines before these are left out."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One line of the list of runs."""

    run_id: str
    name: str
    state: RunState
    created_at: float = field(metadata=INSTANT)
    spent_usd: float | None
    """None is unknown, never zero."""
    demo_prices: bool = False
    """True if the money is played: local nodes cost nothing, and their price was not given."""
    budget_usd: float | None = None
    rate_usd_per_h: float | None = None
    """What it costs in an hour now; 0 while it has no nodes, None if a price is unknown."""
    next_alert: str | None = None
    """What it would be told of next as money is spent; None if of nothing."""
    step: int | None = None
    """Steps done; while running it may be some seconds old."""
    total_steps: int | None = None
    attempts: int = 0
    interruptions: int = 0
    """Attempts that ended though the job was not done, and nobody had asked for it."""
    store: str | None = None
    """URL of the run's own prefix, if it was read from its store; None: from this machine."""
    controlled_by: str | None = None
    """The machine whose controller looks after it, by its store; None if no controller lives, or
    the store was not asked."""
    heard_at: float | None = field(default=None, metadata=INSTANT)
    """When a controller last said in the store how the run stands; None if the store was not
    asked, or none did."""
    problem: str | None = None
    """Why no more is known of it, or nothing that is new; None if all can be read."""
    queued: str | None = None
    """Why it waits for money of the team's budget; None if it does not."""

    @property
    def state_label(self) -> str:
        """Its state in a word."""
        return label_of(self.state, self.queued)


@dataclass(frozen=True, kw_only=True)
class UnreadableRun:
    """What looks like a run in a store, and cannot be read."""

    store: str
    """URL of its own prefix."""
    problem: str
    """Why, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class RunsDocument:
    """What `runs --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    runs: tuple[RunSummary, ...]
    """The runs of this machine, or of the stores that were named, newest first."""
    unreadable: tuple[UnreadableRun, ...] = ()
    """What looks like a run in those stores, and cannot be read."""
