"""MLflow: the same run over all attempts, found by a tag."""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

from spotguard.errors import MissingExtra
from spotguard.runtime.reporting.trackers import TrackerProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spotguard.runtime import Run

TAG = "spotguard.run_id"
_AT_ONCE = 1000
"""MLflow's own limit of metrics in one request."""
_LARGEST = 1.7976931348623157e308


class MlflowTracker:
    """A `Tracker` for `run.report_to`: an MLflow run that bears the run's id as a tag.

    MLflow never takes a value back. So of a step that was lost with an attempt and is done again,
    the value that it has stays: each step stands there once.
    """

    def __init__(
        self,
        run: Run,
        *,
        experiment: str = "spotguard",
        tracking_uri: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is asked of MLflow before the loop begins.

        Args:
            run: From `spotguard.init`.
            experiment: Its name; made if there is none.
            tracking_uri: Where MLflow is; as MLflow knows (`MLFLOW_TRACKING_URI`) unless given.
            params: Logged once, when the run begins.
            tags: Set on the run.

        Raises:
            MissingExtra: mlflow is not installed.
        """
        try:
            from mlflow.exceptions import MlflowException

            library: Any = import_module("mlflow.tracking")
        except ImportError:
            raise MissingExtra(
                "MLflow needs the package mlflow-skinny or mlflow",
                hint="pip install 'spotguard[mlflow]'",
            ) from None
        self._fails = (MlflowException, OSError)
        self._client: Any = None
        self._make_client: Callable[[], Any] = lambda: library.MlflowClient(
            tracking_uri=tracking_uri
        )
        self._id = run.id
        self._experiment = experiment
        self._params = dict(params or {})
        self._tags = dict(tags or {})
        self.run_id: str | None = None
        """MLflow's own id of the run, once the loop has begun."""
        self._newest: dict[str, int] = {}
        """By name, the newest step that MLflow has of attempts before."""
        self._resumed = False
        self._waiting: list[Any] = []

    def begin(self, first: int) -> None:
        """Find the run, or begin it."""
        try:
            self._client = self._make_client()
            self.run_id = self._find() or self._create()
        except self._fails as problem:
            raise TrackerProblem(f"MLflow: {problem}") from problem

    def _find(self) -> str | None:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return None
        found = self._client.search_runs(
            [experiment.experiment_id], f"tags.`{TAG}` = '{self._id}'", max_results=1
        )
        if not found:
            return None
        self._resumed = True
        run_id = str(found[0].info.run_id)
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _create(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = (
            self._client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        tags = {**self._tags, TAG: self._id}
        run = self._client.create_run(experiment_id, run_name=self._id, tags=tags)
        for name, value in self._params.items():
            self._client.log_param(run.info.run_id, name, value)
        return str(run.info.run_id)

    def log(self, step: int, values: dict[str, float], at: float) -> None:
        """Take values of a step; they are sent with the next hundreds, or when flushed."""
        if self.run_id is None:
            return
        from mlflow.entities import Metric

        for name, value in values.items():
            if step > self._newest_of(name):
                if math.isinf(value):  # some of its databases know no infinity
                    value = math.copysign(_LARGEST, value)
                self._waiting.append(Metric(name, value, int(at * 1000), step))
        if len(self._waiting) >= _AT_ONCE:
            self.flush()

    def _newest_of(self, name: str) -> int:
        if name not in self._newest:
            self._newest[name] = -1
            if self._resumed:
                try:
                    history = self._client.get_metric_history(self.run_id, name)
                except self._fails as problem:
                    del self._newest[name]
                    raise TrackerProblem(f"MLflow: {problem}") from problem
                self._newest[name] = max((metric.step for metric in history), default=-1)
        return self._newest[name]

    def preempting(self) -> None:
        """Say so by a tag."""
        if self.run_id is not None:
            try:
                self._client.set_tag(self.run_id, "spotguard.preempting", "true")
            except self._fails as problem:
                raise TrackerProblem(f"MLflow: {problem}") from problem

    def flush(self) -> None:
        """Send what waits."""
        while self._waiting and self.run_id is not None:
            try:
                self._client.log_batch(self.run_id, metrics=self._waiting[:_AT_ONCE])
            except self._fails as problem:
                raise TrackerProblem(f"MLflow: {problem}") from problem
            del self._waiting[:_AT_ONCE]

    def close(self, *, finished: bool) -> None:
        """Send the rest, and end the run if it is finished; else another attempt follows."""
        if self.run_id is None:
            return
        self.flush()
        if finished:
            try:
                self._client.set_terminated(self.run_id, "FINISHED")
            except self._fails as problem:
                raise TrackerProblem(f"MLflow: {problem}") from problem
