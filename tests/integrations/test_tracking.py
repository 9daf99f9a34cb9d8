"""Trackers go on over attempts: after three interruptions one run, and no step in it twice.

Each against the real library, offline; those that are not installed are skipped by name.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from spotguard.errors import MissingExtra
from spotguard.events.metric import MetricLine
from spotguard.runtime.reporting import trackers
from spotguard.runtime.reporting.metrics import Metrics
from spotguard.runtime.reporting.trackers import TrackerFeed, TrackerProblem
from spotguard.testing import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.reporting.trackers import Tracker

ROOT = Path(__file__).parents[2]
ATTEMPTS = ((0, 7), (4, 9), (8, 14), (10, 20))
"""Where each attempt begins, and where it is taken: three interruptions."""
PATIENCE_S = 240.0
"""For a process to load its library and to flush, where many others keep the cores busy."""
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of libraries that are not ours
    pytest.mark.timeout(300),
]


class Run:
    """As much of a run as a tracker asks for."""

    id = "gpt-261124-1200-ab12"


CHILD = """
import sys
from tests.integrations.test_tracking import tracker_in, train_and_hang
train_and_hang(tracker_in(sys.argv[1], sys.argv[2]), *map(int, sys.argv[3:]))
"""


def tracker_in(name: str, folder: str) -> Tracker:
    """Return a tracker of that library which keeps all in a folder."""
    run: Any = Run()
    if name == "tensorboard":
        from spotguard.integrations.tracking.tensorboard import TensorBoardTracker

        return TensorBoardTracker(f"{folder}/board")
    if name == "mlflow":
        from spotguard.integrations.tracking.mlflow import MlflowTracker

        return MlflowTracker(run, tracking_uri=_mlflow_uri(Path(folder)), experiment="gpt")
    from spotguard.integrations.tracking.wandb import WandbTracker

    return WandbTracker(run, project="gpt", mode="offline", dir=folder)


class Watched:
    """A tracker of which others may know that it has flushed."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.flushed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    def flush(self) -> None:
        """Pass it on."""
        self._tracker.flush()
        self.flushed.set()


def train_and_hang(tracker: Tracker, number: int, first: int, last: int, saved: int) -> None:
    """Train one attempt that commits the step `saved`, goes on to `last`, and then hangs."""
    metrics = Metrics(MemoryStore(), attempt=number, node=0, local_rank=1, rank=0)
    watched: Any = Watched(tracker)
    metrics.report_to(watched)
    metrics.begin(first)
    for step in range(first, last):
        metrics.log(None, {"loss": step + 0.5, "val/acc": step / 100})
        metrics.finished_step(step + 1, 0.0, None)
        if step + 1 == saved:
            metrics.before_commit()
            assert watched.flushed.wait(PATIENCE_S)  # a save itself waits for seconds only
    if number == len(ATTEMPTS):
        metrics.close(finished=True, timeout_s=120.0)
        return
    print("hangs", flush=True)  # noqa: T201 - said to who kills it
    time.sleep(600)


def train_and_kill(name: str, folder: Path) -> None:
    """Train in four processes, of which three are killed soon after what they commit."""
    if name == "mlflow":  # its database, which a server would have; to make one takes it seconds
        from mlflow.tracking import MlflowClient

        MlflowClient(tracking_uri=_mlflow_uri(folder)).search_experiments()
    # W&B tells children of which process it is a service, here of one that another test began.
    environ = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    for number, (first, last) in enumerate(ATTEMPTS, start=1):
        saved = ATTEMPTS[number][0] if number < len(ATTEMPTS) else last
        given = [name, str(folder), *map(str, (number, first, last, saved))]
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", CHILD, *given],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **environ,
                "WANDB_SILENT": "true",
                "WANDB_INIT_TIMEOUT": f"{PATIENCE_S:.0f}",
                "PYTHONPATH": str(ROOT),
            },
        )
        assert child.stdout is not None
        if number < len(ATTEMPTS):
            assert any("hangs" in line for line in child.stdout)
            time.sleep(random.Random(number).uniform(0.0, 0.5))
            helpers = psutil.Process(child.pid).children(recursive=True)
            child.kill()
            psutil.wait_procs(helpers, timeout=60)  # they end by themselves once it is gone
        child.wait(PATIENCE_S)
        child.stdout.close()
        assert child.returncode == (0 if number == len(ATTEMPTS) else -signal.SIGKILL)


def train(make: Callable[[], Tracker]) -> None:
    """Train in four attempts, each with a tracker of its own, as each is another process."""
    store = MemoryStore()
    for number, (first, last) in enumerate(ATTEMPTS, start=1):
        metrics = Metrics(store, attempt=number, node=0, local_rank=1, rank=0)
        metrics.report_to(make())
        metrics.begin(first)
        for step in range(first, last):
            metrics.log(None, {"loss": step + 0.5, "val/acc": step / 100})
            metrics.finished_step(step + 1, 0.0, None)
        finished = number == len(ATTEMPTS)
        if not finished:
            metrics.told_to_stop()
        metrics.before_commit()
        metrics.close(finished=finished, timeout_s=120.0)


def test_tensorboard_shows_one_run(tmp_path: Path) -> None:
    """Its own reader purges what an attempt logged beyond where the next one went on."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from spotguard.integrations.tracking.tensorboard import TensorBoardTracker

    train(lambda: TensorBoardTracker(tmp_path / "board"))
    reader: Any = EventAccumulator(str(tmp_path / "board"))
    reader.Reload()
    for name in ("loss", "val/acc"):
        assert [event.step for event in reader.Scalars(name)] == list(range(20))
    assert [event.value for event in reader.Scalars("loss")] == [step + 0.5 for step in range(20)]


def test_mlflow_has_one_run(tmp_path: Path) -> None:
    """Found again by its tag, in a database of its own; finished only by the last attempt."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    from spotguard.integrations.tracking.mlflow import TAG, MlflowTracker

    uri = _mlflow_uri(tmp_path)
    run: Any = Run()
    train(lambda: MlflowTracker(run, tracking_uri=uri, experiment="gpt", params={"lr": 0.1}))
    client: Any = MlflowClient(tracking_uri=uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "gpt"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.tags[TAG] == Run.id
    assert found.data.params == {"lr": "0.1"}
    assert found.info.status == "FINISHED"
    for name in ("loss", "val/acc"):
        history = client.get_metric_history(found.info.run_id, name)
        assert [metric.step for metric in history] == list(range(20))


def _mlflow_uri(tmp_path: Path) -> str:
    try:
        import sqlalchemy  # noqa: F401 - the skinny one comes without a database
    except ImportError:
        return (tmp_path / "mlruns").as_uri()
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_wandb_offline_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt's part has the run's own id, and says that it was preempted."""
    wandb = pytest.importorskip("wandb")
    from spotguard.integrations.tracking.wandb import WandbTracker

    monkeypatch.setenv("WANDB_SILENT", "true")
    run: Any = Run()
    train(lambda: WandbTracker(run, project="gpt", mode="offline", dir=str(tmp_path)))
    wandb.teardown()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    parts = [_records(file) for file in files]
    assert {record.run.run_id for part in parts for record in part if record.HasField("run")} == {
        Run.id
    }
    steps: list[int] = []
    for part in parts:
        own = [int(record.history.step.num) for record in part if record.HasField("history")]
        assert own == sorted(set(own)), "none twice in one part"
        # What W&B's server does with a run that is resumed: no step below its newest is taken.
        steps += [step for step in own if not steps or step > steps[-1]]
    assert steps == list(range(20))
    preempted = [any(record.HasField("preempting") for record in part) for part in parts]
    assert sorted(preempted) == [False, True, True, True]


@pytest.mark.e2e
@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_kill_repeats_no_step(name: str, tmp_path: Path) -> None:
    """Three attempts end by SIGKILL, without a word to the tracker: one run, and no step twice.

    W&B's own process keeps what it has not filled a block with, and loses it: a killed attempt may
    be missing there, while the run store has it.
    """
    pytest.importorskip(name)
    train_and_kill(name, tmp_path)
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        reader: Any = EventAccumulator(str(tmp_path / "board"))
        reader.Reload()
        steps = [event.step for event in reader.Scalars("loss")]
    elif name == "mlflow":
        from mlflow.tracking import MlflowClient

        client: Any = MlflowClient(tracking_uri=_mlflow_uri(tmp_path))
        (experiment,) = [e for e in client.search_experiments() if e.name == "gpt"]
        (found,) = client.search_runs([experiment.experiment_id])
        assert found.info.status == "FINISHED"
        steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "loss")]
    else:
        files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
        assert {file.name for file in files} == {f"run-{Run.id}.wandb"}
        parts = [_records(file) for file in files]
        steps = [
            int(each.history.step.num) for p in parts for each in p if each.HasField("history")
        ]
        assert steps == sorted(set(steps))
        assert steps[-10:] == list(range(10, 20))
        return
    assert steps == list(range(20))


_BLOCK, _FILE_HEAD, _PIECE_HEAD = 32_768, 7, 7
_WHOLE_OR_LAST = (1, 4)


def _records(file: Path) -> list[Any]:
    """Return the records of a W&B file: LevelDB's log form, protobuf of the library's own."""
    from wandb.proto import wandb_internal_pb2

    protobuf: Any = wandb_internal_pb2
    data, at, parts, records = file.read_bytes(), _FILE_HEAD, b"", []
    while at + _PIECE_HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _PIECE_HEAD:
            at += _BLOCK - at % _BLOCK  # the end of a block is filled with zeros
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += _PIECE_HEAD
        parts += data[at : at + length]
        at += length
        if kind in _WHOLE_OR_LAST:
            record = protobuf.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def test_wandb_rewinds_to_the_restored_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Online, the server is asked for it; where it does not, the run is resumed as it is."""
    wandb = pytest.importorskip("wandb")
    from spotguard.integrations.tracking.wandb import WandbTracker

    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> object:
        asked.append(options)
        if "resume_from" in options and len(asked) > 1:
            raise wandb.errors.CommError("rewind is not enabled")
        return object()

    monkeypatch.setattr(wandb, "init", init)
    run: Any = Run()
    WandbTracker(run, project="gpt", mode="online").begin(12)
    assert asked == [
        {"name": Run.id, "project": "gpt", "mode": "online", "resume_from": f"{Run.id}?_step=11"}
    ]
    WandbTracker(run, project="gpt", mode="online").begin(12)
    assert asked[-1]["resume"] == "allow"
    assert asked[-1]["id"] == Run.id
    asked.clear()
    WandbTracker(run, project="gpt", mode="online").begin(0)
    assert asked == [
        {"id": Run.id, "name": Run.id, "project": "gpt", "mode": "online", "resume": "allow"}
    ]


@pytest.mark.parametrize(
    ("library", "module", "make"),
    [
        ("wandb", "wandb", lambda m: m.WandbTracker(Run())),
        ("mlflow", "mlflow", lambda m: m.MlflowTracker(Run())),
        ("torch.utils.tensorboard", "tensorboard", lambda m: m.TensorBoardTracker("x")),
    ],
)
def test_a_missing_library_is_told_with_its_extra(
    library: str, module: str, make: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the tracker is made, not somewhere in the training loop."""
    import importlib
    import sys

    tracking = importlib.import_module(f"spotguard.integrations.tracking.{module}")
    loaded = [name for name in sys.modules if name.startswith(f"{library}.")]  # by another test
    for name in (library, *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra) as missing:
        make(tracking)
    assert missing.value.hint == f"pip install 'spotguard[{module}]'"


class Broken:
    """A tracker whose server is away."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)
            raise TrackerProblem("the server is away")

        return call


def test_a_tracker_that_fails_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is told once; the run goes on, and its store has all that was logged."""
    broken = Broken()
    tracker: Any = broken
    train(lambda: tracker)
    assert broken.calls.count("log") == sum(last - first for first, last in ATTEMPTS)
    assert caplog.text.count("the server is away") == len(ATTEMPTS)


class Buggy(Broken):
    """A tracker whose own code is wrong: what it raises is none of the errors that it may."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)
            raise AttributeError("it has no such thing")

        return call


def test_a_tracker_may_raise_anything(caplog: pytest.LogCaptureFixture) -> None:
    """Its thread lives on, so that no save waits for one that is dead; it is told once."""
    buggy = Buggy()
    tracker: Any = buggy
    train(lambda: tracker)
    assert buggy.calls.count("log") == sum(last - first for first, last in ATTEMPTS)
    assert buggy.calls.count("flush") == len(ATTEMPTS)
    assert caplog.text.count("Buggy: AttributeError: it has no such thing") == len(ATTEMPTS)


class Slow:
    """A tracker that hangs until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.logged = 0

    def begin(self, first: int) -> None:
        """Hang."""
        self.go.wait()

    def log(self, step: int, values: dict[str, float], at: float) -> None:
        """Count."""
        self.logged += 1

    def flush(self) -> None:
        """It has all."""

    def close(self, *, finished: bool) -> None:
        """It ends."""

    def preempting(self) -> None:
        """It knows."""


def test_a_tracker_that_hangs_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at each save; and what waits for it stays within bounds, and is told so."""
    monkeypatch.setattr(trackers, "_MOST_WAITING", 50)
    slow = Slow()
    feed = TrackerFeed(slow)
    feed.begin(0)
    line = MetricLine(
        name="loss", steps=list(range(80)), done=[0] * 80, at=[0.0] * 80, values=[0.0] * 80
    )
    feed.take([line])
    feed.take([line])
    assert caplog.text.count("steps behind") == 1
    assert not feed.wait(0.01)
    for _ in range(5):
        assert not feed.wait(600.0), "longer than a test may take"
    slow.go.set()
    feed.close(finished=True, timeout_s=60.0)
    assert 48 <= slow.logged <= 51
