"""What becomes of a node and when: the clouds' own times, scaled. Pure arithmetic.

| | notice | SIGTERM | SIGKILL |
|---|---|---|---|
| AWS | at once | after 120 s | 2 s later |
| Google | at once | after 1 s | 30 s after the notice |
| Azure | at once | after 30 s | 2 s later |
| no metadata service | a file, at once | after 1 s | 30 s after the notice |
| `term` | never | at once and 0.3 s later | 30 s later |
| `kill` | never | never | at once |

A speed-up divides these times, but leaves 1.5 s after a notice and 2 s after `term`: a process
cannot be sped up, and with less no job could react. AWS and Azure announce whole seconds, cut
off, so that what they announce is up to a second early and never late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from spotguard.launch.local.interruptions import How

MIN_NOTICE_S = 1.5
MIN_TERM_GRACE_S = 2.0
RELEASE_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL when the user or the controller gives a node back, or when a cluster
has lived longer than it was meant to: its job had its own time to save, before that."""

_NOTICE_S: Final = {"aws": 120.0, "azure": 30.0, "gcp": 30.0, "none": 30.0}
_SIGTERM_WITH_NOTICE: Final = ("gcp", "none")
"""Where the operating system shuts down during the grace, and not only at its end."""
_TERM_GRACE_S = 30.0
_REPEAT_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What was decided for a node. Instants are on the monotonic clock."""

    since: float
    """When it was decided."""
    term_at: tuple[float, ...]
    """When SIGTERM goes to every process of the node."""
    kill_at: float
    """When SIGKILL does, until none is left."""
    announced_at: float | None = None
    """The deadline that the notice names; None where there is no notice."""
    left: str
    """How a node ended that left by itself before `kill_at`, in words."""
    taken: str
    """How a node ended that did not; `{after}` becomes the time since `since`."""

    def after_term(self) -> Fate:
        """Return what is left of it when the next SIGTERM was sent."""
        return replace(self, term_at=self.term_at[1:])

    def hastened(self, now: float) -> Fate:
        """Return it with its deadline, and what follows from that, moved forward to `now`."""
        assert self.announced_at is not None
        earlier_s = max(0.0, self.announced_at - now)
        return replace(
            self,
            term_at=tuple(at - earlier_s for at in self.term_at),
            kill_at=self.kill_at - earlier_s,
            announced_at=self.announced_at - earlier_s,
        )


def notice_fate(cloud: str, speed_up: float, now: float) -> Fate:
    """Return the fate of a node that gets `cloud`'s notice at `now`."""
    grace_s = max(MIN_NOTICE_S, _NOTICE_S[cloud] / speed_up)
    deadline = now + grace_s
    if cloud in _SIGTERM_WITH_NOTICE:
        term_at, kill_at = now + max(0.1, 1.0 / speed_up), deadline
    else:
        term_at, kill_at = deadline, deadline + max(0.2, 2.0 / speed_up)
    return Fate(
        since=now,
        term_at=(term_at,),
        kill_at=kill_at,
        announced_at=deadline,
        left="left after the notice",
        taken="taken by the cloud {after} after its notice",
    )


def term_fate(speed_up: float, now: float) -> Fate:
    """Return the fate of a node that gets SIGTERM at `now`, twice as on real clusters."""
    return Fate(
        since=now,
        term_at=(now, now + _REPEAT_S),
        kill_at=now + term_grace_s(speed_up),
        left="left after SIGTERM, which came without a notice",
        taken="killed {after} after SIGTERM, which came without a notice",
    )


def kill_fate(now: float) -> Fate:
    """Return the fate of a node that is killed at `now`."""
    return Fate(
        since=now,
        term_at=(),
        kill_at=now,
        left="ended just before it was killed",
        taken="killed without notice",
    )


def release_fate(now: float) -> Fate:
    """Return the fate of a node that is given back at `now`."""
    return Fate(
        since=now,
        term_at=(now,),
        kill_at=now + RELEASE_GRACE_S,
        left="left when it was released",
        taken="released",
    )


def leak_guard_fate(now: float, lifetime_s: float, *, late_s: float = 0.0) -> Fate:
    """Return the fate of a node whose cluster outlived its `lifetime_s` at `now`.

    `late_s` is how long ago that was: who notices late, on a busy machine, kills no later.
    """
    words = f"by the leak guard: the cluster was meant to live {lifetime_s:g} s"
    return Fate(
        since=now,
        term_at=(now,),
        kill_at=now + max(0.0, RELEASE_GRACE_S - late_s),
        left=f"told to end {words}",
        taken=f"ended {words}",
    )


def fate_of(how: How, cloud: str, speed_up: float, now: float) -> Fate:
    """Return the fate of a node to which the cloud does `how` at `now`."""
    if how is How.KILL:
        return kill_fate(now)
    if how is How.TERM:
        return term_fate(speed_up, now)
    return notice_fate(cloud, speed_up, now)


def term_grace_s(speed_up: float) -> float:
    """Return the seconds between an unannounced SIGTERM and SIGKILL."""
    return max(MIN_TERM_GRACE_S, _TERM_GRACE_S / speed_up)
