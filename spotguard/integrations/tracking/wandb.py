"""Weights & Biases: the same run over all attempts, by the run's own id."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from spotguard.errors import MissingExtra
from spotguard.runtime.reporting.trackers import TrackerProblem

if TYPE_CHECKING:
    from spotguard.runtime import Run

log = logging.getLogger("spotguard")

_FAILS = (OSError, RuntimeError, ValueError, TypeError)


class WandbTracker:
    """A `Tracker` for `run.report_to`: a W&B run whose id is the run's, resumed by each attempt.

    Where the server can rewind, the run goes back to the step that an attempt resumed from. Else
    W&B itself keeps the first value of each step: it takes no step below its newest. What you log
    with a `step=` of your own must therefore not go back either.
    """

    def __init__(self, run: Run, *, rewind: bool | None = None, **options: Any) -> None:
        """Nothing is asked of W&B before the loop begins.

        Args:
            run: From `spotguard.init`.
            rewind: Ask the server to rewind to the restored step; None does where it is online.
            **options: Of `wandb.init`: `project`, `entity`, `config`, `dir`, `mode` ...

        Raises:
            MissingExtra: wandb is not installed.
        """
        try:
            import wandb
        except ImportError:
            raise MissingExtra(
                "W&B needs the package wandb", hint="pip install 'spotguard[wandb]'"
            ) from None
        self._wandb = wandb
        self._id = run.id
        self._rewind = rewind
        self._options = options
        self._run: Any = None
        self._preempting = False

    @property
    def run(self) -> Any:
        """The `wandb.Run`, once the loop has begun; None before, and on other ranks."""
        return self._run

    def begin(self, first: int) -> None:
        """Resume the run, or begin it; after `first` steps."""
        wandb = self._wandb
        settings = {"id": self._id, "name": self._id, **self._options}
        online = settings.get("mode", wandb.setup().settings.mode) in (None, "online")
        rewind = online if self._rewind is None else self._rewind
        try:
            if first and rewind:
                try:
                    # The last step that counts is the one before.
                    self._run = wandb.init(
                        **{k: v for k, v in settings.items() if k != "id"},
                        resume_from=f"{self._id}?_step={first - 1}",
                    )
                except (wandb.Error, *_FAILS) as problem:
                    log.warning("W&B does not rewind: %s; it keeps its first values", problem)
            if self._run is None:
                self._run = wandb.init(**settings, resume="allow")
        except (wandb.Error, *_FAILS) as problem:
            raise TrackerProblem(f"W&B: {problem}") from problem

    def log(self, step: int, values: dict[str, float], at: float) -> None:
        """Log values of a step."""
        if self._run is None:
            return
        try:
            self._run.log(values, step=step)
        except (self._wandb.Error, *_FAILS) as problem:
            raise TrackerProblem(f"W&B: {problem}") from problem

    def preempting(self) -> None:
        """Have W&B say `preempting`, and then `preempted`, instead of `crashed`."""
        if self._run is None or self._preempting:
            return
        self._preempting = True
        try:
            self._run.mark_preempting()
        except (self._wandb.Error, *_FAILS) as problem:
            raise TrackerProblem(f"W&B: {problem}") from problem

    def flush(self) -> None:
        """Do nothing: another process of W&B's own has what was logged."""

    def close(self, *, finished: bool) -> None:
        """End this attempt's part; what was preempted ends with another code than 0."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=0 if finished else 1)
        except (self._wandb.Error, *_FAILS) as problem:
            raise TrackerProblem(f"W&B: {problem}") from problem
