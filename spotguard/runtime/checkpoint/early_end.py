"""That a script has ended its training before the last step, which is a part of its state.

What follows the loop may take long: a test set, an export. If the job is interrupted there, the
next attempt has to begin there, too, and must not train on to the last step with other weights.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from spotguard.runtime.process import clock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.runtime.checkpoint.captured import Saved
    from spotguard.runtime.preemption.stop_consensus import StopRequest

log = logging.getLogger("spotguard")

SAME_MOMENT_S: Final = 5.0
"""A script that leaves its loop by `break` so shortly before it is told to stop, or after that, may
do so because it knows. Clocks of nodes differ, too."""
_KEY: Final = "ended_early"


class EarlyEnd:
    """Why the training is over before its last step, once it is."""

    def __init__(self) -> None:
        self.why: str | None = None
        """As the script has said so far, in the midst of a step, too."""
        self._at_boundary: str | None = None
        """As it had said by the last step boundary: what is saved of that."""
        self._asked_for: dict[str, int | None] = {}
        self._loop_left_at = 0.0
        self._told_at: float | None = None
        self._said_not_kept = False

    def begin(self, total: int | None, epochs: int | None, counters: Mapping[str, Any]) -> bool:
        """Return whether the training was ended early in the checkpoint with these counters.

        One that asks for more steps or epochs in all than the script did then is to train on.
        """
        self._asked_for = {"total": total, "epochs": epochs}
        found = counters.get(_KEY)  # which earlier versions do not have
        if not isinstance(found, dict) or not isinstance(why := found.get("why"), str):
            return False
        if any(_number(asked) > _number(found.get(of)) for of, asked in self._asked_for.items()):
            return False
        self.why = self._at_boundary = why
        return True

    def take(self) -> None:
        """Take what was said so far for a part of the step boundary."""
        self._at_boundary = self.why

    def loop_left(self) -> None:
        """Take note that the script leaves its loop now: by `break`, or by an error."""
        self._loop_left_at = clock.now()

    def told(self, request: StopRequest) -> None:
        """Take note that the process ends by this request, and what follows the loop is cut short.

        The script knows of none that does not say when it was made.
        """
        self._told_at = request.warned_at or clock.now()

    def left_on_purpose(self) -> None:
        """Take where the loop was left by `break` for the boundary, as the process ends after it.

        If it was told to stop since then, the `break` has ended the training, unless it may be due
        to that. Else it has ended the run, and who starts that again takes it up where it was left.
        """
        told_at = self._told_at
        if told_at is not None and told_at > self._loop_left_at + SAME_MOMENT_S:
            self.why = self.why or "the loop was left early"
        self.take()

    def saved(self, saved: Saved | None) -> None:
        """Say once that the boundary's checkpoint does not tell of the end, which came after it.

        A step is saved once in an attempt, so the next one will train on from there.
        """
        if saved is None or self._at_boundary is None or saved.ended_early is not False:
            return
        if not self._said_not_kept:
            self._said_not_kept = True
            log.warning(
                "step %d was saved before the training was ended (%s), so no checkpoint tells of "
                "it: if the job is interrupted from here on, the next attempt trains on",
                saved.step,
                self._at_boundary,
            )

    def counters(self) -> dict[str, Any]:
        """Return what `begin` reads."""
        if self._at_boundary is None:
            return {}
        return {_KEY: {"why": self._at_boundary, **self._asked_for}}


def is_early_end(counters: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint with these counters tells of an early end."""
    return counters.get(_KEY) is not None


def _number(value: object) -> int:
    """Return a number from the store, 0 for anything else."""
    return value if isinstance(value, int) else 0
