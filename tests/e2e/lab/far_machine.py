"""A user's machine whose runs are on nodes elsewhere, which take minutes to come."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from tests.e2e.lab import lab_jobs
from tests.e2e.lab.lab_jobs import Lab, Status

if TYPE_CHECKING:
    from collections.abc import Callable

_OVER = ("finished", "failed", "paused", "stopped")


class FarMachine(Lab):
    """Waits for what its runs do. Each look is a command."""

    look_every_s: ClassVar[float] = 4.0
    """More looks would take the cores from what they wait for."""
    launch_s: ClassVar[float] = 900.0
    """How long nodes may take to come up, on a machine that has ten times as much to do."""
    more_steps: ClassVar[int] = 3
    """After which it is believed that an attempt trains."""

    def trains(self, run: str, *, attempt: int, more_steps: int | None = None) -> Status:
        """Return the status once `attempt`, or a later one, has done some steps."""
        enough = self.more_steps if more_steps is None else more_steps
        base: list[int] = []

        def reached(status: Status) -> bool:
            assert status["state"] not in _OVER, status
            attempts = status["attempts"]
            if status["state"] != "running" or attempts[-1]["attempt"] < attempt:
                return False
            base.append(status["step"])
            return bool(status["step"] >= base[0] + enough)

        return self._watched(run, reached, f"attempt {attempt} trains", self.launch_s)

    def ended(self, run: str, *, attempt: int, within_s: float = 600.0) -> Status:
        """Return the status once `attempt` has ended."""

        def over(status: Status) -> bool:
            ends = {each["attempt"]: each["end_reason"] for each in status["attempts"]}
            return ends.get(attempt) is not None

        return self._watched(run, over, f"attempt {attempt} has ended", within_s)

    def is_in(self, run: str, *states: str, within_s: float | None = None) -> Status:
        """Return the status once the run is in one of these states."""
        words = f"{run} is {' or '.join(states)}"
        limit_s = self.launch_s if within_s is None else within_s
        return self._watched(run, lambda status: status["state"] in states, words, limit_s)

    def settled(self, run: str, *, within_s: float | None = None) -> Status:
        """Wait until the run settles and return its status."""
        limit_s = 2 * self.launch_s if within_s is None else within_s
        said = self.spotguard("status", run, "--watch", timeout_s=limit_s)
        assert said.code == 0, said.err
        return self.status(run)

    def kinds(self, run: str) -> list[str]:
        """Return what kinds of things happened to a run."""
        return [entry["kind"] for entry in self.history(run)]

    def _watched(
        self, run: str, enough: Callable[[Status], bool], what: str, limit_s: float
    ) -> Status:
        status: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal status
            status = self.status(run)
            return enough(status)

        wait_until = partial(lab_jobs.wait_until, every_s=self.look_every_s)
        wait_until(reached, what, timeout_s=limit_s)
        return status
