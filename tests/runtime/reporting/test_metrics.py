"""`run.log`: numbers of a step, taken at once, one value for each step and name in the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from spotguard.control.status.metrics import Series, SeriesReader, read_series
from spotguard.errors import StoreError, UsageError
from spotguard.events import keys, metric
from spotguard.events.event import Heartbeat
from spotguard.events.metric import MetricLine, node_metric, of_node
from spotguard.events.untrusted import Refused
from spotguard.runtime.reporting import machine_use
from spotguard.runtime.reporting.machine_use import MachineUse
from spotguard.runtime.reporting.metrics import Metrics
from spotguard.storage.patterns.growing_lines import GrowingObjects
from spotguard.testing import FaultyStore, MemoryStore
from tests.control.made import Line, ended, launched, made

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord
    from spotguard.storage.base import ObjectStore


def metrics(
    store: ObjectStore, attempt: int = 1, *, rank: int = 0, begins: int | None = 0
) -> Metrics:
    """Return a rank's metrics in a loop that began with so many steps done."""
    made = Metrics(store, attempt=attempt, node=rank, local_rank=1, rank=rank)
    if begins is not None:
        made.begin(begins)
    return made


def began(attempt: int, resumed: int, at: float) -> Line:
    """Return that an attempt began to train."""
    data = {"resumed_step": resumed, "total_steps": 100, "world_size": 2, "resumed_from": None}
    return ("job_started", at, attempt, data)


def record(*resumed: int) -> RunRecord:
    """Return a run whose attempts resumed from these steps; all but the last have ended."""
    lines: list[Line] = []
    for number, step in enumerate(resumed, start=1):
        at = 10.0 * number
        lines += [*launched(at, number), began(number, step, at + 1)]
        if number < len(resumed):
            lines.append(ended(at + 9, "preempted", number))
    return made(*lines)


def series(store: ObjectStore, *resumed: int, name: str = "loss") -> list[tuple[int, float, int]]:
    """Return (step, value, attempt) of a metric over such attempts."""
    found = read_series(store, record(*resumed)).get(name)
    if found is None:
        return []
    return list(zip(found.steps, found.values, found.attempts, strict=True))


def train(store: ObjectStore, attempt: int, first: int, last: int) -> Metrics:
    """Log `loss` in each step from `first` up to `last`, and store it."""
    mine = metrics(store, attempt, begins=first)
    for step in range(first, last):
        mine.log(None, {"loss": 100.0 * attempt + step})
        mine.finished_step(step + 1, 0.0, None)
    mine.flush()
    return mine


def test_one_value_for_each_step_over_three_interruptions() -> None:
    """What was logged after the checkpoint from which a later attempt went on is superseded."""
    store = MemoryStore()
    train(store, 1, 0, 30)
    train(store, 2, 20, 50)
    train(store, 3, 40, 45)
    train(store, 4, 10, 60)  # a damaged checkpoint: it fell back behind attempt 2
    assert [step for step, _, _ in series(store, 0, 20, 40, 10)] == list(range(60))
    assert [attempt for _, _, attempt in series(store, 0, 20, 40, 10)] == [1] * 10 + [4] * 50
    assert [a for _, _, a in series(store, 0, 20, 40)] == [1] * 20 + [2] * 20 + [3] * 5
    assert all(value == 100 * attempt + step for step, value, attempt in series(store, 0, 20, 40))


def test_a_zombie_adds_nothing() -> None:
    """It goes on logging after the claim of the next attempt, beyond where that one is."""
    store = MemoryStore()
    train(store, 2, 20, 25)
    train(store, 1, 0, 90)
    assert [a for _, _, a in series(store, 0, 20)] == [1] * 20 + [2] * 5


def test_an_attempt_that_never_began_supersedes_nothing() -> None:
    """It was launched, and taken before it had restored anything."""
    store = MemoryStore()
    train(store, 1, 0, 30)
    run = made(
        *launched(10.0, 1), began(1, 0, 11.0), ended(19.0, "preempted", 1), *launched(20.0, 2)
    )
    found = read_series(store, run)["loss"]
    assert list(found.steps) == list(range(30))


def test_a_step_of_ones_own_is_superseded_by_when_it_was_logged() -> None:
    """An epoch's number says nothing of the checkpoint; the steps done then do."""
    store = MemoryStore()
    first = metrics(store)
    for epoch, done in enumerate((10, 20, 30)):
        first.finished_step(done, 0.0, None)
        first.log(epoch, {"val/loss": float(epoch)})
    first.flush()
    second = metrics(store, 2, begins=25)
    second.finished_step(30, 0.0, None)
    second.log(2, {"val/loss": 7.0})
    second.flush()
    assert series(store, 0, 25, name="val/loss") == [(0, 0.0, 1), (1, 1.0, 1), (2, 7.0, 2)]


def test_the_last_value_of_a_step_counts() -> None:
    """Also where it was logged again in another upload."""
    store = MemoryStore()
    mine = metrics(store)
    mine.log(3, {"loss": 1.0})
    mine.log(3, {"loss": 2.0})
    mine.flush()
    mine.log(3, {"loss": 3.0})
    mine.flush()
    assert series(store, 0) == [(3, 3.0, 1)]


def test_a_survivor_that_saves_alone_keeps_what_the_first_rank_had_not_stored() -> None:
    """The first rank died with it; where both have it, the first rank's counts."""
    store = MemoryStore()
    first, other = metrics(store), metrics(store, rank=1)
    for step in range(10):
        for rank, each in enumerate((first, other)):
            each.log(None, {"loss": step + 0.5 * rank})
            each.finished_step(step + 1, 0.0, 4 if step == 6 else None)
        if step == 7:
            first.flush()
    other.before_commit()
    values = [value for _, value, _ in series(store, 0)]
    assert values == [*map(float, range(8)), 8.5, 9.5]


def test_other_ranks_store_nothing() -> None:
    """Their values differ from the first rank's; who wants the mean reduces it first."""
    store = MemoryStore()
    other = metrics(store, rank=1)
    other.log(0, {"loss": 1.0})
    other.measure()
    other.flush()
    assert list(store.list()) == []


NUMBERS = [
    (1, 1.0),
    (True, 1.0),
    (0.5, 0.5),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3.0),
    (np.array(2.5), 2.5),
    (torch.tensor(0.25), 0.25),
    (torch.tensor([[4]]), 4.0),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (10**400, math.inf),
    (math.inf, math.inf),
    (-math.inf, -math.inf),
    (math.nan, math.nan),
]


@pytest.mark.parametrize(("value", "stored"), NUMBERS, ids=str)
def test_numbers_of_all_kinds_are_kept(value: Any, stored: float) -> None:
    """Python's, NumPy's, tensors of one element; a loss that is NaN is seen as that."""
    store = MemoryStore()
    mine = metrics(store)
    mine.log(0, {"loss": value})
    mine.flush()
    ((_, found, _),) = series(store, 0)
    assert found == stored or (math.isnan(found) and math.isnan(stored))
    assert ("loss" in mine.newest()) is math.isfinite(stored), "a heartbeat is JSON"


@pytest.mark.parametrize(
    "value",
    ["0.5", b"1", None, [1.0], {}, 1j, torch.zeros(2), np.zeros(3), torch.tensor(1j)],
    ids=str,
)
def test_what_is_no_number_is_refused_in_a_sentence(value: Any) -> None:
    """It names the metric and the type, and nothing of the call is kept."""
    store = MemoryStore()
    mine = metrics(store)
    with pytest.raises(
        UsageError, match=rf"run\.log: acc is a {type(value).__name__}.*must be a n"
    ):
        mine.log(0, {"loss": 1.0, "acc": value})
    mine.flush()
    assert series(store, 0) == []


def test_a_tensor_is_taken_as_it_is_now() -> None:
    """Scripts go on adding to it."""
    store = MemoryStore()
    mine = metrics(store)
    total = torch.tensor(1.0)
    mine.log(0, {"loss": total})
    total += 5
    mine.flush()
    assert series(store, 0) == [(0, 1.0, 1)]


def test_a_value_that_its_device_gives_no_more_is_left_out() -> None:
    """After a kernel has failed CUDA refuses all that is asked of it; the other values count."""
    store = MemoryStore()
    mine = metrics(store)
    lost = torch.ones((), device="meta")  # which has no value, either
    mine.log(0, {"loss": lost, "late": 1.0})
    mine.log(1, {"loss": 2.0, "late": lost})
    mine.log(1, {"gone": lost})
    mine.flush()
    assert series(store, 0) == [(1, 2.0, 1)]
    assert series(store, 0, name="late") == [(0, 1.0, 1)]
    assert series(store, 0, name="gone") == []
    assert mine.newest() == {"loss": 2.0, "late": 1.0}


@pytest.mark.parametrize("name", ["", "1st", "spotguard/step_s", "a\nb", "x" * 129, "a=b"])
def test_names_that_are_none_are_refused(name: str) -> None:
    """Also the runtime's own."""
    with pytest.raises(UsageError, match="is no name for a metric"):
        metrics(MemoryStore()).log(0, {name: 1.0})


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", 2**64])
def test_steps_that_are_none_are_refused(step: Any) -> None:
    """A step is a count."""
    with pytest.raises(UsageError, match="must be a count of steps"):
        metrics(MemoryStore()).log(step, {"loss": 1.0})


def test_there_are_only_so_many_names() -> None:
    """A name that holds the step's number would become a million objects on a page."""
    mine = metrics(MemoryStore())
    mine.log(0, {f"loss{number}": 1.0 for number in range(1000)})
    with pytest.raises(UsageError, match="metric number 1001"):
        mine.log(0, {"loss1000": 1.0})


def test_before_the_loop_a_step_is_needed() -> None:
    """What is logged there counts as logged where the loop begins, which nobody knows yet."""
    store = MemoryStore()
    train(store, 1, 0, 20)
    mine = metrics(store, 2, begins=None)
    with pytest.raises(UsageError, match="before the loop needs a step"):
        mine.log(None, {"loss": 1.0})
    mine.log(3, {"samples": 9.0})
    mine.flush()
    assert series(store, 0, 10, name="samples") == []
    mine.begin(10)
    mine.flush()
    assert series(store, 0, 10, name="samples") == [(3, 9.0, 2)]
    assert len(series(store, 0, 10)) == 10


@pytest.mark.parametrize("fault", ["fail", "tear"])
def test_a_store_that_fails_costs_no_value_and_no_step(fault: str) -> None:
    """The next upload has it; each value once."""
    inner = MemoryStore()
    store = FaultyStore(inner)
    store.fail("put", nth=2, times=3) if fault == "fail" else store.tear(nth=2, times=3)
    mine = metrics(store)
    for step in range(12):
        mine.log(step, {"loss": float(step)})
        try:
            mine.flush()
        except StoreError:
            mine.before_commit()  # says it, and lets the save go on
    mine.flush()
    assert series(inner, 0) == [(step, float(step), 1) for step in range(12)]


def test_a_step_is_split_into_what_it_waits_for() -> None:
    """The mean of the steps since the last look; parts add up to the whole."""
    store = MemoryStore()
    mine = metrics(store, begins=5)
    waited = iter([0.0, 0.25, 0.5, 0.75, 1.0])
    mine.communicated_s = lambda: next(waited, 1.0)
    mine.finished_step(6, 0.0, None)
    mine.finished_step(7, 0.125, None)
    mine.measure()
    mine.flush()
    found = read_series(store, record(5))
    part = {name: one.values[0] for name, one in found.items()}
    assert list(found[metric.STEP_S].steps) == [6]
    assert part[metric.SAVE_S] == 0.125
    assert part[metric.COMMUNICATION_S] == 0.25
    assert part[metric.DATA_S] == 0.0
    assert part[metric.STEP_S] > 0.0
    mine.measure()
    assert metric.STEP_S in mine.newest(), "no step since: the newest stays"


def test_waiting_for_data_is_measured() -> None:
    """What the loader's own next took; batches come through as they are."""
    mine = metrics(MemoryStore())
    batches: Any = iter([(None, "a"), (None, "b")])
    loader: Any = None
    assert [batch for _, batch in mine.timed(batches, loader)] == ["a", "b"]


class Nvml:
    """NVIDIA's library, as it answers for one GPU that cannot tell its power."""

    class NVMLError(Exception):
        """As its own."""

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetUtilizationRates": type("Rates", (), {"gpu": 37}),
            "nvmlDeviceGetMemoryInfo": type("Memory", (), {"used": 10, "total": 80}),
            "nvmlDeviceGetTotalEnergyConsumption": 5000,
        }

        def call(*_: Any) -> Any:
            if name not in answers:
                raise self.NVMLError("Not Supported")
            return answers[name]

        return call


def test_a_node_tells_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU cannot tell is missing, never zero; without the library there is no GPU."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", Nvml())
    found = MachineUse(3).look()
    gpu = {name: value for name, value in found.items() if "gpu0" in name}
    assert gpu == {
        "spotguard/node3/gpu0/utilization_pct": 37.0,
        "spotguard/node3/gpu0/memory_bytes": 10.0,
        "spotguard/node3/gpu0/memory_total_bytes": 80.0,
        "spotguard/node3/gpu0/energy_j": 5.0,
    }
    assert found[node_metric(3, "rss_bytes")] > 1e6
    assert 0 <= found[node_metric(3, "cpu_pct")] <= 100
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert not any("gpu" in name for name in MachineUse(0).look())
    assert machine_use.__doc__


def test_names_of_what_nodes_use_can_be_read() -> None:
    """By whoever draws them."""
    assert of_node(node_metric(2, "power_w", gpu=1)) == (2, 1, "power_w")
    assert of_node(node_metric(0, "cpu_pct")) == (0, None, "cpu_pct")
    assert of_node("spotguard/step_s") is None
    assert of_node("loss") is None


def test_what_others_wrote_is_refused() -> None:
    """A line of another form costs only itself."""
    good = MetricLine(name="a", steps=[1], done=[1], at=[1.0], values=[math.nan]).to_body()
    for change in (
        {"name": "a\n"},
        {"step": [-1]},
        {"step": [1, 2]},
        {"done": None},
        {"value": ["many"]},
        {"value": [None]},
        {"at": ["now"]},
    ):
        import json

        with pytest.raises(Refused):
            MetricLine.from_json(json.dumps({**good, **change}).encode())
    store = MemoryStore()
    objects = GrowingObjects(store, keys.metrics(1), owner=0, at=1e9)
    line = MetricLine(name="loss", steps=[1], done=[1], at=[1.0], values=[2.0])
    objects.add([b"{}", json.dumps(line.to_body()).encode(), b"no JSON"])
    objects.store()
    store.put(keys.piece(keys.metrics(1), owner=1, at=1e9, number=0, count=1), b"no gzip")
    assert series(store, 0) == [(1, 2.0, 1)]


def test_heartbeats_carry_the_newest_values() -> None:
    """And whoever reads them takes only numbers with names."""
    beat = Heartbeat(
        at=1.0,
        attempt=1,
        node=0,
        step=3,
        total_steps=9,
        epoch=0,
        train_s=1.0,
        step_s=0.1,
        loss=None,
        saved_step=None,
        saved_at=None,
        metrics={"loss": 2.0},
    )
    assert Heartbeat.from_json(beat.to_json()).metrics == {"loss": 2.0}
    raw = beat.to_json().replace(b'{"loss": 2.0}', b'{"a\\n": 1, "b": "x", "c": null, "d": 4}')
    assert Heartbeat.from_json(raw).metrics == {"d": 4.0}
    without = beat.to_json().replace(b'"metrics"', b'"others"')
    assert Heartbeat.from_json(without).metrics == {}


def test_reading_again_costs_what_is_new() -> None:
    """A page that is live asks every second."""
    inner = MemoryStore()
    store = FaultyStore(inner)
    mine = train(inner, 1, 0, 10)
    reader = SeriesReader(store)
    run = record(0)
    assert len(reader.read(run)["loss"].steps) == 10
    gets = store.calls["get"]
    assert len(reader.read(run)["loss"].steps) == 10
    assert store.calls["get"] == gets
    mine.log(10, {"loss": 1.0})
    mine.flush()
    assert len(reader.read(run)["loss"].steps) == 11
    assert store.calls["get"] == gets + 1


def test_a_long_series_is_thinned() -> None:
    """Evenly, and the newest is among them."""
    store = MemoryStore()
    train(store, 1, 0, 1000)
    found: Series = read_series(store, record(0), names={"loss"}, points=100)["loss"]
    assert len(found.steps) == 100
    assert found.steps[-1] == 999
    assert read_series(store, record(0), names={"other"}) == {}
