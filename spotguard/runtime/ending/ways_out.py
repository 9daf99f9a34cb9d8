"""Every way out of a job, as one table: what is saved, with whom, and how the process ends.

`leaving.py` notices the cause and does what the cause's row says. The exit code alone never says
how an attempt ended (a node returns 1 even after a clean save), so each way out also writes one
`ended` event, whose reason is the row's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from spotguard.errors import Fenced, JobFailed, SpotguardError, StoreError
from spotguard.events.states import EndReason


class Cause(Enum):
    """Why a job leaves."""

    ALL_STEPS_DONE = auto()
    """The loop has done its last step, or `run.end` was called."""
    LOOP_LEFT = auto()
    """The script left its loop on purpose: by `break`, or by an exit without an error."""
    TOLD = auto()
    """All ranks agreed on a step to stop after, and this one has reached it."""
    TOLD_AND_LATE = auto()
    """The same, but the main thread did not get there in time: the watcher's thread leaves."""
    TOLD_AND_LEFT = auto()
    """The script was told to stop, and left its loop by itself."""
    TOLD_AND_FAILED = auto()
    """It raised an error after it was told: what it needs may have been ended before it."""
    CTRL_C = auto()
    PEER_LOST = auto()
    """A collective or the rendezvous failed because another rank is gone."""
    SCRIPT_FAILED = auto()
    """The script raised an error of its own."""
    FENCED = auto()
    """A later attempt of the run has begun: this one must write nothing more."""
    STORE_FAILED = auto()
    UNPROTECTED = auto()
    """The script trains outside of any loop of ours."""
    STATE_REFUSED = auto()
    """The script does not fit its checkpoint, or uses spotguard wrongly."""


class Saves(Enum):
    """What a job saves before it leaves."""

    NOTHING = auto()
    IN_FLIGHT = auto()
    """Nothing new, but a save that is under way is waited for."""
    AGREED_STEP = auto()
    """The state after the agreed step, by all ranks together; alone if the others are gone."""
    LAST_STEP = auto()
    """The state after the last finished step; by this rank alone where it holds all of it."""
    FINAL = auto()
    """The final state, by all ranks together."""


class Ends(Enum):
    """How the process ends."""

    AS_THE_SCRIPT_DOES = auto()
    """The script goes on after its loop, or Python ends by the script's error: its own code."""
    BY_SYSTEM_EXIT = auto()
    """The main thread raises `SystemExit`, so that the script's own clean-up runs; not for long."""
    AT_ONCE = auto()
    """`os._exit`: the main thread may hang in a collective with a rank that is gone."""


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """One row of the table.

    The exit code of a job that was told to stop is 75, of an error of spotguard its own.
    """

    reason: EndReason | None
    """What the `ended` event says; None: what the request to stop says."""
    in_loop: Saves
    """What is saved while the script is in its training loop."""
    outside: Saves = Saves.NOTHING
    """And before or after the loop."""
    ends: Ends


WAYS_OUT = {
    Cause.ALL_STEPS_DONE: WayOut(
        reason=EndReason.FINISHED, in_loop=Saves.FINAL, ends=Ends.AS_THE_SCRIPT_DOES
    ),
    Cause.LOOP_LEFT: WayOut(
        reason=EndReason.FINISHED, in_loop=Saves.FINAL, ends=Ends.AS_THE_SCRIPT_DOES
    ),
    Cause.TOLD: WayOut(reason=None, in_loop=Saves.AGREED_STEP, ends=Ends.BY_SYSTEM_EXIT),
    Cause.TOLD_AND_LATE: WayOut(reason=None, in_loop=Saves.LAST_STEP, ends=Ends.AT_ONCE),
    Cause.TOLD_AND_LEFT: WayOut(reason=None, in_loop=Saves.LAST_STEP, ends=Ends.AT_ONCE),
    Cause.TOLD_AND_FAILED: WayOut(
        reason=None, in_loop=Saves.LAST_STEP, outside=Saves.IN_FLIGHT, ends=Ends.AT_ONCE
    ),
    Cause.CTRL_C: WayOut(
        reason=EndReason.STOPPED,
        in_loop=Saves.LAST_STEP,
        outside=Saves.IN_FLIGHT,
        ends=Ends.AT_ONCE,
    ),
    Cause.PEER_LOST: WayOut(
        reason=EndReason.NODE_LOST,
        in_loop=Saves.LAST_STEP,
        outside=Saves.IN_FLIGHT,
        ends=Ends.AT_ONCE,
    ),
    Cause.SCRIPT_FAILED: WayOut(
        reason=EndReason.FAILED,
        in_loop=Saves.IN_FLIGHT,
        outside=Saves.IN_FLIGHT,
        ends=Ends.AS_THE_SCRIPT_DOES,
    ),
    Cause.FENCED: WayOut(reason=EndReason.FENCED, in_loop=Saves.NOTHING, ends=Ends.BY_SYSTEM_EXIT),
    Cause.STORE_FAILED: WayOut(
        reason=EndReason.STORE_FAILED, in_loop=Saves.NOTHING, ends=Ends.BY_SYSTEM_EXIT
    ),
    Cause.UNPROTECTED: WayOut(
        reason=EndReason.UNPROTECTED, in_loop=Saves.NOTHING, ends=Ends.BY_SYSTEM_EXIT
    ),
    Cause.STATE_REFUSED: WayOut(
        reason=EndReason.FAILED, in_loop=Saves.NOTHING, ends=Ends.BY_SYSTEM_EXIT
    ),
}


def cause_of(problem: SpotguardError) -> Cause:
    """Return the cause that an error of ours is."""
    if isinstance(problem, Fenced):
        return Cause.FENCED
    if isinstance(problem, JobFailed):
        return Cause.UNPROTECTED
    return Cause.STORE_FAILED if isinstance(problem, StoreError) else Cause.STATE_REFUSED
