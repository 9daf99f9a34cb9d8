"""How patient the controller is with a job, and which margins it keeps.

Where nodes are real, all takes longer: SkyPilot needs half a minute and more for a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.control.supervisor.request import heartbeat_s
from spotguard.shared.units import parse_duration_s
from spotguard.spec.infra import DEADLINE, FALLBACK, LOCAL

if TYPE_CHECKING:
    from spotguard.events.states import Market
    from spotguard.spec.model import JobSpec

_LOCAL_CAPACITY_PATIENCE_S = 60.0
_BEATS_MISSED = 10


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The controller's patience and margins."""

    survivor_patience_s: float = 15.0
    """For the other nodes to save and report after one was lost or failed."""
    exit_patience_s: float = 10.0
    """For the nodes to go by themselves after the job reported its end."""
    solo_exit_patience_s: float = 3.0
    """The same where a node is gone, of which nothing will be heard, and another has saved."""
    regroup_patience_s: float = 20.0
    """The same where the nodes that stay may go on in place."""
    regrow_after_s: float = 1800.0
    """An attempt in place on fewer nodes than the run may have is saved and launched anew, on as
    many as can be had, after this long."""
    regrow_startups: float | None = None
    """Any attempt on fewer nodes than the run may have is launched anew after so many times its
    own start-up, if that pays. None: only those that went on in place."""
    market: Market | None = None
    """What nodes are bought as; None is whatever is offered."""
    max_usd_per_h: float | None = None
    """No spot node that costs more is bought. None: no limit."""
    on_demand_after_s: float | None = None
    """Spot nodes that were not to be had for so long may be on-demand ones. None: never."""
    on_demand_for_deadline: bool = False
    """Nodes are bought on demand where the deadline could not be kept otherwise."""
    back_to_spot_after_s: float = 3600.0
    """An attempt that had to buy on demand is saved and launched anew after this."""
    think_of_moves_s: float = 3600.0
    """A spot attempt thinks so often about cheaper places that say that they have nodes."""
    start_s: float = 30.0
    """What a start takes, as long as none has been seen."""
    ask_s: float = 60.0
    """What asking for nodes in vain may take until the next decision."""
    avoid_lost_place_s: float = 1800.0
    """A place that took nodes is asked last for this long."""
    finish_patience_s: float = 300.0
    """The same after the last step: what follows the loop (an export, a last evaluation) is
    the user's work and is not cut short lightly."""
    stop_patience_s: float = 300.0
    """For the job to save after the user asked it to stop."""
    down_patience_s: float = 30.0
    """Until the launcher is asked again to take the nodes down."""
    down_retry_s: float = 5.0
    """Between tries when the launcher fails to take them down."""
    intent_valid_s: float = 30.0
    """A launch that was written down but not made is given up after this."""
    capacity_patience_s: float = 600.0
    """How long to wait for capacity before the run is paused."""
    capacity_backoff_s: float = 1.0
    """The first wait between rounds of launching; doubles up to `capacity_backoff_max_s`."""
    capacity_backoff_max_s: float = 30.0
    quota_patience_s: float = 180.0
    """A quota that is full may be so for a moment only: nodes count until a cloud has closed their
    books. A run that had no nodes of late is not kept waiting long, as it may have no quota at all.
    """
    quota_freed_s: float = 900.0
    """The same after the end of the run's own last nodes, which filled it."""
    barren_attempts: int = 3
    """So many attempts in a row without one new step pause the run."""
    contact_patience_s: float = 15.0
    """Silence that counts as lost contact."""
    answer_patience_s: float = 600.0
    """For the launcher to say whether nodes live of which nothing is known, before the run rests
    without its word."""
    save_s: float = 3.0
    """Kept for the last save, until a slower one has been measured."""
    teardown_s: float = 7.0
    """Kept for the nodes' end, until a slower one has been measured. The local launcher kills 2 s
    after its leak guard is due; the rest is for a machine that is busy."""
    useful_s: float = 5.0
    """An attempt that could train for less is not worth its start."""


SKY_POLICY = Policy(
    survivor_patience_s=30.0,  # EC2 tells of a lost node seconds after it is gone
    down_patience_s=180.0,
    down_retry_s=15.0,
    intent_valid_s=180.0,
    capacity_patience_s=86_400.0,
    capacity_backoff_s=10.0,
    capacity_backoff_max_s=300.0,
    contact_patience_s=60.0,
    answer_patience_s=3600.0,
    save_s=10.0,
    teardown_s=225.0,  # 60 s until a frozen job is killed; SkyPilot ended its cluster after 155 s
    useful_s=60.0,
    start_s=600.0,
    ask_s=600.0,
    regrow_startups=3.0,
)
"""Where nodes are real, all takes longer: SkyPilot needs half a minute and more for a cluster."""
_LOCAL_BARREN_ATTEMPTS = 10
"""More than elsewhere: a local node costs nothing, and may be interrupted as often as you like."""


def policy_for(spec: JobSpec) -> Policy:
    """Return the controller's patience for such a job."""
    if spec.infra != LOCAL:
        beats_s = _BEATS_MISSED * heartbeat_s(spec)
        rule, _, after = spec.on_demand.partition(" ")
        return replace(
            SKY_POLICY,
            contact_patience_s=max(beats_s, SKY_POLICY.contact_patience_s),
            market=spec.market,
            max_usd_per_h=spec.max_price_usd_per_h,
            on_demand_after_s=parse_duration_s(after) if rule == FALLBACK else None,
            on_demand_for_deadline=rule == DEADLINE,
        )
    return Policy(
        capacity_patience_s=_LOCAL_CAPACITY_PATIENCE_S,
        barren_attempts=_LOCAL_BARREN_ATTEMPTS,
        contact_patience_s=max(_BEATS_MISSED * heartbeat_s(spec), Policy().contact_patience_s),
    )
