"""Run states, end reasons and the other vocabularies; each value owns its words and colour."""

from __future__ import annotations

from enum import Enum


class _Worded(str, Enum):
    """A string enum whose members carry what the user reads."""

    label: str
    hint: str
    colour: str

    def __new__(
        cls, value: str, label: str = "", hint: str = "", colour: str = "default"
    ) -> _Worded:
        member = str.__new__(cls, value)
        member._value_ = value
        member.label = label
        member.hint = hint
        member.colour = colour
        return member

    def __str__(self) -> str:
        return str(self.value)


class RunState(_Worded):
    """Where a run stands. `exit_code` is what a command that follows the run returns."""

    LAUNCHING = ("launching", "launching", "nodes are being started", "cyan")
    RUNNING = ("running", "running", "training goes on", "green")
    CONTACT_LOST = (
        "contact_lost",
        "contact lost",
        "no sign of life, but no proof of death either; nothing is killed, it may come back",
        "yellow",
    )
    CLOUD_SILENT = (
        "cloud_silent",
        "cloud silent",
        "the job gives signs of life, but who launched its nodes says nothing of them; nothing is "
        "killed",
        "yellow",
    )
    DRAINING = ("draining", "draining", "saving, then releasing the nodes", "cyan")
    RECOVERING = ("recovering", "recovering", "the next attempt is being prepared", "cyan")
    WAITING = ("waiting", "waiting for capacity", "no place has enough nodes now", "yellow")
    PAUSED = ("paused", "paused", "its nodes are released; `spotguard resume` goes on", "yellow")
    FINISHED = ("finished", "finished", "all steps are done", "green")
    FAILED = ("failed", "failed", "the job itself failed; see the traceback below", "red")
    STOPPED = ("stopped", "stopped", "stopped by you; `spotguard resume` goes on", "yellow")

    @property
    def settled(self) -> bool:
        """True when nothing more happens unless the user asks for it."""
        return self in (RunState.PAUSED, RunState.FINISHED, RunState.FAILED, RunState.STOPPED)


class EndReason(_Worded):
    """Why an attempt ended. A preemption is expected, so it is never red."""

    FINISHED = ("finished", "finished", "all steps done", "green")
    PREEMPTED = (
        "preempted",
        "preempted with notice, saved in time",
        "the cloud announced it; the job saved and left",
        "yellow",
    )
    TERMINATED = (
        "terminated",
        "told to end by SIGTERM, saved in time",
        "no cloud notice came, only the signal; the job saved and left",
        "yellow",
    )
    NODE_LOST = (
        "node_lost",
        "a node vanished without notice",
        "the survivors saved what they had, or the last periodic save counts",
        "yellow",
    )
    VANISHED = (
        "vanished",
        "the whole cluster vanished without notice",
        "the last committed save counts",
        "yellow",
    )
    RESIZED = ("resized", "resized", "saved to go on with another node count", "cyan")
    MOVED = ("moved", "moved", "saved to go on in another place", "cyan")
    PHASE_DONE = (
        "phase_done",
        "phase done, state saved",
        "the next phase begins by itself",
        "cyan",
    )
    BUDGET = (
        "budget",
        "budget reached, state saved",
        "raise it: spotguard resume --budget",
        "yellow",
    )
    DEADLINE = (
        "deadline",
        "deadline reached, state saved",
        "spotguard resume --deadline",
        "yellow",
    )
    STOPPED = ("stopped", "stopped by you, state saved", "spotguard resume goes on", "yellow")
    NO_CAPACITY = ("no_capacity", "no capacity", "no place had the nodes", "yellow")
    STORE_FAILED = (
        "store_failed",
        "the store failed",
        "state could not be saved; free space or fix the store, then spotguard resume",
        "red",
    )
    FENCED = ("fenced", "fenced by a later attempt", "it wrote nothing that counts", "yellow")
    UNPROTECTED = (
        "unprotected",
        "the script trains without spotguard",
        "use run.steps, spotguard.integrations, or run.begin_step: see docs/coming-from.md",
        "red",
    )
    LAUNCH_FAILED = ("launch_failed", "the launch failed", "nodes did not start", "red")
    FAILED = ("failed", "the job's own failure", "see its traceback", "red")

    def told(self, saved: bool | None, *, by_sweep: bool = False) -> str:
        """Return the label, with what became of the state if the label speaks of it.

        Args:
            saved: Whether all that was done is saved; None if that is not known.
            by_sweep: Whether it was the run's sweep that wanted it stopped, and not the user.
        """
        label = self.label.replace("by you", "by its sweep") if by_sweep else self.label
        what, promise, _ = label.partition(", ")
        if not promise or saved:
            return label
        return what if saved is None else f"{what}, not saved in time"

    @property
    def retried(self) -> bool:
        """True when the next attempt starts by itself."""
        return self in (
            EndReason.PREEMPTED,
            EndReason.TERMINATED,
            EndReason.NODE_LOST,
            EndReason.VANISHED,
            EndReason.RESIZED,
            EndReason.MOVED,
            EndReason.FENCED,
        )


class CheckpointKind(_Worded):
    """Why a checkpoint was made."""

    PERIODIC = ("periodic", "periodic")
    EMERGENCY = ("emergency", "emergency")
    BEST = ("best", "best")
    FINAL = ("final", "final")


class Market(_Worded):
    """How a node is bought."""

    SPOT = ("spot", "spot")
    ON_DEMAND = ("on_demand", "on-demand")


EXIT_CODE_OF_JOB_TOLD_TO_STOP = 75
"""The job's exit code after 'saved and told to stop' (EX_TEMPFAIL of sysexits.h)."""
