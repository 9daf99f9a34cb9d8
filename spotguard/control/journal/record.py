"""What is known of a run: one immutable `RunRecord`, folded from the journal's events.

Nothing here reads a clock, a store or a launcher, so the same journal always gives the same
record, in the controller as in `spotguard status`. Data that came from the job is not trusted
to be complete: what is missing or of the wrong type is unknown (None).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from spotguard.control.journal.nodes.controller_node import ControllerNode  # noqa: TC001 - snapshots read it
from spotguard.control.journal.nodes.energy_counter import EnergyCounter  # noqa: TC001 - snapshots read it
from spotguard.control.journal.nodes.lost_launch import LostLaunch  # noqa: TC001 - snapshots read it
from spotguard.control.journal.nodes.search import Search  # noqa: TC001 - snapshots read it
from spotguard.events.states import EndReason, RunState
from spotguard.events.untrusted import integer, number, objects
from spotguard.launch.base import NodeEnd, Offer


class Kind(str, Enum):
    """What the journal's events are. Job events stand in it as `job_` + their own kind."""

    CREATED = "run_created"
    ADOPTED = "adopted"
    CONTROLLER_STARTED = "controller_started"
    TAKEN_OVER = "taken_over"
    CONTROLLER_NODE = "controller_node"
    """What is known of a node that the run's controller has, or had, for itself alone."""
    CLOCK_MOVED = "clock_moved"
    """The clock of the controller's machine jumped; the run's time goes on evenly."""
    CONTROLLER_REPAIRED = "controller_repaired"
    INTENDED = "launch_intended"
    LAUNCHED = "launched"
    CLUSTER_UP = "cluster_up"
    """The nodes began to cost, at an instant that the launcher knows."""
    NO_CAPACITY = "no_capacity"
    LAUNCH_FAILED = "launch_failed"
    DROPPED = "launch_dropped"
    WAITING = "waiting"
    NODE_ENDED = "node_ended"
    CONTACT_LOST = "contact_lost"
    CONTACT_BACK = "contact_back"
    CLOUD_SILENT = "cloud_silent"
    """The launcher cannot be asked of a cluster whose job is heard."""
    CLOUD_BACK = "cloud_back"
    STORE_LOST = "store_lost"
    STORE_BACK = "store_back"
    STOP_ASKED = "stop_asked"
    STOP_WRITTEN = "stop_written"
    DOWN_ASKED = "down_asked"
    DOWN_SENT = "down_sent"
    DOWN_FAILED = "down_failed"
    NODES_GONE = "nodes_gone"
    """No node is left of an attempt; what its job wrote last can't be read yet."""
    ATTEMPT_ENDED = "attempt_ended"
    RELEASED = "released"
    """The nodes of an attempt that had ended before were confirmed gone."""
    TOOK_OVER = "next_took_over"
    """An attempt ended, and the one whose nodes had been asked for ahead took its place."""
    GIVEN_UP = "next_given_up"
    """Nodes that had been asked for ahead are not needed, and nothing is left of them."""
    WENT_ON = "went_on_in_place"
    """An attempt ended, and the nodes that stayed had begun the next one by themselves."""
    PROGRESS = "progress"
    ALERT = "budget_alert"
    NOTED = "noted"
    """Something that the user wants to hear of; changes nothing else."""
    TOLD = "told"
    """The user's webhooks have heard of an event, or were given up."""
    SETTLED = "settled"
    USER_STOP = "user_stop"
    USER_DOWN = "user_down"
    COMPARED = "compared"
    """A sweep looked at what its points have come to, and this one goes on or is stopped."""
    RESUMED = "resumed"
    MOVED = "moved"
    """The user lets the run go on, and in another place: what it says of the job counts now."""
    PHASE_BEGUN = "phase_begun"
    """The steps of a phase are done: what this says of the job counts now."""
    SET_ASIDE = "set_aside"
    """Something in the run store makes no sense; it is never read again."""
    CHUNK_READ = "chunk_read"
    """All events of a chunk of the run store are in the journal."""
    SNAPSHOT = "snapshot"
    """What all entries before said, so that a reader can begin here; changes nothing."""


class BudgetOf(str, Enum):
    """Whose budget may be used up, so that a larger one lets the run go on."""

    RUN = "run"
    SWEEP = "sweep"


JOB_PREFIX = "job_"
KEPT_SAVES = 32
"""Saves that an attempt's record keeps: see `fold_attempt`."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user allows the run; `resume` can change it."""

    budget_usd: float | None = None
    deadline_at: float | None = None
    nodes_min: int = 1
    nodes_max: int = 1
    allow_unknown_price: bool = False


@dataclass(frozen=True, kw_only=True)
class Allotment:
    """When one attempt has to be over, and what sees to it. None is 'no such limit'."""

    budget_stop_at: float | None = None
    """The job saves and stops by itself from here on."""
    deadline_stop_at: float | None = None
    """The same, for the deadline."""
    down_at: float | None = None
    """The controller takes the nodes down, saved or not."""
    down_reason: EndReason = EndReason.BUDGET
    """Which limit `down_at` comes from."""
    max_lifetime_s: float | None = None
    """The launcher's own leak guard, should the controller be dead."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """A committed checkpoint, as the job reported it."""

    at: float
    step: int
    train_s: float | None
    checkpoint: str | None
    kind: str
    duration_s: float | None


@dataclass(frozen=True, kw_only=True)
class SaveTotals:
    """What all saves of an attempt took together; `AttemptRecord.saves` keeps some of them."""

    count: int = 0
    size_bytes: float = 0.0
    duration_s: float = 0.0
    stall_s: float = 0.0
    """Seconds in which steps waited for them."""
    last_bytes: float | None = None
    """Of the newest one; None is unknown."""


@dataclass(frozen=True, kw_only=True)
class NoticeHeard:
    """The first warning of an attempt's end on one of its nodes."""

    at: float
    source: str
    deadline_at: float | None
    node: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """Where training stood."""

    at: float
    step: int
    total_steps: int | None = None
    epoch: int | None = None
    train_s: float | None = None
    step_s: float | None = None
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest values of what the script logged and the runtime measured."""


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How the job itself says that an attempt ended."""

    at: float
    """By the job's clock."""
    seen_at: float
    """By the controller's clock, which may differ."""
    reason: EndReason
    step: int | None
    saved_step: int | None
    train_s: float | None
    message: str
    traceback: str | None
    warned: bool = False
    """True if it had been told to stop, whether or not that is why it ended."""
    solo: bool = False
    """True if another rank was gone: who wrote this left without its answer."""
    saved: bool | None = None
    """Whether who wrote this had all that was done saved; None if it did not say."""


@dataclass(frozen=True, kw_only=True)
class NodeEnded:
    """A node's end as the launcher told; `in_doubt`: maybe another's, `in_vain`: nobody took it."""

    node: int
    at: float
    end: NodeEnd
    exit_code: int | None
    detail: str
    in_doubt: bool = False
    in_vain: bool = False


@dataclass(frozen=True, kw_only=True)
class StopAsked:
    """The controller asked the job to save and stop; `written` once the job can see it."""

    at: float
    reason: EndReason
    written: bool = False
    why: str = ""
    """Why its sweep wants it stopped; empty if it is the user, or the controller itself."""


@dataclass(frozen=True, kw_only=True)
class DownAsked:
    """The controller wants the nodes gone; `sent_at` once the launcher has been told."""

    at: float
    reason: EndReason
    detail: str
    log: str | None = None
    """The last lines of the job's output, if it failed: a cloud forgets them with the cluster."""
    in_doubt: bool = False
    """Who adopted the run asks: whether nodes live, nobody said."""
    sent_at: float | None = None
    failed_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """The verdict on an attempt, given when its last node was confirmed gone, or told to go."""

    at: float
    reason: EndReason
    detail: str
    gone_at: float
    """When the last node was gone; where nobody saw that, when it was last known to be there."""
    gone_latest_at: float | None = None
    """By when it was gone for certain, where nobody saw when; None: `gone_at` is known."""
    last_step: int | None
    training_ended_at: float | None
    traceback: str | None
    last_beat_at: float | None = None
    """By the node's clock: its last sign of life."""
    leaving: bool = False
    """Its nodes had been told to go and were not confirmed gone yet: they are still paid."""
    charged_node_s: float | None = None
    """The seconds that all its nodes were charged, added up, where the cloud itself told them."""


_KILL_WAIT_S = 30.0
"""How long Slurm lets processes live after `scancel`, if nobody changed its `KillWait`."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """When an attempt came how far: what `control.recovery` is made of. None is unknown."""

    waiting_since: float | None = None
    """By the controller's clock: the first launch that was refused. None: none was."""
    node_up_at: float | None = None
    """By the node's clock, as the two below: the first command of ours ran there."""
    init_at: float | None = None
    """The script called `spotguard.init`; it had restored its state at `started_at`."""
    first_step_at: float | None = None
    end_seen_at: float | None = None
    """By the controller's clock: it first knew that the attempt ends."""
    after_resume: bool = False
    """The run had come to rest before, and the user let it go on."""


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One cluster's life, from the intent to launch it to its confirmed end."""

    number: int
    cluster: str
    nodes: int
    offer: Offer
    intended_at: float
    allotment: Allotment
    members: tuple[int, ...] | None = None
    """The nodes that it began on, if it began in place: on what was left of a cluster."""
    demo_price: bool = False
    """Its money is played: local nodes cost nothing, and the user had given no price."""
    launched: bool = False
    up_at: float | None = None
    """When its nodes began to cost, where the launcher can tell."""
    launch_problem: str | None = None
    started_at: float | None = None
    resumed_from: str | None = None
    resumed_step: int | None = None
    notices: tuple[NoticeHeard, ...] = ()
    """Of each node that was warned, unless its warning was withdrawn."""
    saves: tuple[Save, ...] = ()
    saving: SaveTotals = SaveTotals()
    progress: StepProgress | None = None
    energy: tuple[EnergyCounter, ...] = ()
    job_end: JobEnd | None = None
    node_ends: tuple[NodeEnded, ...] = ()
    stop: StopAsked | None = None
    down: DownAsked | None = None
    contact_lost_at: float | None = None
    """Nothing is heard of its job, and nobody says that it has ended."""
    cloud_silent_at: float | None = None
    """The launcher says nothing of its cluster, whose job is heard."""
    gone_seen: tuple[float, float | None] | None = None
    """Its nodes are gone (`gone_at`, `gone_latest_at` of its end), and its verdict is to come."""
    given_back_at: float | None = None
    """A node of it had its whole allocation cancelled, by the node's clock."""
    end: AttemptEnd | None = None
    course: Course = Course()

    @property
    def billed_from(self) -> float:
        """When its nodes began to cost, or at the earliest can have."""
        return self.intended_at if self.up_at is None else max(self.up_at, self.intended_at)

    @property
    def notice(self) -> NoticeHeard | None:
        """The first warning that holds; one that sets an end comes before a recommendation."""
        return min(self.notices, key=lambda each: each.deadline_at is None, default=None)

    @property
    def gone_by(self) -> float | None:
        """When it is gone at the latest, as one of its own nodes says; None if none does."""
        if self.gone_seen is not None:
            return self.gone_seen[0]
        return None if self.given_back_at is None else self.given_back_at + _KILL_WAIT_S

    @property
    def in_doubt(self) -> bool:
        """True if who adopted the run could not ask for its nodes, and nobody saw them since."""
        down = self.down  # only what was seen to live is told to go
        if down is None or not down.in_doubt or self.end is None or not self.end.leaving:
            return False
        return down.sent_at is None and down.failed_at is None

    @property
    def by_sweep(self) -> bool:
        """True if it was stopped because other points of its sweep did better."""
        return self.stop is not None and bool(self.stop.why)

    @property
    def in_place(self) -> bool:
        """True if it began on what was left of the cluster of the attempt before."""
        return self.members is not None

    @property
    def cluster_nodes(self) -> tuple[int, ...]:
        """The indices of its nodes in the cluster."""
        return tuple(range(self.nodes)) if self.members is None else self.members

    @property
    def last_save(self) -> Save | None:
        """The newest save, if there is one."""
        return self.saves[-1] if self.saves else None

    @property
    def last_step(self) -> int | None:
        """The highest number of finished steps that anything told of, or None."""
        tellers = (self.progress, self.last_save, self.job_end)
        known = [teller.step for teller in tellers if teller is not None]
        known += [self.resumed_step, self.end.last_step if self.end is not None else None]
        return max((step for step in known if step is not None), default=None)

    @property
    def saved(self) -> bool | None:
        """Whether all that it did is saved, by whomever.

        None if it is not known what it did, or if it did nothing and nothing was to be saved.
        """
        done, save = self.last_step, self.last_save
        if done is None:
            return None
        if save is not None and save.step >= done:
            return True
        told = self.job_end.saved if self.job_end is not None else None
        if done == 0 and told is not False:
            return None
        if told is not None:
            return told
        return (save.step if save is not None else self.resumed_step or 0) >= done

    @property
    def lost_nodes(self) -> tuple[NodeEnded, ...]:
        """The nodes that were taken, for all that is known, in the order in which it was seen."""
        return tuple(n for n in self.node_ends if n.end in (NodeEnd.LOST, NodeEnd.OVER))

    @property
    def failed_nodes(self) -> tuple[NodeEnded, ...]:
        """The nodes whose job ended by itself with an exit code other than 0."""
        return tuple(
            node for node in self.node_ends if node.end is NodeEnd.EXITED and node.exit_code
        )

    @property
    def failed_node(self) -> int:
        """The one of them that was seen first, or node 0."""
        return self.failed_nodes[0].node if self.failed_nodes else 0


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The run came to rest."""

    at: float
    state: RunState
    detail: str
    exit_code: int
    lacks_budget_of: BudgetOf | None = None
    """Whose budget is used up; None: it rests for another reason."""


@dataclass(frozen=True, kw_only=True)
class Tiding:
    """An event that people want to hear of."""

    seq: int
    """Number of the journal's event."""
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Where the run has gone on since some attempt: by the user's move, or as a phase began."""

    number: int
    """From 1; in the run store it has a key of its own."""
    kind: str
    """`MOVED` or `PHASE_BEGUN`."""
    at: float
    after: int
    """Number of the last attempt before it; 0 if there was none."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that is known of a run."""

    run_id: str
    name: str
    created_at: float
    store_root: str
    """URL of the store; the run lives below it at `run_id`."""
    spec: dict[str, Any]
    """The job as it is where the run is now, as `JobSpec.to_json` gave it."""
    limits: Limits
    job: dict[str, Any] = field(default_factory=dict)
    """The same with all its phases; empty where it has none."""
    sweep: dict[str, Any] = field(default_factory=dict)
    """Its part in a sweep, as `SweepPart.to_json` gave it; empty for a run of none."""
    code: dict[str, Any] = field(default_factory=dict)
    """Which copy of its folder it has; empty where an earlier version began it."""
    looks: int | None = 0
    """How many looks at it and the other points are behind it; None: it is compared no more."""
    phase: int = 0
    """In which of the job's phases the run is, from 0."""
    placing: Placing | None = None
    """The newest move, or beginning of a phase; None: the run is where it was launched."""
    attempts: tuple[AttemptRecord, ...] = ()
    ahead: AttemptRecord | None = None
    """The attempt to come, where its nodes were asked for while the current one still trains: it
    waits for its turn, and is paid meanwhile."""
    asked_ahead_of: int = 0
    """Number of the attempt at whose notice nodes were asked for and given up: once is enough."""
    next_number: int = 1
    tried: tuple[tuple[int, str], ...] = ()
    """(nodes, place) that had no capacity in this round of launching."""
    full: tuple[tuple[int, str], ...] = ()
    """Those of them for which a quota of the account was full."""
    quota_refusal: str = ""
    """What the newest refusal by a full quota said, since the last launch."""
    mendable: bool = False
    """Something in this round was refused that a wait may mend: capacity, not a right."""
    refusal: str = ""
    """What the newest refusal said."""
    offers_problem: str = ""
    """Why the places could not be looked up for the newest wait; empty if they could."""
    unlisted_since: float | None = None
    """Since when they could not be; None if they could."""
    rounds: int = 0
    """Rounds of launching without any capacity, since the last launch."""
    waiting_since: float | None = None
    quota_until: float | None = None
    """Until when a full quota counts as full for a moment; None: no quota is waited for."""
    waited_s: float = 0.0
    """Seconds of waits for capacity that are over, and that no attempt has: it was not launched."""
    queued: str = ""
    """Why it waits for money of the team's budget; empty while it does not."""
    retry_at: float | None = None
    search: Search | None = None
    """How far the search for capacity was when the last launch was taken; it may yet be refused."""
    refused: int = 0
    """Launches that were refused; no cluster's name is used again."""
    lost_launches: tuple[LostLaunch, ...] = ()
    """Those of them that may have cost money, oldest first: see `with_lost`."""
    controller_nodes: tuple[ControllerNode, ...] = ()
    """Those that the run's controller had for itself, oldest first."""
    is_away: bool = False
    """Another machine took the run over from this one, to which the journal belongs."""
    wish: Kind | None = None
    """USER_STOP or USER_DOWN while the user, or its sweep, wants the run to end."""
    wish_why: str = ""
    """Why its sweep does; empty if it is the user."""
    rests: str = ""
    """In which words it rests once none of its nodes may live, as it trained on none when it was
    adopted; empty: it goes on."""
    resumed_after: int = 0
    """Number of the last attempt before the last `resume`; its end no longer settles the run."""
    untold: tuple[Tiding, ...] = ()
    """What the user's webhooks have not been told yet."""
    noted: tuple[str, ...] = ()
    """Keys of what was written down to be told, the newest of them."""
    alerted: tuple[int, ...] = ()
    """Shares of the budget (percent) that have been reported."""
    total_steps: int | None = None
    store_problem: str | None = None
    """Why the run's store cannot be read; None while it can."""
    store_silent_since: float | None = None
    warnings: tuple[str, ...] = ()
    settled: Settled | None = None
    seq: int = 0
    """Number of the last journal event in here."""

    @property
    def start_at(self) -> float | None:
        """Before when nothing is launched, as the user set it; None: at once."""
        return number(self.spec, "start_at")

    @property
    def until_step(self) -> int | None:
        """Steps done at which the phase ends that the run is in; None: with the run."""
        here = self.phases[self.phase : self.phase + 1]
        return integer(here[0], "until_step") if here else None

    @property
    def phases(self) -> list[dict[str, Any]]:
        """What each phase of the job says; nothing where it has none."""
        return objects(self.job, "phases")

    @property
    def of_this_place(self) -> tuple[AttemptRecord, ...]:
        """The attempts since the run was last moved, or its phase began."""
        after = self.placing.after if self.placing is not None else 0
        return tuple(each for each in self.attempts if each.number > after)

    @property
    def current(self) -> AttemptRecord | None:
        """The attempt that lives or may live; None between attempts."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.end is None else None

    def attempt(self, number: int) -> AttemptRecord | None:
        """Return the attempt of this number, also one that waits for its turn."""
        every = (*self.attempts, self.ahead)
        return next((each for each in every if each is not None and each.number == number), None)

    @property
    def controller_node(self) -> ControllerNode | None:
        """The newest one that nobody has told to go; None if the controller has none."""
        last = self.controller_nodes[-1] if self.controller_nodes else None
        return last if last is not None and last.until is None else None

    @property
    def leaving(self) -> tuple[AttemptRecord, ...]:
        """The ended attempts whose nodes are still paid, oldest first."""
        return tuple(each for each in self.attempts if each.end is not None and each.end.leaving)

    @property
    def may_cost(self) -> bool:
        """True while nodes of any of its attempts are paid, or may be."""
        return bool(self.current or self.ahead or self.leaving)

    @property
    def last_ended(self) -> AttemptRecord | None:
        """The newest attempt with a verdict."""
        ended = [attempt for attempt in self.attempts if attempt.end is not None]
        return ended[-1] if ended else None
