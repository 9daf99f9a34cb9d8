"""TensorBoard: one log folder over all attempts, of which superseded steps are purged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotguard.errors import MissingExtra
from spotguard.runtime.reporting.trackers import TrackerProblem

if TYPE_CHECKING:
    from pathlib import Path

_FAILS = (OSError, RuntimeError, ValueError)


class TensorBoardTracker:
    """A `Tracker` for `run.report_to`: event files that TensorBoard reads as one run.

    The folder must outlive a node: on a disk that all nodes share, or a bucket's URL as far as
    your TensorBoard can write there.
    """

    def __init__(self, log_dir: str | Path) -> None:
        """Nothing is written before the loop begins.

        Raises:
            MissingExtra: tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra(
                "TensorBoard needs the package tensorboard",
                hint="pip install 'spotguard[tensorboard]'",
            ) from None
        self._make = SummaryWriter
        self._log_dir = str(log_dir)
        self._writer: Any = None

    def begin(self, first: int) -> None:
        """Begin a file; by it, what earlier ones say of the step `first` and later is void."""
        try:
            self._writer = self._make(self._log_dir, purge_step=first)
        except _FAILS as problem:
            raise TrackerProblem(f"TensorBoard: {problem}") from problem

    def log(self, step: int, values: dict[str, float], at: float) -> None:
        """Write values of a step."""
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step, walltime=at)
        except _FAILS as problem:
            raise TrackerProblem(f"TensorBoard: {problem}") from problem

    def preempting(self) -> None:
        """Do nothing: TensorBoard knows no such state."""

    def flush(self) -> None:
        """Write the file out."""
        if self._writer is not None:
            try:
                self._writer.flush()
            except _FAILS as problem:
                raise TrackerProblem(f"TensorBoard: {problem}") from problem

    def close(self, *, finished: bool) -> None:
        """End the file."""
        if self._writer is not None:
            try:
                self._writer.close()
            except _FAILS as problem:
                raise TrackerProblem(f"TensorBoard: {problem}") from problem
